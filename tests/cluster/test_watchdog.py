"""How long a phase may take, and when a run stops."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.commands.conftest import ROOT
from tests.conftest import LIMIT
from volo.cluster.preempt import StopSignal
from volo.cluster.stopping import StopGuard
from volo.cluster.watchdog import START_TIMEOUT_S, Watchdog
from volo.train.precision import Precision

CPU = torch.device("cpu")


def watchdog(timeout: float = 3.0, loader_timeout: float = 50.0) -> Watchdog:
    return Watchdog(0, timeout, loader_timeout, note=lambda **fields: None)


def test_fault_21_a_phase_may_take_long_the_first_time_and_data_as_long_as_the_loader_waits() -> None:
    dog = watchdog()
    assert dog.allowed("step") == dog.allowed("start") == START_TIMEOUT_S
    dog.at("step")
    dog.at("validation")
    assert dog.allowed("step") == 3.0 and dog.allowed("validation") == START_TIMEOUT_S
    for phase in ("data", "others", "step"):
        dog.at(phase)
    assert dog.allowed("data") == dog.allowed("others") == 80.0
    assert watchdog(loader_timeout=0).allowed("data") == math.inf


def test_fault_21_a_save_within_an_epoch_is_no_hang_for_who_waits_for_it() -> None:
    dog = watchdog()
    for phase in ("step", "data", "others", "step", "saving"):
        dog.at(phase)
    for phase in ("data", "others"):  # rank 0 may still be saving
        dog.at(phase)
        assert dog.allowed(phase) == START_TIMEOUT_S
    dog.at("step")
    assert dog.allowed("step") == 3.0


def test_a_stop_is_between_updates_alone() -> None:
    stop = StopSignal()
    guard = StopGuard(stop, watchdog())
    seen = []
    micro_batches = [(False, 2, "a"), (True, 2, "b"), (False, 2, "c")]
    with pytest.raises(BaseException, match="stopped by SIGUSR1") as stopped:  # noqa: PT011
        for _, _, batch in guard.updates(micro_batches):
            seen.append(batch)
            if batch == "a":
                stop.request(signal.SIGUSR1)
    assert seen == ["a", "b"] and stopped.value.exit_code == 85  # type: ignore[attr-defined]


TOLD_WHILE_LOADED = """
import os, signal, sys
from argparse import Namespace
from volo.cluster.preempt import STOP
from volo.commands.console import run_program
with STOP.handled():
    code = run_program(lambda argv: Namespace(), "program")
print(code, run_program(lambda argv: Namespace(), "another"))
"""


def test_a_program_is_loaded_whole_before_a_signal_ends_it_and_no_other_one(tmp_path: Path) -> None:
    # An exception while torch's C++ is loaded, which itself imports Python, aborts the process.
    (tmp_path / "program.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nprint('loaded')\n")
    (tmp_path / "another.py").write_text("run = lambda args: 0\n")
    command, env = [sys.executable, "-c", TOLD_WHILE_LOADED], {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.split() == ["loaded", "85", "0"], done.stderr


LEAVES_A_CHILD = """
import os, time
from volo.cluster.preempt import STOP
with STOP.handled():
    child = os.fork()  # a data worker that its storage holds up
    if not child:
        time.sleep(9999)
    print(child, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="data workers are forked on Linux alone")
def test_a_program_ends_while_a_child_of_its_own_hangs() -> None:
    with subprocess.Popen([sys.executable, "-c", LEAVES_A_CHILD], cwd=ROOT, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        child = int(program.stdout.readline())
        try:
            assert program.wait(LIMIT) == 0
        finally:
            os.kill(child, signal.SIGKILL)
            program.kill()


def test_a_rank_that_stops_because_another_had_to_says_so() -> None:
    stop = StopSignal()
    stop.follow(2)  # another one's data failed: nobody was told to end
    assert stop.number is None
    stop.follow(130)
    assert (stop.number, stop.exit_code) == (signal.SIGINT, 130)
    assert stop.reason == "stopped because another rank had to"


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
