"""Data sets that tensorflow_datasets prepared, without TensorFlow (`--dataset tfds/NAME`): TFRecord files, and
`dataset_info.json` and `label.labels.txt` that say what is in them. Nothing is downloaded.

    DATA/NAME[/CONFIG]/VERSION/NAME-SPLIT.tfrecord-00000-of-01024
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from tlt.data.sources.folder import split_names
from tlt.data.sources.records import RecordFiles
from tlt.data.sources.tfrecords import record_files
from tlt.errors import MissingSplit, UserError
from tlt.io.natural import natural_key
from tlt.io.text import printable

_VERSION = re.compile(r"\d+\.\d+\.\d+")


def find_tfds(name: str, data: str, split: str) -> RecordFiles:
    """The files of a split.

    Args:
        name: `NAME[/CONFIG][:VERSION]`; without a version the newest one.
        data: tensorflow_datasets' `data_dir`.

    Raises:
        UserError: It is not there, in another format, has no such split, or files are missing.
    """
    folder = _version_folder(name, data)
    prefix, lengths = _read_info(os.path.join(folder, "dataset_info.json"))
    found = next((each for each in split_names(split) if each in lengths), None)
    if found is None:
        raise MissingSplit(
            f"--dataset tfds/{name}: no split {printable(split)} in {printable(folder)}, which has "
            f"{', '.join(map(printable, lengths))}: name one of them"
        )
    count = len(lengths[found])
    paths = [os.path.join(folder, f"{prefix}-{found}.tfrecord-{number:05d}-of-{count:05d}") for number in range(count)]
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise UserError(f"{len(missing)} of {count} files are missing, such as {printable(missing[0])}: copy them")
    class_names = _class_names(os.path.join(folder, "label.labels.txt"))
    return record_files(paths, os.path.join(folder, f"{found}.records"), class_names, sum(lengths[found]))


def _version_folder(name: str, data: str) -> str:
    builder, _, version = name.partition(":")
    folder = os.path.join(data, *builder.split("/"))
    if not os.path.isdir(folder) or ".." in builder.split("/"):
        raise UserError(
            f"--dataset tfds/{name}: there is no folder {printable(folder)}; prepare it with tensorflow_datasets, and "
            "give its data_dir as DATA"
        )
    there = sorted(os.listdir(folder), key=natural_key)
    versions = [each for each in there if _VERSION.fullmatch(each)]
    if not versions or version not in ("", *versions):
        what = f"no version {printable(version)}" if version else "no version"
        raise UserError(
            f"--dataset tfds/{name}: {what} in {printable(folder)}, which holds {', '.join(map(printable, there))}: "
            "give NAME[/CONFIG][:VERSION]"
        )
    return os.path.join(folder, version or versions[-1])


def _read_info(path: str) -> tuple[str, dict[str, list[int]]]:
    """How the files' names begin, and the number of records in each file of each split."""
    try:
        with open(path, encoding="utf-8") as file:
            info: Any = json.load(file)
        format_name = info.get("fileFormat", "tfrecord")
        lengths = {split["name"]: [int(count) for count in split["shardLengths"]] for split in info["splits"]}
        prefix = info["name"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{printable(path)} can't be read or is no description of a data set ({type(error).__name__}): prepare the "
            "data set again with tensorflow_datasets"
        ) from error
    if format_name != "tfrecord":
        raise UserError(
            f"{printable(path)}: the files are in the format {printable(str(format_name))}: prepare the data set with "
            "tfds.builder(NAME, file_format='tfrecord')"
        )
    if not isinstance(prefix, str) or "/" in prefix or any("/" in split for split in lengths):
        raise UserError(f"{printable(path)}: names of files elsewhere: prepare the data set again")
    return prefix, lengths


def _class_names(path: str) -> list[str] | None:
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()
