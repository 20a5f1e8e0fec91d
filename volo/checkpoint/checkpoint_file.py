"""Writing a checkpoint file: at any instant there is either the complete old file or the complete new one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tlt.errors import UserError
from tlt.io.files import sync_folder
from tlt.io.text import natural_key

STAGED = ".staged-"
ENDINGS = (".pth", ".pt", ".tar", ".safetensors")


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
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(tensor_bytes, values))


def checkpoints_in(folder: Path, flag: str) -> list[Path]:
    """Return the checkpoints in a folder, in natural order.

    Raises:
        UserError: The folder holds no checkpoint.
    """
    files = [
        path for path in folder.iterdir() if path.is_file() and path.name.endswith(ENDINGS) and path.name[0] != "."
    ]
    if not files:
        raise UserError(f"{flag} {folder}: no file in it ends in {', '.join(ENDINGS)}")
    return sorted(files, key=lambda path: natural_key(path.name))


def the_checkpoint(path: str, flag: str) -> Path:
    """Return the file that a flag names, or the only checkpoint in the folder that it names.

    Raises:
        UserError: The folder holds no checkpoint, or several.
    """
    if not Path(path).is_dir():
        return Path(path)
    first, *others = checkpoints_in(Path(path), flag)
    if others:
        raise UserError(
            f"{flag} {path} holds {1 + len(others)} checkpoints: name one of them, such as {others[-1].name}"
        )
    return first
