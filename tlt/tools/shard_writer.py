"""One tar shard of a split: written beside its place, read back and compared, then renamed.

A shard is a function of images and labels alone, not of who wrote it when.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tlt.data.sources.image_file import BadImage, image_extensions, read_size
from tlt.data.sources.shard_scan import LABEL_EXTENSION, ShardRows, scan_shard
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.files import sync_folder
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.archive_format import UNKNOWN_AREA
from tlt.labels.records import MapForm
from tlt.labels.store import LabelStore
from tlt.tools.shrink import shrink
from tlt.tools.shrink_folder import ShrinkSettings

_JPEG_SUFFIXES = {"jpeg", "jpe", "jfif"}  # other readers look for jpg


@dataclass(frozen=True)
class ShardedSplit:
    """The images and labels of a split, and the folder of their shards.

    Attributes:
        names: (N,) Member of each image.
        per_shard: Images in a shard; the last one has fewer.
        without_label: Images without a label map.
    """

    folder: str
    source: ImageSource
    names: Sequence[str]
    per_shard: int
    labels: LabelStore | None
    without_label: Collection[int]
    shrinking: ShrinkSettings | None

    @property
    def shards(self) -> int:
        return -(-len(self.source) // self.per_shard)

    def rows(self, shard: int) -> range:
        """The images of a shard."""
        return range(shard * self.per_shard, min((shard + 1) * self.per_shard, len(self.source)))


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


def make_shard(split: ShardedSplit, shard: int) -> tuple[ShardRows, int]:
    """Write a shard unless it exists, and read it; return it and the largest class id of its label maps (-1: no maps).

    Raises:
        UserError: An image or label can't be read; or what is there is something else, or other than it was written.
        OSError: It can't be written.
    """
    path = os.path.join(split.folder, f"{shard:05d}.tar")
    if os.path.exists(path):
        rows = scan_shard(path)
    else:
        temporary = os.path.join(split.folder, f".{shard:05d}.tar.tmp")
        try:
            digest = _write(split, shard, temporary)
            rows = scan_shard(temporary)
            if rows.sha256 != digest:
                raise UserError(f"OUT {printable(path)} reads other than it was written: is the disk damaged?")
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        sync_folder(split.folder)
        rows.path = path
    other = UserError(f"OUT {printable(path)} holds other images or labels: remove it, and run the same command again")
    labelled = [split.labels is not None and row not in split.without_label for row in split.rows(shard)]
    if rows.names != [split.names[row] for row in split.rows(shard)] or rows.labelled() != labelled:
        raise other
    try:
        return rows, _largest_id(rows)
    except (SafetensorError, KeyError, ValueError) as error:
        raise other from error


def _write(split: ShardedSplit, shard: int, path: str) -> bytes:
    """Write the file of a shard. Returns its sha256."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for row in split.rows(shard):
            for name, data in _members(split, row):
                block = _tar_member(name, data)
                digest.update(block)
                file.write(block)
        digest.update(end := bytes(2 * tarfile.BLOCKSIZE))
        file.write(end)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that it is read back from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.digest()


def _tar_member(name: str, data: bytes | bytearray) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    header = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    return header + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def _members(split: ShardedSplit, row: int) -> list[tuple[str, bytes | bytearray]]:
    """Name and bytes of the files that are stored for an image."""
    image: bytes | bytearray = read_image(split.source, row)
    size = None
    if split.shrinking is not None and image:
        image, size = _shrunk(split.shrinking, image)
    name, number = split.names[row], int(split.source.classes[row])
    key = name.rpartition(".")[0]
    members: list[tuple[str, bytes | bytearray]] = [(name, image), (f"{key}.cls", str(number).encode())]
    if split.labels is not None and row not in split.without_label:
        members.append((f"{key}.{LABEL_EXTENSION}", save(label_record(split.labels, row, size))))
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


def _shrunk(shrinking: ShrinkSettings, image: bytes | bytearray) -> tuple[bytes | bytearray, tuple[int, int] | None]:
    """The image made smaller and its new size if it is too large, else the image itself and None."""
    try:
        small = shrink(image, shrinking.max_side, shrinking.quality)
        return (image, None) if small == image else (small, read_size(small))
    except BadImage:  # it keeps its place, and the index says that it can't be read
        return image, None


def _largest_id(rows: ShardRows) -> int:
    largest = -1
    with open(rows.path, "rb") as file:
        for offset, length in rows.label_places.tolist():
            if length:
                ids = load(os.pread(file.fileno(), length, offset))["ids"]
                largest = max(largest, int(ids.max()))
    return largest


def describe_labels(labels: LabelStore, max_id: int) -> dict[str, Any]:
    """The description of the packed labels in an index."""
    text = labels.metadata.text() if labels.metadata else None
    form = MapForm(labels.shape, max_id, labels.area, labels.has_log_sum_exp, text)
    return {**asdict(form), "identity": labels.identity().decode(errors="surrogateescape")}


def label_record(labels: LabelStore, index: int, size: tuple[int, int] | None = None) -> dict[str, np.ndarray]:
    """The map of image `index` as it is written beside it. `size`: of the image, where it isn't the one labelled.

    Raises:
        UserError: The map is damaged, or can't be trained on.
    """
    found = labels.reader.record(index)
    record = {name: np.ascontiguousarray(array) for name, array in found._asdict().items() if array is not None}
    if found.area is None:
        record["area"] = np.array(UNKNOWN_AREA if labels.area == "center" else labels.area_of(None, None), np.float32)
    if found.size is None:
        record["ids"] = found.ids.astype(np.uint16 if found.ids.max() < 2**16 else np.int32)
        record["size"] = np.zeros(2, np.int32)
    classes = labels.metadata.num_classes if labels.metadata else labels.num_classes
    shape = LabelMap(record["values"], record["ids"]).validate(classes, labels.source(index)).shape
    if shape != labels.shape:
        raise UserError(f"{labels.source(index)}: shape (k, h, w) = {shape}, but the others' is {labels.shape}")
    if size is not None:
        record["size"] = np.array(size, np.int32)
    return record
