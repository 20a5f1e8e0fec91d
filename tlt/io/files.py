"""Checksums of files, flushing them to the disk, and reading from a place in them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from threading import Lock

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


def sha256_of(path: str | Path) -> str:
    """The sha256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
