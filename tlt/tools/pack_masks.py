"""Makes a label archive from masks (`tlt pack-masks`): in each cell, the share of every class among the pixels.

Images lie in class folders, and then the numbers in the masks are those of these classes. With a list of classes
(`--classes`, or the categories of COCO) that are not the folders', images may lie anywhere below DATA. Then
OUT/classes.csv is written, a table for `--dataset csv/FILE`, in which the class of an image is the one with the largest
share of its mask's cells.
"""

import csv
import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from tlt.data.sources import open_images
from tlt.data.sources.folder import scan_folder, split_names
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError, size_of
from tlt.io.files import blamed_on, read_bytes, write_csv
from tlt.io.jobs import START_METHOD
from tlt.io.text import natural_sorted, printable, some_names
from tlt.label_map import LabelMap
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo, agreement_text
from tlt.tools.coco import CocoMasks, is_coco, read_categories
from tlt.tools.masks import MaskFiles, Masks, Numbers, image_size
from tlt.tools.pack import missing_lines, write_rows

_TABLE = "classes.csv"
_PIXELS = 16  # of a cell's side, by default
_SAMPLED = 1000  # images whose size decides the default grid
_IGNORED = 255  # by default, in PNG files


class MaskArchiveWriter(ArchiveWriter):
    """Writes an archive of masks."""

    other_files = (_TABLE,)


def pack_masks(
    masks: Sequence[str],
    out: str,
    images: str,
    split: str | None = None,
    grid: Sequence[int] | None = None,
    top_k: int = 5,
    ignore: Sequence[int] | None = None,
    classes: str | None = None,
    merge: str | None = None,
    endings: Sequence[str] = ("", ""),
    dataset: str = "",
    workers: int = 1,
    overwrite: bool = False,
) -> list[str]:
    """Pack the masks of a data set; the arguments are the flags of `tlt pack-masks`. Return lines that report the
    result. Raise UserError if there are no images or masks, a mask is unusable, or `out` can't be written."""
    coco = is_coco(masks)
    names = read_table(classes) if classes else read_categories(masks) if coco else None
    merged = read_table(merge) if merge else {}
    void = {*ignore} if ignore is not None else set() if coco else {_IGNORED}
    source = class_folders(images, split, dataset, names)
    names = names or dict(enumerate(source.class_names if source else ()))
    named = named_numbers(names, merged, void)
    void |= {number for number, target in merged.items() if target in map(str, void)}
    flat = source is None or not {*named.values()} <= {*source.class_names}
    if source is None or flat:
        source = flat_images(images, split, dataset, named, masks[0])
    class_names = natural_sorted({*named.values()}) if flat else source.class_names
    ids = {number: class_names.index(name) for number, name in sorted(named.items())}
    read = open_masks(masks, source, Numbers(ids, sorted(void), (endings[0], endings[1])))
    remedy = f": not in {_TABLE}" if flat else ": give volo train --bad-label skip"
    notes = missing_lines(source, read.rows, read.unused, "mask", remedy)
    if ignore is None and not coco and _IGNORED in names:
        name = printable(names[_IGNORED])
        notes.append(f"warning: number {_IGNORED} (class {name}) counts as void: give --ignore without a number if not")
    cells = size_of("--grid", grid) if grid else default_grid(read)
    k = min(top_k, len(class_names))
    about = {**asdict(read.numbers), "ids": {str(number): i for number, i in ids.items()}}
    info = LabelInfo(k, cells, len(class_names), annotator=about, class_names=class_names, shares=True)
    writer = MaskArchiveWriter(out, info, [source.paths[row] for row in read.rows], overwrite)
    # Where processes are not forked, they can't share the open file of COCO's masks.
    write_rows(writer, _label, (read, cells, k), workers if START_METHOD == "fork" else 1, "other masks")
    done = f"{len(read.rows)} masks packed in {printable(out)}: {cells[0]} x {cells[1]} cells"
    if not flat:
        return [*notes, done, agreement_text(writer.finish((), source.classes[read.rows]))]
    if left_out := write_classes(writer, class_names):
        notes.append(f"warning: {left_out} masks are void alone: not in {_TABLE}")
    writer.finish()
    table = os.path.abspath(os.path.join(out, _TABLE))
    command = f"volo train --token-label --token-label-data {out} --dataset csv/{table} {images}"
    return [*notes, f"{done}, {len(class_names)} classes", printable(command)]


def _label(job: tuple[Masks, tuple[int, int], int], row: int) -> LabelMap:
    """Return the label map of a row of the archive."""
    masks, grid, k = job
    return masks.label(masks.rows[row], grid, k)


def read_table(path: str) -> dict[int, str]:
    """Return the text of each number in a file: of JSON a list of objects with id and name, or one object; else lines
    with the number in the first column, separated by tabs or commas. A first line without a number names the columns,
    of which `name` is used; without one it is the second. Numbers of one name are one class. Raise UserError if it is
    something else."""
    with blamed_on(path, "is no table of numbers and names", 'write lines such as "7,road"'):
        text = read_bytes(path).decode("utf-8-sig")
        if path.lower().endswith(".json"):
            content = json.loads(text)
            pairs = [(item["id"], item["name"]) for item in content] if isinstance(content, list) else content.items()
        else:
            tabs = "\t" in text.partition("\n")[0]
            rows = [row for row in csv.reader(io.StringIO(text), delimiter="\t" if tabs else ",") if row]
            head = [cell.strip().lower() for cell in rows[0]]
            column = head.index("name") if "name" in head else 1
            pairs = [(row[0], row[column]) for row in rows[not head[0].isdecimal() :]]
        table = {int(number): str(name).strip() for number, name in pairs}
        if len(table) < len(pairs) or not table or "" in table.values() or min(table) < 0:
            raise ValueError("a number twice or negative, or no name")
        return table


def class_folders(data: str, split: str | None, dataset: str, names: dict[int, str] | None) -> ImageSource | None:
    """Return images with classes; None if there are no class folders and `names` are given. Raise UserError."""
    try:
        return open_images(data, split or "train", dataset, allow_root=True)
    except UserError as error:
        if names and not dataset:
            return None
        hint = "" if dataset else "; if folders are not the classes, give --classes FILE (number, name)"
        raise UserError(f"{error}{hint}") from error


def named_numbers(names: dict[int, str], merged: dict[int, str], void: set[int]) -> dict[int, str]:
    """Return the class of each number that is not void, after `--map`. Raise UserError if that names no class."""
    named = dict[int, str]()
    for number in (names.keys() | merged.keys()) - void:
        target = merged.get(number, str(number))
        if target.isdecimal() and int(target) not in names.keys() | void:
            raise UserError(f"--map: number {number} becomes {target}, which is none of the {len(names)} classes")
        if target not in map(str, void):
            named[number] = names[int(target)] if target.isdecimal() else target
    return named


def flat_images(data: str, split: str | None, dataset: str, named: dict[int, str], masks: str) -> ImageSource:
    """Return all images below a folder, or below those of a split in it. Raise UserError if there are none."""
    if dataset:
        raise UserError(f"--dataset {dataset} has other classes than the masks: {some_names([*named.values()])}")
    images = scan_folder(data, classes=False)
    inside = os.path.relpath(masks, data).replace(os.sep, "/") + "/"  # masks below DATA are no images
    below = tuple(f"{name}/" for name in split_names(split)) if split else ""
    rows = [row for row, path in enumerate(images.paths) if path.startswith(below) and not path.startswith(inside)]
    if not rows:
        raise UserError(f"no images in {printable(data)}{f' below {below[0]}' if below else ''}")
    return images.select(rows)


def open_masks(paths: Sequence[str], images: ImageSource, numbers: Numbers) -> Masks:
    """Return the masks of images. Raise UserError if no image has one, or the files are unusable."""
    masks = CocoMasks(paths, images, numbers) if is_coco(paths) else MaskFiles(paths[0], images, numbers)
    if not masks.rows:
        raise UserError(
            f"no image in {printable(images.root)} has a mask in {printable(paths[0])}: images are named "
            f"{some_names(images.paths[:2])}, masks {some_names(masks.unused[:2])} (--suffix says how names differ)"
        )
    return masks


def default_grid(masks: Masks) -> tuple[int, int]:
    """Return rows and columns of cells of 16 pixels in an image of the usual size."""
    rows = masks.rows[:: -(-len(masks.rows) // _SAMPLED)]
    width, height = np.median([image_size(masks.images, row) for row in rows], axis=0)
    return max(1, int(-(-height // _PIXELS))), max(1, int(-(-width // _PIXELS)))


def write_classes(writer: ArchiveWriter, class_names: Sequence[str]) -> int:
    """Write the table of the images' classes. Return the number of masks that name none."""
    folders = [path.partition("/")[0] if "/" in path else "" for path in writer.names]
    splits = [match[0] if (match := re.match("train|val", folder)) else folder for folder in folders]
    has_splits = not {"train", "val"}.isdisjoint(splits)
    table = [("path", "class", "split")]
    for row, arrays in writer.written_rows():
        shares = arrays["values"] * (1 - arrays["void"])
        tally = np.bincount(arrays["ids"].ravel(), shares.ravel())
        if tally.any():
            table.append((writer.names[row], class_names[int(tally.argmax())], splits[row] if has_splits else "train"))
    absent = {*class_names}.difference(name for _, name, _ in table[1:])
    unnamed = len(writer.names) - len(table) + 1
    table += [("-", name, "none") for name in natural_sorted(absent)]  # every class keeps its number
    with writer.writing():
        write_csv(writer.root / _TABLE, table, quoting=csv.QUOTE_ALL, lineterminator="\n")
    return unnamed
