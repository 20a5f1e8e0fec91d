"""Images in TFRecord files, read in any order and without TensorFlow (`--dataset tfrecord`).

    DATA/train/*.tfrecord*    DATA/train/*-00000-of-01024    DATA/train*.tfrecord*    DATA/train-00000-of-01024

An index like that of tar shards says where in which file each image lies. DALI's `.idx` files, which know records and
neither images nor classes, are not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlt.data.sources.folder import split_names
from tlt.data.sources.record_scan import RecordRows, scan_records
from tlt.data.sources.shard_index import Contents, write_index
from tlt.data.sources.shards import FORMAT, IndexedFiles
from tlt.data.sources.source import class_folder, numbered_names, renumber
from tlt.errors import MissingSplit, UserError
from tlt.io.natural import natural_key
from tlt.io.processes import in_processes
from tlt.io.tensor_file import refuse_other_file
from tlt.io.text import printable

INDEX_SUFFIX = "records.safetensors"
_RECORDS = re.compile(r"(?!\.).*(\.tfrecords?(-\d+-of-\d+)?|-\d{5,}-of-\d{5,})")
_PART = re.compile(r"(.*)-(\d{5,9})-of-(\d{5,9})")
_UNNAMED = "warning: the records don't name their images, which are numbered: labels of another copy will not be found"


@dataclass(frozen=True)
class RecordFiles(IndexedFiles):
    """TFRecord files.

    Attributes:
        class_names: By number, where the data set lists them.
        lengths: Records in each file, where the data set says so.
    """

    class_names: list[str] | None = None
    lengths: list[int] | None = None

    def make_index(self, workers: int = 1) -> list[str]:
        refuse_other_file(self.index, FORMAT)
        found = list(in_processes(_scan, None, self.paths, workers, "indexing", "file"))
        for rows, length in zip(found, self.lengths or (), strict=self.lengths is not None):
            if len(rows.shard) != length:
                shown = printable(rows.shard.path)
                raise UserError(f"{shown} holds {len(rows.shard)} records instead of {length}: copy it again")
        contents, named = _contents(found, self.class_names)
        order = list(range(len(contents.names)))
        if named:  # as in a folder
            order.sort(key=lambda row: (natural_key(contents.names[row]), contents.names[row]))
        shards = [rows.shard for rows in found]
        lines = write_index(self.index, shards, contents, np.array(order, np.int64), whole_folder=False)
        return lines if named else [_UNNAMED, *lines]


def find_records(_name: str, data: str, split: str) -> RecordFiles:
    """The TFRecord files of a split: those in its folder, or those whose names begin with its name.

    Raises:
        UserError: There are none, or some are missing by the numbers in their names.
    """
    for name in split_names(split):
        folder = os.path.join(data, name)
        if os.path.isdir(folder) and (found := _record_files(folder)):
            return RecordFiles(_whole(folder, found), os.path.join(folder, INDEX_SUFFIX))
        found = [file for file in _record_files(data) if re.match(rf"{re.escape(name)}[-._]", file)]
        if found:
            return RecordFiles(_whole(data, found), os.path.join(data, f"{name}.{INDEX_SUFFIX}"))
    searched = ", ".join(map(printable, split_names(split)))
    raise MissingSplit(
        f"no TFRecord files of the split {printable(split)} in {printable(data)} (searched folders and files that are "
        f"named {searched}): name another split"
    )


def _record_files(folder: str) -> list[str]:
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


def _scan(_: None, path: str) -> RecordRows:
    return scan_records(path)


def _contents(found: Sequence[RecordRows], class_names: list[str] | None) -> tuple[Contents, bool]:
    """What the index says of the images, and whether they have names of their own.

    Where the records name their classes, these are numbered in natural order, as in a folder; else as in the records.
    """
    classes = np.concatenate([rows.shard.classes for rows in found])
    texts = [text for rows in found for text in rows.class_names]
    files = [name for rows in found for name in rows.file_names]
    one_to_one = len(set(zip(texts, classes.tolist(), strict=True))) == len(set(texts)) == len(np.unique(classes))
    named = class_names is not None or (all(texts) and one_to_one)
    if class_names is not None:
        own = class_names
    elif named:
        own = sorted(set(texts), key=lambda text: (natural_key(text), text))
        numbers = {text: number for number, text in enumerate(own)}
        classes = np.array([numbers[text] for text in texts], np.int64)
    else:
        own = [str(number) for number in range(classes.max(initial=-1) + 1)]
    renumber(classes, own, None, printable(os.path.dirname(found[0].shard.path)))
    there = own if class_names is not None else [own[number] for number in np.unique(classes)]
    names = [f"{class_folder(own[number])}/{file}" for number, file in zip(classes, files, strict=True)]
    if all(files) and len(set(names)) == len(names):
        return Contents(names, classes, own, there, named), True
    return Contents(numbered_names(own[number] for number in classes), classes, own, there, named), False
