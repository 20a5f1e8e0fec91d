"""What is in one TFRecord file of image classification: where its images lie, their classes, sizes and checksums.

A record is a length (8 bytes), its crc32c, the data, their crc32c; both checksums are verified here.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from tlt.data.sources.example_proto import Feature, parse_example
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.shard_scan import ShardRows, image_size
from tlt.data.sources.shards import HEAD_BYTES
from tlt.data.sources.tar_members import Listing
from tlt.errors import UserError, require
from tlt.io.files import sha256_of
from tlt.io.text import printable

# Names of the features: TensorFlow's image records, then tensorflow_datasets'.
_IMAGE = ("image/encoded", "image")
_LABEL = ("image/class/label", "label")
_CLASS_NAME = ("image/class/synset", "image/class/text")
_FILE_NAME = ("image/filename", "file_name")
_GZIP = b"\x1f\x8b"


@dataclass
class RecordRows:
    """What one file holds, n images in its order: `shard` without names, and for each image the name of its class and
    of its file, "" where the record has none."""

    shard: ShardRows
    class_names: list[str]
    file_names: list[str]


def scan_records(path: str) -> RecordRows:
    """Read a TFRecord file, every byte of it.

    Raises:
        UserError: It is cut, damaged or compressed, or a record has no image or not one class.
    """
    places, crcs, sizes, classes, class_names, file_names, broken = [], [], [], [], [], [], {}
    with open(path, "rb") as file:
        length, head = os.fstat(file.fileno()).st_size, zlib.crc32(file.read(HEAD_BYTES))
        file.seek(0)
        for row, (offset, record) in enumerate(_records(file, path, length)):
            example = _Example(record, f"record {row} of {printable(path)}")
            start, stop = example.image()
            data = record[start:stop]
            places.append((offset + start, stop - start))
            crcs.append(zlib.crc32(data))
            classes.append(example.label())
            class_names.append(example.text(_CLASS_NAME))
            file_names.append(os.path.basename(example.text(_FILE_NAME)))
            try:
                sizes.append(image_size(data))
            except BadImage as error:
                broken[row] = str(error)
                sizes.append((0, 0))
    count = len(places)
    shard = ShardRows(
        path,
        length,
        head,
        bytes.fromhex(sha256_of(path)),
        [""] * count,
        np.array(places, np.int64).reshape(-1, 2),
        np.zeros((count, 2), np.int64),
        np.array(crcs, np.uint32),
        np.zeros(count, np.uint32),
        np.array(sizes, np.uint16).reshape(-1, 2),
        np.array(classes, np.int64),
        broken,
        Listing(),
    )
    return RecordRows(shard, class_names, file_names)


def _records(file: BinaryIO, path: str, size: int) -> Iterator[tuple[int, bytes]]:
    """Where the data of each record begin, and the data. Raises UserError."""
    crc32c = require("google_crc32c", "tfrecord").value
    shown = f"TFRecord file {printable(path)}"
    at = 0
    while at < size:
        head = file.read(12)
        if at == 0 and head.startswith(_GZIP):
            raise UserError(f"{shown} is compressed, and can't be read by index: write it uncompressed")
        if len(head) == 12 and _masked(crc32c(head[:8])) != int.from_bytes(head[8:], "little"):
            raise UserError(f"{shown} is damaged at byte {at}, or no TFRecord file: copy it again")
        length = int.from_bytes(head[:8], "little")
        if len(head) < 12 or at + length + 16 > size:
            raise UserError(f"{shown} is cut: its last record begins at byte {at} of {size}; copy it again")
        data, checksum = file.read(length), int.from_bytes(file.read(4), "little")
        if _masked(crc32c(data)) != checksum:
            raise UserError(f"{shown} is damaged in the record at byte {at} (crc32c is wrong): copy it again")
        yield at + 12, data
        at += length + 16
    if size == 0:
        raise UserError(f"{shown} is empty: copy it again, or remove it")


def _masked(crc: int) -> int:
    """As TFRecords store a crc32c: turned by 15 bits, plus a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class _Example:
    """The features of one record by their usual names. Methods raise UserError: there is no such thing."""

    def __init__(self, record: bytes, shown: str) -> None:
        self._record, self._shown = record, shown
        try:
            self._features = parse_example(record)
        except ValueError as error:
            raise UserError(f"{shown} is no Example of TensorFlow ({error})") from error

    def image(self) -> tuple[int, int]:
        """Where in the record the encoded image lies."""
        places = self._feature(_IMAGE).places
        if len(places) != 1:
            raise self._lacks("image", _IMAGE)
        return places[0]

    def label(self) -> int:
        integers = self._feature(_LABEL).integers
        if len(integers) != 1 or integers[0] < 0:
            raise self._lacks("class number", _LABEL)
        return integers[0]

    def text(self, names: Sequence[str]) -> str:
        """A name, "" where there is none."""
        places = self._feature(names).places
        return os.fsdecode(self._record[slice(*places[0])]) if len(places) == 1 else ""

    def _feature(self, names: Sequence[str]) -> Feature:
        return next((self._features[name] for name in names if name in self._features), Feature())

    def _lacks(self, what: str, names: Sequence[str]) -> UserError:
        features = ", ".join(printable(name) for name in sorted(self._features)) or "nothing"
        return UserError(f"{self._shown} has no single {what} named {' or '.join(names)}: it has {features}")
