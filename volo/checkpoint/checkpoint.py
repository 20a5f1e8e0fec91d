"""The checkpoint files of a run. Each is written completely or not at all.

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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt.errors import NonFiniteError, UserError
from tlt.io.weights import first_non_finite
from volo.checkpoint.checkpoint_file import STAGED, duplicate, explained, save_checkpoint, tensor_bytes
from volo.checkpoint.state import RankedCheckpoint, TrainState

LAST = "last.pth.tar"
BEST = "model_best.pth.tar"
NAMES = re.compile(r"(?:last|model_best|checkpoint-(\d+))\.pth\.tar")  # the only names that `auto` reads
_ABANDONED = "superseded-"


def rank(entries: Iterable[RankedCheckpoint], by: str) -> list[RankedCheckpoint]:
    """Return checkpoints best first, by the score of this name: the lowest `loss...` is the best, of every other score
    the highest. Of equal ones the earlier comes first; those without a metric come last, the newest first."""

    def order(entry: RankedCheckpoint) -> tuple[bool, float, int]:
        if entry.metric is None:
            return True, 0.0, -entry.epoch
        return False, entry.metric if by.startswith("loss") else -entry.metric, entry.epoch

    return sorted(entries, key=order)


@dataclass
class Save:
    """A save: the content of the file, what happens to the other files, and how it goes (`volo.checkpoint.saver`).

    Attributes:
        payload: Shares its tensors with the model, unless it was copied.
        epoch: Counted from 0; after an epoch, which gets a ranked `checkpoint-N.pth.tar`. None: only `last` is written.
        best: The kept checkpoints, best first.
        outdated: The files that are not kept any more.
        reason: For the log.
        blocked: Seconds for which training waited.
        seconds: Of the newest attempt to write it.
    """

    payload: dict[str, Any]
    epoch: int | None
    best: list[RankedCheckpoint]
    outdated: list[str]
    reason: str = ""
    blocked: float = 0.0
    attempts: int = 0
    seconds: float = 0.0
    error: BaseException | None = None

    @property
    def update(self) -> int:
        """Optimizer steps done."""
        return int(self.payload["update"])

    def commit(self, state: TrainState) -> None:
        """Put the ranking into the state, when the file is written."""
        state.best, state.outdated = self.best, self.outdated


class CheckpointDir:
    """Writes the checkpoints of one run. Construct it on rank 0 only.

    Args:
        directory: Created if missing. Remains of an interrupted write are removed.
        keep: How many `checkpoint-N.pth.tar` are kept (`--checkpoint-hist`).
        ranked_by: Name of the score (`TrainState.scores`) that ranks epochs.

    Raises:
        UserError: `keep` is below 1, or the directory can't be made.
    """

    def __init__(self, directory: Path, keep: int = 10, ranked_by: str = "top1") -> None:
        if keep < 1:
            raise UserError(f"--checkpoint-hist {keep}: keep at least 1 checkpoint")
        self.directory, self.keep, self.ranked_by = Path(directory), keep, ranked_by
        self._best: RankedCheckpoint | None = None  # the content of model_best, if known
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob(f"{STAGED}*"):
                leftover.unlink()
        except OSError as error:
            raise UserError(f"cannot write checkpoints to {directory}: {error.strerror}") from error

    def plan(self, state: TrainState, payload: dict[str, Any], ranked: bool = True) -> Save:
        """Plan a save of `payload`, the result of `state.state_dict`, which gets the ranking. The state stays as it is.

        Args:
            ranked: Save after an epoch, which `state.epoch` counts already, ranked by its score; a missing, NaN or
                infinite score ranks below every number and is never the best. False: save only `last.pth.tar`.

        Raises:
            NonFiniteError: The weights hold NaN or infinity.
        """
        epoch, entries = state.epoch - 1, self._present(state.best)
        if ranked:
            payload["metric"] = self._score(state, epoch)
            new = RankedCheckpoint(payload["metric"], epoch, _file(epoch))
            entries = rank([*(entry for entry in entries if entry.epoch != epoch), new], self.ranked_by)
        best, outdated = entries[: self.keep], [entry.file for entry in entries[self.keep :]]
        payload |= {"best": [list(entry) for entry in best], "outdated": outdated}
        weights = payload["state_dict"] | payload.get("dense_head", {})
        if broken := first_non_finite({name: value for name, value in weights.items() if isinstance(value, Tensor)}):
            raise NonFiniteError(f"{broken} holds NaN or infinite values: not saved, {LAST} is of an earlier epoch")
        return Save(payload, epoch if ranked else None, best, outdated)

    def write(self, save: Save) -> None:
        """Write the file and update the directory. May be repeated, and be called in any thread, one at a time.

        Raises:
            NotWrittenError: The files that existed are unchanged, except that obsolete ones may be gone.
        """
        save_checkpoint(self.directory / LAST, save.payload)
        with explained(self.directory / LAST, lambda: tensor_bytes(save.payload)):
            if save.epoch is not None and (own := _file(save.epoch)) not in save.outdated:
                duplicate(self.directory / LAST, self.directory / own)
            self._refresh_best(save.best)
            self._remove(save.outdated)

    def restore(self, state: TrainState, path: Path) -> list[str]:
        """Make the directory agree with a state that was loaded from `path`; return lines for the user.

        Call it when every rank has read `path`. A `write` that was killed half-way is completed. If `path` is an older
        checkpoint, files of later epochs are renamed so that `auto` does not read them, and `path` becomes `last`: a
        run that is killed before its next save continues from there, too.
        """
        if path.parent.resolve() != self.directory.resolve():
            before, state.best, state.outdated, state.scores = state.best, [], [], {}
            return [f"the best and kept checkpoints stay in {path.parent}: ranked anew here"] if before else []
        messages = self._rank_anew(state) + self._set_aside(state, path)
        duplicate(path, self.directory / LAST)
        own = self.directory / _file(state.epoch - 1)
        at_end = state.update == state.epoch * state.updates_per_epoch
        if at_end and not own.exists() and own.name in (entry.file for entry in state.best):
            duplicate(path, own)
        self._remove(state.outdated)
        present = self._present(state.best)
        messages += [f"{e.file}, one of the kept checkpoints, is gone" for e in state.best if e not in present]
        self._remove([entry.file for entry in present[self.keep :]])
        state.best = present[: self.keep]
        self._refresh_best(state.best)
        return messages

    def _rank_anew(self, state: TrainState) -> list[str]:
        """Rank the kept epochs again, because `--eval-metric` or EMA may have changed."""
        before = state.best
        entries = [entry._replace(metric=self._score(state, entry.epoch)) for entry in before]
        state.best = rank(entries, self.ranked_by)
        return [] if state.best == before else [f"the kept checkpoints are now ranked by {self.ranked_by}"]

    def _score(self, state: TrainState, epoch: int) -> float | None:
        score = state.scores.get(epoch, {}).get(self.ranked_by)
        return score if score is not None and math.isfinite(score) else None

    def _present(self, ranked: list[RankedCheckpoint]) -> list[RankedCheckpoint]:
        """Return the ranked checkpoints that still have files: the directory may have been removed during the run."""
        return [entry for entry in ranked if (self.directory / entry.file).is_file()]

    def _refresh_best(self, ranked: list[RankedCheckpoint]) -> None:
        best = best_of(self._present(ranked))
        if best is not None and (best != self._best or not (self.directory / BEST).exists()):
            duplicate(self.directory / best.file, self.directory / BEST)
        self._best = best

    def _remove(self, names: list[str]) -> None:
        for name in names:
            (self.directory / name).unlink(missing_ok=True)

    def _set_aside(self, state: TrainState, path: Path) -> list[str]:
        aside = []
        for file in sorted(self.directory.glob("checkpoint-*.pth.tar")):
            match = NAMES.fullmatch(file.name)
            if match and int(match[1]) >= state.epoch and file.name != path.name:
                os.replace(file, file.with_name(_ABANDONED + file.name))
                aside.append(file.name)
        last = self.directory / LAST
        if last.exists() and not last.samefile(path):
            duplicate(last, last.with_name(_ABANDONED + LAST))  # a copy: there is a `last` at every instant
            aside.append(LAST)
        if best_of(state.best) is None and (self.directory / BEST).exists():
            os.replace(self.directory / BEST, self.directory / (_ABANDONED + BEST))
            aside.append(BEST)
        return [f"set aside as {_ABANDONED}*, not on the way to {path.name}: {', '.join(aside)}"] if aside else []


def _file(epoch: int) -> str:
    return f"checkpoint-{epoch}.pth.tar"


def best_of(ranked: list[RankedCheckpoint]) -> RankedCheckpoint | None:
    """Return the best checkpoint of a ranked list; None if none has a metric."""
    return ranked[0] if ranked and ranked[0].metric is not None else None
