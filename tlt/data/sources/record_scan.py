"""What is in one TFRecord file of image classification: where its images lie, their classes, sizes and checksums.

A record is a length (8 bytes), its CRC-32C, the data, their CRC-32C; both checksums are verified here. The data are
TensorFlow's Example messages:

    Example {Features features = 1}      Features {map<string, Feature> feature = 1}
    Feature {BytesList = 1 | FloatList = 2 | Int64List = 3}, each {repeated value = 1}; numbers may be packed

They are read strictly: what is anything else raises ValueError, and nothing outside of a record's bounds is looked at.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import numpy as np

from tlt.data.sources.image_file import BadImage, most_bytes
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
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # wire types
_VARINT_BITS = 70  # of at most ten bytes


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
        if length > most_bytes():
            raise UserError(f"{shown}: the record at byte {at} has {length} bytes, more than an image takes")
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


@dataclass
class Feature:
    """Values of a feature: places (start, stop) of byte strings in the record, or integers. Floats are left out."""

    places: list[tuple[int, int]] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)


class _Field(NamedTuple):
    """A field of a message: the value of a varint, else where its bytes lie."""

    number: int
    wire_type: int
    value: int
    start: int
    stop: int


def parse_example(record: bytes) -> dict[str, Feature]:
    """The features of an Example by name. Raises ValueError: it is none, or damaged."""
    found: dict[str, Feature] = {}
    for features in _messages(record, 0, len(record), 1):
        for entry in _messages(record, features.start, features.stop, 1):
            name, feature = "", Feature()
            for part in _fields(record, entry.start, entry.stop):
                if part.number == 1 and part.wire_type == _BYTES:
                    name = record[part.start : part.stop].decode()
                elif part.number == 2 and part.wire_type == _BYTES:
                    feature = _feature(record, part)
            found[name] = feature
    return found


def _feature(record: bytes, message: _Field) -> Feature:
    feature = Feature()
    for strings in _messages(record, message.start, message.stop, 1):
        feature.places += [(value.start, value.stop) for value in _messages(record, strings.start, strings.stop, 1)]
    for integers in _messages(record, message.start, message.stop, 3):
        for value in _fields(record, integers.start, integers.stop):
            feature.integers += _integers(record, value) if value.number == 1 else []
    return feature


def _integers(record: bytes, values: _Field) -> list[int]:
    """One integer, or several packed ones; 64 bits with a sign."""
    found, at = [values.value], values.stop
    if values.wire_type == _BYTES:
        found, at = [], values.start
    elif values.wire_type != _VARINT:
        raise ValueError("integers of another type")
    while at < values.stop:
        value, at = _varint(record, at, values.stop)
        found.append(value)
    return [value - 2**64 if value >= 2**63 else value for value in found]


def _messages(record: bytes, start: int, stop: int, number: int) -> Iterator[_Field]:
    """The fields of a number, which must be byte strings or messages."""
    for each in _fields(record, start, stop):
        if each.number == number:
            if each.wire_type != _BYTES:
                raise ValueError(f"field {number} is not of the type that it has in an Example")
            yield each


def _fields(record: bytes, start: int, stop: int) -> Iterator[_Field]:
    at = start
    while at < stop:
        tag, at = _varint(record, at, stop)
        number, wire_type, value, length = tag >> 3, tag & 7, 0, 0
        begin = at
        if wire_type == _VARINT:
            value, at = _varint(record, at, stop)
        elif wire_type == _BYTES:
            length, begin = _varint(record, at, stop)
            at = begin + length
        elif wire_type in (_EIGHT_BYTES, _FOUR_BYTES):
            at += 8 if wire_type == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if number == 0 or at > stop:
            raise ValueError("a field goes beyond its message")
        yield _Field(number, wire_type, value, begin, at)


def _varint(record: bytes, at: int, stop: int) -> tuple[int, int]:
    """An unsigned number of seven bits a byte, and where it ends."""
    value = 0
    for shift in range(0, _VARINT_BITS, 7):
        if at >= stop:
            break
        byte, at = record[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), at
    raise ValueError("a number without an end")
