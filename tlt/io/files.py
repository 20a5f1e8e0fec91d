"""Checksums of files, and flushing them to the disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sync_folder(folder: str | Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: str | Path) -> str:
    """The sha256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
