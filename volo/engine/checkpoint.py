"""Checkpoint files of a run: whole or not there, and the newest good one found again.

    last.pth.tar           after every epoch
    checkpoint-N.pth.tar   the best K epochs; N counts from 0, as published
    model_best.pth.tar     the best epoch

The names of one epoch share one file (hard links). The payload has timm's keys, so that timm and the published code can
read it, and holds tensors and plain data only.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tlt.errors import UserError
from tlt.weights import check_finite, first_non_finite, peek_checkpoint, read_checkpoint, state_dict_of
from volo.engine.finetune import FinetuneReport, load_finetune, load_weights
from volo.engine.precision import NonFiniteError
from volo.engine.run_directory import plain
from volo.engine.train_state import RankedCheckpoint, TrainState

__all__ = [
    "CheckpointDir",
    "FinetuneReport",
    "RankedCheckpoint",
    "Resume",
    "TrainState",
    "changed_args",
    "find_resume",
    "load_finetune",
    "load_weights",
    "save_checkpoint",
]

LAST = "last.pth.tar"
BEST = "model_best.pth.tar"
_OURS = re.compile(r"(?:last|model_best|checkpoint-(\d+))\.pth\.tar")  # all that `auto` ever reads
_STAGED = ".staged-"
_ABANDONED = "superseded-"


def save_checkpoint(path: Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint so that at any instant, power cuts included, `path` is the old file or the new one, whole.

    Raises:
        UserError: It can't be written (disk full, say). The old file is untouched and nothing is left behind.
    """

    def write(staged: Path) -> None:
        with staged.open("wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())

    try:
        _install(path, write)
    except (OSError, RuntimeError) as error:
        # torch's zip writer hides the system's error behind one of its own.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise _write_error(path, cause, _tensor_bytes(payload)) from error


def _write_error(path: Path, cause: OSError, size: int) -> UserError:
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    return UserError(
        f"cannot write {path}: {cause.strerror or cause}; it needs {size / 2**20:.1f} MiB, "
        f"{free / 2**20:.1f} MiB are free there; what was saved before is untouched"
    )


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_tensor_bytes, values))


def _install(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` make a file under a staging name beside `path`, then put it in place; the directory is synced too."""
    staged = path.with_name(f"{_STAGED}{os.getpid()}-{path.name}")
    try:
        fill(staged)
        os.replace(staged, path)
    finally:
        # Also left over where both names already were one file: rename then does nothing.
        with suppress(OSError):
            staged.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _duplicate(source: Path, target: Path) -> None:
    """Give `source` a second name, atomically; copy it where the file system knows no hard links."""

    def fill(staged: Path) -> None:
        try:
            os.link(source, staged)
        except OSError:
            with source.open("rb") as old, staged.open("wb") as new:
                shutil.copyfileobj(old, new, 1 << 20)
                new.flush()
                os.fsync(new.fileno())

    try:
        if not (target.exists() and target.samefile(source)):
            _install(target, fill)
    except OSError as error:
        raise _write_error(target, error, source.stat().st_size if source.exists() else 0) from error


class CheckpointDir:
    """Writes the checkpoints of one run. Construct it on rank 0 only.

    Args:
        directory: Created if missing. What an interrupted write left there is removed.
        keep: How many `checkpoint-N.pth.tar` are kept (`--checkpoint-hist`).
        higher_is_better: Whether the metric is an accuracy, not a loss.

    Raises:
        UserError: `keep` is below 1, or the directory can't be made.
    """

    def __init__(self, directory: Path, keep: int = 10, higher_is_better: bool = True) -> None:
        if keep < 1:
            raise UserError(f"--checkpoint-hist {keep}: keep at least 1 checkpoint")
        self.directory, self.keep, self.higher_is_better = Path(directory), keep, higher_is_better
        self._best: RankedCheckpoint | None = None  # what model_best is known to hold
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob(f"{_STAGED}*"):
                leftover.unlink()
        except OSError as error:
            raise UserError(f"cannot write checkpoints to {directory}: {error.strerror}") from error

    def save(self, state: TrainState, metric: float | None = None) -> RankedCheckpoint | None:
        """Save after an epoch, `state.epoch` already counting it; return the best checkpoint so far, if any.

        Args:
            state: Its list of ranked checkpoints is brought up to date.
            metric: Of this epoch. None, NaN and infinite rank below every number and are never the best.

        Raises:
            NonFiniteError: The weights hold NaN or infinity. Nothing is written.
            UserError: The file can't be written; `state.best` is as before.
        """
        metric = None if metric is None else float(metric)
        ranked = self._ranked(state, metric)
        kept, outdated = ranked[: self.keep], [entry.file for entry in ranked[self.keep :]]
        self._write(state, metric, kept, outdated)
        newest = self.directory / _file(state)
        if newest.name not in outdated:
            _duplicate(self.directory / LAST, newest)
        self._refresh_best(state)
        self._remove(outdated)
        return _best(state)

    def save_last(self, state: TrainState) -> None:
        """Save between epochs: only `last.pth.tar`, unranked."""
        self._write(state, None, state.best, [])

    def restore(self, state: TrainState, path: Path) -> list[str]:
        """Make the directory agree with a state that was loaded from `path`; return what a user should know.

        Call it when every rank has read `path`.

        What a kill between two steps of `save` left undone is done. If an older checkpoint was chosen, files of later
        epochs are set aside under names that `auto` does not read, and `path` becomes `last`: a run that is killed
        before its next save goes on from there, too.
        """
        if path.parent.resolve() != self.directory.resolve():
            before, state.best, state.outdated = state.best, [], []
            return [f"the best and kept checkpoints stay in {path.parent}: ranked anew here"] if before else []
        messages = self._set_aside(state, path)
        _duplicate(path, self.directory / LAST)
        own = self.directory / _file(state)
        at_end = state.update == state.epoch * state.updates_per_epoch
        if at_end and not own.exists() and own.name in (entry.file for entry in state.best):
            _duplicate(path, own)
        self._remove(state.outdated)
        for entry in [e for e in state.best if not (self.directory / e.file).is_file()]:
            state.best.remove(entry)
            messages.append(f"{entry.file}, one of the kept checkpoints, is gone")
        self._remove([entry.file for entry in state.best[self.keep :]])
        del state.best[self.keep :]
        self._refresh_best(state)
        return messages

    def _ranked(self, state: TrainState, metric: float | None) -> list[RankedCheckpoint]:
        metric = metric if metric is not None and math.isfinite(metric) else None
        others = [entry for entry in state.best if entry.epoch != state.epoch - 1]
        return sorted([*others, RankedCheckpoint(metric, state.epoch - 1, _file(state))], key=self._order)

    def _order(self, entry: RankedCheckpoint) -> tuple[bool, float, int]:
        """Best first, the earlier of equals first; after all others those without a metric, newest first."""
        if entry.metric is None:
            return True, 0.0, -entry.epoch
        return False, -entry.metric if self.higher_is_better else entry.metric, entry.epoch

    def _write(
        self, state: TrainState, metric: float | None, best: list[RankedCheckpoint], outdated: list[str]
    ) -> None:
        before = state.best, state.outdated
        state.best, state.outdated = best, outdated
        try:
            payload = state.state_dict(metric)
            if broken := first_non_finite(payload["state_dict"] | payload.get("dense_head", {})):
                raise NonFiniteError(f"{broken} holds NaN or infinite values: not saved, {LAST} is of an earlier epoch")
            save_checkpoint(self.directory / LAST, payload)
        except BaseException:
            state.best, state.outdated = before
            raise

    def _refresh_best(self, state: TrainState) -> None:
        best = _best(state)
        if best is not None and best != self._best:
            _duplicate(self.directory / best.file, self.directory / BEST)
        self._best = best

    def _remove(self, names: list[str]) -> None:
        for name in names:
            (self.directory / name).unlink(missing_ok=True)

    def _set_aside(self, state: TrainState, path: Path) -> list[str]:
        aside = []
        for file in sorted(self.directory.glob("checkpoint-*.pth.tar")):
            match = _OURS.fullmatch(file.name)
            if match and int(match[1]) >= state.epoch and file.name != path.name:
                os.replace(file, file.with_name(_ABANDONED + file.name))
                aside.append(file.name)
        last = self.directory / LAST
        if last.exists() and not last.samefile(path):
            _duplicate(last, last.with_name(_ABANDONED + LAST))  # a copy: there is a `last` at every instant
            aside.append(LAST)
        if _best(state) is None and (self.directory / BEST).exists():
            os.replace(self.directory / BEST, self.directory / (_ABANDONED + BEST))
            aside.append(BEST)
        return [f"set aside as {_ABANDONED}*, not on the way to {path.name}: {', '.join(aside)}"] if aside else []


def _file(state: TrainState) -> str:
    return f"checkpoint-{state.epoch - 1}.pth.tar"


def _best(state: TrainState) -> RankedCheckpoint | None:
    return state.best[0] if state.best and state.best[0].metric is not None else None


@dataclass(frozen=True)
class Resume:
    """What a run goes on from; `path` is None for a fresh start."""

    path: Path | None
    checkpoint: dict[str, Any] | None
    messages: list[str]


def find_resume(spec: str, directory: Path) -> Resume:
    """Return the checkpoint that `--resume` means, read and verified.

    Args:
        spec: A path, or "auto": the newest checkpoint in `directory` (by update number) that can be read, whose records
            match their checksums and whose weights are finite. Each skipped one is in the messages.
        directory: Of the run.

    Raises:
        UserError: `spec` is a path and that checkpoint is not good.
    """
    if spec != "auto":
        return Resume(Path(spec), _verified(Path(spec)), [])
    messages: list[str] = []
    for path in _newest_first(Path(directory), messages):
        try:
            return Resume(path, _verified(path), messages)
        except UserError as error:
            messages.append(f"skipped: {error}")
    return Resume(None, None, [*messages, f"no checkpoint to resume in {directory}: a fresh start"])


def _verified(path: Path) -> dict[str, Any]:
    checkpoint = read_checkpoint(path)
    check_finite(state_dict_of(checkpoint, use_ema=False, path=path), path)
    return checkpoint


def _newest_first(directory: Path, messages: list[str]) -> list[Path]:
    """Order the run's checkpoints by what is written in them; times of files do not survive a copy."""
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if not _OURS.fullmatch(path.name):
            continue
        try:
            checkpoint = peek_checkpoint(path)
            position = int(checkpoint.get("epoch", -1)), int(checkpoint.get("update", 0)), path.name == LAST
            found.append((position, path))
        except UserError as error:
            messages.append(f"skipped: {error}")
        except (TypeError, ValueError):
            messages.append(f"skipped: {path} does not tell its epoch")
    return [path for _, path in sorted(found, key=lambda item: item[0], reverse=True)]


def changed_args(checkpoint: dict[str, Any], args: dict[str, Any]) -> list[str]:
    """Compare the arguments recorded in a checkpoint with the present ones: one line for each that differs.

    That is their only use; nothing in a file decides what a run does.
    """
    recorded = checkpoint.get("args")
    if not isinstance(recorded, dict):
        return []
    now = plain(args)
    differing = [k for k in sorted(now) if k in recorded and plain(recorded[k]) != now[k]]
    return [f"{k}: {recorded[k]!r} in the checkpoint, {now[k]!r} now" for k in differing]
