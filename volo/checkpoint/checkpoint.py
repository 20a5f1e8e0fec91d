"""The checkpoint files of a run. Each is written completely or not at all.

    last.pth.tar           after every epoch
    checkpoint-N.pth.tar   the best K epochs; N counts from 0, as published
    model_best.pth.tar     the best epoch
    milestone-N.pth.tar    after N epochs (`--save-epochs`); kept for ever, to branch from

The names of one epoch share one file (hard links). The payload has timm's keys, so that timm and the published code can
read it, and holds tensors and plain data only.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt.errors import NonFiniteError, UserError
from tlt.io.files import sync_folder
from tlt.io.weights import first_non_finite
from volo.checkpoint.state import TrainState
from volo.config.checkpoint_files import BEST, LAST, MILESTONE

NAMES = re.compile(r"(?:last|model_best|(?:checkpoint|milestone)-(\d+))\.pth\.tar")  # the only names that `auto` reads
STAGED, _ABANDONED = ".staged-", "superseded-"


class NotWrittenError(UserError):
    """A checkpoint can't be written (disk full, read-only, lost mount, ...). Earlier checkpoints are unchanged."""

    exit_code = 4


def save_checkpoint(path: Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint so that `path` is the complete old or new file at any instant, even after a power cut.

    Raises:
        NotWrittenError: The old file is unchanged, and no temporary file is left.
    """

    def write(staged: Path) -> None:
        # A file object, not a path: torch's own writer loses the system's reason (ENOSPC, ...) for a failure.
        with staged.open("wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())

    with explained(path, lambda: tensor_bytes(payload)):
        install(path, write)


def duplicate(source: Path, target: Path) -> None:
    """Give `source` a second name atomically; copy it where the file system has no hard links.

    Raises:
        NotWrittenError: `target` is unchanged.
    """

    def fill(staged: Path) -> None:
        try:
            os.link(source, staged)
        except OSError:
            with source.open("rb") as old, staged.open("wb") as new:
                shutil.copyfileobj(old, new, 1 << 20)
                new.flush()
                os.fsync(new.fileno())

    with explained(target, lambda: source.stat().st_size):
        if not (target.exists() and target.samefile(source)):
            install(target, fill)


def install(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a temporary file beside `path`, then rename it to `path` and sync the directory."""
    staged = path.with_name(f"{STAGED}{os.getpid()}-{path.name}")
    try:
        fill(staged)
        os.replace(staged, path)
    finally:
        # The temporary name is also left if both names are one file: rename then does nothing.
        with suppress(OSError):
            staged.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def explained(path: Path, size: Callable[[], int]) -> Iterator[None]:
    """Turn errors of the system in the block into one line with the bytes needed, `size()`, and free."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch's zip writer hides the system's error behind one of its own.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        needed = free = 0
        with suppress(OSError):
            needed = size()
            free = shutil.disk_usage(next(parent for parent in path.parents if parent.exists())).free
        raise NotWrittenError(
            f"cannot write {path}: {cause.strerror or cause}; it needs {needed / 2**20:.1f} MiB, "
            f"{free / 2**20:.1f} MiB are free there; what was saved before is untouched"
        ) from error


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(tensor_bytes, values))


class RankedCheckpoint(NamedTuple):
    """A `checkpoint-N.pth.tar`. `epoch` is N; `metric` is None where there was no finite one."""

    metric: float | None
    epoch: int
    file: str


def rank(scores: Mapping[int, Mapping[str, float]], by: str) -> list[RankedCheckpoint]:
    """Return the checkpoints of epochs, best first, by the score of this name: the lowest `loss...` is the best, of
    every other score the highest. Of equal ones the earlier comes first; those without a finite one come last, the
    newest first."""
    sign = 1 if by.startswith("loss") else -1
    score_of = {n: metrics.get(by, math.nan) for n, metrics in scores.items()}
    finite = sorted((sign * score, n) for n, score in score_of.items() if math.isfinite(score))
    others = sorted((n for n, score in score_of.items() if not math.isfinite(score)), reverse=True)
    ranked = [*((sign * score, n) for score, n in finite), *((None, n) for n in others)]
    return [RankedCheckpoint(metric, n, f"checkpoint-{n}.pth.tar") for metric, n in ranked]


def best_of(ranked: list[RankedCheckpoint]) -> RankedCheckpoint | None:
    """Return the best checkpoint of a ranked list; None if none has a metric."""
    return ranked[0] if ranked and ranked[0].metric is not None else None


@dataclass
class Save:
    """A save: the content of the file, and how it goes (`volo.checkpoint.saver`).

    Attributes:
        payload: Shares its tensors with the model, unless it was copied.
        ranked: After an epoch, which may get a `checkpoint-N.pth.tar`; else only `last` is written.
        size: Bytes of its tensors.
        reason: For the log.
        blocked: Seconds for which training waited.
        seconds: Of the newest attempt to write it.
    """

    payload: dict[str, Any]
    ranked: bool
    size: int
    reason: str = ""
    blocked: float = 0.0
    attempts: int = 0
    seconds: float = 0.0
    error: NotWrittenError | None = None  # of the newest attempt


class CheckpointDir:
    """Writes the checkpoints of one run. Construct it on rank 0 only.

    The epochs of the run whose files are there are those that are kept; their scores are in every checkpoint.

    Args:
        directory: Created if missing. Remains of an interrupted write are removed.
        keep: How many `checkpoint-N.pth.tar` are kept (`--checkpoint-hist`), at least 1.
        ranked_by: Name of the score (`TrainState.scores`) that ranks epochs.
        milestones: Numbers of finished epochs after which a file is kept for ever.

    Raises:
        UserError: The directory can't be made.
    """

    def __init__(
        self, directory: Path, keep: int = 10, ranked_by: str = "top1", milestones: Sequence[int] | None = None
    ) -> None:
        self.directory, self.keep, self.ranked_by, self.milestones = Path(directory), keep, ranked_by, milestones or ()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob(f"{STAGED}*"):
                leftover.unlink()
        except OSError as error:
            raise UserError(f"cannot write checkpoints to {directory}: {error.strerror}") from error

    def plan(self, payload: dict[str, Any], ranked: bool = True) -> Save:
        """Plan a save of `payload`, the result of `TrainState.state_dict`, which gets the epoch's metric.

        Args:
            ranked: Save after an epoch, ranked by its score; a missing, NaN or infinite score ranks below every number
                and is never the best. False: save only `last.pth.tar`.

        Raises:
            NonFiniteError: The weights hold NaN or infinity.
        """
        if ranked:
            epoch = payload["epoch"]
            payload["metric"] = rank({epoch: payload["scores"][epoch]}, self.ranked_by)[0].metric
        weights = payload["state_dict"] | payload.get("dense_head", {})
        if broken := first_non_finite({name: value for name, value in weights.items() if isinstance(value, Tensor)}):
            raise NonFiniteError(f"{broken} holds NaN or infinite values: not saved, {LAST} is of an earlier epoch")
        return Save(payload, ranked, tensor_bytes(payload))

    def write(self, save: Save) -> None:
        """Write the file and update the directory. May be repeated, and be called in any thread, one at a time.

        Raises:
            NotWrittenError: The files that existed are unchanged, except that obsolete ones may be gone.
        """
        save_checkpoint(self.directory / LAST, save.payload)
        if save.ranked:
            with explained(self.directory / LAST, lambda: save.size):
                self._keep_best(save.payload["scores"], save.payload["epoch"])

    def restore(self, state: TrainState, path: Path) -> list[str]:
        """Make the directory agree with a state that was loaded from `path`; return lines for the user.

        Call it when every rank has read `path`. A `write` that was killed half-way is completed. If `path` is an older
        checkpoint, files of later epochs are renamed so that `auto` does not read them, and `path` becomes `last`: a
        run that is killed before its next save continues from there, too.
        """
        if path.parent.resolve() != self.directory.resolve():
            return []  # a branch
        messages = self._set_aside(state, path)
        duplicate(path, self.directory / LAST)
        at_end = state.update == state.epoch * state.updates_per_epoch
        self._keep_best(state.scores, state.epoch - 1 if at_end else None)
        return messages

    def ranking(self, scores: Mapping[int, Mapping[str, float]], newest: int | None = None) -> list[RankedCheckpoint]:
        """Rank the epochs with these scores that have files, and the newest one, whose file is `last`."""
        ranked = rank(scores, self.ranked_by)
        return [entry for entry in ranked if entry.epoch == newest or (self.directory / entry.file).is_file()]

    def _keep_best(self, scores: Mapping[int, Mapping[str, float]], newest: int | None) -> None:
        """Leave the files of the best epochs, the one of `last` among them if it is as good, and name the best and a
        milestone."""
        if newest is not None and newest + 1 in self.milestones:
            duplicate(self.directory / LAST, self.directory / f"milestone-{newest + 1}.pth.tar")
        ranked = self.ranking(scores, newest)
        for entry in ranked[: self.keep]:
            if entry.epoch == newest:
                duplicate(self.directory / LAST, self.directory / entry.file)
        if best := best_of(ranked):
            duplicate(self.directory / best.file, self.directory / BEST)
        for entry in ranked[self.keep :]:
            (self.directory / entry.file).unlink(missing_ok=True)

    def _set_aside(self, state: TrainState, path: Path) -> list[str]:
        aside = []
        for file in sorted(self.directory.glob("*-*.pth.tar")):
            match = NAMES.fullmatch(file.name)  # the number of a milestone is one more than that of its epoch
            if match and int(match[1]) - bool(MILESTONE.fullmatch(file.name)) >= state.epoch and file.name != path.name:
                os.replace(file, file.with_name(_ABANDONED + file.name))
                aside.append(file.name)
        last = self.directory / LAST
        if last.exists() and not last.samefile(path):
            duplicate(last, last.with_name(_ABANDONED + LAST))  # a copy: there is a `last` at every instant
            aside.append(LAST)
        if best_of(self.ranking(state.scores)) is None and (self.directory / BEST).exists():
            os.replace(self.directory / BEST, self.directory / (_ABANDONED + BEST))
            aside.append(BEST)
        return [f"set aside as {_ABANDONED}*, not on the way to {path.name}: {', '.join(aside)}"] if aside else []
