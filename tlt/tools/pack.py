"""A tree of label files, or an archive of version 1, into an archive (`tlt pack`); a tree out of it (`tlt unpack`)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tlt.data.sources.open_images import open_images
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.names import Names, leads_out
from tlt.io.natural import natural_key
from tlt.io.progress import Progress
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.agreement import agreement_text
from tlt.labels.archive import ArchiveReader, is_old_archive, read_meta, read_names
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_files import find_labels, label_files_below, label_names, tree_listing
from tlt.labels.label_info import INFO_NAME, LabelInfo
from tlt.labels.tree import read_map, read_tensor, write_map
from tlt.tools.old_archive import convert_old_archive


@dataclass(frozen=True)
class TreeRows:
    """The contents of a tree, row by row: label file, image (or label file, where the image is not known), and class
    (-1 where not known)."""

    labels: list[str]
    names: list[str]
    classes: np.ndarray
    notes: list[str]


def pack(
    tree: str,
    out: str,
    images: str | None = None,
    split: str = "train",
    area: str | None = None,
    transposed: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Pack every label file of a tree, or an archive of version 1; return lines that say what was done.

    Args:
        images: The images, or a folder with them in `split`: gives image names, and how well labels agree.
        area: "full" or "center", what the maps cover; None: as `labels.json` says, else full.
        transposed: The maps of the tree are stored as (k, w, h): they are turned.
        overwrite: Begin anew.

    Raises:
        UserError: No labels, a label that can't be trained on, or `out` can't be written.
    """
    if is_old_archive(tree):
        return convert_old_archive(tree, out, overwrite)
    if not os.path.isdir(tree):
        raise UserError(f"TREE {printable(tree)} does not exist or is not a folder")
    said = LabelInfo.read(os.path.join(tree, INFO_NAME))
    folder = open_images(images, split, allow_root=True) if images else None
    rows = find_rows(tree, folder)
    k, h, w = _read(tree, rows.labels[0], said, transposed).shape
    info = replace(said or LabelInfo(k, (h, w)), k=k, grid=(h, w), log_sum_exp=False, skipped=[], max_id=None)
    info = replace(info, area=area or info.area)
    writer = ArchiveWriter(out, info, rows.names, overwrite, large_ids=_large_ids(tree, rows.labels[0], said))
    if writer.complete:
        raise UserError(f"OUT {printable(out)} is a complete label archive: choose another folder, or --overwrite")
    pending = writer.pending()
    progress = Progress("packing", len(pending), "label")
    for row in pending:
        writer.write(row, _read(tree, rows.labels[row], said, transposed))
        progress.step()
    progress.close()
    compared = folder is not None and (said is None or said.class_names == folder.class_names)
    agreement = writer.agreement(rows.classes) if compared else {}
    writer.finish(said.skipped if said else (), agreement)
    done = f"{len(rows.names)} labels packed in {printable(out)}"
    return [*rows.notes, done, *([agreement_text(agreement)] if agreement else [])]


def find_rows(tree: str, folder: ImageSource | None) -> TreeRows:
    """The label files of a tree: those of the images in their order, then all others.

    Raises:
        UserError: None at all, or one of them fits two images.
    """
    files, other = label_files_below(tree)
    other = [name for name in other if name != INFO_NAME]
    notes = [f"left out {len(other)} files that are no labels, such as {printable(other[0])}"] if other else []
    if not files:
        raise UserError(f"TREE {printable(tree)} holds no label file (CLASS/IMAGE.pt)")
    if folder is None:
        return TreeRows(files, files, np.full(len(files), -1), notes)
    found = find_labels(tree_listing(tree), tree, folder.paths)
    images = [row for row in range(len(folder)) if row not in found.missing]
    labels = [found.label(row, folder.paths[row]) for row in images]
    extra = sorted(set(files).difference(labels), key=lambda name: (natural_key(name), name))
    if not images:
        raise UserError(
            f"no image in {printable(folder.root)} has a label in {printable(tree)}: is it another data set?"
        )
    if found.missing:
        first = printable(folder.paths[min(found.missing)])
        notes.append(f"warning: {len(found.missing)} of {len(folder)} images have no label, such as {first}")
    if extra:
        notes.append(f"warning: {len(extra)} labels belong to no image, such as {printable(extra[0])}; packed too")
    names, classes = [folder.paths[row] for row in images], folder.classes[images]
    return TreeRows(labels + extra, names + extra, np.append(classes, [-1] * len(extra)), notes)


def _read(tree: str, label: str, said: LabelInfo | None, transposed: bool) -> LabelMap:
    found = read_map(os.path.join(tree, label), said.num_classes if said else None)
    if not transposed:
        return found
    return replace(found, values=found.values.swapaxes(1, 2), ids=found.ids.swapaxes(1, 2))


def _large_ids(tree: str, label: str, said: LabelInfo | None) -> bool:
    """Whether class ids may be above 65,535: the tree says so, or is in a number format that can hold them."""
    if said is not None and said.num_classes:
        return said.num_classes > 2**16
    path = os.path.join(tree, label)
    return read_tensor(path, f"label {printable(path)}").dtype in (torch.float32, torch.float64)


def unpack(archive: str, out: str, overwrite: bool = False) -> list[str]:
    """Write the labels of an archive as a tree of label files; return lines that say what was done.

    `labels.json` is written first. A file of an image without a label is not written.

    Raises:
        UserError: The archive is incomplete or damaged, or `out` can't be written or holds something else than a tree
            that such a command has begun.
    """
    meta, root = read_meta(archive), Path(out)
    names = read_names(archive, meta)
    reader = ArchiveReader(archive, names)
    labels = tree_names(names)
    if (outside := next(filter(leads_out, labels), None)) is not None:
        raise UserError(f"the archive names {printable(outside)}, outside of its tree: it is not unpacked")
    try:
        if root.exists() and not root.is_dir():
            raise UserError(f"OUT {printable(out)} is not a folder")
        if root.is_dir() and any(not path.name.startswith(".") for path in root.iterdir()):
            if not overwrite:
                raise UserError(f"OUT {printable(out)} is not empty: choose another folder, or --overwrite")
            if LabelInfo.read(root / INFO_NAME) is None:
                raise UserError(f"OUT {printable(out)} holds other things than a label tree: choose another folder")
        root.mkdir(parents=True, exist_ok=True)
        replace(meta.info, log_sum_exp=False).write(root / INFO_NAME)
        _write_files(reader, labels, root)
    except OSError as error:
        raise UserError(f"OUT {printable(str(error.filename or out))} can't be written ({error.strerror})") from error
    except RuntimeError as error:  # torch.save hides a full disk in it
        raise UserError(f"OUT {printable(out)} can't be written ({error})") from error
    absent = f", {len(reader.missing)} images without label" if reader.missing else ""
    return [f"{meta.records - len(reader.missing)} label files in {printable(out)}{absent}"]


def _write_files(reader: ArchiveReader, labels: list[str], root: Path) -> None:
    info = reader.info
    num_classes = info.num_classes or (info.max_id or 0) + 1
    progress = Progress("unpacking", len(labels), "label")
    for row, label in enumerate(labels):
        if row not in reader.missing:
            label_map = reader.read(row).validate(info.num_classes)
            (root / label).parent.mkdir(parents=True, exist_ok=True)
            write_map(root / label, label_map, num_classes)
        progress.step()
    progress.close()


def tree_names(names: Names) -> list[str]:
    """The label file of each row of an archive, in a tree: of its image, or the one that the row is called after."""
    made = label_names(names)
    return [name if name.endswith(".pt") else label for name, label in zip(names, made, strict=True)]
