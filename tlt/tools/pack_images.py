"""An image folder, or any other source of images, into tar shards that any reader of WebDataset's reads.

OUT/SPLIT/00000.tar ...   images in the folder's order: KEY.jpg (bytes unchanged), KEY.cls, KEY.labels.safetensors
OUT/SPLIT/shards.json     and .npy, .names: the table of the images (`tlt.data.sources.records`); written last
OUT/SPLIT/labels.json     and .npy, .names: the table of the label maps, where there are some
OUT/SPLIT/packing.json    what is being packed, until the tables are there

A shard that has its name is whole, and the table of the images makes a split whole. The same command goes on where a
killed one was; what it then finds is read again, every byte of it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load

from tlt.data.sources.folder import TRAIN_SPLITS, VALIDATION_SPLITS
from tlt.data.sources.image_file import (
    DEFAULT_MAX_PIXELS,
    BadImage,
    as_rgb,
    check_pixel_limit,
    image_extensions,
    image_formats,
    pillow_errors,
)
from tlt.data.sources.open_images import open_images
from tlt.data.sources.records import Contents, FileRecords, RecordTable, write_table
from tlt.data.sources.source import ImageSource
from tlt.data.sources.tar_shards import LABEL_EXTENSION, LABELS, PARTIAL_NAME, TABLE, scan_labels, scan_tar
from tlt.errors import UserError
from tlt.io.files import locked, read_at, sync_folder, write_whole
from tlt.io.names import leads_out
from tlt.io.processes import in_processes
from tlt.io.text import printable
from tlt.labels.shards import described, label_bytes
from tlt.labels.store import LabelStore, open_labels

# A shard, a file of a table, or the plan.
_OURS = re.compile(r"\d{5,}\.tar|(shards|labels)\.(npy|names|json)|packing\.json")
_JPEG_SUFFIXES = {"jpeg", "jpe", "jfif"}  # other readers look for jpg
_JPEG_QUALITY = 90
_MOST_PIXELS = 10 * DEFAULT_MAX_PIXELS  # of an image that is made smaller: 1.5 GB of memory
_SAMPLED = 256  # images whose bytes say how many make a shard


def pack_images(
    data: str,
    out: str,
    splits: Sequence[str] = (),
    labels: str | None = None,
    shard_mb: int = 512,
    workers: int = 1,
    overwrite: bool = False,
    max_side: int | None = None,
    dataset: str = "",
) -> list[str]:
    """Pack the images of a data set into shards; return lines that say what was done.

    Args:
        splits: What is packed, the training set first: its classes number the others. (): train and, where it is there,
            validation.
        labels: Label maps of the first split's images.
        shard_mb: About so many megabytes make a shard.
        overwrite: Begin anew: the shards that are there are removed, and nothing else.
        max_side: Pixels; larger images are made smaller (`made_smaller`).
        dataset: Kind of data set (`--dataset`).

    Raises:
        UserError: No images, an image or label that can't be read, or `out` can't be written or holds something else.
    """
    lines: list[str] = []
    class_names: list[str] | None = None
    for split in splits or _splits_of(data):
        source = open_images(data, split, dataset, class_names)
        first = class_names is None
        store = open_labels(labels, source.paths, None, None, "skip", source.class_names) if labels and first else None
        class_names = source.class_names
        packing = Packing(os.path.join(out, split), source, store, shard_mb, max_side)
        lines += [*(f"warning: {warning}" for warning in source.warnings), *packing.run(workers, overwrite)]
    return lines


def _splits_of(data: str) -> list[str]:
    both = ("train", TRAIN_SPLITS), ("validation", VALIDATION_SPLITS)
    there = [split for split, names in both if any(os.path.isdir(os.path.join(data, name)) for name in names)]
    return there or ["train"]  # which is then missing


class Packing:
    """Writes the shards of one split into `folder`; `shard_mb` and `max_side` are those of `pack_images`."""

    def __init__(
        self, folder: str, source: ImageSource, labels: LabelStore | None, shard_mb: int, max_side: int | None
    ) -> None:
        self.folder, self.source, self.labels, self.max_side = folder, source, labels, max_side
        self.shard_mb, self.shown = shard_mb, f"OUT {printable(folder)}"
        if (outside := next(filter(leads_out, source.paths), None)) is not None:
            raise UserError(
                f"{printable(outside)}, an image of {printable(source.root)}, is named outside of it: rename it"
            )
        self.names = member_names(source.paths)  # the member of each image
        self._without_label = frozenset(labels.missing() if labels else ())
        self.settings = self._settings()

    def has_label(self, row: int) -> bool:
        """Whether there is a label map for an image."""
        return self.labels is not None and row not in self._without_label

    def run(self, workers: int, overwrite: bool) -> list[str]:
        """Write the shards that are missing, and the tables. Returns lines that say what was done."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            with locked(self.folder, f"{self.shown}: another command is packing into it; wait until it ends"):
                if not overwrite and self._begun() == {"settings": self.settings}:
                    RecordTable(os.path.join(self.folder, TABLE)).check_files()
                    return [f"{len(self.source)} images are packed in {printable(self.folder)} already"]
                per_shard, total = self._begin(overwrite), len(self.source)
                images = [range(start, min(start + per_shard, total)) for start in range(0, total, per_shard)]
                made = in_processes(make_shard, self, [*enumerate(images)], workers, "packing", "shard")
                return self._finish(*zip(*made, strict=True))
        except OSError as error:
            where = printable(str(error.filename or self.folder))
            raise UserError(
                f"OUT {where} can't be written ({error.strerror}): mend that and run the same command again"
            ) from error

    def _settings(self) -> list[Any]:
        """What must be equal for a command to continue what another one began."""
        names = hashlib.sha256("\0".join(self.source.class_names).encode(errors="surrogateescape"))
        for path, number in zip(self.source.paths, self.source.classes.tolist(), strict=True):
            names.update(f"\n{path}\0{number}".encode(errors="surrogateescape"))
        labels = self.labels
        digest = hashlib.sha256(repr((labels.shape, labels.area)).encode() + labels.identity()) if labels else None
        return [names.hexdigest(), digest.hexdigest() if digest else None, self.shard_mb, self.max_side]

    def _begun(self) -> dict[str, Any] | None:
        """What this program has packed here or begun to pack; None: nothing."""
        table, plan = os.path.join(self.folder, TABLE), Path(self.folder, PARTIAL_NAME)
        if not plan.exists() and not os.path.exists(f"{table}.json"):
            return None
        try:
            found = json.loads(plan.read_text()) if plan.exists() else RecordTable(table).description["about"]
            return {"settings": found["settings"]} | ({"per_shard": int(found["per_shard"])} if plan.exists() else {})
        except (ValueError, KeyError, TypeError) as error:
            name = plan.name if plan.exists() else f"{TABLE}.json"
            raise UserError(f"{self.shown} holds other things ({name}): choose another folder") from error

    def _begin(self, overwrite: bool) -> int:
        """Plan how many images make a shard; the plan is saved, or compared with the one that another command saved."""
        begun, names = self._begun(), os.listdir(self.folder)
        ours = [name for name in names if begun and _OURS.fullmatch(name.removeprefix(".").removesuffix(".tmp"))]
        other = sorted({*names} - {*ours})
        if other:
            raise UserError(f"{self.shown} holds other things ({printable(other[0])}): choose another folder")
        if begun is not None and not overwrite and begun["settings"] != self.settings:
            raise UserError(
                f"{self.shown} holds shards of other images or labels, or packed in another way: choose another "
                "folder, or --overwrite"
            )
        if begun is None or overwrite:
            begun = {"settings": self.settings, "per_shard": self._images_per_shard()}
            for name in {*names} - {PARTIAL_NAME, f"{TABLE}.json"}:  # these last: they say whose the others are
                Path(self.folder, name).unlink()
            write_whole(Path(self.folder, PARTIAL_NAME), json.dumps(begun).encode())
            Path(self.folder, f"{TABLE}.json").unlink(missing_ok=True)
            sync_folder(self.folder)
        return int(begun["per_shard"])

    def _images_per_shard(self) -> int:
        rows = np.unique(np.linspace(0, len(self.source) - 1, _SAMPLED).astype(np.int64)).tolist()
        image = sum(len(read_image(self.source, row)) for row in rows) / len(rows)
        label = 4 * int(np.prod(self.labels.shape)) + tarfile.BLOCKSIZE if self.labels else 0
        return max(1, int(self.shard_mb * 1e6 / (image + label + 3 * tarfile.BLOCKSIZE)))

    def _finish(self, shards: Sequence[FileRecords], maps: Sequence[FileRecords], max_ids: Sequence[int]) -> list[str]:
        source, labels = self.source, self.labels
        if labels is not None:
            about = described(replace(labels.info, max_id=max(max_ids), area=labels.area), labels.identity())
            rows = [row for row in range(len(source)) if self.has_label(row)]
            names, classes = [source.paths[row] for row in rows], source.classes[rows]
            own = Contents(names, classes, source.class_names, about=about)
            write_table(os.path.join(self.folder, LABELS), maps, own)
        contents = Contents(
            source.paths,
            source.classes,
            source.class_names,
            folder_names=source.folder_names,
            about={"settings": self.settings},
        )
        write_table(os.path.join(self.folder, TABLE), shards, contents)
        Path(self.folder, PARTIAL_NAME).unlink()
        size = sum(shard.length for shard in shards)
        return [
            f"{printable(self.folder)}: {len(source)} images in {len(shards)} shards, {size} bytes, every one of them "
            "read back and compared"
        ]


def member_names(names: Sequence[str]) -> list[str]:
    """The tar member of each image, `CLASS/STEM.jpg`. Other readers cut file names at the first dot, so a stem has
    none, and no two images share one: dots and percent signs are written as in addresses (`%2E`)."""
    stems = [os.path.splitext(name)[0] for name in names]
    shared = {stem for stem, count in Counter(stems).items() if count > 1}
    return [_member_name(name, stem, stem in shared) for name, stem in zip(names, stems, strict=True)]


def _member_name(name: str, stem: str, shared: bool) -> str:
    suffix = name[len(stem) + 1 :]
    folder, base = os.path.split(stem)
    key = base.replace("%", "%25").replace(".", "%2E") + (f"%_{suffix}" if shared else "")
    extension = suffix.lower()
    if extension in _JPEG_SUFFIXES or f".{extension}" not in image_extensions():
        extension = "jpg"
    return f"{os.path.join(folder, key)}.{extension}"


def make_shard(packing: Packing, shard: tuple[int, range]) -> tuple[FileRecords, FileRecords, int]:
    """Write a shard, a number and its images, unless it exists, and read it. Returns where its images and its label
    maps are, and the largest class id of these (-1: no maps). A shard is a function of images and labels alone, not of
    who wrote it when.

    Raises:
        UserError: An image or label can't be read; or what is there is something else, or other than it was written.
        OSError: It can't be written.
    """
    number, images = shard
    path = os.path.join(packing.folder, f"{number:05d}.tar")
    if not os.path.exists(path):
        temporary = os.path.join(packing.folder, f".{number:05d}.tar.tmp")
        try:
            written = _write(packing, images, temporary)
            if _crc32(temporary) != written:
                raise UserError(f"OUT {printable(path)} reads other than it was written: is the disk damaged?")
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        sync_folder(packing.folder)
    found, maps = scan_tar(path), scan_labels(path)
    names = [packing.names[row] for row in images]
    labelled = [packing.names[row] for row in images if packing.has_label(row)]
    try:
        if found.names != names or maps.names != [f"{name.rpartition('.')[0]}.{LABEL_EXTENSION}" for name in labelled]:
            raise ValueError("other names")
        return found, maps, _largest_id(maps)
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"OUT {printable(path)} holds other images or labels: remove it, and run the same command again"
        ) from error


def _write(packing: Packing, images: range, path: str) -> int:
    """Write the file of a shard. Returns its crc32."""
    crc32 = 0
    with open(path, "wb") as file:
        for row in images:
            for name, data in _members(packing, row):
                block = _tar_header(name, len(data)) + data + bytes(-len(data) % tarfile.BLOCKSIZE)
                crc32 = zlib.crc32(block, crc32)
                file.write(block)
        end = bytes(2 * tarfile.BLOCKSIZE)
        file.write(end)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that it is read back from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return zlib.crc32(end, crc32)


def _crc32(path: str) -> int:
    crc32 = 0
    with open(path, "rb") as file:
        while block := file.read(2**22):
            crc32 = zlib.crc32(block, crc32)
    return crc32


def _tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _members(packing: Packing, row: int) -> list[tuple[str, bytes | bytearray]]:
    """Name and bytes of the files that are stored for an image."""
    image: bytes | bytearray = read_image(packing.source, row)
    if packing.max_side is not None:
        image, _ = made_smaller(image, packing.max_side)
    name, number = packing.names[row], int(packing.source.classes[row])
    key = name.rpartition(".")[0]
    members: list[tuple[str, bytes | bytearray]] = [(name, image), (f"{key}.cls", str(number).encode())]
    if packing.labels is not None and packing.has_label(row):
        members.append((f"{key}.{LABEL_EXTENSION}", label_of(packing.labels, row)))
    return members


def read_image(source: ImageSource, row: int) -> bytearray:
    """The encoded image; empty bytes for an empty file.

    Raises:
        UserError: It is unreadable, perhaps only for now.
    """
    try:
        return source.read(row)
    except BadImage as error:
        if str(error) == "empty file":
            return bytearray()
        raise UserError(f"{printable(source.path(row))} can't be read ({error}): mend or remove it") from error


def made_smaller(image: bytes | bytearray, max_side: int) -> tuple[bytes | bytearray, tuple[int, int] | None]:
    """A JPEG with the longer side `max_side` and its (width, height); the image itself and None where it is no larger
    or can't be decoded. A label map stays valid for it: maps cover shares of an image."""
    try:
        with pillow_errors(_MOST_PIXELS), Image.open(io.BytesIO(image), formats=image_formats()) as opened:
            width, height = check_pixel_limit(opened.width, opened.height, _MOST_PIXELS)
            if max(width, height) <= max_side:
                return image, None
            opened.draft(None, (2 * max_side, 2 * max_side))  # libjpeg scales by 1/2, 1/4 or 1/8 while it decodes
            scale = max_side / max(width, height)
            size = max(1, round(width * scale)), max(1, round(height * scale))
            small, encoded = as_rgb(opened).resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0), io.BytesIO()
            small.save(encoded, "JPEG", quality=_JPEG_QUALITY, optimize=True)
            return encoded.getvalue(), small.size
    except BadImage:
        return image, None


def _largest_id(maps: FileRecords) -> int:
    largest = -1
    with open(maps.path, "rb") as file:
        for row in maps.rows:
            ids = load(read_at(file.fileno(), int(row["length"]), int(row["offset"])))["ids"]
            largest = max(largest, int(ids.max()))
    return largest


def label_of(labels: LabelStore, index: int) -> bytes:
    """The map of image `index` as it is written beside it.

    Raises:
        UserError: The map is damaged, or can't be trained on.
    """
    label_map = labels.reader.read(index).validate(labels.num_classes)
    if label_map.shape != labels.shape:
        raise UserError(f"{label_map.source}: shape (k, h, w) = {label_map.shape}, but the others' is {labels.shape}")
    return label_bytes(label_map)
