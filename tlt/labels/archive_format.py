"""The label archive on disk: one folder of safetensors files, complete when its manifest is there.

OUT/manifest.json          what the archive is, with size and sha256 of every other file; written last
OUT/manifest.partial.json  the same without checksums, while the archive is being written
OUT/names.safetensors      names of the rows: image paths and label files
OUT/00000.safetensors ...  shards of `shard_records` rows each (the last one may be shorter)

A file that the manifest doesn't name is no part of the archive. Every row carries a crc32 over its contents and its
name, because safetensors notices neither a flipped bit nor a hole of zeros. Headers are a function of the manifest, so
that they are compared and not parsed.

Legend: n rows of a shard, k classes, h x w cells.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from tlt.errors import UserError
from tlt.io.files import sync_folder, with_retries, write_whole
from tlt.io.tensor_file import numpy_dtype
from tlt.io.text import printable
from tlt.label_map import Area

FORMAT = "volo-tlt label archive, version 1"
MANIFEST_NAME = "manifest.json"
PARTIAL_NAME = "manifest.partial.json"
NAMES_NAME = "names.safetensors"
SHARD_RECORDS = 65_536
UNKNOWN_AREA = (-1.0, -1.0, -1.0, -1.0)  # of maps of the centred square of an image whose size is not known

_ALIGNMENT = 64

Fields = dict[str, tuple[str, tuple[int, ...]]]  # name -> (safetensors dtype, shape), in file order


class Form:
    """Bits of a row's `form`: how the packed label file was written, so that it can be restored."""

    DTYPE = 0b0011  # index into `FILE_DTYPES`
    FIVE_DIMENSIONS = 0b0100  # [1, 2, k, H, W]
    TEMPORARY_NAME = 0b1000  # saved under the name that `tlt.labels.tree.write_map` uses, which torch keeps in the file
    NO_NAME = 0b10000  # saved to memory first
    ABSENT = 0xFF  # no label: the image could not be read when the labels were made


FILE_DTYPES = ("float16", "float32", "bfloat16", "float64")


@dataclass(frozen=True)
class Header:
    """The part of the manifest that is known before the first row is written.

    Attributes:
        k, grid: Every map is k x grid[0] x grid[1], as stored.
        ids: "U16" or "I32".
        log_sum_exp: Whether rows have the log-sum-exp of all the annotator's logits, (h, w).
        records, shard_records: Rows in all, and per shard.
        name_bytes: Length of all image paths, and of all label files.
        names_sha256: Of the names' file.
        area: "full", "center" or (x0, y0, x1, y1).
        transposed: The maps are stored as (k, w, h): readers exchange their axes.
        labels_json: Text of the tree's `labels.json`, None where it has none.
    """

    k: int
    grid: tuple[int, int]
    ids: str
    log_sum_exp: bool
    records: int
    shard_records: int
    name_bytes: tuple[int, int]
    names_sha256: str
    area: str | Area
    transposed: bool
    labels_json: str | None

    @property
    def shards(self) -> int:
        return -(-self.records // self.shard_records)

    def has_file(self, name: str) -> bool:
        """Whether the names' file or a shard is called so."""
        stem = name.removesuffix(".safetensors")
        is_shard = stem.isdecimal() and name == shard_name(int(stem)) and int(stem) < self.shards
        return is_shard or name == NAMES_NAME

    def shard_length(self, shard: int) -> int:
        """Rows in a shard."""
        return min(self.shard_records, self.records - shard * self.shard_records)

    def shard_fields(self, shard: int) -> Fields:
        """The tensors of a shard, those of wider numbers first so that all are aligned."""
        n, grid = self.shard_length(shard), self.grid
        ids = {"ids": (self.ids, (n, self.k, *grid))}
        wide, narrow = (ids, {}) if self.ids == "I32" else ({}, ids)
        return {
            "area": ("F32", (n, 4)),  # x0, y0, x1, y1
            "size": ("I32", (n, 2)),  # width, height of the image; 0: not known
            "crc32": ("U32", (n,)),
            **({"log_sum_exp": ("F32", (n, *grid))} if self.log_sum_exp else {}),
            **wide,
            **narrow,
            "values": ("F16", (n, self.k, *grid)),
            "form": ("U8", (n,)),
        }


def names_fields(records: int, image_bytes: int, label_bytes: int) -> Fields:
    """The tensors of a names' file: where each name ends, then all of them in one."""
    return {
        "image_ends": ("I64", (records,)),
        "label_ends": ("I64", (records,)),
        "images": ("U8", (image_bytes,)),
        "labels": ("U8", (label_bytes,)),
    }


def shard_name(shard: int) -> str:
    """File name of a shard."""
    return f"{shard:05d}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """The whole archive: header, files, and what was found out when it was closed.

    Attributes:
        files: (bytes, sha256) of every file by name.
        max_id: The largest class id.
        absent: Rows without a label.
        accuracy: How well the labels name the folders' classes (see `tlt.labels.agreement`), {} where not measured.
    """

    header: Header
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    max_id: int = 0
    absent: int = 0
    accuracy: dict[str, Any] = field(default_factory=dict)

    def write(self, path: str | Path) -> None:
        """Write as JSON with a checksum of itself, replacing `path` in one step, and wait until it is on the disk."""
        content = {"format": FORMAT, **asdict(self)}
        content["sha256"] = _digest(content)
        write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
        sync_folder(Path(path).parent)

    @classmethod
    def read(cls, path: str | Path) -> Manifest:
        """Read what `write` wrote.

        Raises:
            UserError: The file is something else, damaged, or not readable.
        """
        shown = printable(os.fspath(path))
        try:
            content = json.loads(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{shown} can't be read as JSON ({error}): pack the archive anew, into another folder"
            ) from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise UserError(f"{shown} does not describe a label archive ({FORMAT})")
        digest = content.pop("sha256", None)
        if digest != _digest({"format": FORMAT, **content}):
            raise UserError(f"{shown} is damaged (its checksum is wrong): pack the archive anew, into another folder")
        try:
            header = {name: _tuples(value) for name, value in content.pop("header").items()}
            files = {name: (int(size), str(sha)) for name, (size, sha) in content.pop("files").items()}
            known = {each.name for each in fields(cls)}
            return cls(Header(**header), files, **{key: value for key, value in content.items() if key in known})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{shown}: {error}; was it written by a newer version?") from error


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_header(tensors: Fields) -> bytes:
    """The start of a safetensors file: its length, then names, types, shapes and places as JSON."""
    entries, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + _bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": FORMAT}, **entries}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def file_places(tensors: Fields) -> tuple[dict[str, int], int]:
    """Byte at which each tensor begins, and the length of the file."""
    places, offset = {}, len(file_header(tensors))
    for name, (dtype, shape) in tensors.items():
        places[name] = offset
        offset += _bytes(dtype, shape)
    return places, offset


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * numpy_dtype(dtype).itemsize


class MappedFile:
    """The tensors of one file of an archive, in memory that all processes reading it share.

    Raises:
        UserError: The file is missing, cut, or does not begin as the manifest says.
    """

    def __init__(self, path: str, tensors: Fields) -> None:
        self.path = path
        header = file_header(tensors)
        places, self.size = file_places(tensors)
        try:
            with with_retries(lambda: open(path, "rb"), path) as file:
                found = os.fstat(file.fileno()).st_size
                if found != self.size:
                    raise UserError(f"{self._shown()} has {found} bytes instead of {self.size}: {_REMEDY}")
                self._map = mmap.mmap(file.fileno(), self.size, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise UserError(f"{self._shown()} can't be read ({error.strerror}): {_REMEDY}") from error
        if self._map[: len(header)] != header:
            raise UserError(f"{self._shown()} is damaged or of another archive (its header is wrong): {_REMEDY}")
        self.tensors = {
            name: np.frombuffer(self._map, numpy_dtype(dtype), int(np.prod(shape)), places[name]).reshape(shape)
            for name, (dtype, shape) in tensors.items()
        }
        self.rows = row_bytes(self.tensors)  # of a shard; [] of other files

    def check_length(self) -> None:
        """Raise UserError if the file was cut since it was opened: touching what is gone would kill the process."""
        try:
            found = with_retries(self._map.size, self.path)  # of the file
        except OSError as error:
            raise UserError(f"{self._shown()} can't be read any more ({error.strerror}): {_REMEDY}") from error
        if found < self.size:
            raise UserError(f"{self._shown()} has been cut to {found} of {self.size} bytes: {_REMEDY}")

    def _shown(self) -> str:
        return f"label archive {printable(self.path)}"


_REMEDY = "copy the archive again, or pack it again"
ROW_FIELDS = ("ids", "values", "log_sum_exp", "size", "area", "form")  # what a row's crc32 covers, in this order


def row_crc(rows: Iterable[np.ndarray], row: int, crc: int) -> int:
    """The crc32 of a row, continued from that of its label file's name: of its bytes in each of `row_bytes`."""
    for each in rows:
        crc = zlib.crc32(each[row].data, crc)
    return crc


def row_bytes(tensors: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """(n, bytes) uint8 views of the tensors of a shard that a row's crc32 covers."""
    return [tensors[name].reshape(len(tensors[name]), -1).view(np.uint8) for name in ROW_FIELDS if name in tensors]
