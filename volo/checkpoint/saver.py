"""When a run saves, and how failed saves are handled. Training waits for a copy in memory, a thread writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from volo.checkpoint.checkpoint import LAST, CheckpointDir, Save, best_of
from volo.checkpoint.checkpoint_file import NotWrittenError, tensor_bytes
from volo.checkpoint.parts import parts_bytes
from volo.checkpoint.train_state import RankedCheckpoint, TrainState

_FIRST_RETRY, _LONGEST_RETRY = 30.0, 600.0  # seconds until a failed save is tried again; doubled each time
_FINAL_RETRIES = (1.0, 5.0, 30.0)  # seconds before each further attempt at what a run ends with


Key = tuple[object, ...]


class HostSnapshot:
    """Host memory for one checkpoint, as large as the file; reused by later saves, because allocating it is slow.

    CUDA tensors go to page-locked memory, in the order of the current stream: the host waits for nothing, and the next
    step changes no weight before it is copied. Call `wait` before reading.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    @property
    def empty(self) -> bool:
        """Whether no memory is allocated yet."""
        return not self._kept

    def reserve(self, payload: dict[str, Any]) -> None:
        """Allocate memory for such a payload, of which only the shapes are read; in any thread, before `take`."""
        assert self.empty
        self._fill(payload, lambda buffer, value: buffer.zero_())

    def take(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return `payload` with all tensors copied into the memory of the previous copy. Shared tensors stay shared."""
        on_gpu: list[Tensor] = []

        def copy(buffer: Tensor, value: Tensor) -> None:
            buffer.copy_(value.detach(), non_blocking=True)
            if value.is_cuda:
                on_gpu.append(value)

        copied = self._fill(payload, copy)
        self._copied = torch.cuda.current_stream(on_gpu[0].device).record_event() if on_gpu else None
        return copied

    def wait(self) -> None:
        """Return when the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _fill(self, payload: dict[str, Any], fill: Callable[[Tensor, Tensor], object]) -> dict[str, Any]:
        before, self._kept = self._kept, {}
        shared: dict[Key, Tensor] = {}

        def copy(value: Any, key: Key) -> Any:
            if isinstance(value, dict):
                return {name: copy(item, (*key, name)) for name, item in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(copy(item, (*key, number)) for number, item in enumerate(value))
            if not isinstance(value, Tensor):
                return value
            identity = (value.data_ptr(), value.dtype, value.device, value.shape, value.stride())
            if value.numel() and identity in shared:
                return shared[identity]
            buffer = before.get(key)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, requires_grad=False)
            fill(buffer, value)
            shared[identity] = self._kept[key] = buffer
            return buffer

        copied: dict[str, Any] = copy(payload, ())
        return copied


class Reporter(Protocol):
    """Receives what there is to say about saves: a `Logger`, or what a benchmark puts in its place."""

    def line(self, text: str) -> None: ...

    def event(self, kind: Any, **fields: Any) -> None: ...

    def sync(self) -> None: ...


@dataclass(frozen=True)
class SavePolicy:
    """When to save, and how many failures to accept.

    Args:
        every_updates: Updates between saves within an epoch; 0: none.
        every_minutes: Minutes between saves; 0: none.
        check_interval: Updates between two checks of the clock of rank 0, which synchronise the ranks.
        synchronous: Write in the training thread.
        max_failed: The run ends after more failed saves in a row.
    """

    every_updates: int = 0
    every_minutes: float = 0.0
    check_interval: int = 1
    synchronous: bool = False
    max_failed: int = 10


@dataclass
class _Job:
    save: Save
    reason: str
    blocked: float  # seconds for which training waited
    attempts: int = 0
    seconds: float = 0.0  # of the newest attempt
    error: BaseException | None = None


class Saver:
    """Saves a run. Every rank has one and makes the same calls at the same updates; rank 0 writes.

    There is one save at a time. If it fails (full disk, ...), a warning is printed, training goes on, and the save is
    tried again later or replaced by the next one. Other errors of the writing thread are raised by the next call.

    Args:
        checkpoints: None on ranks other than 0.
        logger: Receives lines and events about every save.
        progress: Returns the sums of the current epoch; all ranks call it before a save within an epoch.
        from_primary: Returns rank 0's value on every rank.
        before_save: Called on rank 0 before each attempt to write; if it raises, nothing is written.
        parts_in: The directory in which every rank writes its parts of a divided model; None: rank 0 writes all.
        on_save: Called on every rank before a save within an epoch, which may take long.
        clock: Returns seconds, monotonically.
    """

    def __init__(
        self,
        state: TrainState,
        checkpoints: CheckpointDir | None,
        logger: Reporter,
        policy: SavePolicy,
        progress: Callable[[], dict[str, Any]] = dict,
        from_primary: Callable[[bool], bool] = bool,
        before_save: Callable[[], None] = lambda: None,
        parts_in: Path | None = None,
        on_save: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state, self.checkpoints, self.logger, self.policy = state, checkpoints, logger, policy
        self._progress, self._from_primary = progress, from_primary
        self._before_save, self._parts_in, self._on_save, self._clock = before_save, parts_in, on_save, clock
        self._unsaved: NotWrittenError | None = None  # why the newest save has no parts; the same on all ranks
        self._without_parts = 0  # saves in a row that failed so
        self._snapshot = HostSnapshot()
        self._job: _Job | None = None  # in progress, or failed and waiting for another attempt
        self._thread: Thread | None = None
        self._reserving: Thread | None = None
        self._retry_at = 0.0
        self._failures = 0  # in a row
        self._saved_at: tuple[int, int] | None = None  # (epochs, updates) in `last`
        self._last_save = clock()

    def after_update(self) -> None:
        """Save if it is time to; call it between two updates of an epoch.

        Raises:
            NotWrittenError: Too many saves have failed.
            NonFiniteError: The weights hold NaN or infinity.
        """
        self.poll()
        if reason := self._due():
            self._save_between(reason)
        elif (
            self._reserving is None
            and self.checkpoints is not None
            and not self.policy.synchronous
            and not self.state.is_sharded
            and self._snapshot.empty
        ):
            # After the first update, when the optimizer has its state.
            self._reserving = Thread(target=self._snapshot.reserve, args=(self.state.state_dict(),))
            self._reserving.start()

    def after_epoch(self) -> RankedCheckpoint | None:
        """Save after an epoch that the state has counted and scored. Raises as `after_update`.

        Returns the best checkpoint so far; None on other ranks, and if no epoch has a score (`CheckpointDir.decide`).
        """
        collected = self._collected(lambda: self.state.gather(self._parts_in))
        if self.checkpoints is None:
            return None
        if collected:
            self._settle()
            self._start(lambda checkpoints: checkpoints.decide(self.state), "epoch")
        return best_of(self.state.best)

    def save_now(self, reason: str) -> None:
        """Save at any position, and return when it is on disk; a position that is on disk is not saved again.

        Training waits, so that the weights are written without a copy in memory.

        Args:
            reason: For the log, such as "SIGTERM".

        Raises:
            NotWrittenError: It can't be written.
            NonFiniteError: The weights hold NaN or infinity.
        """
        self._settle()
        # Only rank 0 knows what is on disk, and a save needs all ranks.
        if self._from_primary(self._saved_at != (self.state.epoch, self.state.update)):
            self._save_between(reason, in_place=True)
        if self._job is not None and isinstance(self._job.error, NotWrittenError):
            raise self._job.error
        if self._unsaved is not None:
            raise self._unsaved

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish; after a failure of the program only wait for the save in progress."""
        if kind is None:
            self.finish()
        else:
            with suppress(Exception):  # the first failure is the one to tell
                self._settle()

    def finish(self, retries: tuple[float, ...] = _FINAL_RETRIES) -> None:
        """Return when everything is on disk.

        Raises:
            NotWrittenError: The last save of the run can't be written, even after the retries.
        """
        self._settle()
        for seconds in retries:
            if self._job is None:
                return
            time.sleep(seconds)
            self._attempt()
            self._settle()
        if self._job is not None and self._job.error is not None:
            raise self._job.error
        if self._unsaved is not None:
            raise self._unsaved

    @property
    def idle(self) -> bool:
        """Whether no save is in progress or waiting for another attempt."""
        return self._job is None

    def poll(self) -> None:
        """Handle a save that has ended, and retry a failed one when it is due. Raises as `after_update`."""
        if self._thread is not None and not self._thread.is_alive():
            self._settle()
        elif self._thread is None and self._job is not None and self._clock() >= self._retry_at:
            self._attempt()

    def _due(self) -> str | None:
        """Return the reason to save now, the same on all ranks, or None."""
        policy, update = self.policy, self.state.update
        if policy.every_updates and update % policy.every_updates == 0:
            return "--recovery-interval"
        if (
            not policy.every_minutes
            or (update - self.state.epoch * self.state.updates_per_epoch) % policy.check_interval
        ):
            return None
        late = self._clock() - self._last_save >= 60 * policy.every_minutes
        return "--checkpoint-minutes" if self._from_primary(late) else None

    def _save_between(self, reason: str, in_place: bool = False) -> None:
        self._on_save()
        progress = self._progress()
        if not self._collected(lambda: self.state.collect_ranks(progress, self._parts_in)) or self.checkpoints is None:
            return
        if self._thread is not None:
            self.logger.line(f"update {self.state.update} is not saved: the save before it is still being written")
            self.logger.event("checkpoint-skipped", file=LAST, reason=reason)
            self.state.gathered = None  # as large as a checkpoint
            return
        self._start(lambda checkpoints: checkpoints.decide(self.state, ranked=False), reason, in_place)

    def _collected(self, collect: Callable[[], None]) -> bool:
        """Collect the parts of all ranks; return False if they were to be written and some rank can't.

        Raises:
            NotWrittenError: Too many saves in a row have failed so, on all ranks.
        """
        try:
            collect()
        except NotWrittenError as error:
            self._unsaved = error
            self._without_parts += 1
            self.logger.line(f"warning: {error}; training goes on, the next attempt is at the next save")
            self.logger.event("checkpoint-failed", file=LAST, reason=str(error), update=self.state.update, attempt=1)
            self._end_if_too_many(self._without_parts, error)
            return False
        self._unsaved, self._without_parts = None, 0
        return True

    def _start(self, decide: Callable[[CheckpointDir], Save], reason: str, in_place: bool = False) -> None:
        """Plan a save and write it, from a copy unless `in_place`; it replaces a save that has failed."""
        assert self.checkpoints is not None
        began = self._clock()
        self._give_up()
        save = decide(self.checkpoints)
        in_place = in_place or self.policy.synchronous
        if not in_place and not self.state.is_sharded:
            self._copy(save)
        self._last_save = began
        self._job = _Job(save, reason, self._clock() - began)
        self._attempt(wait=in_place)

    def _copy(self, save: Save) -> None:
        if self._reserving is not None:
            self._reserving.join()
        save.payload = self._snapshot.take(save.payload)

    def _attempt(self, wait: bool = False) -> None:
        assert self._job is not None
        self._before_save()
        self._job.attempts += 1
        self._thread = Thread(target=self._write, args=(self._job,), name="checkpoint")
        self._thread.start()
        if wait:
            self._thread.join()
            self._job.blocked += self._job.seconds
            if isinstance(self._job.error, NotWrittenError) and not self.state.is_sharded:  # for the attempts to come
                self._copy(self._job.save)
            self._settle()

    def _write(self, job: _Job) -> None:
        began = self._clock()
        try:
            self.logger.sync()  # a checkpoint must not outlive the records of what led to it
            self._snapshot.wait()
            assert self.checkpoints is not None
            self.checkpoints.write(job.save)
            job.error = None
        except BaseException as error:  # raised again in the training thread
            job.error = error
        job.seconds = self._clock() - began

    def _settle(self) -> None:
        """Wait for the save in progress, report it, and raise its error unless it will be retried."""
        if self._thread is None or self._job is None:
            return
        self._thread.join()
        job, self._thread = self._job, None
        if job.error is None:
            self._job, self._failures = None, 0
            self._saved_at = job.save.payload["epoch"] + 1, job.save.update
            self._report(job)
        elif isinstance(job.error, NotWrittenError):
            self._retry_later(job, job.error)
        else:
            self._job = None
            raise job.error

    def _report(self, job: _Job) -> None:
        size = tensor_bytes(job.save.payload) + parts_bytes(job.save.payload)
        if job.save.epoch is None or job.attempts > 1:
            self.logger.line(
                f"saved {LAST} of update {job.save.update} ({job.reason}): {size / 2**20:.1f} MiB "
                f"in {job.seconds:.2f} s, training waited {job.blocked:.2f} s"
            )
        self.logger.event(
            "checkpoint",
            file=LAST,
            reason=job.reason,
            update=job.save.update,
            bytes=size,
            seconds=round(job.seconds, 3),
            blocked_seconds=round(job.blocked, 3),
            attempts=job.attempts,
        )

    def _retry_later(self, job: _Job, error: NotWrittenError) -> None:
        delay = min(_FIRST_RETRY * 2 ** (job.attempts - 1), _LONGEST_RETRY)
        self._retry_at = self._clock() + delay
        self._failures += job.attempts == 1
        self.logger.line(
            f"warning: {error}; training goes on, the next attempt is in {delay:.0f} s or at the next save"
        )
        self.logger.event(
            "checkpoint-failed", file=LAST, reason=str(error), update=job.save.update, attempt=job.attempts
        )
        self._end_if_too_many(self._failures, error)

    def _end_if_too_many(self, failures: int, error: NotWrittenError) -> None:
        if failures > self.policy.max_failed:
            raise NotWrittenError(f"{failures} saves in a row have failed (--max-failed-saves), the last one: {error}")

    def _give_up(self) -> None:
        """Give up a failed save for a newer one."""
        job, self._job = self._job, None
        if job is None:
            return
        job.save.undo(self.state)
        if job.save.epoch is not None:
            self.logger.line(
                f"warning: epoch {job.save.epoch + 1} could not be saved and is not among the kept checkpoints"
            )
