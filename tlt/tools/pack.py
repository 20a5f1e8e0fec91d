"""A published tree of label files into one archive (`tlt pack`), and back, bit for bit (`tlt unpack`)."""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from tlt.data.sources.image_file import BadImage
from tlt.data.sources.open_images import open_images
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.names import leads_out
from tlt.io.natural import natural_key
from tlt.io.progress import Progress
from tlt.io.text import printable
from tlt.label_map import Area, centre_square
from tlt.labels.agreement import Agreement
from tlt.labels.archive import Rows, read_manifest
from tlt.labels.archive_format import FILE_DTYPES, SHARD_RECORDS, UNKNOWN_AREA, Form
from tlt.labels.archive_writer import ArchiveWriter, make_header
from tlt.labels.label_files import find_labels, label_files_below, tree_listing
from tlt.labels.metadata import METADATA_NAME, TreeMetadata
from tlt.labels.tree import map_of, most_classes, read_tensor, refuse_other_files


@dataclass(frozen=True)
class Sources:
    """The contents of a tree, row by row: label file, image ("" where not known) and its row
    among the images (-1 where not known), its class (-1 where not known)."""

    labels: list[str]
    images: list[str]
    image_rows: list[int]
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
    shard_records: int = SHARD_RECORDS,
) -> list[str]:
    """Pack every label file of a tree, reading each one back from what was packed; return lines that say what was done.

    Args:
        images: The images, or a folder with them in `split`: gives sizes, image names, and how well labels agree.
        area: "full" or "center", what the maps cover; None: as `labels.json` says, else full.
        transposed: The maps are stored as (k, w, h); readers will turn them.
        overwrite: Begin anew.

    Raises:
        UserError: No labels, a label that can't be trained on or restored exactly, or `out` can't be written.
    """
    if not os.path.isdir(tree):
        raise UserError(f"TREE {printable(tree)} does not exist or is not a folder")
    path = os.path.join(tree, METADATA_NAME)
    metadata = TreeMetadata.read(path)
    text = None if metadata is None else Path(path).read_text()
    folder = open_images(images, split, allow_root=True) if images else None
    sources = find_sources(tree, folder)
    path = os.path.join(tree, sources.labels[0])
    tensor = read_tensor(path, f"label {printable(path)}")
    first = map_of(tensor, f"label {printable(path)}", metadata.num_classes if metadata else None)
    num_classes = metadata.num_classes if metadata else most_classes(tensor.dtype)
    covered = area or (metadata.area if metadata else "full")
    header = make_header(
        first.shape, num_classes, sources.images, sources.labels, covered, text, False, transposed, shard_records
    )
    writer = ArchiveWriter(out, header, sources.images, sources.labels, overwrite)
    pending = writer.pending()
    progress = Progress("packing", len(pending), "label")
    for row in pending:
        size = _image_size(folder, sources.image_rows[row])
        _pack_row(writer, tree, row, sources.labels[row], size, metadata.num_classes if metadata else None)
        progress.step()
    progress.close()
    tally = Agreement() if folder and (metadata is None or metadata.class_names == folder.class_names) else None
    manifest = writer.finish(tally=tally, classes=sources.classes)
    total = sum(length for length, _ in manifest.files.values())
    done = f"{header.records} labels packed in {out}: {len(manifest.files)} files, {total} bytes, every label compared"
    notes = [*sources.notes, done]
    return [*notes, tally.text()] if tally else notes


def find_sources(tree: str, folder: ImageSource | None) -> Sources:
    """The label files of a tree: those of the images in their order, then all others.

    Raises:
        UserError: None at all, or one of them fits two images.
    """
    files, other = label_files_below(tree)
    other = [name for name in other if name != METADATA_NAME]
    notes = [f"left out {len(other)} files that are no labels, such as {printable(other[0])}"] if other else []
    if not files:
        raise UserError(f"TREE {printable(tree)} holds no label file (CLASS/IMAGE.pt)")
    if folder is None:
        return Sources(files, [""] * len(files), [-1] * len(files), np.full(len(files), -1), notes)
    found = find_labels(tree_listing(tree), tree, folder.paths)
    rows = [row for row in range(len(folder)) if row not in found.missing]
    labels = [found.label(row, folder.paths[row]) for row in rows]
    extra = sorted(set(files).difference(labels), key=lambda name: (natural_key(name), name))
    if not rows:
        raise UserError(
            f"no image in {printable(folder.root)} has a label in {printable(tree)}: is it another data set?"
        )
    if found.missing:
        first = printable(folder.paths[min(found.missing)])
        notes.append(f"warning: {len(found.missing)} of {len(folder)} images have no label, such as {first}")
    if extra:
        notes.append(f"warning: {len(extra)} labels belong to no image, such as {printable(extra[0])}; packed too")
    images = [folder.paths[row] for row in rows] + [""] * len(extra)
    return Sources(
        labels + extra, images, rows + [-1] * len(extra), np.append(folder.classes[rows], [-1] * len(extra)), notes
    )


def _image_size(folder: ImageSource | None, image_row: int) -> tuple[int, int]:
    if folder is None or image_row < 0:
        return 0, 0
    try:
        return folder.size(image_row)
    except BadImage as error:
        raise UserError(
            f"{printable(folder.path(image_row))}: {error}; mend the image, or pack without --images"
        ) from error


def _pack_row(
    writer: ArchiveWriter, tree: str, row: int, label: str, size: tuple[int, int], num_classes: int | None
) -> None:
    path = os.path.join(tree, label)
    shown = f"label {printable(path)}"
    tensor = read_tensor(path, shown)
    label_map = map_of(tensor, shown, num_classes).validate(num_classes)
    form = _form(path, tensor, shown)
    writer.write(row, label_map, size, form, area=_area(writer.header.area, size))
    tensors, place = writer.rows.tensors(row)
    restored = restore(tensors["values"][place], tensors["ids"][place], form)
    if not _same_bits(restored, tensor):
        raise UserError(
            f"{shown} holds numbers that half precision logits and whole class ids can't: packing would change them; "
            "make it again with generate_label.py"
        )


def _area(area: str | Area, size: tuple[int, int]) -> Area | None:
    if not isinstance(area, str):
        return area
    if area == "full":
        return None
    return centre_square(*size) if all(size) else UNKNOWN_AREA


def _form(path: str, tensor: torch.Tensor, shown: str) -> int:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in FILE_DTYPES:
        raise UserError(f"{shown}: numbers of type {dtype} are none of {', '.join(FILE_DTYPES)}")
    form = FILE_DTYPES.index(dtype) | (Form.FIVE_DIMENSIONS if tensor.ndim == 5 else 0)
    if not zipfile.is_zipfile(path):
        return form  # torch's format before 1.6
    with zipfile.ZipFile(path) as file:
        saved_as = file.namelist()[0].split("/")[0]
    return form | {f".{os.path.basename(path)}": Form.TEMPORARY_NAME, "archive": Form.NO_NAME}.get(saved_as, 0)


def restore(values: np.ndarray, ids: np.ndarray, form: int) -> torch.Tensor:
    """The tensor of a label file from its row: values and ids (k, h, w) as stored."""
    dtype = getattr(torch, FILE_DTYPES[form & Form.DTYPE])
    both = [torch.from_numpy(values.copy()).to(dtype), torch.from_numpy(ids.astype(np.int64)).to(dtype)]
    tensor = torch.stack(both)
    return tensor[None] if form & Form.FIVE_DIMENSIONS else tensor


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def unpack(archive: str, out: str, overwrite: bool = False) -> list[str]:
    """Write the label files that an archive was packed from, `labels.json` last; return lines that say what was done.

    Raises:
        UserError: The archive is incomplete or damaged, or `out` is not empty or can't be written, or holds something
            else than label files where these are to be.
    """
    manifest = read_manifest(archive)
    header, root = manifest.header, Path(out)
    try:
        if root.exists() and not root.is_dir():
            raise UserError(f"OUT {printable(out)} is not a folder")
        if root.is_dir() and any(root.iterdir()) and not overwrite:
            raise UserError(f"OUT {printable(out)} is not empty: choose another folder, or --overwrite")
        rows = Rows(archive, header)
        labels = [_inside(label) for label in rows.all_names("label")]
        if TreeMetadata.read(root / METADATA_NAME) is None:
            refuse_other_files(root, labels)
        root.mkdir(parents=True, exist_ok=True)
        progress = Progress("unpacking", header.records, "label")
        with TemporaryDirectory(prefix=".saving-", dir=root) as saving:
            for row, label in enumerate(labels):
                _unpack_row(rows, row, root / label, Path(saving))
                progress.step()
        progress.close()
        if header.labels_json is not None:
            (root / METADATA_NAME).write_text(header.labels_json)
    except OSError as error:
        raise UserError(f"OUT {printable(str(error.filename or out))} can't be written ({error.strerror})") from error
    absent = f", {manifest.absent} rows without label" if manifest.absent else ""
    return [f"{header.records - manifest.absent} label files in {out}{absent}"]


def _unpack_row(rows: Rows, row: int, path: Path, saving: Path) -> None:
    tensors, place = rows.tensors(row)
    form = int(tensors["form"][place])
    if form == Form.ABSENT:
        return
    tensor = restore(tensors["values"][place], tensors["ids"][place], form)
    path.parent.mkdir(parents=True, exist_ok=True)
    # torch keeps in a file the name it was saved under: so a file is saved under its own name, in another folder.
    temporary = path.with_name(f".{path.name}.tmp") if form & Form.TEMPORARY_NAME else saving / path.name
    try:
        if form & Form.NO_NAME:
            torch.save(tensor, buffer := io.BytesIO())
            temporary.write_bytes(buffer.getvalue())
        else:
            torch.save(tensor, temporary)
        os.replace(temporary, path)
    except RuntimeError as error:  # torch.save hides a full disk in it
        raise UserError(f"OUT {printable(str(path))} can't be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def _inside(label: str) -> str:
    """The path of the label file, refused if it is outside of the folder it is unpacked into."""
    if leads_out(label):
        raise UserError(f"the archive names the label file {printable(label)}, outside of its tree: it is not unpacked")
    return label
