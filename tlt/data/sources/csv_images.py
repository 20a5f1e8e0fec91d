"""Images that a table lists (`--dataset csv/FILE`): a column `path`, a column `class`, and perhaps one `split`."""

from __future__ import annotations

import csv
import os

import numpy as np

from tlt.data.sources.folder import ImageFolder, split_names
from tlt.errors import MissingSplit, UserError
from tlt.io.names import Names
from tlt.io.text import leads_out, natural_sorted, printable, some_names


def open_csv(name: str, data: str, split: str, _found: object) -> ImageFolder:
    """The images of a table, in its order.

    Args:
        name: The file, from `data` on or absolute. The first line names the columns; `path` is that of a
            file below `data`, and counts from there.
        data: Folder of the data set.
        split: Which rows, where there is a column `split`: those with this name or one of its synonyms.

    Raises:
        UserError: The file can't be read, has other columns or a row of other fields, names an image twice, one that is
            not there, or one elsewhere.
        MissingSplit: No row is of the split, or the table doesn't tell the validation images from the others.
    """
    file, searched = os.path.join(data, name), split_names(split)
    rows, shown = _rows(file), printable(file)
    mine = [row for row in rows if row.get("split", "train") in searched]
    if not mine:
        there = some_names(sorted({row["split"] for row in rows if "split" in row}))
        raise MissingSplit(f"{shown} has no row whose column 'split' says {split}: it has {there}")
    paths = [row["path"] for row in mine]
    gone = [path for path in paths if not os.path.isfile(os.path.join(data, path))]
    if gone or len(set(paths)) < len(paths):
        what = f"{len(gone)} images that are not there ({some_names(gone)})" if gone else "an image more than once"
        raise UserError(f"{shown} names {what}: paths count from {printable(data)}")
    own = natural_sorted({row["class"] for row in rows})
    number = {name: row for row, name in enumerate(own)}
    return ImageFolder(data, Names(paths), np.array([number[row["class"]] for row in mine]), own, own)


def _rows(file: str) -> list[dict[str, str]]:
    """The rows, with their paths in the usual form (`a.jpg` for `./a.jpg`)."""
    shown, rows = printable(file), list[dict[str, str]]()
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines)
            if not {"path", "class"} <= {*(reader.fieldnames or ())}:
                raise UserError(f"{shown} is no table, with commas, of columns 'path' and 'class' in its first line")
            for row in reader:
                where = f"{shown}, line {reader.line_num}"
                if any(row.get(None, ())) or None in row.values() or "" in (row["path"], row["class"]):
                    raise UserError(
                        f"{where}: a row needs a path and a class, and a field for each column and no more; write "
                        '"a, b" for a name with a comma'
                    )
                row["path"] = os.path.normpath(row["path"])
                if leads_out(row["path"]):
                    raise UserError(f"{where}: {printable(row['path'])} is not below DATA: paths count from there")
                rows.append(row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--dataset csv: {shown} can't be read as a table: {error}") from error
    return rows
