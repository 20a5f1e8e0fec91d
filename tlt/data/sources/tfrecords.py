"""Reads images in TFRecord files without TensorFlow (`--dataset tfrecord`, and `tfds/NAME` for files prepared by
tensorflow_datasets). Nothing is downloaded.

    DATA/train/*.tfrecord*    DATA/train/*-00000-of-01024    DATA/train*.tfrecord*    DATA/train-00000-of-01024
    DATA/NAME[/CONFIG]/VERSION/NAME-train.tfrecord-00000-of-01024

A record is a length (8 bytes), its CRC-32C, the data, and their CRC-32C. We verify both checksums. The data are
TensorFlow's Example messages, which `_PROTO` describes.
"""

import functools
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tlt.data.sources import records
from tlt.data.sources.folder import split_names
from tlt.data.sources.image_file import most_bytes
from tlt.data.sources.records import ROW, FileRecords, RecordImages
from tlt.data.sources.source import MAX_CLASS, ProgressCallback, check_classes, class_folder, numbered_names
from tlt.errors import MissingSplit, UserError, require
from tlt.io.files import blamed_on, os_errors_as, regular_only
from tlt.io.text import first_difference, leads_out, natural_key, natural_sorted, printable, some_names

# Names of the features in TensorFlow's image records, then in those of tensorflow_datasets.
_IMAGE = ("image/encoded", "image")
_LABEL = ("image/class/label", "label")
_CLASS_NAME = ("image/class/synset", "image/class/text")
_FILE_NAME = ("image/filename", "file_name")
_GZIP = b"\x1f\x8b"
_RECORDS = re.compile(r"(?!\.).*(\.tfrecords?(-\d+-of-\d+)?|-\d{5,}-of-\d{5,})")
_PART = re.compile(r"(.*)-(\d{5,9})-of-(\d{5,9})")
_VERSION = re.compile(r"\d+\.\d+\.\d+")

# tensorflow/core/example/*.proto without floating-point numbers. On the wire, a map is a list of such entries.
_PROTO = """
name: "tlt/example.proto" syntax: "proto3"
message_type { name: "Texts" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Numbers" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature"
  field { name: "texts" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".Texts" }
  field { name: "numbers" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".Numbers" } }
message_type { name: "Entry"
  field { name: "name" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "feature" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".Feature" } }
message_type { name: "Features"
  field { name: "entries" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".Entry" } }
message_type { name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".Features" } }
"""
Features = dict[str, list[bytes | int]]


def open_tfrecords(_name: str, data: str, split: str, on_progress: ProgressCallback | None) -> RecordImages:
    """Open the images in the TFRecord files of a split: those in its folder, or those with its name in their name. A
    file `label.labels.txt` beside them, if there is one, names the classes. Raise UserError if there are no files, or
    by the numbers in their names some are missing."""
    for name in split_names(split):
        folder = os.path.join(data, name)
        table = "records"
        files = _record_names(folder) if os.path.isdir(folder) else []
        if not files:
            folder = data
            table = f"{name}.records"
            files = [file for file in _record_names(data) if re.search(rf"(^|-){re.escape(name)}[-._]", file)]
        if files:
            paths = _complete_paths(folder, files)
            table = os.path.join(folder, table)
            images = records.open_records(paths, table, scan_records, _write_record_table, on_progress)
            if (listed := _class_list(folder)) and listed != images.class_names:
                raise UserError(
                    f"{printable(folder)}: label.labels.txt was changed after {printable(table)}.json was made "
                    f"({first_difference(images.class_names, listed)}): remove that: it is then made anew"
                )
            return images
    searched = ", ".join(map(printable, split_names(split)))
    raise MissingSplit(
        f"no TFRecord files of the split {printable(split)} in {printable(data)} (searched folders and files that are "
        f"named {searched}): name another split"
    )


def open_tfds(name: str, data: str, split: str, on_progress: ProgressCallback | None) -> RecordImages:
    """Open the images of a split that tensorflow_datasets prepared. `name` is `NAME[/CONFIG][:VERSION]`, without a
    version the newest one; `data` is tensorflow_datasets' `data_dir`."""
    builder, _, version = name.partition(":")
    folder = os.path.join(data, builder)
    if leads_out(builder) or not os.path.isdir(folder):
        raise UserError(
            f"--dataset tfds/{name}: there is no folder {printable(folder)}; prepare it with tensorflow_datasets, and "
            "give its data_dir as DATA"
        )
    versions = [version_name for version_name in natural_sorted(os.listdir(folder)) if _VERSION.fullmatch(version_name)]
    if not versions or version not in ("", *versions):
        raise UserError(
            f"--dataset tfds/{name}: no version {printable(version)} in {printable(folder)}, which holds "
            f"{some_names(sorted(os.listdir(folder)))}: give NAME[/CONFIG][:VERSION]"
        )
    return open_tfrecords("", os.path.join(folder, version or versions[-1]), split, on_progress)


def _record_names(folder: str) -> list[str]:
    with os_errors_as(lambda error: f"{printable(folder)} can't be read ({error.strerror})"):
        return sorted(filter(_RECORDS.fullmatch, os.listdir(folder)), key=natural_key)


def _complete_paths(folder: str, names: Sequence[str]) -> list[str]:
    """Return the paths of the files. Raise UserError if one of those numbered `-00000-of-01024` is missing."""
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


def _class_list(folder: str) -> list[str]:
    """Return the classes that a file beside the records names; [] without such a file."""
    file = Path(folder, "label.labels.txt")
    return file.read_text("utf-8").splitlines() if file.is_file() else []


def _write_record_table(table: str, read: list[FileRecords]) -> None:
    """Write the table of TFRecord files.

    If the records name their classes, the classes are numbered in natural order, as in a folder; else as in the
    records. Images with unique names are in natural order, as in a folder; others are numbered in the files' order.
    """
    rows = records.concatenated(read)
    folder = os.path.dirname(read[0].path)
    classes = rows["class"].tolist()
    texts = [text for file in read for text in file.class_texts]
    if class_names := _class_list(folder):
        named = class_names
    elif all(texts) and len({*zip(texts, classes, strict=True)}) == len({*texts}) == len({*classes}):
        named = natural_sorted({*texts})
        numbers = {text: number for number, text in enumerate(named)}
        rows["class"] = [numbers[text] for text in texts]
    else:
        named = [str(number) for number in range(max(classes, default=-1) + 1)]
    check_classes(rows["class"], named, printable(folder))
    files = [name for file in read for name in file.names]
    names = [f"{class_folder(named[number])}/{file}" for number, file in zip(rows["class"], files, strict=True)]
    if all(files) and len({*names}) == len(names):
        records.write_table(table, read, *records.in_natural_order(rows, names), named, class_names)
    else:
        note = "the records don't name their images, which are numbered: labels of another copy will not be found"
        records.write_table(
            table, read, rows, numbered_names(named[number] for number in rows["class"]), named, class_names, [note]
        )


def scan_records(path: str, texts_only: bool = False) -> FileRecords:
    """Read a TFRecord file, in any case wholly: the class of an image is beside its bytes. Raise UserError if the file
    is cut, damaged or compressed, or a record lacks an image or a single class."""
    rows = []
    names = []
    class_texts = []
    with open(path, "rb", opener=regular_only) as file:
        length = os.fstat(file.fileno()).st_size
        for number, (offset, record) in enumerate(_records(file, path, length)):
            where = f"record {number} of {printable(path)}"
            features = _parse_example(record, where)
            image = _single(features, _IMAGE, bytes)
            label = _single(features, _LABEL, int)
            for part, names_of, value in (("image", _IMAGE, image), ("class number", _LABEL, label)):
                if value is None:
                    keys = ", ".join(map(printable, sorted(features))) or "nothing"
                    raise UserError(f"{where} has no single {part} named {' or '.join(names_of)}: it has {keys}")
            if not 0 <= label <= MAX_CLASS:
                raise UserError(f"{where}: {label} is no class number (0 to {MAX_CLASS})")
            rows.append((0, offset + record.index(image), len(image), zlib.crc32(image), label, 0))
            names.append(os.path.basename(os.fsdecode(_single(features, _FILE_NAME, bytes, b""))))
            class_texts.append(os.fsdecode(_single(features, _CLASS_NAME, bytes, b"")))
    return FileRecords(path, length, np.array(rows, ROW), names, class_texts)


def _parse_example(record: bytes, record_name: str) -> Features:
    """Return the features of an Example by name. Raise UserError if it is damaged or of another kind."""
    with blamed_on(record_name, "is no Example of TensorFlow", "write the file with these"):
        entries = _example().FromString(record).features.entries
    return {entry.name: [*entry.feature.texts.value, *entry.feature.numbers.value] for entry in entries}


@functools.cache
def _example() -> Any:
    """Return the class of Example messages."""
    text, descriptor, pools, factory = (
        require(f"google.protobuf.{module}", "tfrecord")
        for module in ("text_format", "descriptor_pb2", "descriptor_pool", "message_factory")
    )
    pool = pools.DescriptorPool()
    pool.AddSerializedFile(text.Parse(_PROTO, descriptor.FileDescriptorProto()).SerializeToString())
    return factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def _single(features: Features, names: Sequence[str], kind: type, otherwise: Any = None) -> Any:
    """Return the single value of the first of these features that exists, or `otherwise` if it is of another kind."""
    values = next((features[name] for name in names if name in features), [])
    return values[0] if len(values) == 1 and isinstance(values[0], kind) else otherwise


def _records(file: BinaryIO, path: str, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the data of each record. Raise UserError if the file is damaged."""
    crc32c = require("google_crc32c", "tfrecord").value
    file_name = f"TFRecord file {printable(path)}"
    at = 0
    while at < size:
        head = file.read(12)
        if at == 0 and head.startswith(_GZIP):
            raise UserError(f"{file_name} is compressed, and can't be read by index: write it uncompressed")
        if len(head) == 12 and _masked(crc32c(head[:8])) != int.from_bytes(head[8:], "little"):
            raise UserError(f"{file_name} is damaged at byte {at}, or no TFRecord file: copy it again")
        length = int.from_bytes(head[:8], "little")
        if len(head) < 12 or at + length + 16 > size:
            raise UserError(f"{file_name} is cut: its last record begins at byte {at} of {size}; copy it again")
        if length > most_bytes():
            raise UserError(f"{file_name}: the record at byte {at} has {length} bytes, more than an image takes")
        data = file.read(length)
        checksum = int.from_bytes(file.read(4), "little")
        if _masked(crc32c(data)) != checksum:
            raise UserError(f"{file_name} is damaged in the record at byte {at} (crc32c is wrong): copy it again")
        yield at + 12, data
        at += length + 16
    if size == 0:
        raise UserError(f"{file_name} is empty: copy it again, or remove it")


def _masked(crc: int) -> int:
    """Return a crc32c as TFRecords store it: rotated by 15 bits, plus a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
