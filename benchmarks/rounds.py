"""Time alternatives in turns and write each row as soon as it is measured: what all benchmarks share.

Whatever else runs on the machine slows all alternatives alike if they take turns, so ratios are formed within a round.
"""

import ctypes
import json
import multiprocessing
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from tlt.errors import UserError
from tlt.io.files import os_errors_as
from tlt.io.jobs import available_cpus
from volo.config import value_types as t
from volo.config.fields import Group, Settings, flag
from volo.config.settings_shared import DEBUG, DEVICE

Name = TypeVar("Name", bound=Hashable)


class BenchmarkSettings(Settings):
    """What was typed. Each command has a subclass with its flags, `--output` among them."""

    command_line: str = ""


class Measuring(Group):
    """Measuring"""

    device: t.Device | None = DEVICE()
    rounds: t.Positive = flag(5, "rounds of all alternatives, which take turns")
    output: t.File = flag("", "append each row to it as a line of JSON")
    debug: bool = DEBUG()


class Range(NamedTuple):
    """What several rounds gave."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> "Range":
        """Return the range of `values`, each multiplied by `scale`."""
        scaled = [scale * value for value in values]
        return cls(statistics.median(scaled), min(scaled), max(scaled))

    def __str__(self) -> str:
        between = "-" if self.low >= 0 else " to "
        return f"{self.median:.4g} ({self.low:.4g}{between}{self.high:.4g})"


class Timing(NamedTuple):
    """Seconds per unit of work in each round: by the clock, and of all processors."""

    wall: list[float]
    cpu: list[float]


def in_turns(works: Mapping[Name, Callable[[], int]], rounds: int) -> dict[Name, Timing]:
    """Do each work once a round, after an unmeasured round; each round begins with another one. A work returns how many
    units it did, once the device has finished them."""
    names = list(works)
    timings = {name: Timing([], []) for name in works}
    for number in range(rounds + 1):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            wall = time.perf_counter()
            cpu = cpu_seconds()
            units = works[name]()
            if number:
                timings[name].wall.append((time.perf_counter() - wall) / units)
                timings[name].cpu.append((cpu_seconds() - cpu) / units)
    return timings


def speedup(ours: Sequence[float], other: Sequence[float]) -> Range:
    """Return how many times as fast `ours` is as `other`, from the seconds of each round."""
    return Range.of([theirs / own for own, theirs in zip(ours, other, strict=True)])


def cpu_seconds() -> float:
    """Return the CPU time of all threads of this process and of its living children. Raises UserError: unknown."""
    return time.process_time() + sum(_cpu_seconds_of(child.pid) for child in multiprocessing.active_children())


def _cpu_seconds_of(pid: int | None) -> float:
    number = ctypes.c_int()
    find = getattr(ctypes.CDLL(None), "clock_getcpuclockid", None)
    if find is None or find(pid, ctypes.byref(number)):
        raise UserError("the CPU time of worker processes can't be read here: use --workers 0")
    return time.clock_gettime(number.value)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def conditions(command_line: str) -> dict[str, str]:
    """Return the command, the day, the commit, the hardware and the versions."""
    git = subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    described = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    cpus = available_cpus()
    cpu = re.search(r"^model name\s*: (.*)", described, re.MULTILINE)
    return {
        "command": command_line,
        "day": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "commit": git.stdout.strip() or "unknown",
        "CPU": f"{cpu[1] if cpu else platform.machine()}, {cpus} to run on, {torch.get_num_threads()} threads",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "torchvision", "timm", "pillow", "numpy")},
    }


class DifferentResult(UserError):
    """An arm computes something else than it should."""


class Rows:
    """A table that grows: each row is printed as Markdown when it is written, and appended to `--output` as JSON.

    Args:
        settings: Its `command_line` is printed with the conditions before the first row.
        columns: Their names. A row may lack some, and what else it has goes to `--output` alone.

    Attributes:
        failure: Why the last arm that was not measured failed. It is text: an error keeps the tensors of its stack.
    """

    def __init__(self, settings: BenchmarkSettings, columns: Sequence[str]) -> None:
        self.columns = columns
        self.file: str = settings["output"]
        self.failure = ""
        self._different = ""
        facts = conditions(settings.command_line)
        self._append({"conditions": facts})
        print("; ".join(f"{name} {value}" for name, value in facts.items()), end="\n\n")
        print(f"| {' | '.join(columns)} |", f"{'|---' * len(columns)}|", sep="\n", flush=True)

    def write(self, row: Mapping[str, Any]) -> None:
        """Print and append a row."""
        self._append(row)
        print(f"| {' | '.join(_cell(row.get(name)) for name in self.columns)} |", flush=True)

    @contextmanager
    def measuring(self, facts: Mapping[str, Any]) -> Iterator[None]:
        """Measure an arm in the block. If that fails, write its row with the reason, so that the others go on."""
        try:
            yield
        except Exception as error:  # a kernel that does not fit; compilers raise their own kinds
            self.failure = _reason_of(error)
            if isinstance(error, DifferentResult):
                self._different = self.failure
            self.write({**facts, "note": f"not measured: {self.failure}"})

    def refuse_different(self) -> None:
        """Raise UserError if an arm computed something else. Called after the others were measured."""
        if self._different:
            raise UserError(self._different)

    def _append(self, row: Mapping[str, Any]) -> None:
        if not self.file:
            return
        naming_it = os_errors_as(lambda e: f"--output {self.file}: {e.strerror}; name a file that can be written")
        with naming_it, open(self.file, "a") as file:
            file.write(json.dumps(row) + "\n")


def _reason_of(error: Exception) -> str:
    """Return the error in a few words; print the traceback to stderr unless it is a UserError."""
    if isinstance(error, UserError):
        return str(error)
    traceback.print_exception(error)
    lines = str(error).strip().splitlines() or [""]
    line = lines[0 if isinstance(error, RuntimeError) else -1]  # Triton's say it last
    return f"{type(error).__name__}: {line}"[:160]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
