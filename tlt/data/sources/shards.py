"""Images in tar shards (WebDataset's layout), read in any order: an index says where in which shard each one lies.

SPLIT/00000.tar ...       KEY.jpg, KEY.cls and, with labels, KEY.labels.safetensors
SPLIT/shards.safetensors  the index, mapped by all processes; `tlt.data.sources.shard_index` writes it

Nothing is ever unpacked. Names, classes and order are the index's, those of the image folder that was packed: the same
image has the same number in both.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, BadImage, check_length
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.files import READ_FLAGS, read_at, sha256_of, with_retries
from tlt.io.names import Names, leads_out
from tlt.io.tensor_file import MappedTensors
from tlt.io.text import printable

INDEX_NAME = "shards.safetensors"
PARTIAL_NAME = "packing.json"  # what is being packed, while it is
FORMAT = "volo-tlt shard index, version 1"
HEAD_BYTES = 4096  # of a shard, compared at the start
_OPEN_FILES = 256  # kept open per list of shards; more are opened for each read
_REMEDY = "copy the shards with their index again, or make the index anew with `tlt index`"


class ShardIndex:
    """The index of a split. Travels to other processes as its path; a forked process uses the same mapping.

    Attributes:
        shard: (N,) uint32, number of the shard of each image.
        offset, length: (N,) int64 in bytes, where in it the image lies.
        crc32: (N,) uint32 of the image.
        sizes: (N, 2) uint16 width, height; 0, 0 where the image can't be read.
        classes: (N,) int64.
        names: `CLASS/FILE` of each image.
        labels: Whether label maps lie beside the images: `tensors` then has `label_offset`, `label_length` (0: none)
            and `label_crc32`.
        shards: Where the shards are.
        description: See `tlt.data.sources.shard_index`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        file = MappedTensors(path, FORMAT, _REMEDY)
        self.tensors, self.description = file.tensors, file.description
        tensors = self.tensors
        self.shard, self.offset, self.length = tensors["shard"], tensors["offset"], tensors["length"]
        self.crc32, self.sizes, self.classes = tensors["crc32"], tensors["size"], tensors["class"]
        self.names = Names.packed(tensors["names"].data, tensors["name_ends"])
        self.labels = "label_offset" in tensors
        folder, shards = os.path.dirname(path), self.description["shards"]
        for name in shards:
            if leads_out(name):
                raise UserError(
                    f"{printable(path)} names the shard {printable(name)}, outside of its folder: {_REMEDY}"
                )
        self.shards = ShardFiles([os.path.join(folder, name) for name in shards])

    def __reduce__(self) -> tuple[type[ShardIndex], tuple[str]]:
        return ShardIndex, (self.path,)

    def __len__(self) -> int:
        return len(self.shard)

    def check_shards(self) -> None:
        """Compare the length and the beginning of every shard with the index.

        Raises:
            UserError: One is missing, cut, or of another data set; or there is one that the index doesn't know.
        """
        lengths, heads = self.tensors["shard_length"].tolist(), self.tensors["shard_head"].tolist()
        for path, length, head in zip(self.shards.paths, lengths, heads, strict=True):
            shown = f"shard {printable(path)}"
            try:
                info = os.stat(path)
                if not stat.S_ISREG(info.st_mode):
                    raise UserError(f"{shown} is not a regular file: {_REMEDY}")
                if info.st_size != length:
                    raise UserError(f"{shown} has {info.st_size} bytes instead of {length}: {_REMEDY}")
                with open(path, "rb", buffering=0) as file:
                    found = zlib.crc32(file.read(HEAD_BYTES))
            except OSError as error:
                raise UserError(f"{shown} can't be read ({error.strerror}): {_REMEDY}") from error
            if found != head:
                raise UserError(f"{shown} is not the one that was indexed, or is damaged: {_REMEDY}")
        self._refuse_unknown()

    def _refuse_unknown(self) -> None:
        if not self.description["whole_folder"]:
            return
        folder, known = os.path.dirname(self.path) or ".", set(self.description["shards"])
        unknown = sorted(name for name in tar_files(folder) if name not in known)
        if unknown:
            raise UserError(
                f"{printable(self.path)} knows nothing of {len(unknown)} tar files beside it, such as "
                f"{printable(unknown[0])}: remove them, or make the index anew with `tlt index`"
            )

    def damaged_files(self) -> list[str]:
        """Shards whose sha256 is wrong."""
        digests = zip(self.shards.paths, self.tensors["shard_sha256"], strict=True)
        return [path for path, sha256 in digests if bytes.fromhex(sha256_of(path)) != sha256.tobytes()]


class ShardFiles:
    """Files that are read at given places, by any number of threads and forked processes; opened when first read."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        self._open: dict[int, int] = {}

    def __reduce__(self) -> tuple[type[ShardFiles], tuple[list[str]]]:
        return ShardFiles, (self.paths,)

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read(self, shard: int, offset: int, length: int, crc32: int) -> bytearray:
        """`length` bytes of a shard from `offset` on. Raises BadImage: they can't be read, or their crc32 is wrong;
        MachineFault."""
        data = bytearray(length)
        try:
            done = with_retries(lambda: self._read(shard, offset, data), self.paths[shard])
        except OSError as error:
            raise BadImage(f"shard can't be read: {error.strerror}") from error
        if done < length:
            raise BadImage(f"shard ends after {done} of {length} bytes")
        if zlib.crc32(data) != crc32:
            raise BadImage("damaged in the shard (crc32 is wrong): copy the shard again")
        return data

    def _read(self, shard: int, offset: int, data: bytearray) -> int:
        if (descriptor := self._open.get(shard)) is not None:
            try:
                return _fill(descriptor, data, offset)
            except OSError:
                # Opened anew the next time, which helps where it is stale. Not closed: others may be reading from it.
                self._open.pop(shard, None)
                raise
        # Opening a pipe without a writer would wait for ever.
        descriptor = os.open(self.paths[shard], READ_FLAGS)
        kept = len(self._open) < _OPEN_FILES and self._open.setdefault(shard, descriptor) == descriptor
        try:
            return _fill(descriptor, data, offset)
        finally:
            if not kept:
                os.close(descriptor)


def _fill(descriptor: int, data: bytearray, offset: int) -> int:
    """Read into all of `data`; returns how much of it there was."""
    view, done = memoryview(data), 0
    while done < len(data):
        if hasattr(os, "preadv"):
            count = os.preadv(descriptor, [view[done:]], offset + done)
        else:
            part = read_at(descriptor, len(data) - done, offset + done)
            view[done : done + len(part)], count = part, len(part)
        if not count:
            break
        done += count
    return done


@dataclass(frozen=True)
class ShardedImages(ImageSource):
    """What `open_shards` found.

    Attributes:
        index: The index of the split.
        rows: (N,) int64 row in the index of each image; None: all in order.
    """

    index: ShardIndex = field(kw_only=True)
    rows: np.ndarray | None = None

    def row(self, index: int) -> int:
        """Row in the index of image `index`."""
        return index if self.rows is None else int(self.rows[index])

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        row, where = self.row(index), self.index
        length = check_length(int(where.length[row]), max_pixels)
        return where.shards.read(int(where.shard[row]), int(where.offset[row]), length, int(where.crc32[row]))

    def select(self, rows: Sequence[int] | np.ndarray) -> ShardedImages:
        rows = np.asarray(rows, np.int64)
        return replace(super().select(rows), rows=rows if self.rows is None else self.rows[rows])

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _source_of, (self.index, self.class_names, self.rows)


def is_sharded(folder: str) -> bool:
    """Whether a folder holds shards: with an index, or about to have one, or tar files and no folder."""
    try:
        with os.scandir(folder) as entries:
            folders = {entry.name: entry.is_dir() for entry in entries}
    except OSError:  # which scan_folder tells
        return False
    if INDEX_NAME in folders or PARTIAL_NAME in folders:
        return True
    return not any(folders.values()) and any(map(_is_tar, folders))


def tar_files(folder: str) -> list[str]:
    """Names of the tar files in a folder, in order, without the hidden ones that a killed writer left."""
    return sorted(filter(_is_tar, os.listdir(folder)))


def _is_tar(name: str) -> bool:
    return name.endswith(".tar") and not name.startswith(".")


def open_shards(path: str, class_names: Sequence[str] | None = None) -> ShardedImages:
    """The images of the shards of a folder, or of an index file.

    Args:
        class_names: Imposed class list; None: the index's own.

    Raises:
        UserError: No index, or it is damaged; a shard is missing, cut or another one; classes that are not in
            `class_names`.
    """
    if os.path.isdir(path):
        folder, path = path, os.path.join(path, INDEX_NAME)
        if os.path.isfile(os.path.join(folder, PARTIAL_NAME)) and not os.path.isfile(path):
            raise UserError(f"shards in {printable(folder)} are not complete: run `tlt pack-images` again")
        if not os.path.isfile(path):
            raise UserError(
                f"{printable(folder)} holds tar files without an index ({INDEX_NAME}): make it with `tlt index`"
            )
    index = ShardIndex(path)
    index.check_shards()
    return _source_of(index, class_names)


def _source_of(
    index: ShardIndex, class_names: Sequence[str] | None = None, rows: np.ndarray | None = None
) -> ShardedImages:
    """The images of an index."""
    said = index.description
    names, classes, found = said["class_names"], index.classes, said["folder_names"]
    if class_names is not None and list(class_names) != names:
        names, classes, found = _imposed(index, list(class_names))
    warnings = [f"{printable(index.path)}: {text}" for text in said["warnings"]]
    folder = os.path.dirname(index.path) or "."
    faults = {int(row): str(reason) for row, reason in said["broken"]}
    source = ShardedImages(folder, index.names, classes, names, found, warnings, index.sizes, faults, index=index)
    return source if rows is None else source.select(rows)


def _imposed(index: ShardIndex, class_names: list[str]) -> tuple[list[str], np.ndarray, list[str]]:
    """Class list, class of each image and the classes there are, by the numbers that `class_names` gives."""
    own, found = index.description["class_names"], index.description["folder_names"]
    if not index.description["named"] and len(own) <= len(class_names):
        return class_names, index.classes, [class_names[int(number)] for number in found]
    numbers = {name: number for number, name in enumerate(class_names)}
    unknown = [name for name in found if name not in numbers]
    if unknown:
        raise UserError(
            f"{printable(index.path)} has {len(unknown)} classes that are not in the class list of the training set or "
            f"class map, such as {printable(unknown[0])}"
        )
    table = np.array([numbers.get(name, -1) for name in own], np.int64)
    return class_names, table[index.classes], found


@dataclass(frozen=True)
class IndexedFiles:
    """Files of many images that a split consists of, read through an index that lies beside them.

    Attributes:
        paths: Of the files, in order.
        index: Of their index.
    """

    paths: list[str]
    index: str

    def make_index(self, workers: int = 1) -> list[str]:
        """Read every byte of the files and write the index. Returns lines that say what was found.

        Raises:
            UserError: A file is cut or damaged, or holds something else.
        """
        raise NotImplementedError

    def open(self, class_names: Sequence[str] | None = None) -> ShardedImages:
        """The images.

        Args:
            class_names: Imposed class list; None: the index's own.

        Raises:
            UserError: No index, or it is stale; and as `open_shards`.
        """
        if not os.path.isfile(self.index):
            raise UserError(
                f"{printable(self.index)}, the index of {len(self.paths)} files such as {printable(self.paths[0])}, "
                "is missing: make it with `tlt index DATA --split SPLIT --dataset KIND`"
            )
        source = open_shards(self.index, class_names)
        indexed = source.index.shards.paths
        if list(map(os.path.abspath, indexed)) != list(map(os.path.abspath, self.paths)):
            raise UserError(
                f"{printable(self.index)} is of {len(indexed)} files, not of the {len(self.paths)} that are there: "
                "make it anew with `tlt index DATA --split SPLIT --dataset KIND`"
            )
        return source
