"""The files in a tar of WebDataset's layout: where they lie, read strictly and never unpacked.

Python's `tarfile` takes a damaged header for the end of the archive, and so do most readers: what lies behind is lost
without a word. Here the end must be marked as tar writers mark it.
"""

from __future__ import annotations

import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tlt.errors import UserError
from tlt.io.files import read_at
from tlt.io.names import leads_out
from tlt.io.text import printable


class Place(NamedTuple):
    """Where a file lies in its tar, in bytes."""

    offset: int
    length: int


@dataclass
class Listing:
    """The samples of a tar: the files of each key by extension, both as WebDataset has them: names are cut at the first
    dot of the file's name, extensions are lower case.

    Attributes:
        samples: Key -> extension -> where.
        left_out: What is no part of any sample: kind -> count.
        example: Kind -> the first of them.
    """

    samples: dict[str, dict[str, Place]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    example: dict[str, str] = field(default_factory=dict)

    def leave_out(self, kind: str, name: str) -> None:
        """Count a member that is not read."""
        self.left_out[kind] += 1
        self.example.setdefault(kind, name)


def list_members(path: str) -> Listing:
    """The samples of a tar file.

    Raises:
        UserError: Not readable, compressed, cut or damaged; a name that is absolute or leads out of the tar; two
            files of one name.
    """
    shown, listing = f"tar {printable(path)}", Listing()
    try:
        for info in _infos(path):
            name = info.name.removeprefix("./")
            if leads_out(name):
                raise UserError(
                    f"{shown} names {printable(info.name)}, which is absolute or leads out of it: do not use this file"
                )
            _add(listing, name, info, shown)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{shown} can't be read ({error.strerror or error})") from error
    except Exception as error:  # damaged headers make tarfile raise OverflowError, RecursionError and others, too
        raise UserError(f"{shown} is cut, damaged, or no uncompressed tar ({error}): copy it again") from error
    return listing


def _add(listing: Listing, name: str, info: tarfile.TarInfo, shown: str) -> None:
    folder, base = os.path.split(name)
    stem, dot, extension = base.partition(".")
    if info.isdir():
        return
    if info.issym() or info.islnk():
        raise UserError(f"{shown} holds a link, {printable(info.name)}: make it of files (tar --dereference)")
    if not info.isreg() or info.issparse():
        listing.leave_out("devices or sparse files", name)
    elif not stem or not dot:
        listing.leave_out("hidden files or files without an extension", name)
    else:
        files = listing.samples.setdefault(os.path.join(folder, stem), {})
        if extension.lower() in files:
            raise UserError(f"{shown} holds two files named {printable(name)}: make it again")
        files[extension.lower()] = Place(info.offset_data, info.size)


def _infos(path: str) -> Iterator[tarfile.TarInfo]:
    """Every member, in order. Raises TarError: the tar is cut or damaged."""
    with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        length, end = os.fstat(file.fileno()).st_size, 0
        while (info := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # or all of them are kept in memory
            if info.offset < end or info.size < 0:  # would go round for ever
                raise tarfile.ReadError(f"member at byte {info.offset} overlaps another one")
            end = info.offset_data + (info.size if info.isreg() else 0)
            if end > length:
                raise tarfile.ReadError(f"{printable(info.name)} ends at byte {end} of {length}")
            yield info
        if read_at(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no end marker at byte {tar.offset}")
