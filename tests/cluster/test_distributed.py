"""Who am I: ranks from torchrun, from srun, from neither."""

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import PrefixStore

from tests.commands.conftest import ROOT, Running
from tests.commands.conftest import nothing_left_running as nothing_left_running  # a fixture
from tests.conftest import LIMIT, free_port, python_path
from tlt.errors import UserError
from tlt.io import jobs
from volo.cli import COMMANDS
from volo.cluster import distributed
from volo.cluster.distributed import LEFT, RankLost, World, choose_device, connect, init_world, meet, serve, start_of
from volo.cluster.launch import launch_of
from volo.train.data import workers_of

NUMBERS = {"RANK": "5", "LOCAL_RANK": "1", "SIZE": "8", "LOCAL_SIZE": "4"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": number for name, number in NUMBERS.items()}
STEP = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
MPICH = {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}
CRAY = {"PMI_RANK": "5", "PMI_LOCAL_RANK": "1", "PMI_SIZE": "8", "PMI_LOCAL_SIZE": "4"}
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
AWAY, HERE = {"MASTER_ADDR": "node0"}, {"MASTER_ADDR": "127.0.0.1"}
ALONE = {"RANK": "5", "WORLD_SIZE": "8"}
# NVIDIA's image under enroot and pyxis, on two nodes: all that there is but LOCAL_WORLD_SIZE.
PYXIS = STEP | ALONE | AWAY | {"LOCAL_RANK": "1", "MASTER_PORT": "61001", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("env", "expected"),  # rank, local rank, size, local size
    [
        (TORCHRUN | AWAY, (5, 1, 8, 4)),
        (TORCHRUN | HERE | {"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "5"}, (5, 5, 8, 8)),  # volo launch
        (TORCHRUN, (5, 1, 8, 4)),  # Ray Train
        (STEP | TORCHRUN | {"RANK": "3", "WORLD_SIZE": "4"}, (3, 1, 4, 4)),  # torchrun in a step
        (STEP | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, (0, 0, 1, 1)),
        (STEP, (5, 1, 8, 4)),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4,3(x2)", "SLURM_NODEID": "2"}, (5, 1, 8, 3)),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "2"}, (5, 1, 8, 4)),
        (STEP | {"RANK": "0"}, (5, 1, 8, 4)),  # of something else
        (PYXIS, (5, 1, 8, 4)),
        ({name: value for name, value in PYXIS.items() if name != "WORLD_SIZE"}, (5, 1, 8, 4)),  # another image
        ({name: value for name, value in PYXIS.items() if name not in ("RANK", "LOCAL_RANK")}, (5, 1, 8, 4)),
        (OPEN_MPI, (5, 1, 8, 4)),
        (OPEN_MPI | STEP | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (5, 1, 8, 4)),  # its daemons
        (MPICH, (5, 1, 8, 4)),
        (MPICH | STEP | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (5, 1, 8, 4)),  # its daemons
        (STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 1, 8, 4)),  # srun --mpi=pmi2
        (CRAY, (5, 1, 8, 4)),
        ({name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}, (5, 1, 8, 4)),  # MVAPICH
        (ALONE | AWAY | {"LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, (5, 1, 8, 4)),  # DeepSpeed
        (ALONE | AWAY | {"LOCAL_RANK": "1", "NODE_RANK": "1"}, (5, 1, 8, None)),  # Azure ML
        (ALONE | AWAY, (5, 0, 8, None)),  # Kubeflow
        (ALONE | {"MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, (5, 0, 8, None)),  # its first pod
        (ALONE | HERE, (5, 5, 8, 8)),
        (ALONE, (5, 5, 8, 8)),
        ({}, (0, 0, 1, 1)),
        ({"RANK": "gold", "MASTER_PORT": "tcp://10.3.2.1:80"}, (0, 0, 1, 1)),  # of something else
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, (0, 0, 1, 1)),  # in a batch script
        (dict(zip(OPEN_MPI, "0011", strict=True)), (0, 0, 1, 1)),
    ],
)
def test_a_rank_knows_itself_whoever_started_it(env, expected):
    launch = launch_of(env)
    assert (launch.rank, launch.local_rank, launch.size, launch.local_size) == expected
    assert launch.one_machine == (expected[2] == expected[3])


@pytest.mark.parametrize("users", [None, "1"])
def test_ranks_do_not_talk_within_a_capture_unasked(monkeypatch, users):
    """Where one of them fails in it, the others would wait for it until a time limit."""
    asked = {} if users is None else {"NCCL_GRAPH_REGISTER": users}
    monkeypatch.setattr(os, "environ", ALONE | HERE | {"RANK": "0"} | asked)
    set_before, launch = list[str](), launch_of(os.environ)
    joined = lambda *_: (set_before.append(os.environ["NCCL_GRAPH_REGISTER"]), launch)[1]  # noqa: E731
    monkeypatch.setattr(distributed, "_join", joined)
    init_world("cpu")
    assert set_before == [users or "0"]


def test_slurm_names_the_meeting_place_and_the_user_threads():
    for nodes, first in {"node[07-12,3]": "node07", "a-1,b[1-2]": "a-1", "x": "x", "r[1-2]n[4,5]s": "r1n4s"}.items():
        launch = launch_of(STEP | {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "70003"})
        assert (launch.address, launch.port) == (first, 30003)
    assert (launch_of(PYXIS).address, launch_of(PYXIS).port) == ("node0", 61001)
    assert launch_of(ALONE, local_rank_flag=3).local_rank == 3  # of old launchers
    assert launch_of(ALONE).address is None and launch_of(ALONE | HERE).port == 29500
    one = {"OMP_NUM_THREADS": "1"}
    for env, set_by_user in ((PYXIS, False), (PYXIS | {"OMP_NUM_THREADS": "2"}, True), (STEP | one, True), (one, True)):
        assert launch_of(env).threads_set == set_by_user, env


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_named(name):
    with pytest.raises(UserError, match=f"^{name}=two in the environment: a whole number is needed"):
        launch_of(TORCHRUN | {name: "two"})


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (STEP, "MASTER_ADDR is not set: .* mpirun"),  # where Slurm names no nodes
        ({"WORLD_SIZE": "8"} | HERE, "of WORLD_SIZE=8 processes RANK must number each from 0 on"),
        (TORCHRUN | {"RANK": "8"}, "of WORLD_SIZE=8 processes RANK must number each from 0 on"),
    ],
)
def test_missing_launch_variable_is_named(env, named, monkeypatch):
    monkeypatch.setattr(os, "environ", env)
    with pytest.raises(UserError, match=named):
        init_world("cpu")


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankLost, match="rank 1, 2 did not come in time"):
        init_world("cpu", timeout_s=1.0)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PrefixStore]:
    """The environment is that of rank 0 of two; `peer(gpu)` does what rank 1 does in their meeting, and no more."""
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)

    def meets(gpu: str = "") -> PrefixStore:
        store = connect("127.0.0.1", int(launch["MASTER_PORT"]), time.monotonic() + LIMIT, "rank")
        store = start_of(store, "", 0)
        store.set("place/1", json.dumps(["127.0.0.1", gpu]))
        meet(store, "rank", 1, 2, time.monotonic() + LIMIT)
        return store

    return meets


@pytest.mark.parametrize("gpus", ["GPU-1 GPU-1", "GPU-1 GPU-2"])
def test_ranks_sharing_a_gpu_are_refused(peer, monkeypatch, gpus):
    gpu, peers_gpu = gpus.split()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Namespace(uuid=gpu))
    connected: list[World] = []
    monkeypatch.setattr(distributed, "_connect_all", lambda store, world, limit: connected.append(world))
    monkeypatch.setattr(distributed, "_own_group", False)  # as it was, afterwards
    # Its launcher shows it its own.
    assert choose_device(None, 1) == choose_device("cuda", 7) == torch.device("cuda", 0)
    with ThreadPoolExecutor() as pool:
        pool.submit(peer, peers_gpu)
        if gpu == peers_gpu:
            with pytest.raises(UserError, match="^ranks 0-1 would share a GPU: start as many processes as"):
                init_world()
        else:
            init_world()
    assert len(connected) == (gpu != peers_gpu)


def test_a_rank_that_is_told_to_end_while_it_connects_ends(peer, tmp_path):
    # The signal comes to the thread that connects, which waits for a peer that never does.
    (tmp_path / "program.py").write_text(
        "import signal, threading, time; from volo.cluster import distributed\n"
        "connect_all = distributed._connect_all\n"
        "def connect(*given):\n"
        "    time.sleep(0.5)\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "    connect_all(*given)\n"
        "distributed._connect_all = connect\n"
        "run = lambda args: distributed.init_world('cpu')"
    )
    starts = "import sys; from volo.cluster.stopping import STOP; from volo.config.fields import Settings\n"
    starts += "from volo.commands.console import run_program\n"
    starts += "with STOP.handled(): sys.exit(run_program(lambda argv: Settings(), 'program'))"
    rank = Running([sys.executable, "-c", starts], PYTHONPATH=python_path(ROOT, tmp_path))
    peer()
    assert rank.end() == 85, rank.output


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (lambda *_: time.sleep(0.3), r"have met, but can't connect: .* \(not within 0.1 s\)"),
        (lambda *_: torch.ones(2) @ torch.ones(3), r"have met, but can't connect: .* \(inconsistent tensor size"),
    ],
)
def test_connecting_takes_no_longer_than_it_may(peer, monkeypatch, does, message):
    monkeypatch.setattr(distributed, "_MESH_S", 0.1)
    monkeypatch.setattr(distributed, "_own_group", False)  # as it was, afterwards
    monkeypatch.setattr(distributed, "_connect_all", does)
    with ThreadPoolExecutor() as pool, pytest.raises(RankLost, match=message):
        pool.submit(peer)
        init_world("cpu")


def test_a_node_that_has_left_is_waited_for_no_longer():
    store = serve("127.0.0.1", 0)
    store.set(LEFT, "")
    with pytest.raises(RankLost, match="rank 1 did not come"):
        meet(store, "rank", 0, 2, time.monotonic() + 2 * LIMIT)


def test_device_names_are_checked_against_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("warp9", "meta", "mps", "cuda"):
        told = f"--device {name}: there is no GPU cuda:0, torch finds none here|{name}: there are cpu"
        with pytest.raises(UserError, match=told):
            choose_device(name, 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="there is no GPU cuda:2, this machine has 2, cuda:0 to cuda:1; --device cpu"):
        choose_device("cuda:2", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert choose_device("xpu", 0).type == "xpu"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="several processes"):
        choose_device("xpu", 0)
    monkeypatch.setattr(distributed, "Path", lambda path: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert choose_device(None, 0) == torch.device("cpu")  # a container without GPUs
    (tmp_path / "nvidia0").touch()
    with pytest.raises(UserError, match="this machine has NVIDIA GPUs, and torch .* or --device cpu"):
        choose_device("auto", 0)
    assert choose_device("cpu", 0) == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device(None, 0) == torch.device("cpu")


V1, V2 = "5:memory:/m\n4:cpuacct,cpu:/docker/1\n0::/docker/1\n", "0::/kubepods/pod/main\n"


@pytest.mark.parametrize(
    ("groups", "limits", "cpus"),
    [
        (None, {}, 8),  # not Linux
        (V2, {"kubepods/pod/main/cpu.max": "400000 100000\n"}, 4),
        (V2, {"kubepods/pod/main/cpu.max": "max 100000", "kubepods/pod/cpu.max": "250000 100000"}, 2),
        (V2, {"kubepods/cpu.max": "max 100000", "kubepods/other/cpu.max": "100000 100000"}, 8),
        ("0::/\n", {"cpu.max": "20000 50000"}, 1),  # less than a processor, in a container
        ("0::/\n", {"cpu.max": "3200000 100000"}, 8),  # more than it is bound to
        (V1, {"cpu/docker/1/cpu.cfs_quota_us": "300000\n", "cpu/docker/1/cpu.cfs_period_us": "100000\n"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "10000"}, 5),  # in a container
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", "memory/m/cpu.max": "1 1"}, 8),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/docker/1/cpu.cfs_period_us": "100000"}, 8),  # half of it is hidden
    ],
)
def test_cpus_are_those_that_control_groups_leave(groups, limits, cpus, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for process in ("self", "17") if groups else ():
        file = tmp_path / "proc" / process / "cgroup"
        file.parent.mkdir(parents=True)
        file.write_text(groups or "")
    for name, text in limits.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert jobs.available_cpus() == jobs.available_cpus(17) == cpus


@pytest.mark.parametrize(
    ("env", "own", "launchers", "threads", "workers"),
    [
        ({}, 8, 8, 7, 8),
        ({}, 64, 64, 63, 8),
        ({}, 2, 2, 1, 2),
        ({}, 1, 8, 1, 1),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 8, 8, 3, 4),
        (STEP, 4, 16, 3, 4),  # each task has its own 4 of 16 cores
        (STEP | {"OMP_NUM_THREADS": "5"}, 16, 16, None, 4),
        (PYXIS, 16, 16, 3, 4),
    ],
)
def test_ranks_on_the_cpu_share_the_cores_whoever_started_them(
    env, own, launchers, threads, workers, tmp_path, monkeypatch
):
    monkeypatch.setattr(jobs, "_ROOT", tmp_path)  # without control groups
    masks = {0: own, os.getppid(): launchers}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(masks[process])), raising=False)
    monkeypatch.setattr(os, "environ", env)
    thread_counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", thread_counts.append)
    distributed.limit_threads(torch.device("cpu"), launch_of(os.environ))
    assert thread_counts == ([] if threads is None else [threads])
    # As many data workers at most; those that are asked for are started in any case.
    for program in ("train", "validate", "label", "predict"):
        row = COMMANDS[program].program.parser().flags["workers"]
        assert workers_of(row.default) == workers
    assert workers_of(11) == 11 and workers_of(0) == 0
