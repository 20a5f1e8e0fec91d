"""Finds the newest checkpoint in a directory, and checks that a checkpoint's data are those of this run.

`volo.checkpoint.start` decides in which directory a run goes on.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from tlt.data.dataset import LabelReader
from tlt.data.sources.source import SYNTHETIC, ImageSource
from tlt.errors import UserError
from tlt.io.files import blamed_on
from tlt.io.weights import check_finite, peek_checkpoint, read_checkpoint, state_dict_of
from tlt.upstream import ROWS
from volo.checkpoint.checkpoint import LAST, NAMES


class Found(NamedTuple):
    """A checkpoint that was looked for.

    Attributes:
        path, checkpoint: The file and its content; None and {} if none can be used.
        skipped: A line for each file that can't be used.
    """

    path: Path | None
    checkpoint: dict[str, Any]
    skipped: list[str]


def newest_checkpoint(directory: Path) -> Found:
    """Return the checkpoint in a directory that has the highest epoch and update, of those that can be read, whose
    checksums match and whose weights are finite."""
    skipped: list[str] = []
    for path in _newest_first(directory, skipped):
        try:
            return Found(path, verified(path), skipped)
        except UserError as error:
            skipped.append(f"skipped: {error}")
    return Found(None, {}, skipped)


def verified(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint. Raises UserError if it can't be read, is damaged, or its weights are not
    finite."""
    checkpoint = read_checkpoint(path)
    check_finite(state_dict_of(checkpoint, use_ema=False, path=path), path)
    return checkpoint


def _newest_first(directory: Path, skipped: list[str]) -> list[Path]:
    """Return the run's checkpoints, ordered by the position in their content: copying files changes their times."""
    candidates = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if not NAMES.fullmatch(path.name):
            continue
        try:
            with blamed_on(path, "does not tell its epoch"):
                checkpoint = peek_checkpoint(path)
                position = int(checkpoint.get("epoch", -1)), int(checkpoint.get("update", 0)), path.name == LAST
            candidates.append((position, path))
        except UserError as error:
            skipped.append(f"skipped: {error}")
    return [path for _, path in sorted(candidates, key=lambda item: item[0], reverse=True)]


def check_behaviour(checkpoint: dict[str, Any], path: Path) -> None:
    """Raise UserError if the checkpoint's run used published behaviour that this version can't set back."""
    removed = [f"--compat {row}" for row in table(checkpoint, "args").get("compat") or () if row not in ROWS]
    if removed:
        raise UserError(
            f"{path} is of a run with {', '.join(removed)}, which this version has no more (docs/parity.md): "
            "finish the run with the version that began it, or begin a new one with --finetune"
        )


def table(checkpoint: dict[Any, Any], key: Any) -> dict[str, Any]:
    """Return the dict that a checkpoint holds under `key`; {} if it holds none there."""
    return value if isinstance(value := checkpoint.get(key), dict) else {}


DATA_KEY = "data"  # key in a checkpoint
_DATA = {
    "images": "the training images (names and classes)",
    "labels": "the token labels",
    "teacher": "the weights of the teacher (--kd-model-name)",
}


def fingerprint(folder: ImageSource, labels: LabelReader | None, teacher: str | None = None) -> dict[str, Any]:
    """Return what `check_same_data` compares: names and classes of the images, how their labels were made, and the
    checksum of a teacher's weights.

    Images are not read: it would take long, and their folder may have moved.
    """
    if folder.root == SYNTHETIC:  # the flags give the number of images, so it is not compared
        return {"images": SYNTHETIC, "labels": SYNTHETIC if labels else None, "teacher": teacher, "count": 0}
    digest = hashlib.sha256("\0".join(folder.class_names).encode(errors="surrogateescape"))
    images = zip(map(os.fsencode, folder.paths), folder.classes, strict=True)
    digest.update(b"".join(b"\n%s\0%d" % image for image in images))
    identity = None
    if labels is not None:
        from tlt.labels.store import LabelStore

        assert isinstance(labels, LabelStore)
        identity = labels.identity()
    return {"images": digest.hexdigest(), "labels": identity, "teacher": teacher, "count": len(folder)}


def check_same_data(checkpoint: dict[str, Any], current: dict[str, Any], path: str | Path, allow: bool) -> list[str]:
    """Compare a checkpoint's data with the data of this run; return lines for the user. Raises UserError if the data
    differ, and `allow` is False.

    Args:
        checkpoint: If it has no fingerprint, nothing is compared.
        current: The result of `fingerprint` in this run.
        allow: Warn about other data instead of refusing them (`--allow-changed-data`).
    """
    recorded = table(checkpoint, DATA_KEY)
    changed = [text for name, text in _DATA.items() if name in recorded and recorded[name] != current[name]]
    if not changed:
        return []
    then = recorded.get("count")
    now = current["count"]
    counts = f" ({then} images then, {now} now)" if then != now else ""
    text = f"{' and '.join(changed)} are not those that {path} was trained on{counts}"
    if not allow:
        raise UserError(f"{text}: resume with the same data, or go on with others by --allow-changed-data")
    return [f"warning: {text} (--allow-changed-data)"]
