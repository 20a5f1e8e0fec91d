"""Which checkpoint a run goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.errors import UserError
from tlt.io.weights import check_finite, peek_checkpoint, read_checkpoint, state_dict_of
from volo.checkpoint.checkpoint import LAST, NAMES


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
        if not NAMES.fullmatch(path.name):
            continue
        try:
            checkpoint = peek_checkpoint(path)
            position = int(checkpoint.get("epoch", -1)), int(checkpoint.get("update", 0)), path.name == LAST
            found.append((position, path))
        except UserError as error:
            messages.append(f"skipped: {error}")
        except (TypeError, ValueError, OverflowError, RuntimeError):
            messages.append(f"skipped: {path} does not tell its epoch")
    return [path for _, path in sorted(found, key=lambda item: item[0], reverse=True)]


def changed_labels(checkpoint: dict[str, Any], metadata: dict[str, Any]) -> list[str]:
    """A line if the teacher of `metadata`, a state's, is not the checkpoint's, or has other weights."""
    configs = [(each.get("model_config") or {}).get("labels") or {} for each in (checkpoint, metadata)]
    was, now = ({key: config.get(key) for key in ("teacher", "sha256")} for config in configs)
    return [f"labels: {was} in the checkpoint, {now} now"] if was != now else []
