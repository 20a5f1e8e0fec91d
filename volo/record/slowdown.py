"""Warnings about a slow run, with advice: it waits for data, for one slow rank, or for repeated compilation."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tlt.data.workers import PREFETCH_FACTOR
from volo.cluster.distributed import World, from_all
from volo.record.logger import Logger

WAIT_SHARE = 0.2  # of an interval, waiting for data
WAIT_SECONDS = 3.0  # of an epoch: in short epochs, workers that begin would be most of it
STRAGGLER_FACTOR = 1.5  # over the median of the ranks
STRAGGLER_SHARE = 0.1  # of an interval, that the median rank loses


LARGE_IMAGES = 2.0  # megapixels: decoding takes five times as long as for 500 x 375 px
BUSY = 0.4  # workers that use less than this share of their CPUs wait for storage
_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Feed:
    """How a rank gets its images.

    Attributes:
        workers: `--workers`.
        cpus: CPUs that this rank may use.
        ranks: Ranks on this machine.
        backend: `--data-backend`.
        source: "folder", "shards", or something else.
        on_gpu: Whether the training device could decode.
        image_size: Height and width of the training images.
        batch_size: Images that a worker returns at a time.
        in_processes: Whether workers return images through shared memory.
    """

    workers: int
    cpus: int
    ranks: int
    backend: str
    source: str
    on_gpu: bool
    image_size: tuple[int, int]
    batch_size: int
    in_processes: bool = True

    def shared_memory(self, workers: int) -> int:
        """Return the bytes that the batches of so many workers on all ranks of the machine take."""
        if not self.in_processes:
            return 0
        height, width = self.image_size
        return self.ranks * workers * PREFETCH_FACTOR * self.batch_size * 3 * height * width


@dataclass(frozen=True)
class Seen:
    """What was measured while the run waited for data.

    Attributes:
        megapixels: Mean size of the image files.
        busy_cpus: Number of CPUs that the workers keep busy or wait for; None: unknown.
        free_shared_memory: In bytes; None: there is no shared memory.
    """

    megapixels: float
    busy_cpus: float | None
    free_shared_memory: int | None


def advice(feed: Feed, seen: Seen) -> str:
    """Return a line with the best and the second best remedy."""
    if not feed.workers:
        steps = [_more_workers(feed, seen, max(1, feed.cpus - 1))]
    elif seen.busy_cpus is not None and seen.busy_cpus < BUSY * min(feed.workers, feed.cpus):
        steps = _about_storage(feed, seen)
    else:
        steps = _about_decoding(feed, seen)
    return "; or ".join(steps[:2])


def _about_storage(feed: Feed, seen: Seen) -> list[str]:
    """Return remedies for workers that wait for files: they use few CPUs, and more workers read in parallel."""
    wait = f"the workers wait for storage ({seen.busy_cpus:.1f} of {min(feed.workers, feed.cpus)} CPUs busy): "
    near = "put the shards on a disk of this machine"
    if feed.source != "shards":
        near = "read shards (tlt pack-images) from a disk of this machine"
    more = [_more_workers(feed, seen, 2 * feed.cpus)] if feed.workers < 2 * feed.cpus else []
    return [wait + near, *more]


def _about_decoding(feed: Feed, seen: Seen) -> list[str]:
    steps = []
    if seen.megapixels >= LARGE_IMAGES and feed.source in ("folder", "shards"):
        steps.append(
            f"decoding {seen.megapixels:.1f} megapixels per image takes most of the time: make the files smaller once "
            f"(tlt pack-images DATA OUT --max-side {max(512, 2 * max(feed.image_size))})"
        )
    if feed.workers < feed.cpus:
        steps.append(_more_workers(feed, seen, feed.cpus))
    if feed.backend == "pil":
        steps.append("use --data-backend torchvision, which takes two thirds of the time of pil")
    elif feed.backend == "torchvision" and not feed.on_gpu:
        steps.append(
            "use --data-backend dali-cpu (pip install 'volo-tlt[dali]'), which decodes the crop's window alone"
        )
    if feed.on_gpu and not feed.backend.startswith("dali"):
        steps.append("decode on the GPU (--data-backend dali-gpu)")
    if feed.workers > feed.cpus:
        steps.append(f"lower --workers ({feed.workers}) to the {feed.cpus} CPUs of this rank")
    return steps or [f"the {feed.cpus} CPUs of this rank are busy with {feed.workers} workers: give it more CPUs"]


def _more_workers(feed: Feed, seen: Seen, workers: int) -> str:
    step = f"raise --workers ({feed.workers}) to {workers}: this rank has {feed.cpus} CPUs"
    needed = feed.shared_memory(workers) - feed.shared_memory(feed.workers)
    if seen.free_shared_memory is not None and needed > seen.free_shared_memory:
        step += (
            f"; that takes {needed / 1e9:.1f} GB more of /dev/shm, where {seen.free_shared_memory / 1e9:.1f} GB are "
            "free (docker --shm-size)"
        )
    return step


class Advisor:
    """Measures the workers of this process in every interval, and gives advice about the newest one.

    Args:
        megapixels: Returns the mean size of the files so far.
    """

    def __init__(self, feed: Feed, megapixels: Callable[[], float]) -> None:
        self.feed, self.megapixels = feed, megapixels
        self.clock = CpuClock()
        self._busy: float | None = None

    def look(self) -> None:
        """Measure the workers at the end of an interval."""
        self._busy = self.clock.look(each.pid for each in multiprocessing.active_children() if each.pid)

    def advice(self) -> str:
        """Return a line of advice."""
        free = None
        with suppress(OSError):
            free = shutil.disk_usage(_SHARED_MEMORY).free
        return advice(self.feed, Seen(self.megapixels(), self._busy, free))


class CpuClock:
    """Measures how many CPUs processes have kept busy on average since the last call.

    Time in which a process waits for a CPU counts as busy, because it does not wait for storage.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self.proc = proc
        self._before: dict[int, tuple[float, float]] = {}  # process -> seconds used, when

    def look(self, processes: Iterable[int]) -> float | None:
        """Return the number of busy CPUs; None without processes, or where the system does not report it."""
        try:
            now = float((self.proc / "uptime").read_text().split()[0])
            used = {process: (self._used(process), now) for process in processes}
            before = {process: self._before.get(process) or (0.0, self._begun(process)) for process in used}
        except (OSError, ValueError, IndexError):
            return None
        self._before = used
        shares = [(used[each][0] - before[each][0]) / max(now - before[each][1], 1e-2) for each in used]
        return sum(shares) if shares else None

    def _used(self, process: int) -> float:
        threads = (self.proc / str(process) / "task").glob("*/schedstat")
        return sum(int(ns) for thread in threads for ns in thread.read_text().split()[:2]) / 1e9  # running, runnable

    def _begun(self, process: int) -> float:
        """Return when a process started, in seconds after the start of the system."""
        # The name of the program, up to the last bracket, may hold any character.
        fields = (self.proc / str(process) / "stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def straggler(own_seconds: list[float], interval: float) -> int | None:
    """Return the rank that took much longer than the others for its own work (loading, forward pass), or None."""
    slowest = max(range(len(own_seconds)), key=own_seconds.__getitem__)
    others = own_seconds[:slowest] + own_seconds[slowest + 1 :]
    if not others:
        return None
    usual, most = statistics.median(others), own_seconds[slowest]
    slow = most > STRAGGLER_FACTOR * usual and most - usual > STRAGGLER_SHARE * interval
    return slowest if slow else None


class SlowdownWatch:
    """Warns, once per epoch each, of waiting for data and of a slow rank; ranks exchange one number per interval.

    Args:
        advisor: Gives advice about waiting for data.
        gather: Returns the values of all ranks.
    """

    def __init__(
        self, world: World, advisor: Advisor, logger: Logger, gather: Callable[[float], list[float]] = from_all
    ) -> None:
        self.world, self.advisor, self.logger, self.gather = world, advisor, logger, gather
        self._warned: dict[str, int] = {}  # epoch of the newest warning
        self._waited = (-1, 0.0)  # epoch, and its seconds so far

    def interval(self, epoch: int, own_seconds: float, wait_seconds: float, seconds: float) -> None:
        """Check an interval of `seconds`, in which this rank waited `wait_seconds` for data."""
        self.advisor.look()
        share = wait_seconds / max(seconds, 1e-9)
        before = self._waited[1] if self._waited[0] == epoch else 0.0
        self._waited = (epoch, before + wait_seconds)
        if share > WAIT_SHARE and self._waited[1] > WAIT_SECONDS and self._first("data-wait", epoch):
            advice = self.advisor.advice()
            self.logger.event("data-wait", share=round(share, 3), advice=advice)
            self.logger.warning(f"data wait {100 * share:.0f} % of the step: {advice}")
        if self.world.size == 1:
            return
        ranks = self.gather(own_seconds)
        if straggler(ranks, seconds) == self.world.rank and self._first("straggler", epoch):
            usual = statistics.median(ranks)
            self.logger.event("straggler", seconds=own_seconds, median_seconds=usual, interval_seconds=seconds)
            self.logger.warning(
                f"the others wait for rank {self.world.rank} on {socket.gethostname()}: {own_seconds:.2f} s for "
                f"loading and forward passes, usual are {usual:.2f} s"
            )

    def _first(self, kind: str, epoch: int) -> bool:
        if self._warned.get(kind) == epoch:
            return False
        self._warned[kind] = epoch
        return True


class CompileWatch:
    """Reports what torch compiles in each interval of training; compilation in the first interval is expected."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.started = False
        self._graphs, self._seconds = _compiled_so_far()

    def skip(self) -> None:
        """Ignore what was compiled since the last interval."""
        self._graphs, self._seconds = _compiled_so_far()

    def interval(self, first: int, last: int) -> None:
        """Check the updates from `first` to `last`."""
        graphs, seconds = _compiled_so_far()
        new = graphs - self._graphs
        if new and not self.started:
            self.tell(f"torch.compile: {new} graphs in {seconds - self._seconds:.0f} s")
        elif new:
            self.tell(
                f"warning: torch compiled {new} graphs anew in updates {first} to {last}, "
                f"{seconds - self._seconds:.0f} s ({graphs} so far): an epoch's last, smaller batch does it once; "
                "TORCH_LOGS=recompiles shows others"
            )
        self.started = True
        self._graphs, self._seconds = graphs, seconds


def _compiled_so_far() -> tuple[int, float]:
    """Return the number of graphs that torch has compiled in this process, and the seconds that it took."""
    dynamo = torch._dynamo.utils
    return dynamo.counters["stats"]["unique_graphs"], dynamo.calculate_time_spent()["total_wall_time"]
