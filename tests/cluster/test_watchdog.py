"""Who is late, how long a phase may take, and which rank holds up the others."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from tests.conftest import LIMIT
from volo.cluster.distributed import World
from volo.cluster.heartbeat import Heartbeat
from volo.cluster.preempt import StopSignal
from volo.cluster.stopping import StopGuard
from volo.cluster.watchdog import START_TIMEOUT_S, RankProgress, Watchdog
from volo.record.slowdown import SlowdownWatch, straggler
from volo.train.precision import Precision

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def rank(steps: int, phase: str = "step", idle: float = 0.0, allowed: float = 3.0) -> RankProgress:
    return RankProgress(steps, phase, idle, allowed, "node", 1)


def watchdog(number: int = 0, timeout: float = 3.0, loader_timeout: float = 50.0) -> Watchdog:
    return Watchdog(number, 3, timeout, loader_timeout, StopSignal(), note=lambda **fields: None)


def verdict(*ranks: RankProgress, silent: dict[int, float] | None = None) -> str:
    """What rank 0's watchdog says of these ranks, with --dist-timeout 3; silent: seconds without a sign of life."""
    numbers = dict(enumerate(ranks))
    return str(watchdog()._verdict(numbers, {**dict.fromkeys(numbers, 0.0), **(silent or {})}))


def test_fault_21_silent_ranks_are_late_else_those_with_the_fewest_steps() -> None:
    told = "no progress for 4 s (--dist-timeout 3): "
    ranks = [rank(7, idle=4), rank(6, idle=4), rank(7, idle=1)]
    assert verdict(*ranks) == f"{told}the others wait for rank 1 (node, pid 1, in step for 4 s)"
    assert verdict(*ranks, silent={2: 2.0}).startswith(f"{told}no sign of life from rank 2 (node, pid 1, in step for 1")
    assert "on any rank; all 2 are equally far" in verdict(rank(7, idle=4), rank(7, idle=5))
    assert verdict(rank(7, idle=4), rank(6, idle=2)) == verdict(rank(7, idle=3), rank(6, idle=3)) == "None"
    assert verdict(rank(7, idle=4)) == f"{told}rank 0 (node, pid 1, in step for 4 s)"


def test_fault_21_a_phase_may_take_long_the_first_time_and_data_as_long_as_the_loader_waits() -> None:
    dog = watchdog()
    assert dog.allowed("step") == dog.allowed("start") == START_TIMEOUT_S
    dog.at("step")
    dog.at("validation")
    assert dog.allowed("step") == 3.0 and dog.allowed("validation") == START_TIMEOUT_S
    assert dog.allowed("saving") == START_TIMEOUT_S
    assert dog.allowed("data") == 80.0 and watchdog(loader_timeout=0).allowed("data") == math.inf
    assert dog.progress().allowed == START_TIMEOUT_S and dog.progress().phase == "validation"


def test_fault_21_a_rank_that_waits_for_data_is_left_to_the_loader() -> None:
    assert verdict(rank(7, idle=4), rank(6, "data", 4.0, allowed=80)) == "None"
    told = verdict(rank(7, idle=90), rank(6, "data", 90.0, allowed=80))
    assert "the others wait for rank 1 (node, pid 1, waiting for data for 90 s)" in told


def test_fault_21_a_lost_rank_is_told_while_data_are_waited_for() -> None:
    waiting = rank(7, "data", 40.0, allowed=80)
    assert verdict(waiting, rank(6, idle=1), silent={1: 2.9}) == "None"
    told = "no sign of life from rank 1 (node, pid 1, in step for 1 s) for 3 s"
    assert told in verdict(waiting, rank(6, idle=1), silent={1: 3.1})
    # A disk may hold up the whole process.
    assert verdict(waiting, rank(6, "saving", 1.0, allowed=600), silent={1: 9.0}) == "None"
    assert "from rank 1 (" in verdict(waiting, rank(6, "data", 1.0, allowed=80), silent={1: 3.1})


@pytest.mark.parametrize(("idle", "told"), [(1.0, "None"), (4.0, "no sign of life from rank 0 (node, pid 1")])
def test_fault_21_where_the_store_does_not_answer_its_host_is_named_by_who_is_stuck(idle: float, told: str) -> None:
    dog = watchdog(1)
    dog._heartbeat = Heartbeat(HashStore(), "", "unanswered", 1, 3, 1.0)
    dog._heartbeat.answered -= 10
    assert told in str(dog._verdict({0: rank(7), 1: rank(7, idle=idle)}, {0: 10.0, 1: 0.0}))


def test_fault_21_ranks_but_the_first_leave_it_to_judge_unless_it_is_silent() -> None:
    ranks = {0: rank(6, idle=4), 1: rank(7, idle=4)}
    assert watchdog(1)._verdict(ranks, {0: 0.0, 1: 0.0}) is None
    assert "no sign of life from rank 0 (" in str(watchdog(1)._verdict(ranks, {0: 2.0, 1: 0.0}))


def test_fault_21_a_start_that_is_still_listing_files_is_no_hang() -> None:
    long = START_TIMEOUT_S + 60
    lists, waits = rank(0, "start", 5.0, START_TIMEOUT_S), rank(0, "start", long, START_TIMEOUT_S)
    assert verdict(lists, waits, waits) == "None"  # rank 0 lists for all
    assert "all 3 are equally far" in verdict(waits, waits, waits)


BUSY = """
import torch.distributed as dist
from volo.cluster.preempt import STOP
from volo.cluster.watchdog import Watchdog, leave_together

dist.init_process_group("gloo")
dog = Watchdog(dist.get_rank(), 2, 60, 0, STOP, print, dist.distributed_c10d._get_default_store())
dog.interval = 1e-5  # always in the store
dog.start()
dist.barrier()  # a rank that has ended can't be joined
"""


@pytest.mark.parametrize("end", ["leave_together(dog)", "dist.destroy_process_group(); dog.end()"])
def test_a_watchdog_that_is_in_the_store_does_not_abort_the_end_of_a_run(end: str, tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(BUSY + end)
    command = [sys.executable, str(ROOT / "volo/commands/launch.py"), "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*command, str(script)], env=env, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    if end.startswith("leave_together"):
        assert ended.stderr == ""  # nobody was looked for who had gone


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [([1.0, 1.0, 1.0], None), ([1.0, 2.0, 1.1], 1), ([0.01, 0.02], None), ([1.0], None), ([1.4, 1.0, 1.0], None)],
)
def test_a_straggler_takes_much_longer_than_the_median_of_the_others(seconds: list[float], slow: int | None) -> None:
    assert straggler(seconds, interval=4.0) == slow


def test_slow_data_is_told_once_an_epoch() -> None:
    events: list[str] = []

    class Told:
        def event(self, kind: str, **fields: object) -> None:
            events.append(kind)

        def warning(self, text: str) -> None:
            events.append(text)

    class Advisor:
        def look(self) -> None:
            events.append("looked")

        def advice(self) -> str:
            return "raise --workers"

    pace = SlowdownWatch(World(0, 0, 1, CPU), Advisor(), Told())
    for epoch, wait in ((0, 0.5), (0, 3.8), (0, 3.8), (1, 3.8)):
        pace.interval(epoch, wait, wait, 10.0)
    told = "data wait 38 % of the step: raise --workers"
    assert events == ["looked", "looked", "data-wait", told, "looked", "looked", "data-wait", told]

    events.clear()
    for _ in range(3):  # an epoch of few images: each interval waits for data, but 3 s in all are not worth a word
        pace.interval(2, 1.0, 1.0, 2.0)
    assert events == ["looked"] * 3
    pace.interval(2, 1.0, 1.0, 2.0)
    assert events[4:] == ["data-wait", "data wait 50 % of the step: raise --workers"]


@pytest.mark.parametrize(
    ("own", "reason"), [(True, "stopped by SIGUSR1"), (False, "stopped because another rank had to")]
)
def test_a_stop_is_between_updates_alone_and_says_whose_it_is(own: bool, reason: str) -> None:
    stop = StopSignal()
    guard = StopGuard(stop, watchdog())
    seen = []
    micro_batches = [(False, 2, "a"), (True, 2, "b"), (False, 2, "c")]
    with pytest.raises(BaseException, match=reason) as stopped:  # noqa: B017, PT011
        for _, _, batch in guard.updates(micro_batches):
            seen.append(batch)
            if batch == "a":
                stop.request(signal.SIGUSR1, own)  # not own: from the watchdog, which is told through the store
    assert seen == ["a", "b"] and stopped.value.exit_code == 85  # type: ignore[attr-defined]


def test_fault_53_the_steps_that_were_not_finite_are_named() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    precision = Precision(CPU, max_nonfinite=9)
    for factor in (1.0, math.nan, 1.0, math.inf, 1.0):
        precision.backward((weight * factor).sum())
        precision.step(optimizer, [weight])
    assert precision.take_broken() == {-4: True, -2: True}
    assert precision.take_broken() == {}
    # The loss is finite, its gradient is not.
    precision.backward(torch.sqrt(weight * 0).sum())
    precision.step(optimizer, [weight])
    assert precision.take_broken() == {-1: False}
