"""Images in TFRecord files, read without TensorFlow (`--dataset tfrecord`).

    DATA/train/*.tfrecord*    DATA/train/*-00000-of-01024    DATA/train*.tfrecord*    DATA/train-00000-of-01024

A record is a length (8 bytes), its CRC-32C, the data, their CRC-32C; both checksums are verified here. The data are
TensorFlow's Example messages:

    Example {Features features = 1}      Features {map<string, Feature> feature = 1}
    Feature {BytesList = 1 | FloatList = 2 | Int64List = 3}, each {repeated value = 1}; numbers may be packed

They are read strictly: what is anything else raises ValueError, and nothing outside of a record's bounds is looked at.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tlt.data.sources.folder import split_names
from tlt.data.sources.image_file import most_bytes
from tlt.data.sources.records import ROW, Contents, FileRecords, RecordFiles, checked_name
from tlt.data.sources.source import class_folder, numbered_names, renumber
from tlt.errors import MissingSplit, UserError, require
from tlt.io.natural import natural_key, natural_sorted
from tlt.io.text import printable

# Names of the features: TensorFlow's image records, then tensorflow_datasets'.
_IMAGE = ("image/encoded", "image")
_LABEL = ("image/class/label", "label")
_CLASS_NAME = ("image/class/synset", "image/class/text")
_FILE_NAME = ("image/filename", "file_name")
_GZIP = b"\x1f\x8b"
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # wire types
_VARINT_BITS = 70  # of at most ten bytes
_MAX_CLASS = 999_999
Values = list[tuple[int, int] | int]  # (start, stop) of byte strings in the record, or integers; floats are left out
Features = dict[str, Values]
_RECORDS = re.compile(r"(?!\.).*(\.tfrecords?(-\d+-of-\d+)?|-\d{5,}-of-\d{5,})")
_PART = re.compile(r"(.*)-(\d{5,9})-of-(\d{5,9})")


def find_records(_name: str, data: str, split: str) -> RecordFiles:
    """The TFRecord files of a split: those in its folder, or those whose names begin with its name.

    Raises:
        UserError: There are none, or some are missing by the numbers in their names.
    """
    for name in split_names(split):
        folder = os.path.join(data, name)
        if os.path.isdir(folder) and (found := _record_names(folder)):
            return record_files(_whole(folder, found), os.path.join(folder, "records"))
        found = [file for file in _record_names(data) if re.match(rf"{re.escape(name)}[-._]", file)]
        if found:
            return record_files(_whole(data, found), os.path.join(data, f"{name}.records"))
    searched = ", ".join(map(printable, split_names(split)))
    raise MissingSplit(
        f"no TFRecord files of the split {printable(split)} in {printable(data)} (searched folders and files that are "
        f"named {searched}): name another split"
    )


def _record_names(folder: str) -> list[str]:
    try:
        return sorted(filter(_RECORDS.fullmatch, os.listdir(folder)), key=natural_key)
    except OSError as error:
        raise UserError(f"{printable(folder)} can't be read ({error.strerror})") from error


def _whole(folder: str, names: Sequence[str]) -> list[str]:
    """Paths of the files. Raises UserError: one of those numbered `-00000-of-01024` is missing."""
    parts = [match for match in map(_PART.fullmatch, names) if match]
    for stem, total in {(part[1], part[3]) for part in parts}:
        there = {int(part[2]) for part in parts if (part[1], part[3]) == (stem, total)}
        missing = next((number for number in range(int(total)) if number not in there), None)
        if missing is not None:
            raise UserError(
                f"{printable(folder)}: {int(total) - len(there)} of {int(total)} files {printable(stem)}-*-of-{total} "
                f"are missing, the first is number {missing}: copy them"
            )
    return [os.path.join(folder, name) for name in names]


def record_files(
    paths: list[str], table: str, class_names: list[str] | None = None, count: int | None = None
) -> RecordFiles:
    """TFRecord files; `class_names` by number where the data set lists them, the others as of `RecordFiles`."""
    return RecordFiles(paths, table, scan_records, partial(record_contents, class_names=class_names), count)


def record_contents(found: list[FileRecords], class_names: list[str] | None = None) -> Contents:
    """What TFRecord files hold together.

    Where the records name their classes, these are numbered in natural order, as in a folder; else as in the records.
    Images with names of their own are in natural order, as in a folder; else they are numbered in the files' order.
    """
    classes = np.concatenate([file.rows["class"] for file in found]).astype(np.int64)
    texts = [text for file in found for text in file.class_texts]
    files = [name for file in found for name in file.names]
    one_to_one = len(set(zip(texts, classes.tolist(), strict=True))) == len(set(texts)) == len(np.unique(classes))
    named = class_names is not None or (all(texts) and one_to_one)
    if class_names is not None:
        own = class_names
    elif named:
        own = natural_sorted(set(texts))
        numbers = {text: number for number, text in enumerate(own)}
        classes = np.array([numbers[text] for text in texts], np.int64)
    else:
        own = [str(number) for number in range(int(classes.max(initial=-1)) + 1)]
    renumber(classes, own, None, printable(os.path.dirname(found[0].path)))
    names = [f"{class_folder(own[number])}/{file}" for number, file in zip(classes, files, strict=True)]
    if all(files) and len(set(names)) == len(names):
        order = sorted(range(len(names)), key=lambda row: (natural_key(names[row]), names[row]))
        return Contents(names, classes, own, named, np.array(order, np.int64), class_names)
    return Contents(
        numbered_names(own[number] for number in classes),
        classes,
        own,
        named,
        folder_names=class_names,
        notes=["the records don't name their images, which are numbered: labels of another copy will not be found"],
    )


def scan_records(path: str) -> FileRecords:
    """Read a TFRecord file.

    Raises:
        UserError: It is cut, damaged or compressed, or a record has no image or not one class.
    """
    rows, names, class_texts = [], [], []
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        for number, (offset, record) in enumerate(_records(file, path, length)):
            shown = f"record {number} of {printable(path)}"
            try:
                features = parse_example(record)
            except ValueError as error:
                raise UserError(f"{shown} is no Example of TensorFlow ({error})") from error
            start, stop = _single(features, _IMAGE, tuple, f"{shown} has no single image")
            label = _single(features, _LABEL, int, f"{shown} has no single class number")
            if not 0 <= label <= _MAX_CLASS:
                raise UserError(f"{shown}: {label} is no class number (0 to {_MAX_CLASS})")
            rows.append((0, offset + start, stop - start, zlib.crc32(record[start:stop]), label, 0))
            names.append(checked_name(os.path.basename(_text(record, features, _FILE_NAME)), path))
            class_texts.append(checked_name(_text(record, features, _CLASS_NAME), path))
    return FileRecords(path, length, np.array(rows, ROW), names, class_texts)


def _single(features: Features, names: Sequence[str], kind: type, problem: str) -> Any:
    """The only value of the first of these features that is there. Raises UserError: there is no such thing."""
    values = _values(features, names)
    if len(values) != 1 or not isinstance(values[0], kind):
        there = ", ".join(printable(name) for name in sorted(features)) or "nothing"
        raise UserError(f"{problem} named {' or '.join(names)}: it has {there}")
    return values[0]


def _text(record: bytes, features: Features, names: Sequence[str]) -> str:
    """A name, "" where there is none."""
    ranges = [value for value in _values(features, names) if isinstance(value, tuple)]
    return os.fsdecode(record[slice(*ranges[0])]) if len(ranges) == 1 else ""


def _values(features: Features, names: Sequence[str]) -> Values:
    return next((features[name] for name in names if name in features), [])


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


class _Field(NamedTuple):
    """A field of a message: the value of a varint, else where its bytes lie."""

    number: int
    wire_type: int
    value: int
    start: int
    stop: int


def parse_example(record: bytes) -> Features:
    """The features of an Example by name. Raises ValueError: the record is damaged or something else."""
    found: Features = {}
    for features in _messages(record, 0, len(record), 1):
        for entry in _messages(record, features.start, features.stop, 1):
            name, values = "", Values()
            for part in _fields(record, entry.start, entry.stop):
                if part.number == 1 and part.wire_type == _BYTES:
                    name = record[part.start : part.stop].decode()
                elif part.number == 2 and part.wire_type == _BYTES:
                    values = _feature(record, part)
            found[name] = values
    return found


def _feature(record: bytes, message: _Field) -> Values:
    values = Values()
    for strings in _messages(record, message.start, message.stop, 1):
        values += [(value.start, value.stop) for value in _messages(record, strings.start, strings.stop, 1)]
    for integers in _messages(record, message.start, message.stop, 3):
        for value in _fields(record, integers.start, integers.stop):
            values += _integers(record, value) if value.number == 1 else []
    return values


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
