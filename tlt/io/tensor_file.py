"""One safetensors file with metadata, read through a memory map: its arrays are in no process's own memory."""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save

from tlt.errors import UserError
from tlt.io.files import sync_folder
from tlt.io.text import printable

_KEY = "volo-tlt"
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
DTYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U32": "<u4", "U16": "<u2", "U8": "|u1"}


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """numpy's name of a safetensors type."""
    return np.dtype(DTYPES[dtype])


def write_tensors(path: str, format_name: str, tensors: Mapping[str, np.ndarray], description: Any) -> None:
    """Write a file, replacing `path` in one step, and wait until it is on the disk.

    Args:
        format_name: What kind of file it is; readers ask for it.
        description: Anything that JSON can hold; it becomes part of the metadata.
    """
    content = {"format": format_name, "crc32": _crc(tensors, description), "description": description}
    metadata = {_KEY: json.dumps(content)}  # one entry: safetensors writes several in any order
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(save(dict(tensors), metadata))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    sync_folder(os.path.dirname(path) or ".")


def has_format(path: str, format_name: str) -> bool:
    """Whether `write_tensors` wrote a file in some version of a format, by its header; the file may be damaged."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        found = json.loads(header["__metadata__"][_KEY])["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return isinstance(found, str) and found.partition(", version")[0] == format_name.partition(", version")[0]


def refuse_other_file(path: str, format_name: str) -> None:
    """Raise UserError if there is something at `path` that `write_tensors` did not write in this format."""
    if os.path.lexists(path) and not os.path.isdir(path) and not has_format(path, format_name):
        raise UserError(f"{printable(path)} is there and is no {format_name.partition(',')[0]}: remove or rename it")


class MappedTensors:
    """What `write_tensors` wrote, in memory that all processes reading it share.

    Attributes:
        tensors: The arrays, read only.
        description: As written.

    Raises:
        UserError: Not such a file, cut, or its checksum is wrong; `remedy` ends the message.
    """

    def __init__(self, path: str, format_name: str, remedy: str) -> None:
        shown = printable(path)
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{shown} can't be read ({reason}): {remedy}") from error
        try:
            content, self.tensors = self._parse()
            found, crc32, self.description = content["format"], content["crc32"], content["description"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{shown} is damaged or something else ({format_name} expected): {remedy}") from error
        if found != format_name:
            raise UserError(f"{shown} is not of the format {format_name}: {remedy}")
        if crc32 != _crc(self.tensors, self.description):
            raise UserError(f"{shown} is damaged (crc32 is wrong): {remedy}")

    def _parse(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The metadata and the arrays. Raises ValueError and others: no such file, or cut."""
        start = 8 + int.from_bytes(self._map[:8], "little")
        header: dict[str, Any] = json.loads(self._map[8:start])
        content = json.loads(header.pop("__metadata__")[_KEY])
        tensors = {}
        for name, entry in header.items():
            dtype, shape = numpy_dtype(entry["dtype"]), entry["shape"]
            array = np.frombuffer(self._map, dtype, int(np.prod(shape)), start + entry["data_offsets"][0])
            tensors[name] = array.reshape(shape)
        return content, tensors


def _crc(tensors: Mapping[str, np.ndarray], description: Any) -> int:
    crc = zlib.crc32(json.dumps(description).encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        crc = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    return crc
