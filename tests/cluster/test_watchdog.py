"""How long a phase may take, and when a run stops."""

import itertools
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.commands.conftest import ROOT
from tests.conftest import LIMIT, python_path
from tlt.data.batch import Batch, BatchKey
from volo.cluster.stopping import Stopped, StopSignal
from volo.cluster.watchdog import StopGuard, Watchdog


def watchdog(timeout: float = 3.0, loader_timeout: float = 50.0) -> Watchdog:
    return Watchdog(0, timeout, loader_timeout, note=lambda **fields: None)


@pytest.mark.parametrize("slow", ["start", "validation", "saving", "capture"])
def test_fault_21_phase_limit_covers_what_it_waits_for(slow):
    watch = watchdog()
    for phase in ("data", "others", "step", "data", "others", "step", slow):
        watch.enter_phase(phase) if slow != "start" else None
    # Rank 0 may still be saving, another one compiling (at the start) or validating: until all ranks have met.
    for phase in ("data", "others", "step", "data", "others")[3 if slow in ("saving", "capture") else 0 :]:
        watch.enter_phase(phase)
        assert watch.allowed() == Watchdog.START_S
    allowed = []
    for phase in ("step", "data", "others"):
        watch.enter_phase(phase)
        allowed.append(watch.allowed())
    assert allowed == [3.0, 80.0, 80.0]
    patient = watchdog(loader_timeout=0)
    patient.enter_phase("data")
    assert patient.allowed() == math.inf


def batch_at(last: bool, size: int = 0) -> Batch:
    nothing = torch.empty(0)
    return Batch(nothing, nothing, torch.empty(size), nothing, nothing, key=BatchKey(0, (), last))


def test_fault_21_first_step_of_each_size_may_compile():
    """Updates of one micro-batch, then of two: a size that is new takes long wherever it comes."""
    watch, long = watchdog(loader_timeout=0), Watchdog.START_S
    sizes = [(4, True), (4, True), (4, True), (3, True), (3, True), (3, True), (4, False), (1, True), (4, False)]
    sizes += [(3, True), (1, True)]
    batches = StopGuard(StopSignal(), watch, int).iterate_until_stopped(batch_at(last, size) for size, last in sizes)
    assert [watch.allowed() for _ in batches] == [long, 3, 3, long, 3, 3, 3, long, 3, 3, 3]


def test_fault_21_hang_after_validation_or_save_is_seen_as_soon():
    watch, allowed = watchdog(), []
    guard = StopGuard(StopSignal(), watch, int)
    for _ in range(2):
        for _ in guard.iterate_until_stopped(batch_at(True, 4) for _ in range(3)):
            allowed.append(watch.allowed())
        list(guard.iterate_validation([0]))
        watch.enter_phase("saving")
    assert allowed == [Watchdog.START_S, *[3.0] * 5]


def test_phases_count_as_what_their_time_is_spent_on():
    counted: list[str] = []
    watch = Watchdog(0, 3.0, 50.0, note=lambda **fields: None, count=counted.append)
    guard = StopGuard(StopSignal(), watch, int)
    watch.enter_phase("start")  # the program tells its parts
    for _ in range(2):
        for _ in guard.iterate_until_stopped(batch_at(True, 4) for _ in range(2)):
            watch.enter_phase("capture")
        list(guard.iterate_validation([0, 1]))
        watch.enter_phase("saving")
    steps = ["data", "step", "capture"]
    epoch = [*steps, *steps, "data", "step", "validation", "saving"]
    assert [part for part, _ in itertools.groupby(counted)] == epoch * 2


def test_a_stop_is_between_updates_alone():
    stop, seen = StopSignal(), []
    with stop.handled(), pytest.raises(Stopped, match="stopped by SIGTERM") as stopped:
        for batch in StopGuard(stop, watchdog(), int).iterate_until_stopped(map(batch_at, (False, True, False))):
            if not seen:
                os.kill(os.getpid(), signal.SIGTERM)
            seen.append(batch.key.last)
    assert seen == [False, True] and stopped.value.exit_code == 85
    # Who tells this process to end tells it often; but what is started later ends itself by an alarm.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    with pytest.raises(Stopped, match="stopped because another rank had to") as stopped:
        list(StopGuard(StopSignal(), watchdog(), lambda own: 130).iterate_until_stopped([batch_at(True)]))
    assert stopped.value.exit_code == 130


def test_fault_09_a_second_signal_ends_the_process_at_once(monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with StopSignal().handled():
        for pause in (0, 0, 1.1):  # what comes within a second is the same warning
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGTERM)
    assert codes == [128 + signal.SIGTERM]


TOLD_WHILE_LOADED = """
__file__ = "volo"  # a program, which imports no more than it needs
import os, signal, sys
from volo.cluster.stopping import STOP
from volo.commands.console import run_program
from volo.config.fields import Settings
from tlt.errors import UserError
with STOP.handled():
    code = run_program(lambda argv: Settings(), "program")
print(code, run_program(lambda argv: Settings(), "another"))

def refuse(argv):  # a launcher signals all ranks when one has refused its flags, which others still read
    os.kill(os.getpid(), signal.SIGTERM)
    raise UserError("unknown flag")

with STOP.handled():
    print(run_program(refuse, "another"))
"""


def test_signal_waits_until_the_program_is_loaded(tmp_path):
    # An exception while torch's C++ is loaded, which itself imports Python, aborts the process.
    (tmp_path / "program.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nprint('loaded')\n")
    (tmp_path / "another.py").write_text("run = lambda args: 0\n")
    command, env = [sys.executable, "-c", TOLD_WHILE_LOADED], {**os.environ, "PYTHONPATH": python_path(ROOT, tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.split() == ["loaded", "85", "0", "2"], done.stderr
    lines = ["SIGTERM: this run stops as soon as it has saved; once more: at once", "stopped by SIGTERM"]
    assert done.stderr.splitlines() == [*lines, "error: unknown flag"]


SUSPENDED = """
import sys, time
from volo.cluster.watchdog import Watchdog
Watchdog.START_S = 2.0
watch = Watchdog(0, 2.0, 50.0, note=lambda **fields: print("noted"))
watch.start()
for _ in range(3):
    watch.enter_phase("step")
    print("step", flush=True)
    time.sleep(0.4)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process")
def test_a_suspended_process_hangs_only_if_it_does_so_later():
    with subprocess.Popen([sys.executable, "-c", SUSPENDED], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "step\n"
            process.send_signal(signal.SIGSTOP)
            time.sleep(4.5)
            process.send_signal(signal.SIGCONT)
            assert process.stdout.read().split() == ["step", "step", "noted"]
            assert process.wait(LIMIT) == 5
        finally:
            process.kill()
