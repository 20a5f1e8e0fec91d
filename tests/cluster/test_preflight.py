"""The preflight without a cluster: made-up reports and networks, and what one machine can show for real."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from tests.commands.conftest import ROOT
from tests.conftest import LIMIT
from tlt.errors import UserError
from volo import cli
from volo.cluster.preflight import bandwidth, coordinator, node_report, rendezvous
from volo.cluster.preflight.bandwidth import AllReduce, Bandwidths, NodeGroup, measure_all, ring_rounds
from volo.cluster.preflight.channel import Channel
from volo.cluster.preflight.coordinator import Coordinator, PreflightReport
from volo.cluster.preflight.findings import Finding, Needs, check_bandwidths, check_clocks, check_nodes, missing_nodes
from volo.cluster.preflight.local_node import WorkerProcess
from volo.cluster.preflight.node_report import NodeReport, PathState
from volo.cluster.preflight.rendezvous import Rendezvous, Unfit, expand_hostlist, rendezvous_from_environment
from volo.config.flags_tools import parse_preflight

NAMES = {0: "n1", 1: "n2", 2: "n3"}
# As `scontrol show hostnames` of Slurm 22.05 writes them out.
HOSTLISTS = {
    "n1": "n1",
    "n[1-3,5]": "n1 n2 n3 n5",
    "n[08-11]": "n08 n09 n10 n11",
    "n[1-2],gpu7,n[001]": "n1 n2 gpu7 n001",
    "r[1-2]n[01-02]": "r1n01 r1n02 r2n01 r2n02",
    "dgx-a[1,3]": "dgx-a1 dgx-a3",
    "n[9-11]": "n9 n10 n11",
}


@pytest.mark.parametrize(("short", "names"), HOSTLISTS.items())
def test_node_lists(short: str, names: str, tmp_path: Path) -> None:
    assert expand_hostlist(short) == names.split()
    if shutil.which("scontrol"):
        (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")  # or it doesn't start
        env = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
        shown = subprocess.run(["scontrol", "show", "hostnames", short], env=env, capture_output=True, text=True)
        assert shown.stdout.split() == names.split(), shown.stderr


def test_names_by_hand_may_be_divided_by_spaces() -> None:
    assert expand_hostlist("n1 n[2-3], n7") == ["n1", "n2", "n3", "n7"]


@pytest.mark.parametrize("text", ["", "n[1-", "n]1", "n[3-1]", "n[1-99999999]", "n[1,,2]", "n[]"])
def test_bad_node_lists(text: str) -> None:
    with pytest.raises(UserError, match="node list"):
        expand_hostlist(text)


def test_where_this_node_is() -> None:
    by_hand = {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "NODES": "a b c"}
    assert rendezvous_from_environment(by_hand) == Rendezvous(1, 3, ("a", "b", "c"), "10.0.0.1", 29401)
    slurm = {"SLURM_NNODES": "3", "SLURM_NODEID": "2", "MASTER_ADDR": "n4", "SLURM_JOB_NODELIST": "n[4-6]"}
    assert rendezvous_from_environment(slurm) == Rendezvous(2, 3, ("n4", "n5", "n6"), "n4", 29501)
    # A step on two of the job's nodes: who they are is not known.
    assert rendezvous_from_environment({**slurm, "SLURM_NNODES": "2", "SLURM_NODEID": "0"}).names == ()
    assert rendezvous_from_environment({}) == Rendezvous(0, 1, (), "", 0)
    assert rendezvous_from_environment({"SLURM_NNODES": "1", "SLURM_NODEID": "0"}).nodes == 1


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"NNODES": "two"}, "NNODES='two' is not a whole number"),
        ({"NNODES": "0"}, "NNODES must be at least 1"),
        ({"NNODES": "2"}, "NODE_RANK is not set"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK 2 is not one of 0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "65535"}, "MASTER_PORT 65535 leaves no"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "NODES": "n1"}, "NODES names 1 nodes and NNODES is 2"),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}, "srun --ntasks-per-node=1"),
    ],
)
def test_variables_that_make_no_sense(env: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)) as error:
        rendezvous_from_environment(env)
    assert error.value.exit_code == 2


def test_addresses_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"n1": "127.0.1.1", "127.0.0.1": "127.0.0.1", "far": "192.0.2.7"}

    def resolve(name: str) -> str:
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return known[name]

    monkeypatch.setattr(rendezvous.socket, "gethostbyname", resolve)
    for master, told in {
        "n1": "MASTER_ADDR n1 resolves to 127.0.1.1, which is a loopback address",
        "127.0.0.1": "MASTER_ADDR 127.0.0.1 is a loopback address",
        "n99": "MASTER_ADDR n99 can't be resolved",
        "far": "MASTER_ADDR far is no address of this node, which is node 0",
    }.items():
        with pytest.raises(Unfit, match=told) as error:
            rendezvous.master_address(Rendezvous(0, 2, ("n1", "n2"), master, 29501))
        assert error.value.exit_code == 6 and str(error.value).startswith("n1 (host ")
    assert rendezvous.master_address(Rendezvous(1, 2, (), "far", 29501)) == "192.0.2.7"


def test_a_name_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(rendezvous.socket, "gethostbyname", lambda name: never.wait())
    monkeypatch.setattr(rendezvous, "_RESOLVER_S", 0.05)
    with pytest.raises(Unfit, match="MASTER_ADDR n9 can't be resolved .no answer within"):
        rendezvous.master_address(Rendezvous(0, 2, (), "n9", 29501))
    assert "can't be resolved" in (rendezvous.own_name_note() or "")
    never.set()


def test_a_host_that_knows_itself_as_127_0_1_1_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert "the own host name resolves to 127.0.1.1: harmless" in (rendezvous.own_name_note() or "")
    monkeypatch.setattr(rendezvous.socket, "gethostbyname", lambda name: "192.0.2.7")
    assert rendezvous.own_name_note() is None


def made_up(rank: int, **changes: object) -> NodeReport:
    """A node of a cluster where all is well."""
    versions = dict.fromkeys(("project", "code", "Python", "torch", "CUDA", "NCCL"), "1.0") | {"driver": "580.1"}
    report = NodeReport(
        rank=rank,
        host=f"n{rank + 1}",
        address=f"10.0.0.{rank + 1}",
        versions=versions,
        gpus=8,
        gpu="NVIDIA H100",
        cpus=96,
        cards={"mlx5_0:1": "ACTIVE at 400 Gb/s"},
        paths={"/data": PathState(2002)},
        shm_gb=500.0,
        memlock_gb=None,
        free_gb=900.0,
    )
    return dataclasses.replace(report, **changes)  # type: ignore[arg-type]


VERSIONS = made_up(0).versions
PROBLEMS: dict[str, tuple[dict[str, object], str]] = {
    "torch": ({"versions": {**VERSIONS, "torch": "2.9"}}, "n2: torch 2.9, 1.0 on the other 2: start all nodes from"),
    "driver": ({"versions": {**VERSIONS, "driver": "570"}}, "n2: driver 570, 580.1 on the other 2: have the driver"),
    "code": ({"versions": {**VERSIONS, "code": "0a"}}, "n2: code 0a, 1.0 on the other 2: bring the checkout"),
    "GPUs": ({"gpus": 7}, "n2: GPUs 7, 8 on the other 2: look for a failed GPU"),
    "model": ({"gpu": "NVIDIA A100"}, "n2: GPU model NVIDIA A100, NVIDIA H100 on the other 2"),
    "card": ({"cards": {"mlx5_0:1": "DOWN"}}, "n2: card mlx5_0:1 DOWN, ACTIVE at 400 Gb/s on the other 2: look at it"),
    "no card": ({"cards": {}}, "n2: card mlx5_0:1 none, ACTIVE at 400 Gb/s on the other 2"),
    "data": ({"paths": {"/data": PathState(2)}}, "n2: size of /data 2, 2002 on the other 2: copy it there again"),
    "no data": ({"paths": {"/data": PathState(error="Stale file handle")}}, "n2: can't read /data (Stale file handle)"),
    "output": ({"free_gb": None, "output_error": "Read-only"}, "n2: can't write to --output (Read-only)"),
    "disk": ({"free_gb": 3.0}, "n2: 3 GB free for checkpoints, --free-gb 20: make room"),
    "shm": ({"shm_gb": 0.064}, "n2: /dev/shm has 0.064 GB free, 8 processes want 8: enlarge it"),
    "memlock": ({"memlock_gb": 65536e-9}, "n2: a process may lock 64 KiB of memory, too little for InfiniBand"),
    "address": ({"address": "10.0.0.1"}, "n1, n2: have the same address 10.0.0.1"),
    "torch without CUDA": ({"gpus": 0}, "n2: an NVIDIA driver is loaded, but torch sees no GPU"),
}


def problems(reports: Sequence[NodeReport], processes: int = 8) -> list[str]:
    """What is told of some nodes that run `processes` each."""
    return [str(found) for found in check_nodes(reports, NAMES, Needs(processes, shm_gb=1.0, free_gb=20.0))]


def test_equal_nodes_are_fit() -> None:
    assert problems([made_up(rank) for rank in range(3)]) == []


@pytest.mark.parametrize("what", PROBLEMS)
def test_one_node_is_different(what: str) -> None:
    change, told = PROBLEMS[what]
    found = problems([made_up(0), made_up(1, **change), made_up(2)])
    assert any(line.startswith(told) for line in found), found
    # Too few GPUs are told twice: fewer than the others have, and too few for the processes.
    assert len(found) == (2 if "gpus" in change else 1)


def test_nobody_is_right_among_two() -> None:
    found = problems([made_up(0), made_up(1, versions={**VERSIONS, "torch": "2.9"})])
    assert [line.split(":")[:2] for line in found] == [["n1, n2", " torch differs (1.0 on n1, 2.9 on n2)"]]


def test_memlock_matters_to_infiniband_alone() -> None:
    assert problems([made_up(rank, cards={}, memlock_gb=65536e-9) for rank in range(3)]) == []


def test_what_nodes_share_is_one_line() -> None:
    found = problems([made_up(rank, shm_gb=0.064, notes=["odd"]) for rank in range(3)])
    assert [line.split(":")[0] for line in found] == ["note", "n1, n2, n3"]


def test_more_processes_than_gpus() -> None:
    assert problems([made_up(0)], processes=9)[0].startswith("n1: 8 GPUs for 9 processes")


def test_missing_nodes_have_a_line_each() -> None:
    lines = [str(each) for each in missing_nodes([1, 2], NAMES, 25.0, 29501)]
    assert [line.split(":")[0] for line in lines] == ["n2", "n3"]
    assert "within 25 s" in lines[0] and "port 29501" in lines[0] and "--exclude=n2" in lines[0]


def test_clocks_count_when_they_are_surely_off() -> None:
    offsets = {1: (-2.0, 0.5), 2: (2.0, 1.5)}
    assert [str(each).partition(" node")[0] for each in check_clocks(offsets, NAMES, 1.0)] == [
        "n2: its clock is 2 s behind"
    ]


def test_clock_offsets_are_measured_through_the_store() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    two = Rendezvous(0, 2, (), "127.0.0.1", server.port)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    ahead = Channel(dataclasses.replace(two, rank=1), client, clock=lambda: time.time() + 3.0)
    codes: list[int] = []
    follower = threading.Thread(target=lambda: codes.append(ahead.follow(lambda task: {"did": task["do"]})))
    follower.start()
    here = Channel(two, server)
    offset, uncertainty = here.clock_offset(1)
    assert abs(offset - 3.0) <= uncertainty
    assert here.ask({1: {"do": "report"}}, LIMIT) == {1: {"did": "report"}}
    here.ask({1: {"do": "end", "code": 6}}, LIMIT)
    follower.join()
    assert codes == [6]


def test_who_has_come() -> None:
    store = HashStore()
    nodes = [Channel(Rendezvous(rank, 3, ("n1", "n2", "n3"), "n1", 29501), store) for rank in (0, 2)]
    for node in nodes:
        node.announce()
    assert nodes[0].wait_for_nodes(time.monotonic() + 0.05) == [0, 2]


def test_two_nodes_of_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    Channel(Rendezvous(0, 2, (), "n1", 29501), store).announce()
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    with pytest.raises(Unfit, match="node 0 is .* already: give other another NODE_RANK"):
        Channel(Rendezvous(0, 2, (), "n1", 29501), store).announce()


def test_nodes_that_count_differently() -> None:
    store = HashStore()
    Channel(Rendezvous(0, 2, (), "n1", 29501), store).announce()
    with pytest.raises(Unfit, match="b: NNODES is 3 here and 2 on node 0"):
        Channel(Rendezvous(1, 3, ("a", "b", "c"), "n1", 29501), store).announce()


class MadeUpNode:
    """Answers as a node would whose all-reduces reach 10 GB/s."""

    processes, backend, measures = 2, "gloo", True

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def perform(self, task: dict[str, Any]) -> Any:
        """As `LocalNode.perform`."""
        if task["do"] == "report":
            return {**dataclasses.asdict(made_up(self._rank)), "processes": 2}
        if task["do"] == "ready":
            return "no GPU" if self._rank == 2 else ""
        return {"bandwidth": 10.0}


def coordinated(nodes: int, silent: int | None = None) -> PreflightReport:
    """What node 0 finds among nodes that run in threads; a `silent` one comes and then does nothing."""
    store = HashStore()
    channels = [Channel(Rendezvous(rank, nodes, (), "n1", 29501), store) for rank in range(nodes)]
    for channel in channels:
        channel.announce()
    followers = [
        threading.Thread(target=channel.follow, args=(MadeUpNode(rank).perform,), daemon=True)
        for rank, channel in enumerate(channels)
        if rank not in (0, silent)
    ]
    for follower in followers:
        follower.start()
    node_0 = Coordinator(parse_preflight(["--shm-gb", "0"]), channels[0], MadeUpNode(0))  # type: ignore[arg-type]
    report = node_0.check(time.monotonic())
    channels[0].ask({rank: {"do": "end", "code": 0} for rank in range(1, nodes) if rank != silent}, LIMIT)
    for follower in followers:
        follower.join()
    return report


def test_node_0_asks_all_and_measures() -> None:
    report = coordinated(2)
    assert report.problems == []
    assert [each.nodes for each in report.bandwidths.alone] == [(0,), (1,)]
    assert [(each.nodes, each.bandwidth) for each in report.bandwidths.ring] == [((0, 1), 10.0)]


def test_a_node_that_stops_answering_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_REPORT_S", 0.3)
    report = coordinated(3, silent=1)
    assert [str(each) for each in report.problems] == ["node 1: came and has stopped answering: its own log tells why"]
    assert report.bandwidths == Bandwidths()


def test_processes_that_do_not_start_are_told() -> None:
    report = coordinated(3)
    assert [each.nodes for each in report.problems] == [("n3",)]
    assert "its processes don't start (no GPU)" in report.problems[0].what


def network(
    speeds: dict[int, float], cut: Sequence[NodeGroup] = (), rack: int = 10**9
) -> Callable[..., list[AllReduce]]:
    """Measures as a network would whose nodes reach `speeds`, or 10 GB/s: `cut` pairs 1, and more than two nodes 2 if
    one of those from `rack` on is among them."""
    rounds: list[Sequence[NodeGroup]] = []

    def measure(groups: Sequence[NodeGroup]) -> list[AllReduce]:
        rounds.append(groups)
        assert len({node for group in groups for node in group}) == sum(map(len, groups))
        found = []
        for group in groups:
            slowest = min(speeds.get(node, 10.0) for node in group)
            slowest = min(slowest, 1.0 if group in cut else 10.0)
            slowest = min(slowest, 2.0 if len(group) > 2 and max(group) >= rack else 10.0)
            found.append(AllReduce(group, slowest, "" if slowest else "Connection timed out"))
        return found

    measure.rounds = rounds  # type: ignore[attr-defined]
    return measure


@pytest.mark.parametrize("nodes", range(2, 18))
def test_the_ring_is_measured_in_few_rounds(nodes: int) -> None:
    rounds = ring_rounds(nodes)
    assert len(rounds) <= 3
    pairs = [set(pair) for pairs in rounds for pair in pairs]
    assert len(pairs) == max(nodes if nodes > 2 else 1, 1)
    assert all({node, (node + 1) % nodes} in pairs for node in range(nodes))


@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 9, 16])
def test_the_one_slow_node_is_named(nodes: int) -> None:
    names = {rank: f"n{rank}" for rank in range(nodes)}
    for slow in range(nodes):
        for speed in (0.0, 4.0):
            found = check_bandwidths(measure_all(nodes, 8, 0.6, network({slow: speed})), names, 0.6)
            assert {each.nodes for each in found if "them" not in each.what or speed} == {(names[slow],)}, found


def test_nobody_is_slow() -> None:
    for nodes in (1, 2, 3, 8, 40):
        measured = measure_all(nodes, 8, 0.6, network({1: 7.0}))
        assert check_bandwidths(measured, {rank: f"n{rank}" for rank in range(nodes)}, 0.6) == []
        assert len(measured.alone) == nodes


def test_one_process_alone_has_nothing_to_measure() -> None:
    assert measure_all(1, 1, 0.6, network({})) == Bandwidths()


def test_a_slow_link_between_good_nodes() -> None:
    names = {rank: f"n{rank}" for rank in range(6)}
    found = check_bandwidths(measure_all(6, 1, 0.6, network({}, cut=[(2, 3)])), names, 0.6)
    assert [str(each) for each in found] == [
        "n2, n3: all-reduce between them reaches 1 GB/s, 10 % of the median node's 10: look at the way between them"
    ]


def test_two_nodes_that_do_not_reach_each_other() -> None:
    found = check_bandwidths(measure_all(2, 1, 0.6, network({0: 0.0})), NAMES, 0.6)
    assert [each.nodes for each in found] == [("n1", "n2")] and "Connection timed out" in found[0].what


def test_a_least_bandwidth_holds_for_two_nodes_as_well() -> None:
    measured = measure_all(2, 1, 0.6, network({0: 3.0}))
    assert check_bandwidths(measured, NAMES, 0.6) == []
    assert "less than --min-bandwidth 5" in str(check_bandwidths(measured, NAMES, 0.6, minimum=5.0)[0])


def test_halves_find_what_pairs_do_not_show() -> None:
    measured = measure_all(16, 1, 0.6, network({}, rack=12))
    found = check_bandwidths(measured, {rank: f"n{rank}" for rank in range(16)}, 0.6)
    assert [each.nodes for each in found] == [("n12", "n13", "n14", "n15")]
    assert "reaches 2 GB/s, among as many others 10" in found[0].what and "leaf switch" in found[0].remedy


def test_healthy_nodes_are_halved_once() -> None:
    measure = network({})
    assert len(measure_all(40, 1, 0.6, measure).halves) == 1
    assert [len(groups) for groups in measure.rounds] == [20, 20, 2]  # type: ignore[attr-defined]


def test_what_was_slow_once_is_measured_again() -> None:
    healthy, calls = network({}), []

    def busy_at_first(groups: Sequence[NodeGroup]) -> list[AllReduce]:
        calls.append(groups)
        return network({1: 1.0})(groups) if len(calls) <= 2 else healthy(groups)

    assert bandwidth.slow_nodes(measure_all(4, 1, 0.6, busy_at_first).ring, 0.6) == []
    assert calls == [[(0, 1), (2, 3)], [(1, 2), (3, 0)], [(0, 1)], [(1, 2)]]


def test_a_report_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number in range(3):
        (tmp_path / "train" / f"class{number}").mkdir()
    (tmp_path / "image.sqsh").write_bytes(b"12345")
    paths = [str(tmp_path), str(tmp_path / "image.sqsh"), str(tmp_path / "absent"), "bad\0name"]
    report = node_report.node_report(0, "127.0.0.1", paths, str(tmp_path / "image.sqsh" / "output"))
    assert report.versions["torch"].split("+")[0] == version("torch").split("+")[0]
    assert report.versions["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert report.paths[paths[0]].size == 2 + 3
    assert report.paths[paths[1]].size == 5
    assert report.paths[paths[2]].error == "No such file or directory"
    assert report.paths[paths[3]].error
    assert report.output_error == "Not a directory" and report.free_gb is None
    assert report.cpus == len(os.sched_getaffinity(0))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert report.memlock_gb == (None if limit == resource.RLIM_INFINITY else limit / 1e9)
    shown = subprocess.run(["df", "--output=avail", "-B1", "/dev/shm", str(tmp_path)], capture_output=True, text=True)
    shm, disk = (int(line) / 1e9 for line in shown.stdout.split()[1:])
    assert report.shm_gb == pytest.approx(shm, abs=0.5)
    assert node_report.output_state(str(tmp_path / "new" / "run"))[0] == pytest.approx(disk, abs=0.5)
    assert not (tmp_path / "new").exists()


def test_a_made_up_machine_with_gpus_and_cards(tmp_path: Path) -> None:
    version_file = tmp_path / "proc/driver/nvidia/version"
    for number, model in enumerate(("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3")):
        gpu = tmp_path / f"proc/driver/nvidia/gpus/0000:{number}b:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 18\n")
    version_file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version: 12\n")
    for port, state, rate in (("1", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("2", "1: DOWN", "40 Gb/sec")):
        folder = tmp_path / "sys/class/infiniband/mlx5_0/ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text(f"{rate}\n")
    report = node_report.node_report(0, "127.0.0.1", [], None, root=tmp_path)
    assert report.gpu == "NVIDIA H100 80GB HBM3"
    assert report.versions["driver"] == "580.95.05"
    assert report.cards == {"mlx5_0:1": "ACTIVE at 400 Gb/s", "mlx5_0:2": "DOWN"}


def test_the_open_kernel_module_is_a_driver_too(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (dvs)\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert node_report.versions(tmp_path)["driver"] == "575.57.08"


def test_a_stale_checkout_shows(tmp_path: Path) -> None:
    for name in ("volo/a.py", "tlt/b.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x = 1\n")
    before = node_report.code_digest(tmp_path)
    (tmp_path / "volo/notes.txt").write_text("not code")
    assert node_report.code_digest(tmp_path) == before
    (tmp_path / "tlt/b.py").write_text("x = 2\n")
    assert node_report.code_digest(tmp_path) != before


def test_storage_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it waits for a writer
    monkeypatch.setattr(node_report, "_STORAGE_S", 0.05)
    assert node_report.path_state(str(tmp_path / "pipe")).error == "no answer within 0.05 s"
    os.close(os.open(tmp_path / "pipe", os.O_RDWR))  # lets the thread go


def worker(code: str, seconds: float = 30.0) -> tuple[WorkerProcess, dict[str, object]]:
    """A process that says it is ready and then does `code`, and what came of a task."""
    program = f"import sys; print('{{\"ready\": true}}', flush=True)\n{code}"
    made = WorkerProcess([sys.executable, "-c", program], os.environ)
    return made, made.perform({"seconds": seconds})


def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volo.cluster.preflight.local_node._SLACK_S", 0.2)
    made, answer = worker("import time; time.sleep(600)", seconds=0.2)
    assert answer == {"error": "no answer within 0.4 s"}
    assert "error" in made.perform({"seconds": 0.2})  # it is started again
    made.end()


def test_a_process_that_dies_leaves_its_last_words() -> None:
    made, answer = worker("sys.stdin.readline(); sys.exit('out of memory')")
    assert answer == {"error": "out of memory"}
    made.end()


def test_a_report_names_what_all_share_and_what_is_missing() -> None:
    reports = [made_up(0), made_up(2, versions={**VERSIONS, "torch": "2.9"})]
    ring = (AllReduce((0, 2), 12.5),)
    finding = Finding(("n2",), "is missing", "look")
    text = PreflightReport(NAMES, reports, {2: (0.002, 0.0001)}, Bandwidths(ring=ring), [finding], 8, "nccl").text(1.0)
    lines = text.splitlines()
    assert lines[0] == "preflight: 3 nodes, 8 processes each (nccl)"
    assert "driver 580.1" in lines[1] and "torch" not in lines[1]
    assert lines[3].split()[:6] == ["n1", "0", "10.0.0.1", "8", "96", "1"] and lines[3].endswith("12.5")
    assert lines[4].split() == ["n2", "1", "missing"]
    assert "+2 ± 0.1" in lines[5]
    assert lines[-2:] == ["n2: is missing: look", "3 nodes checked in 1.0 s: not fit: 1 problem"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--free-gb 5", "--free-gb has no effect without --output"),
        ("--no-bandwidth --slow-below 0.5", "--slow-below has no effect with --no-bandwidth"),
        ("--procesess 2", "did you mean --processes"),
    ],
)
def test_flags_without_effect(flags: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_preflight(flags.split())


def test_one_machine_without_any_variable(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER", "N"))}
    record = tmp_path / "preflight.json"
    flags = f"--processes 2 --data {tmp_path} --output {tmp_path} --free-gb 0.001 --shm-gb 0.001 --json {record}"
    command = [sys.executable, "-m", "volo", "preflight", *flags.split(), "--round-timeout", "120"]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=LIMIT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("preflight: 1 node, 2 processes each (") and ended.stdout.endswith(": fit\n")
    assert not ended.stderr
    found = json.loads(record.read_text())
    assert found["bandwidth_gb_per_s"]["alone"][0]["bandwidth"] > 0
    assert found["exit_code"] == 0 and found["findings"] == []


def test_data_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NNODES", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    assert cli.run("preflight", ["--no-bandwidth", "--data", str(tmp_path / "none")]) == 6
    assert f"can't read {tmp_path / 'none'} (No such file or directory)" in capsys.readouterr().out
