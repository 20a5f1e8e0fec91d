"""Which CPUs, memory and card each rank gets: on machines that are written down, and as this kernel says afterwards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tlt
from tests.cluster import machines
from tests.cluster.machines import Tree
from tests.commands.conftest import ROOT
from tests.conftest import LIMIT
from volo.cluster import binding
from volo.cluster.binding import apply, bind_process, describe, differences, threads
from volo.cluster.placement import Share, compute_ports, distance, make_plan, nearest_ports, variables
from volo.cluster.topology import Gpu, Machine, PciPlace, Port, listed, numbers, read_machine

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="CPU masks are Linux's")
QUICK = settings(max_examples=100, deadline=None, derandomize=True, database=None)

# NUMA node, CPUs, memory, card and distance of each rank under --bind auto.
DGX_A100 = """
3 48-55,176-183 preferred mlx5_0:1 PXB
3 56-63,184-191 preferred mlx5_1:1 PXB
1 16-23,144-151 preferred mlx5_2:1 PXB
1 24-31,152-159 preferred mlx5_3:1 PXB
7 112-119,240-247 preferred mlx5_6:1 PXB
7 120-127,248-255 preferred mlx5_7:1 PXB
5 80-87,208-215 preferred mlx5_8:1 PXB
5 88-95,216-223 preferred mlx5_9:1 PXB
"""
DGX_H100 = """
0 0-13,112-125 preferred mlx5_0:1 PIX
0 14-27,126-139 preferred mlx5_3:1 PIX
0 28-41,140-153 preferred mlx5_4:1 PIX
0 42-55,154-167 preferred mlx5_5:1 PIX
1 56-69,168-181 preferred mlx5_6:1 PIX
1 70-83,182-195 preferred mlx5_9:1 PIX
1 84-97,196-209 preferred mlx5_10:1 PIX
1 98-111,210-223 preferred mlx5_11:1 PIX
"""
DGX_2 = "\n".join(
    f"{i // 8} {3 * i}-{3 * i + 2},{48 + 3 * i}-{50 + 3 * i} preferred mlx5_{(0, 1, 2, 3, 6, 7, 8, 9)[i // 2]}:1 PIX"
    for i in range(16)
)
# The only card hangs on node 1; the others reach it through the processor.
AMD_NPS4 = """
3 24-31 preferred mlx5_0:1 SYS
2 16-23 preferred mlx5_0:1 SYS
1 8-15 preferred mlx5_0:1 PHB
0 0-7 preferred mlx5_0:1 SYS
"""
LAPTOP = "0 as-they-are off - -"
VIRTUAL = "- as-they-are off rxe0:1 PHB\n- as-they-are off rxe0:1 PHB"


def table(root: Path, mode: str = "auto", device: str | None = None, ranks: int = 0, **env: str) -> list[str]:
    """The rows of a machine's table without rank, GPU and address, then the line of what is left out, if any."""
    machine = read_machine(root)
    plan = make_plan(machine, mode, device, ranks or len(machine.gpus), env)
    lines = describe(plan, "here", 0, {}, [])
    rows = [line.replace("as they are", "as-they-are").split()[3:] for line in lines[2 : 2 + len(plan.shares)]]
    return [" ".join(row) for row in rows] + [line for line in lines if line.startswith("left out")]


@pytest.mark.parametrize(
    ("make", "expected", "left_out"),
    [
        (machines.dgx_a100, DGX_A100, ""),
        (machines.dgx_h100, DGX_H100, ""),
        (machines.dgx_2, DGX_2, ""),
        (machines.amd_nps4, AMD_NPS4, ""),
        (machines.laptop, LAPTOP, "one NUMA node: CPUs and memory are left to the kernel; no InfiniBand or RoCE card"),
        (machines.virtual, VIRTUAL, "local rank 0-1 not bound: NUMA node unknown"),
    ],
)
def test_tables_of_known_machines(make: Callable[[Path], Tree], expected: str, left_out: str, tmp_path: Path) -> None:
    make(tmp_path)
    rows = table(tmp_path)
    reason = rows.pop() if left_out else ""
    assert rows == expected.strip().splitlines()
    assert reason.startswith(f"left out: {left_out}" if left_out else "")


@pytest.mark.parametrize("make", [machines.dgx_a100, machines.dgx_h100, machines.dgx_2, machines.amd_nps4])
@pytest.mark.parametrize("allowed", ["0-999", "3-21,25-30,50-70,100,120-131,180-250"])
def test_cpus_are_those_of_torchs_exclusive_binding(
    make: Callable[[Path], Tree], allowed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    machine = replace(read_machine(tmp_path), parent_allowed=None)
    machine = replace(machine, allowed=machine.allowed & set(numbers(allowed)))
    torchs: Any = pytest.importorskip("torch.numa.binding")
    stands_in: dict[str, Callable[..., Any]] = {
        "_get_device_count": lambda: len(machine.gpus),
        "_get_numa_node_index_for_device_index": lambda device_index: machine.gpus[device_index].place.node,
        "_get_allowed_logical_cpu_indices_for_numa_node": lambda numa_node_index: (
            machine.allowed & set(machine.cpus[numa_node_index])
        ),
        "_get_logical_cpu_indices_sharing_same_physical_core_as": lambda logical_cpu_index: {
            cpu for cpu, core in machine.cores.items() if core == machine.cores[logical_cpu_index]
        },
    }
    if not all(hasattr(torchs, name) for name in [*stands_in, "_exclusive_get_logical_cpus_to_bind_to"]):
        pytest.skip("this torch divides CPUs by other functions")
    for name, function in stands_in.items():
        monkeypatch.setattr(torchs, name, function)
    for rank, share in enumerate(make_plan(machine, "cpu", None, len(machine.gpus), {}).shares):
        try:
            expected = torchs._exclusive_get_logical_cpus_to_bind_to(device_index=rank)
        except RuntimeError:  # fewer cores than GPUs, for which torch ends the run
            expected = set()
        assert set(share.cpus) == expected


def test_all_ranks_name_the_same_cards_whichever_gpus_they_see(tmp_path: Path) -> None:
    machines.dgx_a100(tmp_path)
    machine = read_machine(tmp_path)
    expected = "=" + ",".join(f"mlx5_{i}:1" for i in (0, 1, 2, 3, 6, 7, 8, 9))
    for visible, near in (("0,1,2,3,4,5,6,7", "mlx5_0:1"), ("5", "mlx5_7:1"), ("6,2", "mlx5_8:1")):
        plan = make_plan(machine, "auto", None, 1, {"CUDA_VISIBLE_DEVICES": visible})
        assert variables(plan, 0, {}, tmp_path) == ({"NCCL_IB_HCA": expected, "UCX_NET_DEVICES": near}, [])


def test_cards_of_another_network_are_left_out_though_they_are_as_near(tmp_path: Path) -> None:
    tree = machines.dgx_h100(tmp_path)
    for i, name in ((0, "bf3_0"), (4, "bf3_1")):
        switch = f"pci0000:{i + 1:02x}/0000:{i + 1:02x}:01.0/0000:a{i}:00.0"
        tree.card(name, f"{switch}/0000:a{i}:03.0/0000:{i}c:00.0", i // 4, rate=400, layer="Ethernet")
    machine = read_machine(tmp_path)
    assert machine.ports[0].name == "bf3_0:1"
    assert table(tmp_path) == DGX_H100.strip().splitlines()
    # As many of both: InfiniBand.
    assert [port.name for port in compute_ports(machine.gpus[:1], machine.ports[0:3:2])] == ["mlx5_0:1"]


def ib_hca(root: Path) -> str | None:
    """What NCCL is told on a machine."""
    machine = read_machine(root)
    return variables(make_plan(machine, "auto", None, len(machine.gpus), {}), 0, {}, root)[0].get("NCCL_IB_HCA")


def test_the_one_fast_card_beats_more_slow_ports(tmp_path: Path) -> None:
    tree = machines.virtual(tmp_path)
    tree.card("mlx5_9", "pci0000:00/0000:00:1e.0", 0, rate=200)
    for i in (0, 1):
        tree.card(f"bnxt_{i}", f"pci0000:00/0000:00:1f.{i}", 0, rate=25, layer="Ethernet")
    assert ib_hca(tmp_path) == "=mlx5_9:1"


def test_two_equal_cards_for_each_gpu_are_all_left_to_nccl(tmp_path: Path) -> None:
    tree = machines.dgx_h100(tmp_path / "oci")
    for card in (1, 2, 7, 8):
        (tree.root / f"sys/class/infiniband/mlx5_{card}").unlink()
    for i in range(8):
        switch = f"pci0000:{i + 1:02x}/0000:{i + 1:02x}:01.0/0000:a{i}:00.0"
        tree.card(f"mlx5_{20 + i}", f"{switch}/0000:a{i}:04.0/0000:{i}d:00.0", i // 4, rate=400)
    assert len(read_machine(tree.root).ports) == 16 and ib_hca(tree.root) is None


def test_a_slow_storage_card_on_a_gpus_switch_is_left_out(tmp_path: Path) -> None:
    tree = machines.dgx_a100(tmp_path)
    tree.card("mlx5_20", "pci0000:00/0000:00:01.1/0000:f0:00.0/0000:f0:10.1/0000:08:00.0", 3, rate=100)
    named = ib_hca(tmp_path)
    assert named == "=" + ",".join(f"mlx5_{i}:1" for i in (0, 1, 2, 3, 6, 7, 8, 9))
    assert table(tmp_path) == DGX_A100.strip().splitlines()


def test_a_far_card_that_is_faster_leaves_the_choice_to_nccl(tmp_path: Path) -> None:
    tree = machines.dgx_a100(tmp_path)
    for i in (4, 5):
        tree.write(f"sys/class/infiniband/mlx5_{i}/ports/1/rate", "400 Gb/sec (4X NDR)")
    assert ib_hca(tmp_path) is None


def test_gpus_that_the_jobs_cgroup_lets_open_are_those_that_cuda_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = machines.dgx_h100(tmp_path)
    for minor, file in enumerate(sorted(tmp_path.glob("proc/driver/nvidia/gpus/*/information"))):
        file.write_text(f"{file.read_text()}Device Minor: \t {minor}\n")
        tree.write(f"dev/nvidia{minor}", "")
    denied = tuple(f"nvidia{minor}" for minor in range(4))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(denied) and access(path, mode))
    addresses = [gpu.address for gpu in read_machine(tmp_path).gpus if gpu.shown]
    assert addresses == ["0000:9d:00.0", "0000:c3:00.0", "0000:d1:00.0", "0000:df:00.0"]


def test_what_a_kernel_tells_oddly_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = machines.laptop(tmp_path)
    tree.write("sys/bus/pci/devices/0000:01:00.0/numa_node", "")
    assert read_machine(tmp_path).gpus[0].place.node is not None  # of the one that there is
    monkeypatch.setattr(binding, "read_machine", lambda: int("odd"))
    (line,) = bind_process(Namespace(bind="auto", device=None))
    assert line.startswith("binding: nothing is bound: ValueError: ")


def test_nodes_of_memory_alone_do_not_count(tmp_path: Path) -> None:
    machines.laptop(tmp_path).nodes({1: "", 2: ""})
    assert table(tmp_path)[0] == LAPTOP and "one NUMA node" in table(tmp_path)[1]


def test_modes(tmp_path: Path) -> None:
    machines.amd_nps4(tmp_path)
    assert [row.split()[2] for row in table(tmp_path, "cpu")] == ["off"] * 4
    assert [row.split()[2] for row in table(tmp_path, "cpu+mem")] == ["bind"] * 4
    assert table(tmp_path, "cpu+mem")[0].startswith("3 24-31")
    # One node: nothing to gain, but done where it is asked for; second threads stay with their core.
    machines.laptop(tmp_path / "laptop")
    assert table(tmp_path / "laptop", "cpu", ranks=1)[0].startswith("0 0-7 off")
    two = table(tmp_path / "laptop", "cpu", "cuda:0", ranks=2)
    assert [row.split()[1] for row in two[:2]] == ["0-3", "4-7"]


def test_without_gpus_the_cpus_are_divided_only_if_asked_for(tmp_path: Path) -> None:
    machines.dgx_a100(tmp_path)
    machine = read_machine(tmp_path)
    plan = make_plan(machine, "auto", "cpu", 2, {})
    assert plan.shares == (Share(), Share()) and plan.cards == ()
    assert describe(plan, "here", 0, {}, []) == [
        "binding: nothing is bound: CPUs and memory are left to the kernel (--bind cpu would divide the CPUs among the "
        "ranks)"
    ]
    shares = make_plan(machine, "cpu+mem", "cpu", 16, {}).shares
    assert [listed(share.cpus) for share in shares[:3]] == ["0-7,128-135", "8-15,136-143", "16-23,144-151"]
    assert [(share.memory, share.node) for share in shares[:3]] == [("bind", 0), ("bind", 0), ("bind", 1)]
    few = make_plan(replace(machine, allowed=frozenset({0, 1, 128, 129}), parent_allowed=None), "cpu", "cpu", 3, {})
    assert few.shares == (Share(),) * 3
    assert few.reasons == ("2 cores in the CPU mask for 3 ranks: CPUs and memory are left to the kernel",)
    # A share in two nodes has memory of both.
    assert [(share.memory, share.node) for share in make_plan(machine, "cpu+mem", "cpu", 2, {}).shares] == [
        ("off", None)
    ] * 2


def test_a_container_with_few_cpus_and_two_of_the_gpus(tmp_path: Path) -> None:
    tree = machines.dgx_h100(tmp_path)
    for path in tmp_path.glob("proc/driver/nvidia/gpus/*/information"):
        if path.parent.name[5:7] not in ("52", "c3"):
            path.unlink()
            path.parent.rmdir()
    tree.process("0-7,112-119", "0")
    rows = table(tmp_path, ranks=2)
    assert rows[:2] == ["0 0-7,112-119 preferred mlx5_4:1 PIX", "1 as-they-are off mlx5_9:1 PIX"]
    assert rows[2] == "left out: local rank 1 not bound: NUMA node 1 has 0 cores in the CPU mask"
    tree.process("0,112", "0-1")  # a core with two threads, for two ranks
    rows = table(tmp_path, "cpu", "cuda:0", ranks=2)
    assert rows[2] == "left out: local rank 0-1 not bound: NUMA node 0 has 1 cores in the CPU mask"
    # Memory that the cgroup forbids.
    tree.process("0-223", "1")
    rows = table(tmp_path, ranks=2)
    assert rows[0].startswith("0 0-55,112-167 off") and rows[1].startswith("1 56-111,168-223 preferred")
    assert rows[2] == "left out: no memory of NUMA node 0 for this process"


def test_cpus_that_the_launcher_gave_to_each_rank_stay(tmp_path: Path) -> None:
    tree = machines.dgx_a100(tmp_path)
    tree.process("48-63,176-191", "0-7", parent_allowed="0-255")
    rows = table(tmp_path)
    assert rows[0] == "3 as-they-are preferred mlx5_0:1 PXB"
    assert rows[-1] == "left out: CPUs stay as the launcher has given them to each rank"
    # A single rank, started by taskset: what it has is divided with nobody.
    assert table(tmp_path, ranks=1)[0].startswith("3 48-63,176-191 ")


def test_more_ranks_than_gpus_and_none_at_all(tmp_path: Path) -> None:
    machines.amd_nps4(tmp_path)
    rows = table(tmp_path, ranks=5)
    assert rows[-1].startswith("left out: 5 ranks, 4 GPUs") and rows[4] == "- as-they-are off - -"
    assert make_plan(read_machine(tmp_path), "auto", None, 1, {"CUDA_VISIBLE_DEVICES": ""}).reasons == (
        "CUDA_VISIBLE_DEVICES= leaves no GPU",
        "CPUs and memory are left to the kernel (--bind cpu would divide the CPUs among the ranks)",
    )


@st.composite
def made_up(draw: st.DrawFn) -> Machine:
    """Any machine: nodes of any size, threads of a core anywhere in a node, GPUs and cards anywhere, any CPU mask."""
    nodes = draw(st.integers(1, 4))
    cpus, cores, start = {}, {}, 0
    for node in range(nodes):
        here = draw(st.permutations(range(start, start + draw(st.integers(0, 8)))))
        width = draw(st.integers(1, 2))
        for i in range(0, len(here), width):
            cores |= dict.fromkeys(here[i : i + width], min(here[i : i + width]))
        cpus[node] = tuple(sorted(here))
        start += len(here)
    allowed = frozenset(draw(st.sets(st.sampled_from(sorted(cores))))) if cores else frozenset()

    def place(name: str) -> PciPlace:
        node = draw(st.integers(0, nodes - 1))
        above = draw(st.lists(st.sampled_from("ab"), max_size=3))
        path = (f"host{node}", *(f"host{node}-{''.join(above[:i])}" for i in range(1, len(above) + 1)), name)
        return PciPlace(path, draw(st.sampled_from([node, None])))

    gpus = tuple(Gpu(f"gpu{i}", place(f"gpu{i}")) for i in range(draw(st.integers(0, 6))))
    ports = tuple(
        Port(f"card{i}", place(f"card{i}"), draw(st.sampled_from([100.0, 200.0])))
        for i in range(draw(st.integers(0, 6)))
    )
    return Machine(cpus, cores, allowed, None, frozenset(range(nodes)), gpus, ports)


@QUICK
@given(
    made_up(), st.sampled_from(["auto", "cpu", "cpu+mem"]), st.integers(1, 8), st.sampled_from([None, "cpu", "cuda:0"])
)
def test_shares_of_any_machine(machine: Machine, mode: str, ranks: int, device: str | None) -> None:
    plan = make_plan(machine, mode, device, ranks, {})
    every = [cpu for share in plan.shares for cpu in share.cpus]
    assert len(every) == len(set(every)) and set(every) <= machine.allowed
    owner = {machine.cores[cpu]: i for i, share in enumerate(plan.shares) for cpu in share.cpus}
    assert all(owner[machine.cores[cpu]] == i for i, share in enumerate(plan.shares) for cpu in share.cpus)
    for share in plan.shares:
        if share.gpu and share.cpus:
            assert set(share.cpus) <= set(machine.cpus[share.gpu.place.node])
            assert share.memory == {"auto": "preferred", "cpu": "off", "cpu+mem": "bind"}[mode]
            # All of the node that can be used is, and as evenly as it can be.
            mates = [other for other in plan.shares if other.gpu and other.gpu.place.node == share.gpu.place.node]
            cores = sorted({machine.cores[c] for c in machine.cpus[share.gpu.place.node] if c in machine.allowed})
            expected = np.array_split(cores, len(mates))[
                mates.index(share) if device is None else plan.shares.index(share)
            ]
            assert sorted({machine.cores[cpu] for cpu in share.cpus}) == expected.tolist()


@QUICK
@given(made_up())
def test_cards_of_any_machine(machine: Machine) -> None:
    found = nearest_ports(machine.gpus, machine.ports)
    ways = {gpu: {port.name: distance(gpu.place, port.place) for port in machine.ports} for gpu in machine.gpus}
    near = [gpu for gpu, there in ways.items() if min(there.values(), default=(4, 0))[0] < 4]
    taken = [found[gpu.address].port.name for gpu in near]
    # Each GPU has one card as soon as one has a near one.
    assert len(found) == (len(machine.gpus) if near else 0)
    for gpu in near:
        port, there = found[gpu.address].port, ways[gpu]
        nearest = [other for other in machine.ports if there[other.name] == min(there.values())]
        assert port in nearest
        # Nobody shares a card while another that is as good is idle.
        idle = [other for other in nearest if other.name not in taken]
        assert taken.count(port.name) == 1 or not idle
    kept = compute_ports(machine.gpus, machine.ports)
    assert bool(kept) == bool(machine.ports)
    for port in machine.ports:
        if port not in kept:  # slower than one that stays, or farther from all GPUs
            farther = all(min(ways[gpu][p.name] for p in kept) < ways[gpu][port.name] for gpu in machine.gpus)
            assert farther or port.rate < max(other.rate for other in kept)


def test_what_is_set_already_stays(tmp_path: Path) -> None:
    tree = machines.dgx_h100(tmp_path)
    tree.write("etc/nccl.conf", "NCCL_SOCKET_IFNAME=ens1")
    tree.write(
        "proc/net/route",
        "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU\nib7 00000000 0 0003 0 0 0 00000000 0",
    )
    plan = make_plan(read_machine(tmp_path), "auto", None, 8, {})
    env = {"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1"}
    added, reasons = variables(plan, 3, env | {"NCCL_IB_HCA": "^mlx5_1"}, tmp_path)
    assert added == {"UCX_NET_DEVICES": "mlx5_5:1", "GLOO_SOCKET_IFNAME": "ib7"}
    assert reasons == [
        "NCCL_IB_HCA stays as set in the environment",
        "NCCL_SOCKET_IFNAME stays as set in /etc/nccl.conf",
    ]
    (tmp_path / "etc/nccl.conf").unlink()
    assert variables(plan, 3, env, tmp_path)[0]["NCCL_SOCKET_IFNAME"] == "=ib7"
    # One machine needs no interface; an address that is nobody else's leads to none.
    assert set(variables(plan, 3, env | {"WORLD_SIZE": "8"}, tmp_path)[0]) == {"NCCL_IB_HCA", "UCX_NET_DEVICES"}
    added, reasons = variables(plan, 3, env | {"MASTER_ADDR": "127.0.1.1"}, tmp_path)
    assert set(added) == {"NCCL_IB_HCA", "UCX_NET_DEVICES"} and reasons[0].startswith("MASTER_ADDR=127.0.1.1 is no")


def test_threads_are_no_more_than_the_cpus_of_the_share() -> None:
    gpu = Gpu("0000:01:00.0", PciPlace((), 0))
    assert threads(Share(gpu, tuple(range(16))), {"OMP_NUM_THREADS": "32"}) == {"OMP_NUM_THREADS": "16"}
    assert threads(Share(gpu, tuple(range(16))), {"OMP_NUM_THREADS": "4"}) == {}
    assert threads(Share(gpu, tuple(range(16))), {}) == {}
    assert threads(Share(None, tuple(range(16))), {}) == {"OMP_NUM_THREADS": "15"}
    assert threads(Share(None, (3,)), {}) == {"OMP_NUM_THREADS": "1"}
    assert threads(Share(), {"OMP_NUM_THREADS": "32"}) == {}


def test_the_table_of_a_saved_machine_is_printed_without_torch(tmp_path: Path) -> None:
    machines.dgx_a100(tmp_path)
    command = [sys.executable, "-X", "importtime", "-m", "volo.cluster.binding", "--root", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == f"binding on {tmp_path} (--bind auto, not done):" and len(lines) == 11
    assert lines[1] == "rank  GPU  PCI address   NUMA node  CPUs             memory     card      distance"
    assert lines[9].split()[:4] == ["7", "7", "0000:bd:00.0", "5"]
    assert "volo.cluster.topology" in done.stderr and not re.search(r"\| +(torch|timm|numpy)\b", done.stderr)
    assert binding.main(["--root", str(tmp_path / "nothing")]) == 2


def test_the_number_of_a_gpu_is_cudas(tmp_path: Path) -> None:
    machines.dgx_a100(tmp_path)
    plan = make_plan(read_machine(tmp_path), "cpu", "cuda:2", 2, {"CUDA_VISIBLE_DEVICES": "7,6,5,4"})
    rows = [line.split()[:4] for line in describe(plan, "here", 8, {}, [])[2:4]]
    assert rows == [["8", "2", "0000:90:00.0", "7"], ["9", "2", "0000:90:00.0", "7"]]


PROBE = """
import multiprocessing, runpy, sys, threading
sys.argv = [__file__ := "train.py", *sys.argv[1:]]
from volo.cluster import binding
bind = binding.apply
def show(who):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    policies = {line.split()[1] for line in open("/proc/self/numa_maps")}
    print("BOUND", who, status["Cpus_allowed_list"].strip(), *sorted(policies), flush=True)
def apply(share):
    print("TORCH", "torch" in sys.modules, "FAILURES", bind(share), flush=True)
    show("process")
    for start in multiprocessing.get_context("fork").Process, threading.Thread:
        child = start(target=show, args=(start.__name__,))
        child.start()
        child.join()
    sys.exit()
binding.apply = apply
runpy.run_path("train.py", run_name="__main__")
"""


def _numa_maps_tell() -> bool:
    """Whether this kernel has memory policies and lets this process set them."""
    probe = "from volo.cluster.binding import set_policy; set_policy('bind', 0)"
    code = f"__file__ = 'train.py'; {probe}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    return done.returncode == 0 and Path("/proc/self/numa_maps").exists()


@linux
@pytest.mark.parametrize(("rank", "mode", "word"), [(0, "cpu", "default"), (1, "cpu+mem", "bind")])
def test_a_rank_is_bound_before_torch_is_imported_and_so_is_what_it_starts(rank: int, mode: str, word: str) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len({read_machine().cores[cpu] for cpu in allowed}) < 2:
        pytest.skip("two ranks need two cores")
    if word == "bind" and not _numa_maps_tell():
        pytest.skip("memory policies are not there, or forbidden (docker)")
    plan = make_plan(read_machine(), mode, "cpu", 2, {})
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    command = [sys.executable, "-c", PROBE, *f"data --device cpu --bind {mode}".split()]
    env = {**os.environ, **{name: str(value) for name, value in place.items()}}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert "TORCH False FAILURES []" in done.stdout, done.stdout + done.stderr
    found = re.findall(r"BOUND (\w+) (\S+) (.*)", done.stdout)
    assert [who for who, _, _ in found] == ["process", "ForkProcess", "Thread"]
    for _, cpus, policies in found:
        assert numbers(cpus) == plan.shares[rank].cpus and set(numbers(cpus)) < set(allowed)
        assert any(policy.startswith(word) for policy in policies.split())
        assert ("bind" in policies) == (word == "bind")


@linux
def test_what_the_kernel_refuses_is_told() -> None:
    before = os.sched_getaffinity(0)
    (failure,) = apply(Share(cpus=(1000,)))
    assert failure.startswith("CPUs 1000: ") and os.sched_getaffinity(0) == before
    (failure,) = apply(Share(memory="bind", node=1000))
    assert failure.startswith("memory policy bind 1000: ")


@linux
def test_what_the_kernel_says_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)  # some sandboxes accept all and do nothing
    (difference,) = apply(Share(cpus=(1000, 1001)))
    assert difference.startswith("CPUs 1000-1001 were asked for, /proc/self/status says ")
    if _numa_maps_tell():
        (difference,) = differences(Share(memory="preferred", node=0))
        assert difference == "memory policy preferred 0 was asked for, get_mempolicy says default"


def test_nothing_is_touched_with_bind_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "read_machine", None)
    assert bind_process(Namespace(bind="none", device=None)) == []


def test_a_launcher_that_does_not_tell_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "4"})
    (line,) = bind_process(Namespace(bind="cpu", device="cpu"))
    assert line.startswith("binding: nothing is bound: the launcher doesn't set LOCAL_WORLD_SIZE")


def test_what_the_documentation_saves_of_a_machine_is_all_that_is_read(tmp_path: Path) -> None:
    tree = machines.dgx_h100(tmp_path / "there")
    (tmp_path / "there/proc/self/status").unlink()
    snippet = (ROOT / "docs/binding.md").read_text().split("```bash\ncd / && ")[1].split("```")[0]
    script = f"cd {tree.root} && {snippet}".replace("/tmp/node.tar", str(tmp_path / "node.tar"))
    subprocess.run(["bash", "-c", script], check=True)
    (tmp_path / "here").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "node.tar", "-C", tmp_path / "here"], check=True)
    there, here = read_machine(tree.root), read_machine(tmp_path / "here")
    assert here.ports == there.ports and len(here.ports) == 12 and here.cpus == there.cpus and here.cores == there.cores
    assert [(gpu.address, gpu.place) for gpu in here.gpus] == [(gpu.address, gpu.place) for gpu in there.gpus]


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        ([str(ROOT / "train.py")], True),
        (["/usr/bin/volo"], True),
        (["/usr/bin/tlt"], True),
        ([str(ROOT / "volo/commands/launch.py")], True),
        (["-m", "volo"], True),
        (["-m", "volo.cluster.binding"], True),
        (["-m", "tlt"], True),
        (["/home/me/train.py"], False),  # gets the models by importing volo, as ever
        (["-m", "mine.train"], False),
        (["-c"], False),
        ([str(ROOT / "demo/digits.py")], False),
    ],
)
def test_only_programs_of_this_project_register_the_models_late(
    command: list[str], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, command)
    assert tlt._starts_program() == ours


def started(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    """Let this be a Python that was started with `command`."""
    main = ModuleType("__main__")
    if not command[0].startswith("-"):
        main.__file__ = command[0]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", ["python", *command])


@pytest.mark.parametrize("argv", ["[]", "['']", f"[{str(ROOT / 'train.py')!r}]", "['-m']"])
def test_an_import_registers_the_models_whatever_the_importer_has_made_of_sys_argv(argv: str) -> None:
    code = f"import sys; sys.argv = {argv}; import volo, timm; assert all(map(timm.is_model, ('volo_d1', 'lvvit_s')))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


def test_every_program_beside_the_readme_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [str(path) for path in ROOT.glob("*.py") if path.name != "setup.py"]
    assert len(programs) == 4
    for program in programs:
        started(monkeypatch, [program])
        assert tlt._starts_program(), program
