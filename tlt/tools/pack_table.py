"""Makes a label archive from a table of the classes in each image (`tlt pack-table`), as MultiLabel-ImageNet has one:
lines of image, class, class ids and their probabilities, without a heading, or a parquet file with these columns."""

import csv
from collections.abc import Iterable
from typing import Any

import numpy as np

from tlt.data.sources import open_images
from tlt.errors import UserError, require
from tlt.io.files import blamed_on, regular_only
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo, agreement_text
from tlt.tools.masks import partners
from tlt.tools.pack import missing_lines, write_rows

Row = tuple[str, np.ndarray, np.ndarray]  # image, class ids, probabilities


def pack_table(
    table: str,
    out: str,
    images: str,
    split: str | None = None,
    top_k: int | None = None,
    dataset: str = "",
    overwrite: bool = False,
) -> list[str]:
    """Pack a table; the arguments are the flags of `tlt pack-table`. Return lines that report the result. Raise
    UserError if a row is unusable, no image has one, or `out` can't be written."""
    with blamed_on(table, "is no table of images, classes, ids and probabilities", "see docs/token_labels.md"):
        if not (rows := [*read_rows(table)]):
            raise ValueError("it is empty")
    source = open_images(images, split or "train", dataset, allow_root=True)
    names = [name for name, _, _ in rows]
    found = partners(source.paths, names)
    packed = [row for row, number in enumerate(found) if number >= 0]
    if not packed:
        raise UserError(f"no image in {printable(source.root)} is in {printable(table)}, such as {printable(names[0])}")
    k = min(top_k or len(source.class_names), max(1, *(len(rows[found[row]][1]) for row in packed)))

    def make(_: None, number: int) -> LabelMap:
        name, ids, probabilities = rows[found[packed[number]]]
        order = np.argsort(-probabilities, kind="stable")[:k]
        values = np.zeros((k, 1, 1), np.float32)
        kept = np.zeros((k, 1, 1), np.int32)
        values[: len(order), 0, 0] = probabilities[order] / max(1, probabilities.sum())
        kept[: len(order), 0, 0] = np.where(values[: len(order), 0, 0] > 0, ids[order], 0)
        void = np.full((1, 1), float(not values.any()), np.float32)
        return LabelMap(values, kept, source=f"{printable(name)} of {printable(table)}", void=void)

    class_names = source.class_names
    info = LabelInfo(k, (1, 1), len(class_names), class_names=class_names, shares=True)
    writer = ArchiveWriter(out, info, [source.paths[row] for row in packed], overwrite)
    write_rows(writer, make, None, 1, "another table")
    unused = [names[number] for number in sorted({*range(len(rows))}.difference(found))]
    notes = missing_lines(source, packed, unused, "row", ": give volo train --bad-label skip")
    done = f"{len(packed)} labels packed in {printable(out)}"
    return [*notes, done, agreement_text(writer.finish((), source.classes[packed]))]


def read_rows(path: str) -> Iterable[Row]:
    """Yield the rows of a table. Raise an error of any type if it is none."""
    if path.lower().endswith(".parquet"):
        columns = require("pyarrow.parquet", "parquet").read_table(path).columns
        lines: list[Any] = list(zip(*(column.to_pylist() for column in columns), strict=True))
    else:
        with open(path, encoding="utf-8-sig", newline="", opener=regular_only) as file:
            lines = [line for line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if line]
    for number, (name, _, ids, probabilities) in enumerate(lines):
        if number == 0 and isinstance(ids, str) and any(map(str.isalpha, ids)):
            continue  # the heading
        row = name, _numbers(ids).astype(np.int64), _numbers(probabilities)
        if len(row[1]) != len(row[2]) or ((row[2] < 0) | (row[2] > 1)).any() or len({*row[1].tolist()}) < len(row[1]):
            raise UserError(f"row {number + 1}: not one probability in 0..1 for each class id")
        yield row


def _numbers(cell: object) -> np.ndarray:
    """Return the numbers in a cell of the table."""
    return np.array([*filter(None, cell.strip("[]").split(","))] if isinstance(cell, str) else cell, np.float64)
