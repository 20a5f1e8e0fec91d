"""A run of two ranks on a CPU, each bound to its half."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import QUICK, children, held, start
from tests.conftest import wait_until
from volo.cluster.placement import make_plan
from volo.cluster.topology import listed, numbers, read_machine


def _cpus(pid: int) -> set[tuple[int, ...]]:
    """The CPUs of all threads of a process."""
    found = set()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        line = next(line for line in status.read_text().splitlines() if line.startswith("Cpus_allowed_list"))
        found.add(numbers(line.partition(":")[2]))
    return found


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="CPU masks are Linux's")
def test_two_ranks_and_their_data_workers_have_cpus_of_their_own(
    make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    machine = read_machine()
    if len([core for cores in machine.cores.values() for core in cores if set(core) & machine.allowed]) < 2:
        pytest.skip("two ranks need two cores")
    flags = f"{QUICK} -j 1 --epochs 99 --device cpu --bind cpu --output {tmp_path} --experiment run"
    running = start(flags, make_dataset(train=32), processes=2, **held(tmp_path, at=8))
    running.read_until("epoch 1 [1/2]")
    ranks = running.ranks()
    # The workers hang in their second batch.
    workers = {rank: wait_until(lambda pid=pid: children(pid), lambda: running.output) for rank, pid in ranks.items()}
    bound = {rank: _cpus(pid).union(*map(_cpus, workers[rank])) for rank, pid in ranks.items()}
    assert running.end(15) == 85
    shares = make_plan(machine, "cpu", "cpu", 2, {}).shares
    assert bound == {rank: {share.cpus} for rank, share in enumerate(shares)}
    assert running.output.count("binding on ") == 1
    logged = [line.split()[2:] for line in (tmp_path / "run/log.txt").read_text().splitlines()]
    assert [row[3] for row in logged[: len(shares) + 5] if row[1:2] == ["-"]] == [listed(s.cpus) for s in shares]
