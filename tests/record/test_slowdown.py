"""Warnings about a slow run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from volo.cluster.distributed import World
from volo.record.metrics import Interval
from volo.record.slowdown import ADVICE, CompileWatch, SlowdownWatch, straggler


class _Log:
    """Keeps what a logger would print and record."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.world = World(0, 0, 1, torch.device("cpu"))
        self.line = self.warning = self.seen.append

    def event(self, kind: str, **fields: object) -> None:
        self.seen.append(kind)


def _interval(epoch: int, waited: float, seconds: float = 10.0) -> Interval:
    nothing = dict.fromkeys(Interval.__dataclass_fields__, 0)
    return Interval(**{**nothing, "epoch": epoch, "wait_seconds": waited, "seconds": seconds})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [([1.0, 2.0, 1.1], 1), ([0.01, 0.02], None), ([1.0], None), ([1.4, 1.0, 1.0], None)],
)
def test_a_straggler_takes_much_longer_than_the_median_of_the_others(seconds: list[float], slow: int | None) -> None:
    assert straggler(seconds, interval=4.0) == slow


def test_slow_data_is_reported_once_a_run_with_advice() -> None:
    log = _Log()
    watch = SlowdownWatch(log)  # type: ignore[arg-type]
    for _ in range(2):  # an epoch of few images: each interval waits for data, but not for long
        watch.interval(_interval(0, 1.0, seconds=2.0), 0.0)
    assert log.seen == []
    for epoch, waited in ((1, 0.5), (1, 3.8), (1, 3.8), (2, 3.8)):
        watch.interval(_interval(epoch, waited), 0.0)
    assert log.seen == ["data-wait", f"data wait 38 % of the step: {ADVICE}"]


def test_compilation_in_the_middle_of_training_is_reported() -> None:
    torch.compiler.reset()
    log = _Log()
    watch = CompileWatch(log)  # type: ignore[arg-type]
    compiled = torch.compile(nn.Linear(3, 2), backend="eager", dynamic=False)
    compiled(torch.ones(4, 3))
    watch.interval(0, 10)
    watch.interval(10, 20)
    assert len(log.seen) == 1 and log.seen[0].startswith("torch.compile: 1 graphs in ")
    compiled(torch.ones(5, 3))  # a validation
    watch.skip()
    watch.interval(20, 30)
    assert len(log.seen) == 1
    compiled(torch.ones(6, 3))
    watch.interval(30, 40)
    assert len(log.seen) == 2
    assert log.seen[1].startswith("warning: torch compiled 1 graphs anew in updates 30 to 40, ")
    torch.compiler.reset()
