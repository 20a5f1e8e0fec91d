"""The checkpoint files of a run. Each is written completely or not at all.

    last.pth.tar           after every epoch; within one by a signal or `--recovery-interval`
    checkpoint-N.pth.tar   after the best K epochs; N counts from 0, as in the published code
    model_best.pth.tar     after the best epoch
    milestone-N.pth.tar    after N epochs (`--save-epochs`); kept for ever, so that runs can branch from it

If one epoch has several of these names, they are hard links to one file. The payload has timm's keys, so that timm and
the published code can read it. It holds only tensors and plain data.
"""

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
from tlt.io.files import os_errors_as, sync_folder
from tlt.io.weights import first_non_finite
from volo.checkpoint.state import TrainState
from volo.config.checkpoint_files import BEST, LAST, MILESTONE

NAMES = re.compile(r"(?:last|model_best|(?:checkpoint|milestone)-(\d+))\.pth\.tar")  # `--resume auto` reads only these
STAGED = ".staged-"
_ABANDONED = "superseded-"


class NotWrittenError(UserError):
    """A checkpoint can't be written (disk full, read-only, lost mount, ...). Earlier checkpoints are unchanged."""

    exit_code = 4


def save_checkpoint(path: Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint so that `path` is the complete old or new file at any instant, even after a power cut. Raises
    NotWrittenError if that fails: the old file is unchanged then, and no temporary file is left."""

    def write(staged: Path) -> None:
        # Pass a file object instead of a path: torch's own writer loses the system's reason for a failure (ENOSPC).
        with staged.open("wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())

    with explained(path, lambda: tensor_bytes(payload)):
        install(path, write)


def duplicate(source: Path, target: Path) -> None:
    """Give `source` a second name atomically; copy the file if the file system has no hard links. Raises
    NotWrittenError if that fails, and `target` is unchanged then."""

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
    """Let `fill` write a temporary file beside `path`, rename it to `path`, and sync the directory."""
    staged = path.with_name(f"{STAGED}{os.getpid()}-{path.name}")
    try:
        fill(staged)
        os.replace(staged, path)
    finally:
        # If both names were links to one file already, rename does nothing and leaves the temporary name.
        with suppress(OSError):
            staged.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def explained(path: Path, size: Callable[[], int]) -> Iterator[None]:
    """Turn the system's errors in the block into one line that says how many bytes are needed, `size()`, and free."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not (reason := _of_system(error)):
            raise
        needed = free = 0
        with suppress(OSError):
            needed = size()
            free = shutil.disk_usage(next(parent for parent in path.parents if parent.exists())).free
        raise NotWrittenError(
            f"cannot write {path}: {reason}; it needs {needed / 2**20:.1f} MiB, "
            f"{free / 2**20:.1f} MiB are free there; what was saved before is untouched"
        ) from error


def _of_system(error: Exception) -> str:
    """Return the reason if the system has caused an error, else "". The error isn't kept: its frames hold the file's
    content, which the garbage collector would free much later."""
    # torch's zip writer raises its own error, whose context is the system's error.
    cause = error if isinstance(error, OSError) else error.__context__
    return (cause.strerror or str(cause)) if isinstance(cause, OSError) else ""


def tensor_bytes(value: Any) -> int:
    """Return the number of bytes of all tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(tensor_bytes, values))


class RankedCheckpoint(NamedTuple):
    """A file `checkpoint-N.pth.tar`: `epoch` is N; `metric` is None if the epoch has no finite score."""

    metric: float | None
    epoch: int
    file: str


def rank_epochs(scores: Mapping[int, Mapping[str, float]], by: str) -> list[RankedCheckpoint]:
    """Return the checkpoints of epochs, best first, ranked by the score named `by`. A score whose name begins with
    "loss" is better if it is lower, any other score if it is higher. Of equal scores the earlier epoch comes first;
    epochs without a finite score come last, newest first."""
    sign = 1 if by.startswith("loss") else -1
    score_of = {n: metrics.get(by, math.nan) for n, metrics in scores.items()}
    finite = sorted((sign * score, n) for n, score in score_of.items() if math.isfinite(score))
    unranked = sorted((n for n, score in score_of.items() if not math.isfinite(score)), reverse=True)
    ranked = [*((sign * score, n) for score, n in finite), *((None, n) for n in unranked)]
    return [RankedCheckpoint(metric, n, f"checkpoint-{n}.pth.tar") for metric, n in ranked]


def best_of(ranked: list[RankedCheckpoint]) -> RankedCheckpoint | None:
    """Return the best checkpoint of a ranked list; None if none has a metric."""
    return ranked[0] if ranked and ranked[0].metric is not None else None


@dataclass
class Save:
    """One save: the content of the file, and how writing it went (`volo.checkpoint.saver`).

    Attributes:
        payload: It shares its tensors with the model unless it was copied.
        ranked: Whether it follows an epoch, and so may get a `checkpoint-N.pth.tar`; otherwise only `last` is written.
        size: Size of its tensors in bytes.
        reason: Why it is saved, for the log.
        blocked: Seconds for which training waited.
        seconds: Duration of the newest attempt to write it.
        error: Error of the newest attempt.
        copied: Occurs when the copy of the payload in host memory is complete; None if there is nothing to wait for.
    """

    payload: dict[str, Any]
    ranked: bool
    size: int
    reason: str = ""
    blocked: float = 0.0
    attempts: int = 0
    seconds: float = 0.0
    error: NotWrittenError | None = None
    copied: torch.cuda.Event | None = None


class CheckpointDir:
    """Writes the checkpoints of one run. Construct it on rank 0 only.

    An epoch counts as kept if its file is there. Every checkpoint holds the scores of all epochs. Raises UserError if
    the directory can't be made.

    Args:
        directory: Created if missing. Temporary files of an interrupted write are removed.
        keep: Number of files `checkpoint-N.pth.tar` to keep (`--checkpoint-hist`), at least 1.
        ranked_by: Name of the score (`TrainState.scores`) that ranks epochs.
        milestones: Numbers of finished epochs after which a file is written and kept for ever.
    """

    def __init__(
        self, directory: Path, keep: int = 10, ranked_by: str = "top1", milestones: Sequence[int] | None = None
    ) -> None:
        self.directory = Path(directory)
        self.keep = keep
        self.ranked_by = ranked_by
        self.milestones = milestones or ()
        with os_errors_as(lambda error: f"cannot write checkpoints to {directory}: {error.strerror}"):
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob(f"{STAGED}*"):
                leftover.unlink()

    def plan(self, payload: dict[str, Any], ranked: bool = True) -> Save:
        """Return a save of `payload`, which `TrainState.state_dict` made, and add the epoch's metric to it. Raises
        NonFiniteError if the weights hold NaN or infinity.

        Args:
            ranked: True saves after an epoch, ranked by its score; a missing, NaN or infinite score ranks below every
                number and is never the best. False saves only `last.pth.tar`.
        """
        if ranked:
            epoch = payload["epoch"]
            payload["metric"] = rank_epochs({epoch: payload["scores"][epoch]}, self.ranked_by)[0].metric
        weights = payload["state_dict"] | payload.get("dense_head", {})
        if broken := first_non_finite({name: value for name, value in weights.items() if isinstance(value, Tensor)}):
            raise NonFiniteError(f"{broken} holds NaN or infinite values: not saved, {LAST} is of an earlier epoch")
        return Save(payload, ranked, tensor_bytes(payload))

    def write(self, save: Save) -> None:
        """Write the file and update the directory. Any thread may call and repeat this, but only one at a time. Raises
        NotWrittenError if writing fails: existing files are unchanged then, but obsolete ones may be removed."""
        save_checkpoint(self.directory / LAST, save.payload)
        if save.ranked:
            with explained(self.directory / LAST, lambda: save.size):
                self._keep_best(save.payload["scores"], save.payload["epoch"])

    def restore(self, state: TrainState, path: Path) -> list[str]:
        """Make the directory agree with a state that was loaded from its file `path`; return lines for the user.

        Call this after every rank has read `path`. It completes a `write` that was killed half-way. If `path` is an
        older checkpoint, files of later epochs are renamed, so that `auto` ignores them, and `path` becomes `last`, so
        that a run that is killed before its next save continues from there as well.
        """
        messages = self._set_aside(state, path)
        duplicate(path, self.directory / LAST)
        at_end = state.update == state.epoch * state.updates_per_epoch
        self._keep_best(state.scores, state.epoch - 1 if at_end else None)
        return messages

    def ranking(self, scores: Mapping[int, Mapping[str, float]], newest: int | None = None) -> list[RankedCheckpoint]:
        """Rank those of the scored epochs that have files, and the epoch `newest`, whose file is `last`."""
        ranked = rank_epochs(scores, self.ranked_by)
        return [entry for entry in ranked if entry.epoch == newest or (self.directory / entry.file).is_file()]

    def _keep_best(self, scores: Mapping[int, Mapping[str, float]], newest: int | None) -> None:
        """Keep the files of the best epochs and remove the others. Give `last`, the file of `newest`, its other names,
        as far as it has them: milestone, checkpoint and best, in this order."""
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
            match = NAMES.fullmatch(file.name)  # a milestone's number is its epoch's number plus one
            if match and int(match[1]) - bool(MILESTONE.fullmatch(file.name)) >= state.epoch and file.name != path.name:
                os.replace(file, file.with_name(_ABANDONED + file.name))
                aside.append(file.name)
        last = self.directory / LAST
        if last.exists() and not last.samefile(path):
            duplicate(last, last.with_name(_ABANDONED + LAST))  # not renamed: a `last` must exist at every instant
            aside.append(LAST)
        if best_of(self.ranking(state.scores)) is None and (self.directory / BEST).exists():
            os.replace(self.directory / BEST, self.directory / (_ABANDONED + BEST))
            aside.append(BEST)
        return [f"set aside as {_ABANDONED}*, not on the way to {path.name}: {', '.join(aside)}"] if aside else []
