"""Which CPUs, memory and card each rank gets: on machines that are written down, and as this kernel says afterwards.

Made-up machines are tables, and the files of /sys, /proc and /dev that stand for one; no such machine was read. A row
is a NUMA node with its CPUs, behind a comma the second threads of their cores; or a device, its node and its way down
from the host bridge: a bridge is `bus:slot`, the device `bus`. Of a card follow Gb/s (200), link layer (InfiniBand) and
state (ACTIVE). What a GPU's rank gets stands behind the arrow: CPUs, card and distance.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT
from tests.conftest import LIMIT, python_path
from volo.cluster import binding
from volo.cluster.binding import Share, apply, bind_process, describe, make_plan, variables
from volo.cluster.topology import Gpu, listed, numbers, read_machine, visible_gpus

# Two sockets of 64 cores in four NUMA nodes each; GPUs and cards in pairs below two layers of switches; 4, 5: storage.
_NODES = "\n".join(f"node {i} {16 * i}-{16 * i + 15},{128 + 16 * i}-{143 + 16 * i}" for i in range(8))
DGX_A100 = f"""{_NODES}
gpu    3 00/00:01/f0:00/f0:10/07 -> 48-55,176-183 mlx5_0:1 PXB
gpu    3 00/00:01/f0:00/f0:11/0f -> 56-63,184-191 mlx5_1:1 PXB
gpu    1 01/01:01/f1:00/f1:10/47 -> 16-23,144-151 mlx5_2:1 PXB
gpu    1 01/01:01/f1:00/f1:11/4e -> 24-31,152-159 mlx5_3:1 PXB
gpu    7 02/02:01/f2:00/f2:10/87 -> 112-119,240-247 mlx5_6:1 PXB
gpu    7 02/02:01/f2:00/f2:11/90 -> 120-127,248-255 mlx5_7:1 PXB
gpu    5 03/03:01/f3:00/f3:10/b7 -> 80-87,208-215 mlx5_8:1 PXB
gpu    5 03/03:01/f3:00/f3:11/bd -> 88-95,216-223 mlx5_9:1 PXB
mlx5_0 3 00/00:01/f0:00/f0:20/e0:00/0c
mlx5_1 3 00/00:01/f0:00/f0:21/e1:00/12
mlx5_2 1 01/01:01/f1:00/f1:20/e2:00/4b
mlx5_3 1 01/01:01/f1:00/f1:21/e3:00/54
mlx5_4 2 60/60:03/61
mlx5_5 2 60/60:03/62
mlx5_6 7 02/02:01/f2:00/f2:20/e4:00/8d
mlx5_7 7 02/02:01/f2:00/f2:21/e5:00/94
mlx5_8 5 03/03:01/f3:00/f3:20/e6:00/ba
mlx5_9 5 03/03:01/f3:00/f3:21/e7:00/cc
"""
# One socket of 32 cores in four NUMA nodes, without second threads; a card at every other distance from a GPU.
AMD_NPS4 = """
node 0 0-7
node 1 8-15
node 2 16-23
node 3 24-31
gpu    3 01/01:01/02 -> 24-31 mlx5_0:1 SYS
gpu    2 21/21:01/22 -> 16-23 mlx5_2:1 NODE
gpu    1 41/41:01/42 -> 8-15 mlx5_0:1 PHB
gpu    0 61/61:01/a0:00/a0:01/62 -> 0-7 mlx5_1:1 PIX
mlx5_0 1 41/41:03/48 100 Ethernet
mlx5_1 0 61/61:01/a0:00/a0:02/63 100 Ethernet
mlx5_2 2 22/22:01/23 100 Ethernet
mlx5_3 1 41/41:03/49 100 Ethernet DOWN
"""
LAPTOP = """
node 0 0-3,4-7
gpu    -1 00/00:01/01
"""


def write(root: Path, path: str, text: str) -> None:
    """Write a file as the kernel does, with a line's end."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def device(root: Path, node: str, way: str, vendor: str, kind: str) -> Path:
    """Write a PCI device of a class, such as "0x030200", a 3D controller; return its directory."""
    host, *bridges, bus = way.split("/")
    folder = root.joinpath("sys/devices", f"pci0000:{host}", *(f"0000:{it}.0" for it in bridges), f"0000:{bus}:00.0")
    for name, text in {"numa_node": node, "vendor": vendor, "class": kind}.items():
        write(folder, name, text)
    (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / "sys/bus/pci/devices" / folder.name).symlink_to(folder)
    return folder


def process(root: Path, allowed: str, parent_allowed: str = "") -> None:
    """Write the CPUs that the process that looks may use, and those of the one that started it."""
    write(root, "proc/self/status", f"PPid:\t7\nCpus_allowed_list:\t{allowed}")
    write(root, "proc/7/status", f"PPid:\t1\nCpus_allowed_list:\t{parent_allowed or allowed}")


def build(root: Path, machine: str, *more: str) -> Path:
    """Write the files of a machine, and of more rows; this process may use all of it. Return `root`."""
    rows = [row.partition("->")[0].split() for row in (*machine.strip().splitlines(), *more)]
    process(root, ",".join(row[2] for row in rows if row[0] == "node"))
    for what, node, place, *port in rows:
        if what == "node":
            write(root, f"sys/devices/system/node/node{node}/cpulist", place)
            for core in zip(*map(numbers, place.split(",")), strict=True):
                for cpu in core:
                    write(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", listed(core))
        elif what == "gpu":
            driver, minor = root / "proc/driver/nvidia/gpus", len(list(root.glob("dev/nvidia*")))
            information = f"Model: \t A100\nGPU UUID: \t GPU-{minor}{minor}{minor}{minor}-00\nDevice Minor: \t {minor}"
            write(driver / device(root, node, place, "0x10de", "0x030200").name, "information", information)
            write(root, f"dev/nvidia{minor}", "")
        else:
            rate, layer, state = [*port, *("200", "InfiniBand", "ACTIVE")[len(port) :]]
            card = root / "sys/class/infiniband" / what
            for name, text in {"state": f"4: {state}", "rate": f"{rate} Gb/sec (4X)", "link_layer": layer}.items():
                write(card, f"ports/1/{name}", text)
            (card / "device").symlink_to(device(root, node, place, "0x15b3", "0x020700"))
    return root


linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="CPU masks are Linux's")

CARDS = "=" + ",".join(f"mlx5_{i}:1" for i in (0, 1, 2, 3, 6, 7, 8, 9))  # of a DGX A100, without those for storage


def table(root: Path, mode: str = "auto", device: str | None = None, ranks: int = 0, **env: str) -> list[str]:
    """The rows of a machine's table without the rank, then the line of what is left out, if any."""
    machine = read_machine(root)
    lines = describe(make_plan(machine, mode, device, ranks or len(machine.gpus), env), "here", 0, {}, [])
    rows = [" ".join(line.replace("as they are", "as-they-are").split()[1:]) for line in lines[2:]]
    return [*rows[:-1], lines[-1]] if lines[-1].startswith("left out") else rows


def added(root: Path, local_rank: int = 0, ranks: int = 8, **env: str) -> dict[str, str]:
    """The variables that a rank gets."""
    return variables(make_plan(read_machine(root), "auto", None, ranks, env), local_rank, env, root)[0]


@pytest.mark.parametrize("machine", [DGX_A100, AMD_NPS4])
def test_tables_of_known_machines(machine, tmp_path):
    rows = [row.split() for row in machine.splitlines() if row.startswith("gpu")]
    expected = [f"0000:{at[-2:]}:00.0 {node} {cpus} preferred {card} {far}" for _, node, at, _, cpus, card, far in rows]
    assert table(build(tmp_path, machine)) == expected


def test_tables_of_machines_with_nothing_to_bind(tmp_path):
    no_card = "no InfiniBand or RoCE card near a GPU: left to NCCL"
    virtual = "node 0 0-3\nnode 1 4-7\ngpu -1 00/05\ngpu -1 00/06"  # its firmware tells no device's node
    for name, machine, gpus, why in (
        ("laptop", LAPTOP, ["0000:01:00.0 0"], "one NUMA node: CPUs and memory are left to the kernel"),
        ("virtual", virtual, ["0000:05:00.0 -", "0000:06:00.0 -"], "local rank 0-1 not bound: NUMA node unknown"),
    ):
        rows = [f"{gpu} as-they-are off - -" for gpu in gpus]
        assert table(build(tmp_path / name, machine)) == [*rows, f"left out: {why}; {no_card}"]


def test_all_ranks_name_the_same_cards_whichever_gpus_they_see(tmp_path):
    build(tmp_path, DGX_A100)
    for visible, near in (("0,1,2,3,4,5,6,7", "mlx5_0:1"), ("5", "mlx5_7:1"), ("GPU-6666,GPU-2222", "mlx5_8:1")):
        expected = {"NCCL_IB_HCA": CARDS, "UCX_NET_DEVICES": near}
        assert added(tmp_path, ranks=1, CUDA_VISIBLE_DEVICES=visible) == expected


@pytest.mark.parametrize(
    ("machine", "more", "expected"),
    [
        # Slower, on a GPU's switch.
        (DGX_A100, ["mlx5_20 3 00/00:01/f0:00/f0:10/08 100"], CARDS),
        # The nearest is not the fastest: NCCL chooses.
        (LAPTOP, ["mlx5_0 0 00/00:01/02", "mlx5_1 0 01/01:01/03 400"], None),
        # Two equal ones for each GPU: nothing to leave out.
        (LAPTOP, ["mlx5_0 0 00/00:01/02", "mlx5_1 0 00/00:01/03"], None),
        # As near and as fast, but of another network: the more; as many of both.
        (
            LAPTOP,
            [f"bf3_{i} 0 00/00:01/0{i + 4} 200 Ethernet" for i in (0, 1)] + ["mlx5_1 0 00/00:01/03"],
            "=bf3_0:1,bf3_1:1",
        ),
        (LAPTOP, ["bf3_0 0 00/00:01/02 200 Ethernet", "mlx5_1 0 00/00:01/03"], "=mlx5_1:1"),
    ],
)
def test_cards_of_other_use_are_left_out(machine, more, expected, tmp_path):
    assert added(build(tmp_path, machine, *more)).get("NCCL_IB_HCA") == expected


def test_modes(tmp_path):
    build(tmp_path, AMD_NPS4)
    for mode, memory in {"auto": "preferred", "cpu": "off", "cpu+mem": "bind"}.items():
        assert table(tmp_path, mode)[0] == f"0000:02:00.0 3 24-31 {memory} mlx5_0:1 SYS"
    # One node: nothing to gain, but done where it is asked for; second threads stay with their core.
    two = table(build(tmp_path / "laptop", LAPTOP), "cpu", "cuda:0", ranks=2)
    assert [row.split()[2] for row in two[:2]] == ["0-1,4-5", "2-3,6-7"]
    assert bind_process("none", None) == []


@pytest.mark.parametrize(
    ("machine", "bind", "device", "ranks", "message"),
    [
        (LAPTOP, "auto", "cpu", 1, ""),  # nothing to divide
        (DGX_A100, "auto", "cpu", 1, ""),
        ("node 0 0-3,4-7", "auto", None, 1, ""),
        ("node 0 0-3,4-7", "auto", None, 2, "binding: nothing is bound: no NVIDIA GPU in /sys"),
        (DGX_A100, "auto", None, 1, "binding on "),
        (LAPTOP, "cpu", "cpu", 1, "binding on "),
    ],
)
def test_one_process_on_a_cpu_says_nothing_of_binding(machine, bind, device, ranks, message, tmp_path, monkeypatch):
    monkeypatch.setattr(binding, "read_machine", lambda: read_machine(build(tmp_path, machine)))
    monkeypatch.setattr(binding, "apply", lambda share: [])
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"})
    lines = bind_process(bind, device)
    assert lines[0].startswith(message) if message else lines == []


def test_without_gpus_the_cpus_are_divided_only_if_asked_for(tmp_path):
    machine = read_machine(build(tmp_path, DGX_A100))
    (line,) = describe(make_plan(machine, "auto", "cpu", 2, {}), "here", 0, {}, [])
    assert line.startswith("binding: nothing is bound: CPUs and memory are left to the kernel (--bind cpu would divide")
    shares = make_plan(machine, "cpu+mem", "cpu", 16, {}).shares
    assert [listed(share.cpus) for share in shares[:3]] == ["0-7,128-135", "8-15,136-143", "16-23,144-151"]
    assert [(share.memory, share.node) for share in shares[:3]] == [("bind", 0), ("bind", 0), ("bind", 1)]
    # A share in two nodes has memory of both.
    two = make_plan(machine, "cpu+mem", "cpu", 2, {}).shares
    assert [(share.memory, share.node) for share in two] == [("off", None)] * 2


def test_a_container_with_few_cpus_and_more_ranks_than_gpus(tmp_path):
    build(tmp_path, DGX_A100)
    process(tmp_path, "48-55,176-183")
    rows = table(tmp_path, ranks=2, CUDA_VISIBLE_DEVICES="1,5")
    assert rows[0] == "0000:0f:00.0 3 48-55,176-183 preferred mlx5_1:1 PXB"
    assert rows[1] == "0000:90:00.0 7 as-they-are off mlx5_7:1 PXB"
    assert rows[2] == "left out: local rank 1 not bound: NUMA node 7 has 0 cores in the CPU mask"
    rows = table(tmp_path, ranks=3, CUDA_VISIBLE_DEVICES="0,1")
    assert rows[2] == "- - as-they-are off - -" and rows[3].startswith("left out: 3 ranks, 2 GPUs; local rank 2 not")


@pytest.mark.parametrize(("visible", "parent"), [("5", "0-255"), ("GPU-6666", ""), ("0", "")])
def test_a_rank_that_sees_its_own_gpu_alone_is_bound_to_its_node(tmp_path, visible, parent):
    build(tmp_path, DGX_A100)
    if parent:  # srun --gpus-per-task=1 --cpus-per-task=16
        process(tmp_path, "112-127", parent_allowed=parent)
    machine, number = read_machine(tmp_path), int(visible[-1])
    plan = make_plan(machine, "auto", None, 8, {"CUDA_VISIBLE_DEVICES": visible})
    for share in plan.shares:  # as each rank would see it
        assert share.gpu == machine.gpus[number] and share.node == machine.gpus[number].node
        assert share.port == make_plan(machine, "auto", None, 8, {}).shares[number].port
        cores = machine.cores[machine.gpus[number].node or 0]
        assert set(share.cpus) == (set() if parent else {cpu for core in cores for cpu in core})
    rows = table(tmp_path, ranks=8, CUDA_VISIBLE_DEVICES=visible)
    assert len(rows) == 2 and rows[1].endswith("what the other ranks have: each sees its own GPU alone")


def test_cpus_that_the_launcher_gave_to_each_rank_stay(tmp_path):
    build(tmp_path, DGX_A100)
    process(tmp_path, "48-63,176-191", parent_allowed="0-255")  # srun --cpu-bind, torchrun --numa-binding
    rows = table(tmp_path)
    assert rows[0] == "0000:07:00.0 3 as-they-are preferred mlx5_0:1 PXB"
    assert rows[-1] == "left out: CPUs stay as the launcher has given them to each rank"
    # A single rank, started by taskset: what it has is divided with nobody.
    assert table(tmp_path, ranks=1)[0].startswith("0000:07:00.0 3 48-63,176-191 ")


def test_what_is_set_already_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(binding, "interface_to", {"10.0.0.1": "ib7"}.get)
    build(tmp_path, DGX_A100)
    hosts = {"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1", "HOME": "/home/me"}
    cards = {"NCCL_IB_HCA": CARDS, "UCX_NET_DEVICES": "mlx5_3:1"}
    names = {*cards, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert added(tmp_path, 3, **hosts) == cards | {"NCCL_SOCKET_IFNAME": "=ib7", "GLOO_SOCKET_IFNAME": "ib7"}
    assert added(tmp_path, 3, **hosts, NCCL_IB_HCA="^mlx5_1").keys() == names - {"NCCL_IB_HCA"}
    assert added(tmp_path, 3, **hosts | {"WORLD_SIZE": "8"}) == cards  # one machine needs no interface
    plan, elsewhere = make_plan(read_machine(tmp_path), "auto", None, 8, {}), hosts | {"MASTER_ADDR": "127.0.1.1"}
    variables_set, reasons = variables(plan, 3, elsewhere, tmp_path)
    assert variables_set == cards and reasons[0].startswith("MASTER_ADDR=127.0.1.1 is no address of another machine")
    # NCCL's own configuration.
    write(tmp_path, "etc/nccl.conf", "# site\nNCCL_IB_HCA==mlx5_0\n#NCCL_SOCKET_IFNAME=eth0")
    write(tmp_path, "home/me/.nccl.conf", "NCCL_SOCKET_IFNAME=eth0")
    assert set(added(tmp_path, 3, **hosts)) == {"UCX_NET_DEVICES", "GLOO_SOCKET_IFNAME"}


PROBE = """
import runpy, sys
sys.argv = [__file__ := "train.py", *sys.argv[1:]]
from volo.cluster import binding
bind = binding.apply
def apply(share):
    print("TORCH", "torch" in sys.modules, "FAILURES", bind(share))
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print("BOUND", status["Cpus_allowed_list"].strip(), *{line.split()[1] for line in open("/proc/self/numa_maps")})
    sys.exit()
binding.apply = apply
runpy.run_path("train.py", run_name="__main__")
"""
SRUN = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}


@linux
def test_a_rank_is_bound_before_torch_is_imported():
    machine = read_machine()
    if len([core for cores in machine.cores.values() for core in cores if set(core) & machine.allowed]) < 2:
        pytest.skip("two ranks need two cores")
    command = [sys.executable, "-c", PROBE, "data", "--device", "cpu", "--bind", "cpu+mem"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | SRUN, capture_output=True, text=True, timeout=LIMIT)
    assert "TORCH False FAILURES [" in done.stdout, done.stdout + done.stderr
    cpus, *policies = done.stdout.split("BOUND ")[1].split()
    expected = make_plan(machine, "cpu+mem", "cpu", 2, {}).shares[1].cpus
    assert numbers(cpus) == expected != tuple(sorted(machine.allowed))
    if "FAILURES ['memory policy" in done.stdout:
        pytest.skip(f"forbidden, as in docker: {done.stdout}")
    assert "FAILURES []" in done.stdout and any(policy.startswith("bind") for policy in policies), done.stdout


@linux
def test_what_the_kernel_refuses_is_told():
    before = os.sched_getaffinity(0)
    assert apply(Share(cpus=(1000,))) == ["CPUs 1000: Invalid argument"] and os.sched_getaffinity(0) == before
    (failure,) = apply(Share(memory="bind", node=1000))
    assert failure.startswith("memory policy bind 1000: ")


def test_visible_devices_as_cuda_reads_them():
    # As CUDA's programming guide says it: what comes after a GPU that doesn't exist is invisible, too. A part of a UUID
    # names the only one that begins so; a part of a GPU (MIG) is none.
    gpus = [Gpu(str(i), (), None, uuid) for i, uuid in enumerate(("GPU-89-a1", "GPU-89-b2", "GPU-a1-c3"))]
    cases = {"2,0": "20", " 1, 2": "12", "0,9,1": "0", "0,-1,1": "0", "": "", "GPU-89-b,GPU-a1": "12", "GPU-89": ""}
    for chosen, expected in {**cases, "MIG-1f2e": ""}.items():
        visible, why = visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": chosen})
        assert "".join(gpu.name for gpu in visible) == expected, chosen
        assert why == ("" if expected else f"CUDA_VISIBLE_DEVICES={chosen} names no whole GPU that /sys shows")
    assert visible_gpus(gpus, {}) == (gpus, "") and visible_gpus([], {})[1] == "no NVIDIA GPU in /sys"


def test_gpus_of_a_container_and_of_a_slurm_job(tmp_path, monkeypatch):
    build(tmp_path, DGX_A100)
    device(tmp_path, "0", "00/00:01/30", "0x1a03", "0x030000")  # a display of the board
    device(tmp_path, "0", "00/00:02/31", "0x10de", "0x068000")  # an NVSwitch

    def shown() -> str:
        machine = read_machine(tmp_path)
        assert len(machine.gpus) == 8
        return " ".join(gpu.name[5:7] for gpu in visible_gpus(machine.gpus, {})[0])

    assert shown() == "07 0f 47 4e 87 90 b7 bd"
    access = os.access  # as the job's cgroup answers: its GPUs are the last four
    denied = tuple(f"nvidia{minor}" for minor in range(4))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(denied) and access(path, mode))
    assert shown() == "87 90 b7 bd"
    (tmp_path / "proc/driver/nvidia/gpus/0000:90:00.0/information").unlink()
    assert shown() == "87 b7 bd"


def test_ports_that_are_down_or_cannot_be_opened_are_left_out(tmp_path):
    build(tmp_path, AMD_NPS4)
    for i in range(4):
        write(tmp_path, f"sys/class/infiniband_verbs/uverbs{i}/ibdev", f"mlx5_{i}")
        if i != 1:
            write(tmp_path, f"dev/infiniband/uverbs{i}", "")
    machine = read_machine(tmp_path)
    usable = [(port.name, port.rate, port.layer) for port in machine.ports]
    assert usable == [("mlx5_0:1", 100.0, "Ethernet"), ("mlx5_2:1", 100.0, "Ethernet")]
    assert machine.idle_ports == ("mlx5_1:1 is not passed into this container", "mlx5_3:1 is DOWN")


def test_this_machine_is_read_as_python_sees_it():
    machine = read_machine()
    assert machine.allowed == os.sched_getaffinity(0)
    assert machine.allowed <= {cpu for cores in machine.cores.values() for core in cores for cpu in core}
    assert machine.parent_allowed == os.sched_getaffinity(os.getppid())


def test_the_interface_is_found_by_the_route_to_an_address():
    if not shutil.which("unshare"):
        pytest.skip("needs unshare: apt-get install util-linux")
    card = "ip link add eth8 type veth peer name eth9 && ip link set eth8 up && ip link set eth9 up"
    addresses = "ip addr add 10.9.0.1/24 dev eth8 && ip addr add fd00:9::1/64 dev eth8 nodad"
    asked = ("10.9.0.7", "10.9.0.1", "fd00:9::7", "10.9.2.7", "127.0.1.1", "::1", "localhost", "no.such.host.invalid")
    code = f"__file__ = 'volo'; from volo.cluster.topology import interface_to; print(*map(interface_to, {asked}))"
    script = f'{card} && {addresses} && echo made && exec {sys.executable} -c "{code}"'
    namespace = ["unshare", "--map-root-user", "--net", "sh", "-c", script]
    env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run(namespace, env=env, capture_output=True, text=True, timeout=LIMIT)
    if not done.stdout.startswith("made"):
        pytest.skip(f"no network namespace can be made: {done.stderr}")
    assert done.stdout.split()[1:] == ["eth8"] * 3 + ["None"] * 5, done.stderr
