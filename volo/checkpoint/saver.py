"""Decides when a run saves, and handles failed saves. Training waits only for a copy in memory; a thread writes it."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from volo.checkpoint.checkpoint import LAST, CheckpointDir, NotWrittenError, RankedCheckpoint, Save, best_of
from volo.checkpoint.state import TrainState
from volo.cluster.distributed import from_primary
from volo.cluster.shard import is_sharded
from volo.record.logger import Logger

_FIRST_RETRY = 30.0  # seconds until a failed save is tried again; the delay doubles each time
_LONGEST_RETRY = 600.0
_FINAL_RETRIES = (1.0, 5.0, 30.0)  # seconds before each further attempt at the last save of a run


def host_copy(payload: dict[str, Any]) -> tuple[dict[str, Any], torch.cuda.Event | None]:
    """Return `payload` with all tensors copied to host memory, and the event to wait for before reading it, if any.

    CUDA tensors are copied to page-locked memory on the current stream. So the host does not wait, and the next step
    can't change a weight before it is copied.
    """
    devices = set[torch.device]()

    def copied(value: Tensor) -> Tensor:
        if value.is_cuda:
            devices.add(value.device)
        host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, requires_grad=False)
        return host.copy_(value.detach(), non_blocking=True)

    copies: dict[str, Any] = tree_map_only(Tensor, copied, payload)
    return copies, torch.cuda.current_stream(devices.pop()).record_event() if devices else None


@dataclass(frozen=True)
class SavePolicy:
    """When to save, and how many failures to accept.

    Args:
        every_updates: Updates between saves within an epoch; 0 for none.
        every_minutes: Minutes between saves; 0 for none.
        check_interval: Updates between two looks at rank 0's clock; each look synchronises the ranks.
        synchronous: Whether the training thread waits until the file is written.
        max_failed: Failed saves in a row that are accepted; one more ends the run.
    """

    every_updates: int = 0
    every_minutes: float = 0.0
    check_interval: int = 1
    synchronous: bool = False
    max_failed: int = 10


class Saver:
    """Saves a run. Every rank has one and makes the same calls at the same updates; rank 0 writes.

    Only one save is in progress at a time. If it fails (full disk, ...), a warning is printed and training goes on; the
    save is tried again later, or the next save replaces it. The last save of the run is retried for 36 s. The next call
    raises other errors of the writing thread.

    Attributes:
        saved_at: Epochs and updates in the newest checkpoint, on rank 0.

    Args:
        checkpoints: None on ranks other than 0.
        before_write: Called on rank 0 before each attempt to write. If it raises, nothing is written.
        on_save: Called on every rank before a save. If it raises, nothing is saved.
    """

    def __init__(
        self,
        state: TrainState,
        checkpoints: CheckpointDir | None,
        logger: Logger,
        policy: SavePolicy,
        before_write: Callable[[], None] = lambda: None,
        on_save: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = state
        self.checkpoints = checkpoints
        self.logger = logger
        self.policy = policy
        self._before_write = before_write
        self._on_save = on_save
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Save | None = None  # the save that is being written, or that failed and will be retried
        self._writing: Future[None] | None = None  # the attempt in progress
        self._retry_at = 0.0
        self._ending = False  # whether the save in progress is the run's last
        self._failures = 0  # failed saves in a row
        self.saved_at = state.epoch, state.update
        self._last_save = time.monotonic()

    def after_update(self) -> None:
        """Save if a save is due. Call this between two updates of an epoch. Raises NotWrittenError if too many saves
        have failed, and NonFiniteError if the weights hold NaN or infinity."""
        self._look_at_pending()
        if not (reason := self._due()):
            return
        self._on_save()
        if from_primary(self._writing is not None):
            self.logger.line(f"update {self.state.update} is not saved: the save before it is still being written")
            self.logger.event("checkpoint-skipped", file=LAST, reason=reason)
        else:
            self._save(reason)

    def after_epoch(self) -> RankedCheckpoint | None:
        """Save after an epoch whose end and score the state already holds. Raises the errors of `after_update`.

        Return the best checkpoint so far; None on ranks other than 0, or if no epoch has a score.
        """
        self._on_save()
        self._finish_pending()
        save = self._save("epoch", ranked=True)
        if save is None or self.checkpoints is None:
            return None
        return best_of(self.checkpoints.ranking(save.payload["scores"], save.payload["epoch"]))

    def save_now(self, reason: str) -> None:
        """Save because the run stops, and return when the file is on disk; do nothing if this update is saved already.

        No step follows, so the weights are written without a copy in memory. The log gets the `reason`, such as
        "SIGTERM". Raises NotWrittenError if the file can't be written, even after the retries, and NonFiniteError if
        the weights hold NaN or infinity.
        """
        self._on_save()
        self._ending = True
        self._finish_pending()
        # Only rank 0 knows what is on disk, and all ranks must take part in a save.
        if from_primary(self.saved_at != (self.state.epoch, self.state.update)):
            self._save(reason, in_place=True)
        self.finish()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the saves. If the program has failed, only wait for the save in progress."""
        if kind is None:
            self.finish()
        else:
            with suppress(Exception):  # the program's own failure matters more
                self._finish_pending()

    def finish(self) -> None:
        """Wait until everything is on disk. Raises NotWrittenError if the run's last save can't be written, even after
        the retries."""
        self._ending = True
        self._finish_pending()
        for seconds in _FINAL_RETRIES:
            if self._pending is not None:
                self.logger.line(f"warning: {self._pending.error}; the next attempt is in {seconds:.0f} s")
                time.sleep(seconds)
                self._start_attempt(synchronous=True)
        self._ending = False
        if self._pending is not None and self._pending.error is not None:
            raise self._pending.error

    def _look_at_pending(self) -> None:
        """Handle a save that has ended, and retry a failed one when its delay is over."""
        if self._writing is not None:
            if self._writing.done():
                self._finish_pending()
        elif self._pending is not None and time.monotonic() >= self._retry_at:
            self._start_attempt()

    def _due(self) -> str | None:
        """Return the reason to save now, or None; all ranks return the same."""
        policy, update = self.policy, self.state.update
        if policy.every_updates and update % policy.every_updates == 0:
            return "--recovery-interval"
        in_epoch = update - self.state.epoch * self.state.updates_per_epoch
        if not policy.every_minutes or in_epoch % policy.check_interval:
            return None
        late = time.monotonic() - self._last_save >= 60 * policy.every_minutes
        return "--checkpoint-minutes" if from_primary(late) else None

    def _save(self, reason: str, ranked: bool = False, in_place: bool = False) -> Save | None:
        """Save the state, from a copy unless `in_place`. This replaces a pending save that has failed.

        Every rank calls this; rank 0 returns the save.
        """
        began = time.monotonic()
        payload = self.state.state_dict()
        if self.checkpoints is None:
            return None
        if self._pending is not None and self._pending.ranked:
            epoch = self._pending.payload["epoch"] + 1
            self.logger.line(f"warning: epoch {epoch} could not be saved and is not among the kept checkpoints")
        save = self.checkpoints.plan(payload, ranked)
        in_place = in_place or self.policy.synchronous
        if not in_place:
            self._copy(save)
        elif torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the thread that writes has another stream, which does not wait for this one
        self._last_save = began
        save.reason = reason
        save.blocked = time.monotonic() - began
        self._pending = save
        self._start_attempt(synchronous=in_place)
        return save

    def _copy(self, save: Save) -> None:
        if not is_sharded(self.state.model):  # a sharded model's payload is a copy already
            save.payload, save.copied = host_copy(save.payload)

    def _start_attempt(self, synchronous: bool = False) -> None:
        assert self._pending is not None
        save = self._pending
        self._before_write()
        save.attempts += 1
        self._writing = self._writer.submit(self._write, save)
        if synchronous:
            wait([self._writing])
            save.blocked += save.seconds
            if self._writing.exception() is not None and not self._ending:
                self._copy(save)  # training will change the weights before the next attempt
            self._finish_pending()

    def _write(self, save: Save) -> None:
        began = time.monotonic()
        try:
            self.logger.sync()  # records must be on disk before a checkpoint that follows from them
            if save.copied is not None:
                save.copied.synchronize()
            assert self.checkpoints is not None
            self.checkpoints.write(save)
        finally:
            save.seconds = time.monotonic() - began

    def _finish_pending(self) -> None:
        """Wait for the attempt in progress and report it. Raise its error unless the save will be retried."""
        if self._writing is None or self._pending is None:
            return
        save = self._pending
        error = self._writing.exception()
        self._writing = None
        if isinstance(error, NotWrittenError):
            self._retry_later(save, error)
            return
        self._pending = None
        if error is not None:
            raise error
        self._failures = 0
        self.saved_at = save.payload["epoch"] + 1, save.payload["update"]
        self._report(save)

    def _report(self, save: Save) -> None:
        update = save.payload["update"]
        if not save.ranked or save.attempts > 1:
            self.logger.line(
                f"saved {LAST} of update {update} ({save.reason}): {save.size / 2**20:.1f} MiB "
                f"in {save.seconds:.2f} s, training waited {save.blocked:.2f} s"
            )
        seconds = {"seconds": round(save.seconds, 3), "blocked_seconds": round(save.blocked, 3)}
        fields = {"reason": save.reason, "update": update, "bytes": save.size, **seconds, "attempts": save.attempts}
        self.logger.event("checkpoint", file=LAST, **fields)

    def _retry_later(self, save: Save, error: NotWrittenError) -> None:
        save.error = NotWrittenError(str(error))  # the caught one holds the frames of its thread, and these the payload
        fields = {"reason": str(error), "update": save.payload["update"], "attempt": save.attempts}
        self.logger.event("checkpoint-failed", file=LAST, **fields)
        if self._ending:
            return
        delay = min(_FIRST_RETRY * 2 ** (save.attempts - 1), _LONGEST_RETRY)
        self._retry_at = time.monotonic() + delay
        self._failures += save.attempts == 1
        self.logger.line(
            f"warning: {error}; training goes on, the next attempt is in {delay:.0f} s or at the next save"
        )
        if self._failures > self.policy.max_failed:
            raise NotWrittenError(
                f"{self._failures} saves in a row have failed (--max-failed-saves), the last one: {error}"
            )
