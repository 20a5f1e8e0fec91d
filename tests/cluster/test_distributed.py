"""Who am I: ranks from torchrun, from srun, from neither."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.conftest import free_port
from tlt.errors import UserError
from tlt.io import jobs
from volo.cluster import distributed
from volo.cluster.distributed import RankLost, World, choose_device, init_world
from volo.cluster.topology import _OTHERS as OTHERS
from volo.cluster.topology import adopt_launcher, ranks_of


def adopted(env: dict[str, str]) -> dict[str, str]:
    """The environment of a rank that was started with this one."""
    adopt_launcher(env := dict(env))
    return env


OPEN_MPI = dict(zip(OTHERS[0], ("5", "1", "8", "4"), strict=True))
STEP = dict(zip(OTHERS[1], ("5", "1", "8", "4(x2)"), strict=True))
MPICH = dict(zip(OTHERS[2], ("5", "1", "8", "4"), strict=True))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (MPICH, (5, 1, 8, 4)),
        (OPEN_MPI | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (5, 1, 8, 4)),  # daemons
        (MPICH | STEP | {"SLURM_PROCID": "6"}, (6, 1, 8, 4)),
        (STEP | {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, (3, 1, 4, 2)),  # torchrun
        ({"RANK": "9", "WORLD_SIZE": "16"}, (9, 3, 16, 16)),  # the flag --local-rank of old launchers is 3 here
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, (0, 3, 1, 1)),  # in a batch script
        (dict(zip(OTHERS[0], "0011", strict=True)), (0, 3, 1, 1)),
    ],
)
def test_a_rank_knows_itself_whoever_started_it(env: dict[str, str], expected: tuple[int, ...]) -> None:
    assert ranks_of(adopted(env), local_rank_flag=3) == expected


def test_several_nodes_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", adopted(STEP))
    with pytest.raises(UserError, match="MASTER_ADDR is not set: .* mpirun"):
        init_world("cpu")


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankLost, match="rank 1, 2 did not come in time"):
        init_world("cpu", timeout_s=1.0)


def test_device_names_are_checked_and_what_the_machine_has_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("warp9", "meta", "mps", "cuda"):
        with pytest.raises(UserError, match=f"--device {name}"):
            choose_device(name, 0)
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
def test_cpus_are_those_that_control_groups_leave(
    groups: str | None, limits: dict[str, str], cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    ("env", "own", "launchers", "threads"),
    [
        ({}, 8, 8, 7),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 8, 8, 3),
        (STEP, 4, 16, 3),  # each task has its own 4 of 16 cores
        (STEP | {"OMP_NUM_THREADS": "5"}, 16, 16, None),
    ],
)
def test_ranks_on_the_cpu_share_the_cores_whoever_started_them(
    env: dict[str, str],
    own: int,
    launchers: int,
    threads: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "_ROOT", tmp_path)  # without control groups
    masks = {0: own, os.getppid(): launchers}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(masks[process])), raising=False)
    monkeypatch.setattr(os, "environ", adopted(env))
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    distributed.limit_threads(World(0, 0, 1, torch.device("cpu")))
    assert given == ([] if threads is None else [threads])
