"""Reading /sys and /proc: made-up trees, other readers of the same formats, and this machine."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.cluster.machines import Tree, dgx_h100, virtual
from volo.cluster.ranks import local_size_from_environment
from volo.cluster.topology import (
    Gpu,
    PciPlace,
    Port,
    interface_to,
    listed,
    nccl_conf,
    numbers,
    read_machine,
    visible_gpus,
)

QUICK = settings(max_examples=100, deadline=None, derandomize=True, database=None)
NOWHERE = PciPlace((), None)
UUIDS = ("GPU-8932f937-d72c", "GPU-8932f937-0000", "GPU-a1b2c3d4-0000")


@QUICK
@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_as_torch_reads_and_writes_them(cpus: set[int]) -> None:
    torchs = pytest.importorskip("torch.numa.binding")
    if not hasattr(torchs, "_get_ranges_str_from_ints"):
        pytest.skip("this torch writes no lists")
    assert set(numbers(listed(cpus) + "\n")) == cpus == torchs._get_set_of_int_from_ranges_str(listed(cpus))
    assert listed(cpus) == torchs._get_ranges_str_from_ints(cpus)


def _as_torch_sees(monkeypatch: pytest.MonkeyPatch, text: str) -> list[int]:
    """Numbers of the visible ones of three GPUs, by the rules that torch counts GPUs by."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    visible = torch.cuda._parse_visible_devices()
    if visible and isinstance(visible[0], str):
        return torch.cuda._transform_uuid_to_ordinals(visible, list(UUIDS))
    outside = [index for index, value in enumerate(visible) if value >= len(UUIDS)]
    return visible[: outside[0]] if outside else visible


ITEMS = st.sampled_from(["0", "1", "2", "3", "9", "-1", "+1", "1st", " 2", "x", ""])
STARTS = st.sampled_from(["GPU-8932f937", "GPU-8932f937-d", "GPU-8932f937-0", "GPU-a", UUIDS[1], "GPU-f"])


@pytest.mark.parametrize("items", [ITEMS, STARTS])
def test_visible_devices_as_torch_counts_them(items: st.SearchStrategy[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(str(i), NOWHERE, uuid=uuid) for i, uuid in enumerate(UUIDS)]

    @QUICK
    @given(st.lists(items, min_size=1, max_size=4))
    def check(chosen: list[str]) -> None:
        # What comes twice behind an unknown UUID torch takes for an error, too.
        assume(items is ITEMS or len(set(chosen)) == len(chosen))
        text = ",".join(chosen)
        expected = _as_torch_sees(monkeypatch, text)
        visible, why = visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": text})
        assert [int(gpu.address) for gpu in visible] == expected
        assert bool(why) == (not expected)

    check()


def test_which_gpu_is_first_is_told_only_where_it_is_known() -> None:
    gpus = [Gpu("b", NOWHERE, "0x20b0", UUIDS[0]), Gpu("c", NOWHERE, "0x1eb8", UUIDS[2])]
    assert visible_gpus(gpus, {})[0] == [] and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in visible_gpus(gpus, {})[1]
    assert visible_gpus(gpus, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == (gpus, "")
    assert visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": UUIDS[2]}) == ([gpus[1]], "")
    assert visible_gpus(gpus[:1], {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == (gpus[:1], "")
    assert "MIG" in visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "MIG-1f2e"})[1]
    assert visible_gpus([], {"CUDA_VISIBLE_DEVICES": "0"}) == ([], "no NVIDIA GPU in /sys")


def test_gpus_of_a_container_and_of_a_virtual_machine_and_displays_of_others(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    for hidden in ("43", "c3"):
        for path in sorted(tmp_path.glob(f"proc/driver/nvidia/gpus/0000:{hidden}:00.0/*")):
            path.unlink()
            path.parent.rmdir()
    tree.gpu("pci0000:00/0000:00:02.0", 0)
    tree.link("sys/devices/pci0000:00/0000:00:02.0/driver", "sys/bus/pci/drivers/vfio-pci")
    tree.device("pci0000:00/0000:00:03.0", 0, vendor="0x1a03", device="0x2000", **{"class": "0x030000"})
    tree.device("pci0000:00/0000:00:04.0", 0, vendor="0x10de", device="0x22a3", **{"class": "0x068000"})  # NVSwitch
    gpus = read_machine(tmp_path).gpus
    assert len(gpus) == 8 and [gpu.address for gpu in gpus if not gpu.shown] == ["0000:43:00.0", "0000:c3:00.0"]
    assert [gpu.address[5:7] for gpu in visible_gpus(gpus, {})[0]] == ["1b", "52", "61", "9d", "d1", "df"]
    assert [gpu.address[5:7] for gpu in visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "4,1"})[0]] == ["d1", "52"]


def test_addresses_are_ordered_as_numbers(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for bus in ("10000:01", "9000:00", "0000:f1"):
        tree.gpu(f"pci{bus}/{bus}:00.0", 0)
    assert [gpu.address for gpu in read_machine(tmp_path).gpus] == ["0000:f1:00.0", "9000:00:00.0", "10000:01:00.0"]


def test_a_virtio_device_sits_where_its_pci_device_does(tmp_path: Path) -> None:
    virtual(tmp_path)
    (tmp_path / "sys/devices/pci0000:00/0000:00:03.0/numa_node").write_text("1\n")
    (port,) = read_machine(tmp_path).ports
    assert port == Port("rxe0:1", PciPlace(("pci0000:00", "0000:00:03.0"), 1), 10.0, "Ethernet")


def test_ports_that_are_down_or_cannot_be_opened_are_left_out(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    tree.write("sys/class/infiniband/mlx5_3/ports/1/state", "2: INIT")
    for i in range(12):
        tree.write(f"sys/class/infiniband_verbs/uverbs{i}/ibdev", f"mlx5_{i}")
        if i != 5:
            tree.write(f"dev/infiniband/uverbs{i}", "")
    machine = read_machine(tmp_path)
    assert [port.name for port in machine.ports] == [f"mlx5_{i}:1" for i in (0, 1, 2, 4, 6, 7, 8, 9, 10, 11)]
    assert machine.idle_ports == ("mlx5_3:1 is INIT", "mlx5_5:1 is not passed into this container")


def test_files_that_tar_has_padded_are_read(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    before = read_machine(tmp_path)
    for path in [
        *tree.root.glob("sys/**/numa_node"),
        *tree.root.glob("sys/**/cpulist"),
        *tree.root.glob("sys/**/rate"),
    ]:
        path.write_bytes(path.read_bytes().ljust(4096, b"\0"))
    assert read_machine(tmp_path) == before


def test_an_empty_tree_is_a_machine_of_nothing(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.cpus == {0: ()} and not machine.gpus and not machine.ports and machine.parent_allowed is None


def test_this_machine_is_read_as_python_sees_it() -> None:
    machine = read_machine()
    assert machine.allowed == os.sched_getaffinity(0)
    assert machine.allowed <= {cpu for cpus in machine.cpus.values() for cpu in cpus}
    assert machine.parent_allowed == os.sched_getaffinity(os.getppid())


ADDRESSES = st.integers(0x01000000, 0xDFFFFFFF).map(ipaddress.IPv4Address)
NETWORKS = st.tuples(ADDRESSES, st.integers(0, 32)).map(lambda pair: ipaddress.IPv4Network(pair, strict=False))


def _digits(address: ipaddress.IPv4Address) -> str:
    return f"{int.from_bytes(address.packed, sys.byteorder):08X}"


def _write_routes(root: Path, networks: list[ipaddress.IPv4Network], flags: list[int]) -> None:
    lines = ["Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"]
    for i, (network, flag) in enumerate(zip(networks, flags, strict=True)):
        place = f"{_digits(network.network_address)}\t00000000\t{flag:04X}\t0\t0\t{100 - i}\t{_digits(network.netmask)}"
        lines.append(f"eth{i}\t{place}\t0\t0\t0")
    (root / "proc/net").mkdir(parents=True, exist_ok=True)
    (root / "proc/net/route").write_text("\n".join(lines) + "\n")


def test_the_interface_is_that_of_the_longest_prefix_and_then_of_the_lowest_metric(tmp_path: Path) -> None:
    @QUICK
    @given(
        st.lists(NETWORKS, max_size=5), st.lists(st.sampled_from([1, 3, 0, 0x201]), min_size=5, max_size=5), st.data()
    )
    def check(networks: list[ipaddress.IPv4Network], flags: list[int], data: st.DataObject) -> None:
        near = [st.integers(int(n.network_address), int(n.broadcast_address)) for n in networks]
        target = ipaddress.IPv4Address(data.draw(st.one_of(st.integers(0x01000000, 0xDFFFFFFF), *near)))
        assume(not target.is_loopback)
        _write_routes(tmp_path, networks, flags[: len(networks)])
        used = [i for i, n in enumerate(networks) if target in n and flags[i] in (1, 3)]
        # The later ones have the lower metric.
        best = max(used, key=lambda i: (networks[i].prefixlen, i), default=None)
        assert interface_to(str(target), tmp_path) == (None if best is None else f"eth{best}")

    check()


def test_loopback_and_unknown_names_lead_nowhere(tmp_path: Path) -> None:
    _write_routes(tmp_path, [ipaddress.IPv4Network("0.0.0.0/0")], [3])
    assert interface_to("10.1.2.3", tmp_path) == "eth0"
    assert interface_to("127.0.1.1", tmp_path) is None and interface_to("localhost", tmp_path) is None
    assert interface_to("no.such.host.invalid", tmp_path) is None
    assert interface_to("10.1.2.3", tmp_path / "nothing") is None


def test_the_interface_to_another_host_has_the_address_that_the_kernel_would_send_from() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect(("198.51.100.7", 9))  # sends nothing
        except OSError:
            pytest.skip("no route to other hosts")
        name = interface_to("198.51.100.7")
        assert name is not None
        answer = fcntl.ioctl(sender, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
        own = sender.getsockname()[0]
        assert socket.inet_ntoa(answer[20:24]) == own
        assert interface_to(own) == name  # on rank 0's own machine, too


def test_nccl_configuration_files_are_heeded(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("etc/nccl.conf", "# site\nNCCL_IB_HCA==mlx5_0\n#NCCL_DEBUG=INFO\n")
    tree.write("home/me/.nccl.conf", "NCCL_SOCKET_IFNAME=eth0")
    tree.write("job/nccl.conf", "NCCL_DEBUG=WARN")
    site, own = {"NCCL_IB_HCA": "/etc/nccl.conf"}, {"NCCL_SOCKET_IFNAME": "/home/me/.nccl.conf"}
    assert nccl_conf({"HOME": "/home/me"}, tmp_path) == site | own
    assert nccl_conf({"HOME": "/home/me", "NCCL_CONF_FILE": "/job/nccl.conf"}, tmp_path) == site | {
        "NCCL_DEBUG": "/job/nccl.conf"
    }
    assert nccl_conf({}, tmp_path) == site


@pytest.mark.parametrize(
    ("env", "size"),
    [
        ({}, 1),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"RANK": "9", "WORLD_SIZE": "16"}, None),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "8"}, 1),  # a batch script
        ({"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x2),3", "SLURM_NODEID": "1"}, 2),
        ({"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x2),3", "SLURM_NODEID": "2"}, 3),
    ],
)
def test_how_many_ranks_a_machine_has(env: dict[str, str], size: int | None) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert local_size_from_environment(slurm | env) == size
