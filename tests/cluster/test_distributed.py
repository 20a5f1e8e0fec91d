"""Who am I: ranks from torchrun, from srun, from neither."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

from tlt.errors import UserError
from volo.cluster import distributed, per_host
from volo.cluster.distributed import (
    RankLost,
    World,
    choose_device,
    from_primary,
    lost_rank_explained,
    primary_first,
    sum_over_ranks,
)
from volo.cluster.per_host import OncePerHost
from volo.cluster.ranks import BOUND_GPU, adopt_mpi, ranks_from_environment


def test_torchrun_wins_over_slurm_and_over_the_flag() -> None:
    env = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert ranks_from_environment(env, local_rank_flag=3) == (5, 1, 8)


def test_an_srun_step_gives_ranks() -> None:
    env = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
    assert ranks_from_environment(env) == (3, 1, 4)


def test_one_process_in_a_batch_script_is_alone() -> None:
    assert ranks_from_environment({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}) == (0, 0, 1)


def test_mpirun_gives_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getppid", lambda: 41_234)
    expected = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "21234"}
    open_mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(
        ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"), ("5", "1", "8", "4"), strict=True
    )}  # fmt: skip
    mpich = {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}
    daemons = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}  # srun started them, not ranks
    for env in (open_mpi, mpich, open_mpi | daemons):
        adopt_mpi(adopted := dict(env))
        assert adopted == env | expected and ranks_from_environment(adopted) == (5, 1, 8)
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    alone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    for env in (open_mpi | torchrun, mpich | daemons, alone, {"PMI_RANK": "3", "PMI_SIZE": "8"}, {}):
        adopt_mpi(adopted := dict(env))
        assert adopted == env


def test_several_nodes_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match="MASTER_ADDR is not set: .* mpirun"):
        distributed._set_rendezvous_address(8)


def test_the_old_flag_is_the_fallback() -> None:
    assert ranks_from_environment({}, local_rank_flag=3) == (0, 3, 1)


def test_device_names_are_checked() -> None:
    assert choose_device("cpu", 0) == torch.device("cpu")
    with pytest.raises(UserError, match="--device warp9"):
        choose_device("warp9", 0)
    with pytest.raises(UserError, match="--device meta: cpu, cuda, cuda:N, mps and xpu"):
        choose_device("meta", 0)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--device cuda"):
            choose_device("cuda", 0)


def test_gpus_that_torch_cannot_use_are_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
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


def test_a_process_that_is_bound_beside_another_gpu_than_its_own_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9D, pci_device_id=0)
    monkeypatch.setenv(BOUND_GPU, "0000:9d:00.0")
    distributed._check_bound(gpu)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(BOUND_GPU, "0000:1b:00.0")
    distributed._check_bound(gpu)
    assert "bound beside GPU 0000:1b:00.0, but CUDA computes on 0000:9d:00" in capsys.readouterr().err


STEP = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "7"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
MPICH = {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "PMI_SIZE": "4"}


@pytest.mark.parametrize(
    ("env", "own", "launchers", "threads"),
    [
        ({}, 8, 8, 7),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 8, 8, 3),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, 8, 8, 3),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, 8, 8, 7),
        (STEP | {"SLURM_NTASKS_PER_NODE": "4", "SLURM_NODEID": "1"}, 16, 16, 3),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 16, 16, 3),
        (MPICH | {"MPI_LOCALNRANKS": "2"}, 16, 16, 7),
        # Each task has its own 4 of 16 cores; the second time a shell starts it, which has no others either.
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4"}, 4, 16, 3),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_ON_NODE": "16"}, 4, 4, 3),
        # Two tasks on a socket of 8 cores each, so that two share it; and a step of 8 cores that nothing confines.
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_ON_NODE": "16"}, 8, 16, 3),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_CPUS_ON_NODE": "8"}, 64, 64, 3),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 2, 16, 1),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4", "OMP_NUM_THREADS": "5"}, 16, 16, None),
    ],
)
def test_ranks_on_the_cpu_share_the_cores_whoever_started_them(
    env: dict[str, str], own: int, launchers: int, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = {0: own, os.getppid(): launchers}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(masks[process])), raising=False)
    monkeypatch.setattr(os, "environ", dict(env))
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    adopt_mpi(os.environ)
    distributed.limit_threads(World(*ranks_from_environment(os.environ), torch.device("cpu")))
    assert given == ([] if threads is None else [threads])


def test_collectives_alone_change_nothing() -> None:
    value = torch.tensor([1.0, 2.0])
    assert torch.equal(sum_over_ranks(value), value)
    assert from_primary("x") == "x"
    with primary_first():
        ran = True
    assert ran
    with pytest.raises(UserError, match="bad"), primary_first():
        raise UserError("bad")


def one_rank(rank: int, directory: str) -> None:
    """Of three: 0 and 2 on one host, 1 on another."""
    path = Path(directory)
    tempfile.tempdir, socket.gethostname = directory, lambda: "a" if rank in (0, 2) else "b"
    dist.init_process_group("gloo", rank=rank, world_size=3, store=dist.FileStore(f"{path}/store", 3))
    folder, elsewhere = path / f"volo-{os.geteuid()}", path / "elsewhere"

    def share() -> dict[str, Any]:
        return OncePerHost(print)(
            lambda: {"sizes": np.arange(1000), "names": ["a\udcff", "b"], "by": rank},
            lambda value: ({"sizes": value["sizes"]}, {"names": value["names"], "by": value["by"]}),
            lambda arrays, plain: {**arrays, **plain},
        )

    value = share()
    assert value["by"] == (1 if rank == 1 else 0) and value["names"] == ["a\udcff", "b"]
    assert np.array_equal(value["sizes"], np.arange(1000))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert OncePerHost(print)(lambda: rank, lambda value: None, print) == rank  # what can't be packed
    dist.barrier()
    assert not [*folder.iterdir()]
    dist.barrier()
    if rank == 1:
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
    dist.barrier()
    assert share()["by"] == rank and not [*elsewhere.iterdir()]
    try:
        OncePerHost(print)(partial(_refuse, rank), lambda value: None, print)
    except UserError as error:
        (path / f"told{rank}").write_text(str(error))
    dist.destroy_process_group()  # or a thread of the group may abort this process


def _refuse(rank: int) -> None:
    raise UserError(f"no images for {rank}")


def test_the_first_rank_of_each_host_does_what_takes_long_for_all(tmp_path: Path) -> None:
    spawn(one_rank, (str(tmp_path),), nprocs=3)
    told = [(tmp_path / f"told{rank}").read_text() for rank in range(3)]
    assert told == ["no images for 0", "no images for 1", "no images for 0"]


def _one_of_two_hosts(rank: int, path: str) -> None:
    socket.gethostname = lambda: f"host{rank}"
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{path}/store", 2))
    make = partial(os._exit, 0) if rank == 1 else list
    with pytest.raises(RankLost, match="another rank has ended"), lost_rank_explained():
        OncePerHost(print)(make, lambda value: None, print)
    Path(path, "told").touch()
    os._exit(0)


def test_a_rank_that_waits_for_another_host_notices_its_end(tmp_path: Path) -> None:
    spawn(_one_of_two_hosts, (str(tmp_path),), nprocs=2)
    assert (tmp_path / "told").exists()


def _open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)


def _given_away(folder: Path) -> None:
    folder.mkdir(0o700)
    os.chown(folder, 12345, 12345)


@pytest.mark.parametrize(
    "spoil",
    [
        Path.touch,
        lambda folder: folder.symlink_to(folder.parent),
        _open_to_others,
        pytest.param(_given_away, marks=pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files away")),
    ],
)
def test_a_folder_that_is_not_the_users_alone_is_not_used(
    spoil: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert per_host._folder() == per_host._folder() == tmp_path / f"volo-{os.geteuid()}"
    per_host._folder().rmdir()
    spoil(tmp_path / f"volo-{os.geteuid()}")
    with pytest.raises(OSError):
        per_host._folder()


def test_alone_nothing_is_copied() -> None:
    value = object()
    assert OncePerHost(print)(lambda: value, None, None) is value  # type: ignore[arg-type]
