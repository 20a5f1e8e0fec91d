"""Files: checksums, flushing them to the disk, locks of folders, and reading from a place in them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from tlt.errors import UserError
from tlt.io.text import printable

# Windows would translate line ends, and has none of the others. O_NONBLOCK: a pipe without a writer opens at once.
READ_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_SEEKING = Lock()


def sync_folder(folder: str | Path) -> None:
    """Wait until the names in a folder are on the disk (not on Windows, where folders can't be opened)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Read up to `length` bytes from byte `offset` of an open file, which processes and threads may share."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, offset)
    with _SEEKING:  # Windows: there processes that share a file are started anew and open it themselves
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, length)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write `data` to byte `offset` of an open file, in one write."""
    if hasattr(os, "pwrite"):
        os.pwrite(descriptor, data, offset)
        return
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        os.write(descriptor, data)


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file, whole or not at all, and wait until it is on the disk; `sync_folder` does so for its name."""
    path = Path(path)
    # No process id in the name: what a killed process leaves behind, the next one overwrites.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def locked(folder: str | Path, busy: str) -> Iterator[None]:
    """Hold the lock of a folder, if its file system has locks. Raises UserError(`busy`) where another process does."""
    import fcntl  # not on Windows

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(busy) from error
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def refuse_existing(path: str | Path, flag: str) -> None:
    """Raise UserError if there is something already where `flag` asks for a file."""
    if os.path.lexists(path):
        raise UserError(f"{flag} {printable(str(path))} exists already: remove it, or choose another name")


def sha256_of(path: str | Path) -> str:
    """The sha256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
