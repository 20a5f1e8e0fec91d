"""Packs an image folder, or any other source of images, into tar shards in WebDataset's format.

OUT/SPLIT/00000.tar ...   images in the folder's order: KEY.jpg (bytes unchanged), KEY.cls, KEY.labels.safetensors
OUT/SPLIT/shards.json     and .npy, .names: the table of the images (`tlt.data.sources.records`)
OUT/SPLIT/labels.json     and .npy, .names: the table of the label maps, if there are any
OUT/SPLIT/packing.json    the settings, and whether packing has finished

A shard gets its name when it is complete, and the table of the images is written last. So the same command continues
a killed one.
"""

import hashlib
import io
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from tlt.data.sources import open_images
from tlt.data.sources.folder import LABELS, PACKING, TABLE, TRAIN_SPLITS, VALIDATION_SPLITS
from tlt.data.sources.image_file import (
    DEFAULT_MAX_PIXELS,
    BadImage,
    as_rgb,
    check_pixel_limit,
    image_extensions,
    image_formats,
    pillow_errors,
)
from tlt.data.sources.records import FileRecords, RecordImages, concatenated, write_table
from tlt.data.sources.source import ImageSource
from tlt.data.sources.tar_shards import LABEL_EXTENSION, scan_packed
from tlt.errors import UserError
from tlt.io.files import sync_folder
from tlt.io.jobs import in_processes
from tlt.io.output_folder import OutputFolder
from tlt.io.text import leads_out, printable
from tlt.labels.shards import label_bytes
from tlt.labels.store import LabelStore, open_labels

FORMAT = "volo-tlt shards, version 1"
_OURS = re.compile(r"\d{5,}\.tar|\.\d{5,}\.tar\.tmp|(shards|labels)\.(npy|names|json)")
_READ_BY_OTHERS = image_extensions() - {".jpeg", ".jpe", ".jfif"}  # other readers look for .jpg instead
_JPEG_QUALITY = 90
_MOST_PIXELS = 10 * DEFAULT_MAX_PIXELS  # limit for images to be made smaller: 1.5 GB of memory
_SAMPLED = 256  # number of images whose size is measured to choose the images per shard


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
    """Pack the images of a data set into shards; the arguments are the flags of `tlt pack-images`. Return lines that
    report the result. The other splits get the class numbers of the first. Raise UserError if there are no images, an
    image or label is unreadable, or `out` can't be written or has other files."""
    lines = list[str]()
    sources = dict[str, ImageSource]()
    class_names: list[str] | None = None
    if not splits:
        both = ("train", TRAIN_SPLITS), ("validation", VALIDATION_SPLITS)
        present = [split for split, names in both if any(os.path.isdir(os.path.join(data, name)) for name in names)]
        splits = present or ["train"]  # `open_images` then reports that it is missing
    for split in splits:  # open all before packing one, so that errors come first
        sources[split] = open_images(data, split, dataset, class_names)
        class_names = sources[splits[0]].class_names
    for split, source in sources.items():
        label_args = source.paths, None, None, "skip", source.class_names
        store = open_labels(labels, *label_args) if labels and split == splits[0] else None
        # The end of a warning about labels names a flag of volo train.
        about_labels = [text.rpartition("; ")[0] for text in (store.warnings if store else ())]
        lines += [f"warning: {warning}" for warning in (*source.warnings, *about_labels)]
        packing = Packing(os.path.join(out, split), source, store, max_side)
        try:
            lines.append(packing.run(shard_mb, workers, overwrite))
        except OSError as error:
            where = printable(str(error.filename or packing.folder))
            raise UserError(
                f"OUT {where} can't be written ({error.strerror}): mend that and run the same command again"
            ) from error
    return lines


@dataclass
class Packing:
    """Writes the shards of one split into `folder`. `names` has the tar member name of each image, `labelled` the
    indices of the images that have a label map."""

    folder: str
    source: ImageSource
    labels: LabelStore | None
    max_side: int | None

    def __post_init__(self) -> None:
        source = self.source
        if (outside := next(filter(leads_out, source.paths), None)) is not None:
            raise UserError(
                f"{printable(outside)}, an image of {printable(source.root)}, is named outside of it: rename it"
            )
        self.names = member_names(source.paths)
        missing = self.labels.reader.missing if self.labels else range(len(source))
        self.labelled = frozenset(range(len(source))).difference(missing)

    def run(self, shard_mb: int, workers: int, overwrite: bool) -> str:
        """Write the missing shards and the tables. Return a line that reports the result."""
        per_shard = self._images_per_shard(shard_mb)
        total = len(self.source)
        old_files = filter(_OURS.fullmatch, os.listdir(self.folder) if os.path.isdir(self.folder) else ())
        out = OutputFolder(self.folder, PACKING, self._settings(shard_mb, per_shard), old_files, overwrite)
        try:
            if out.complete:
                RecordImages(os.path.join(self.folder, TABLE))  # checks that the shards exist
                return f"{total} images are packed in {printable(self.folder)} already"
            rows = [range(start, min(start + per_shard, total)) for start in range(0, total, per_shard)]
            tables = [*in_processes(make_shard, self, [*enumerate(rows)], workers, "packing", "shard")]
            shards = [images for images, _ in tables]
            self._write_tables(shards, [maps for _, maps in tables])
            out.finish({})
        finally:
            out.close()
        size = sum(shard.length for shard in shards)
        return (
            f"{printable(self.folder)}: {total} images in {len(shards)} shards, {size} bytes, every image and label of "
            "them read back and compared"
        )

    def _settings(self, shard_mb: int, per_shard: int) -> dict[str, Any]:
        """Return the settings that must be equal for continuing an interrupted command."""
        images = hashlib.sha256("\0".join(self.source.class_names).encode(errors="surrogateescape"))
        for path, number in zip(self.source.paths, self.source.classes.tolist(), strict=True):
            images.update(f"\n{path}\0{number}".encode(errors="surrogateescape"))
        return {
            "format": FORMAT,
            "--max-side": self.max_side,
            "--shard-size": shard_mb,
            "images (sha256 of their names)": images.hexdigest()[:16],
            "labels (sha256)": self.labels and self.labels.identity()[:16],
            "images per shard": per_shard,
        }

    def _images_per_shard(self, shard_mb: int) -> int:
        rows = np.unique(np.linspace(0, len(self.source) - 1, _SAMPLED).astype(np.int64)).tolist()
        image = sum(len(read_image(self.source, row)) for row in rows) / len(rows)
        label = 4 * int(np.prod(self.labels.shape)) + tarfile.BLOCKSIZE if self.labels else 0
        return max(1, int(shard_mb * 1e6 / (image + label + 3 * tarfile.BLOCKSIZE)))

    def _write_tables(self, shards: list[FileRecords], maps: list[FileRecords]) -> None:
        source = self.source
        labels = self.labels
        if labels is not None:
            info = asdict(replace(labels.info, area=labels.area))
            about = {"info": info, "identity": labels.reader.identity().decode(errors="surrogateescape")}
            names = [source.paths[row] for row in sorted(self.labelled)]
            table = os.path.join(self.folder, LABELS)
            write_table(table, maps, concatenated(maps), names, source.class_names, about=about)
        table = os.path.join(self.folder, TABLE)
        write_table(table, shards, concatenated(shards), source.paths, source.class_names, source.folder_names)


def member_names(names: Sequence[str]) -> list[str]:
    """Return the tar member name of each image, `CLASS/STEM.jpg`. Other readers cut file names at the first dot. So
    stems are unique and have no dots: dots and percent signs are encoded as in URLs (`%2E`)."""
    shared = Counter(os.path.splitext(name)[0] for name in names)
    members = []
    for name in names:
        stem, suffix = os.path.splitext(name)
        folder, base = os.path.split(stem)
        key = base.replace("%", "%25").replace(".", "%2E") + (f"%_{suffix[1:]}" if shared[stem] > 1 else "")
        members.append(os.path.join(folder, key + (suffix.lower() if suffix.lower() in _READ_BY_OTHERS else ".jpg")))
    return members


def make_shard(packing: Packing, shard: tuple[int, range]) -> tuple[FileRecords, FileRecords]:
    """Write a shard (its number and its images) unless it exists, and read it back. Return the records of its images
    and of its label maps. Its contents depend on the images and labels only, not on the process that wrote it. Raise
    UserError if an image or label is unreadable, the existing shard differs, or the written one reads differently, and
    OSError if writing failed."""
    number, rows = shard
    path = os.path.join(packing.folder, f"{number:05d}.tar")
    if os.path.exists(path):
        images, maps = scan_packed(path)
        labels = [_label_name(packing.names[row]) for row in rows if row in packing.labelled]
        members = ((name, zlib.crc32(data)) for name, data in _members(packing, rows[0]) if not name.endswith(".cls"))
        same = images.names == [packing.names[row] for row in rows] and maps.names == labels
        if not same or {*members}.difference(_crcs(images, maps).items()):
            raise UserError(
                f"OUT {printable(path)} holds other images or labels: remove it, and run the same command again"
            )
        return images, maps
    temporary = os.path.join(packing.folder, f".{number:05d}.tar.tmp")
    written = _write(packing, rows, temporary)
    images, maps = scan_packed(temporary)
    if _crcs(images, maps) != written or (images.rows["class"] != packing.source.classes[rows]).any():
        raise UserError(f"OUT {printable(path)} reads other than it was written: is the disk damaged?")
    os.replace(temporary, path)
    sync_folder(packing.folder)
    return replace(images, path=path), replace(maps, path=path)


def _crcs(*tables: FileRecords) -> dict[str, int]:
    """Return the crc32 of each record by name."""
    return {name: crc for table in tables for name, crc in zip(table.names, table.rows["crc32"].tolist(), strict=True)}


def _write(packing: Packing, rows: range, path: str) -> dict[str, int]:
    """Write the file of a shard. Return the crc32 of each image and label map by name."""
    written = {}
    with open(path, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for row in rows:
            for name, data in _members(packing, row):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                info.mode = 0o644
                tar.addfile(info, io.BytesIO(data))
                if not name.endswith(".cls"):
                    written[name] = zlib.crc32(data)
        tar.close()  # writes the end marker
        file.flush()
        os.fsync(file.fileno())
    return written


def _members(packing: Packing, row: int) -> Iterator[tuple[str, bytes | bytearray]]:
    """Yield name and bytes of each file to store for an image. Raise UserError if its label is invalid."""
    name = packing.names[row]
    image = read_image(packing.source, row)
    yield name, image if packing.max_side is None else shrink_image(image, packing.max_side)
    yield f"{os.path.splitext(name)[0]}.cls", str(packing.source.classes[row]).encode()
    labels = packing.labels
    if labels is not None and row in packing.labelled:
        label_map = labels.reader.read(row).validate(labels.num_classes)
        if label_map.shape != labels.shape:
            raise UserError(
                f"{label_map.source}: shape (k, h, w) = {label_map.shape}, but the others' is {labels.shape}"
            )
        yield _label_name(name), label_bytes(label_map)


def _label_name(image: str) -> str:
    """Return the tar member name of an image's label map."""
    return f"{os.path.splitext(image)[0]}.{LABEL_EXTENSION}"


def read_image(source: ImageSource, row: int) -> bytearray:
    """Return the encoded image, or empty bytes for an empty file. Raise UserError if the image is unreadable."""
    try:
        return source.read(row)
    except BadImage as error:
        if str(error) == "empty file":
            return bytearray()
        raise UserError(f"{printable(source.path(row))} can't be read ({error}): mend or remove it") from error


def shrink_image(image: bytes | bytearray, max_side: int) -> bytes | bytearray:
    """Return a JPEG whose longer side is `max_side`, or the image itself if it is no larger or can't be decoded. Its
    label map stays valid, because maps cover shares of an image."""
    try:
        with pillow_errors(_MOST_PIXELS), Image.open(io.BytesIO(image), formats=image_formats()) as opened:
            width, height = check_pixel_limit(opened.width, opened.height, _MOST_PIXELS)
            if max(width, height) <= max_side:
                return image
            opened.draft(None, (2 * max_side, 2 * max_side))  # libjpeg scales by 1/2, 1/4 or 1/8 while it decodes
            scale = max_side / max(width, height)
            size = max(1, round(width * scale)), max(1, round(height * scale))
            small = as_rgb(opened).resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)
            encoded = io.BytesIO()
            small.save(encoded, "JPEG", quality=_JPEG_QUALITY, optimize=True)
            return encoded.getvalue()
    except BadImage:
        return image
