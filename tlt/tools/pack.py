"""Packs a tree of label files into an archive (`tlt pack`), and unpacks it again (`tlt unpack`)."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tlt.data.sources import open_images
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.files import os_errors_as
from tlt.io.jobs import Job, Progress, in_processes
from tlt.io.text import leads_out, natural_sorted, printable
from tlt.label_map import LabelMap
from tlt.labels.archive import LABELS, ArchiveReader
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import INFO_NAME, LabelInfo, agreement_text
from tlt.labels.rows import read_description
from tlt.labels.tree import find_labels, label_files_below, label_names, read_map, write_map

_COMPARED = 100  # rows of an interrupted command that are compared with the tree


def pack(
    tree: str,
    out: str,
    images: str | None = None,
    split: str | None = None,
    area: str | None = None,
    transposed: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Pack every label file of a tree; the arguments are the flags of `tlt pack`. Return lines that report the result.
    Raise UserError if there are no labels, a label is invalid, or `out` can't be written."""
    if split and not images:
        raise UserError(f"--split {split} has no effect without --images")
    if not os.path.isdir(tree):
        raise UserError(f"TREE {printable(tree)} does not exist or is not a folder")
    recorded = LabelInfo.read(os.path.join(tree, INFO_NAME))
    folder = open_images(images, split or "train", None, allow_root=True) if images else None
    labels, names, classes, notes = find_rows(tree, folder)
    num_classes = recorded.num_classes if recorded else None

    def read(row: int) -> LabelMap:
        label_map = read_map(os.path.join(tree, labels[row]), num_classes)
        if not transposed:
            return label_map
        return replace(label_map, values=label_map.values.swapaxes(1, 2), ids=label_map.ids.swapaxes(1, 2))

    k, h, w = read(0).shape
    info = replace(recorded or LabelInfo(k, (h, w)), k=k, grid=(h, w), log_sum_exp=False, skipped=[], max_id=None)
    made_by = {"--transposed": transposed}
    writer = ArchiveWriter(out, replace(info, area=area or info.area), names, overwrite, made_by=made_by)
    write_rows(writer, lambda _, row: read(row), None, 1, "another tree")
    compared = folder is not None and (recorded is None or recorded.class_names == folder.class_names)
    agreement = writer.finish(recorded.skipped if recorded else (), classes if compared else None)
    done = f"{len(names)} labels packed in {printable(out)}"
    return [*notes, done, *([agreement_text(agreement)] if compared else [])]


def write_rows(
    writer: ArchiveWriter, make: Callable[[Job, int], LabelMap], job: Job, workers: int, source: str
) -> None:
    """Write `make(job, row)` into every row that is not written yet, by `workers` processes. Raise UserError if the
    archive is complete, or some of the rows that are written come from another source."""
    out = printable(str(writer.root))
    if writer.complete:
        raise UserError(f"OUT {out} is a complete label archive: choose another folder, or --overwrite")
    pending = writer.pending()
    written = sorted({*range(len(writer.names))}.difference(pending))
    sample = written[:: max(1, len(written) // _COMPARED)]
    for label_map, row in zip(in_processes(make, job, sample, 1, "comparing"), sample, strict=True):
        if not writer.holds(row, label_map):
            raise UserError(f"OUT {out} holds labels of {source}: choose another OUT, or --overwrite")
    for label_map, row in zip(in_processes(make, job, pending, workers, "packing", "label"), pending, strict=True):
        writer.write(row, label_map)


def find_rows(tree: str, folder: ImageSource | None) -> tuple[list[str], list[str], np.ndarray, list[str]]:
    """Return the label files of a tree, first those of the images, in their order, then all others; image names, or
    label files of unknown images; classes, -1 if not known; and notes. Raise UserError if there are no labels, or one
    fits two images."""
    files = label_files_below(tree)
    if not files:
        raise UserError(f"TREE {printable(tree)} holds no label file (CLASS/IMAGE.pt)")
    paths, numbers = ([], np.empty(0, np.int64)) if folder is None else (folder.paths, folder.classes)
    label_files = list(find_labels(paths, files, tree))
    images = [row for row, label in enumerate(label_files) if label]
    if folder is not None and not images:
        raise UserError(
            f"no image in {printable(folder.root)} has a label in {printable(tree)}: is it another data set?"
        )
    extra = natural_sorted(files.difference(label_files))
    notes = [] if folder is None else missing_lines(folder, images, extra, "label", unused_too="; packed too")
    labels = [label_files[row] for row in images]
    names = [paths[row] for row in images]
    return labels + extra, names + extra, np.append(numbers[images], [-1] * len(extra)), notes


def missing_lines(
    images: ImageSource, rows: Sequence[int], unused: Sequence[str], one: str, remedy: str = "", unused_too: str = ""
) -> list[str]:
    """Return a line about the images that are not among `rows`, those with a label or other `one`, and a line about
    those that belong to no image. Each ends with what becomes of them."""
    lines = []
    has = np.zeros(len(images), bool)
    has[rows] = True
    if not has.all():
        first = printable(images.paths[int(has.argmin())])
        lines.append(f"warning: {(~has).sum()} of {len(images)} images have no {one}, such as {first}{remedy}")
    if unused:
        lines.append(f"warning: {len(unused)} {one}s belong to no image, such as {printable(unused[0])}{unused_too}")
    return lines


def unpack(archive: str, out: str, overwrite: bool = False) -> list[str]:
    """Write the labels of an archive as a tree of label files. Return lines that report the result. `labels.json` is
    written first. An image without a label gets no file. Raise UserError if the archive is incomplete or damaged, or
    `out` can't be written or holds something other than a tree from such a command."""
    root = Path(out)
    info, names = read_description(archive, LABELS)
    if info.shares:
        raise UserError(
            f"{printable(archive)} holds shares of classes, a tree of label files only logits: keep it packed"
        )
    reader = ArchiveReader(archive, names)
    # The label file of the image, or the one whose name the row has.
    labels = [name if name.endswith(".pt") else usual for name, usual in zip(names, label_names(names), strict=True)]
    if (outside := next(filter(leads_out, labels), None)) is not None:
        raise UserError(f"the archive names {printable(outside)}, outside of its tree: it is not unpacked")
    with os_errors_as(lambda e: f"OUT {printable(str(e.filename or out))} can't be written ({e.strerror})"):
        root.mkdir(parents=True, exist_ok=True)
        if any(not path.name.startswith(".") for path in root.iterdir()):
            if not overwrite:
                raise UserError(f"OUT {printable(out)} is not empty: choose another folder, or --overwrite")
            if LabelInfo.read(root / INFO_NAME) is None:
                raise UserError(f"OUT {printable(out)} holds other things than a label tree: choose another folder")
            for old in label_files_below(out).difference(labels):  # those of another archive
                if leads_out(os.path.relpath((root / old).parent.resolve(), root.resolve())):
                    raise UserError(f"OUT {printable(out)} holds a link to a folder elsewhere: choose another folder")
                (root / old).unlink()
        replace(info, log_sum_exp=False).write(root / INFO_NAME)
        progress = Progress("unpacking", len(labels), "label")
        for row, label in enumerate(labels):
            if row not in reader.missing:
                label_map = reader.read(row).validate(info.num_classes)
                (root / label).parent.mkdir(parents=True, exist_ok=True)
                write_map(root / label, label_map, info.num_classes or (info.max_id or 0) + 1)
            progress.step()
        progress.close()
    absent = f", {len(reader.missing)} images without label" if reader.missing else ""
    return [f"{len(names) - len(reader.missing)} label files in {printable(out)}{absent}"]
