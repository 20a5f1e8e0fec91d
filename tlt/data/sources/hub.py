"""Data sets of Hugging Face's `datasets` (`--dataset hfds/NAME`), read by index out of its memory-mapped tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, BadImage, check_length, read_file
from tlt.data.sources.source import ImageSource, numbered_names
from tlt.errors import MissingSplit, UserError, require
from tlt.io.text import printable


@dataclass
class HubImages(ImageSource):
    """What `open_hub_dataset` found.

    Attributes:
        table: `datasets.Dataset` with the column of encoded images alone, in the format of Arrow.
    """

    table: Any = field(kw_only=True)

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        image = self.table[index].column(0)[0]
        if not image.is_valid:
            raise BadImage("no image in this row")
        data, path = image["bytes"].as_buffer(), image["path"].as_py()
        if not data and path:
            return read_file(path, max_pixels)
        check_length(len(data or b""), max_pixels)
        return bytearray(data)


def open_hub_dataset(name: str, data: str | None, split: str, _found: object) -> HubImages:
    """A data set with one column of images and one of classes.

    Args:
        name: As `datasets.load_dataset` takes it: of the hub, or a folder.
        data: Where `datasets` keeps its files; None: in its own cache.
        split: As `datasets` takes it, slices (`train[:10%]`) included.

    Raises:
        UserError: It can't be had, has no such split, or not the columns.
    """
    datasets = require("datasets", "hf")
    shown = f"--dataset hfds/{printable(name)}"
    try:
        table = datasets.load_dataset(name, split=split, cache_dir=data)
    # Whatever its builders, file systems and the hub raise.
    except Exception as error:
        reason = printable(str(error).strip().split("\n")[0])
        raise MissingSplit(f"{shown}, split {printable(split)}, can't be loaded: {reason}") from error
    image = _column(table.features, datasets.Image, "image", shown)
    label = _column(table.features, datasets.ClassLabel, "label", shown)
    own = list(table.features[label].names)
    classes = np.asarray(table.select_columns(label).with_format("numpy")[label][:], np.int64)
    # As Arrow's values, which are views of the mapped file: a length is known before anything is copied.
    table = table.select_columns(image).cast_column(image, datasets.Image(decode=False)).with_format("arrow")
    paths = numbered_names(own[number] for number in classes)
    return HubImages(f"{name}/{split}", paths, classes, own, own, table=table)


def _column(features: Any, kind: type, preferred: str, shown: str) -> str:
    """The column of a kind: the one that has the usual name, or the only one."""
    found = [column for column, feature in features.items() if isinstance(feature, kind)]
    if preferred in found or len(found) == 1:
        return preferred if preferred in found else found[0]
    problem = f"several columns of type {kind.__name__} ({', '.join(found)})" if found else f"no {kind.__name__} column"
    raise UserError(
        f"{shown} has {problem} among {', '.join(features)}: one of them must be named {preferred!r}, with cast_column "
        "and rename_column of `datasets`"
    )
