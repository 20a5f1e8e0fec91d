"""One checkpoint file: at any instant the old one or the new one, whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tlt.errors import UserError
from tlt.io.natural import natural_key

STAGED = ".staged-"
ENDINGS = (".pth", ".pt", ".tar", ".safetensors")


class NotWrittenError(UserError):
    """A checkpoint can't be written (disk full, read-only, lost mount, ...). What was saved before is untouched."""

    exit_code = 4


def save_checkpoint(path: Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint so that at any instant, power cuts included, `path` is the old file or the new one, whole.

    Raises:
        NotWrittenError: The old file is untouched and nothing is left behind.
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
    """Give `source` a second name, atomically; copy it where the file system knows no hard links.

    Raises:
        NotWrittenError: `target` is as before.
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
    """Let `fill` make a file under a staging name beside `path`, then put it in place; the directory is synced too."""
    staged = path.with_name(f"{STAGED}{os.getpid()}-{path.name}")
    try:
        fill(staged)
        os.replace(staged, path)
    finally:
        # Also left over where both names already were one file: rename then does nothing.
        with suppress(OSError):
            staged.unlink(missing_ok=True)
    _sync_directory(path.parent)


@contextmanager
def explained(path: Path, size: Callable[[], int]) -> Iterator[None]:
    """Turn the system's errors inside the block into one line with the bytes needed, `size()`, and free."""
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
        with suppress(OSError):
            free = shutil.disk_usage(next(parent for parent in path.parents if parent.exists())).free
        raise NotWrittenError(
            f"cannot write {path}: {cause.strerror or cause}; it needs {needed / 2**20:.1f} MiB, "
            f"{free / 2**20:.1f} MiB are free there; what was saved before is untouched"
        ) from error


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a nest of dicts and lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(tensor_bytes, values))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints_in(folder: Path, flag: str) -> list[Path]:
    """The checkpoints in a folder, in natural order.

    Raises:
        UserError: There is none.
    """
    files = [
        path for path in folder.iterdir() if path.is_file() and path.name.endswith(ENDINGS) and path.name[0] != "."
    ]
    if not files:
        raise UserError(f"{flag} {folder}: no file in it ends in {', '.join(ENDINGS)}")
    return sorted(files, key=lambda path: natural_key(path.name))


def the_checkpoint(path: str, flag: str) -> Path:
    """The file that a flag names, or the only checkpoint in the folder that it names.

    Raises:
        UserError: The folder holds none, or several.
    """
    if not Path(path).is_dir():
        return Path(path)
    first, *others = checkpoints_in(Path(path), flag)
    if others:
        raise UserError(
            f"{flag} {path} holds {1 + len(others)} checkpoints: name one of them, such as {others[-1].name}"
        )
    return first
