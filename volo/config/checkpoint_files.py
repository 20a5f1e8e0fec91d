"""The names of checkpoint files, and the one file that a folder stands for in every program."""

import re
from pathlib import Path

from tlt.errors import UserError
from tlt.io.output_folder import META_NAME
from tlt.io.text import natural_key

LAST = "last.pth.tar"
BEST = "model_best.pth.tar"
MILESTONE = re.compile(r"milestone-\d+\.pth\.tar")
ENDINGS = (".pth", ".pt", ".tar", ".safetensors")


def holds_features(place: str) -> bool:
    """Return whether a folder is an archive of a teacher's features, perhaps an incomplete one (`volo features`)."""
    return Path(place, META_NAME).is_file()


def best_or_last(folder: str) -> Path | None:
    """Return the best checkpoint of a run directory, else the last; None if the folder is not a run directory."""
    return next((file for name in (BEST, LAST) if (file := Path(folder, name)).is_file()), None)


def checkpoints_in(folder: str, flag: str) -> list[Path]:
    """Return the checkpoints in a folder, in natural order. Raises UserError: the folder holds no checkpoint."""
    every = Path(folder).iterdir()
    files = [path for path in every if path.is_file() and path.name.endswith(ENDINGS) and path.name[0] != "."]
    if not files:
        raise UserError(f"{flag} {folder}: no file in it ends in {', '.join(ENDINGS)}")
    return sorted(files, key=lambda path: natural_key(path.name))


def single_checkpoint(folder: str, flag: str) -> Path:
    """Return the checkpoint that a folder stands for: `best_or_last`, or the only checkpoint in it. Raises UserError:
    the folder is not a run directory, and holds no checkpoint or several."""
    if file := best_or_last(folder):
        return file
    first, *others = checkpoints_in(folder, flag)
    if others:
        raise UserError(
            f"{flag} {folder} holds {1 + len(others)} checkpoints: name one of them, such as {others[-1].name}"
        )
    return first
