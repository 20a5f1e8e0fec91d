"""What is in one tar shard of WebDataset's layout: its images with their classes, sizes and checksums."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tlt.data.sources.image_file import UNLIMITED, BadImage, check_length, image_extensions, read_size
from tlt.data.sources.shards import HEAD_BYTES
from tlt.data.sources.tar_members import Listing, Place, list_members
from tlt.errors import UserError
from tlt.io.files import read_at, sha256_of
from tlt.io.text import printable

LABEL_EXTENSION = "labels.safetensors"
LABEL_KEY = "label"  # of KEY.json, where there is no KEY.cls
_MAX_SIDE = 2**16 - 1
_MAX_CLASS = 999_999
_NOTHING = Place(0, 0)


@dataclass
class ShardRows:
    """What one shard holds, n images in its order.

    Attributes:
        path, length, head, sha256: The shard, its bytes, crc32 of the first of them, checksum of all.
        names: (n,) Names of the images' members.
        places, label_places: (n, 2) int64 offset and length; length 0: there is none.
        crc32, label_crc32: (n,) uint32.
        sizes: (n, 2) uint16 width, height.
        classes: (n,) int64.
        broken: Image -> why it can't be read.
        listing: What was left out.
    """

    path: str
    length: int
    head: int
    sha256: bytes
    names: list[str]
    places: np.ndarray
    label_places: np.ndarray
    crc32: np.ndarray
    label_crc32: np.ndarray
    sizes: np.ndarray
    classes: np.ndarray
    broken: dict[int, str]
    listing: Listing

    def __len__(self) -> int:
        return len(self.names)

    def labelled(self) -> list[bool]:
        """Which images have a label map."""
        return (self.label_places[:, 1] > 0).tolist()


class _Image(NamedTuple):
    """A row of `ShardRows`; `fault`: why it can't be read, or ""."""

    name: str
    place: Place
    label: Place
    crc32: int
    label_crc32: int
    size: tuple[int, int]
    number: int
    fault: str


def scan_shard(path: str, label_key: str = LABEL_KEY) -> ShardRows:
    """Read a shard, every byte of it. Another `label_key` than the usual one goes before KEY.cls.

    Raises:
        UserError: It is cut or damaged, or a sample has no class or several images.
    """
    listing = list_members(path)
    with open(path, "rb") as file:
        length, head = os.fstat(file.fileno()).st_size, zlib.crc32(file.read(HEAD_BYTES))
        images = []
        for key, files in listing.samples.items():
            extension = _image_of(path, key, files)
            if extension:
                number = _class_of(path, key, extension, files, file.fileno(), label_key)
                images.append(_read_image(f"{key}.{extension}", files[extension], files, number, file.fileno()))
            else:
                listing.leave_out("samples without an image", key)
    listing.samples = {}
    return ShardRows(
        path=path,
        length=length,
        head=head,
        sha256=bytes.fromhex(sha256_of(path)),
        names=[image.name for image in images],
        places=np.array([image.place for image in images], np.int64).reshape(-1, 2),
        label_places=np.array([image.label for image in images], np.int64).reshape(-1, 2),
        crc32=np.array([image.crc32 for image in images], np.uint32),
        label_crc32=np.array([image.label_crc32 for image in images], np.uint32),
        sizes=np.array([image.size for image in images], np.uint16).reshape(-1, 2),
        classes=np.array([image.number for image in images], np.int64),
        broken={row: image.fault for row, image in enumerate(images) if image.fault},
        listing=listing,
    )


def _read_image(name: str, place: Place, files: dict[str, Place], number: int, descriptor: int) -> _Image:
    data, label = b"", files.get(LABEL_EXTENSION, _NOTHING)
    size, fault = (0, 0), ""
    try:
        data = _member(descriptor, Place(place.offset, check_length(place.length)))
        size = image_size(data)
    except BadImage as error:
        fault = str(error)
    return _Image(name, place, label, zlib.crc32(data), zlib.crc32(_member(descriptor, label)), size, number, fault)


def _member(descriptor: int, place: Place) -> bytes:
    return read_at(descriptor, place.length, place.offset)


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height as an index holds them. Raises BadImage: no image, or a side is too long for an index."""
    check_length(len(data))
    width, height = read_size(data, UNLIMITED)  # what is too large is decided when it is read
    if max(width, height) > _MAX_SIDE:  # what is too large is decided when the image is read
        raise BadImage(f"{width} x {height} pixels: sides above {_MAX_SIDE} are not read from shards")
    return width, height


def _image_of(path: str, key: str, files: dict[str, Place]) -> str:
    """Extension of a sample's image; "": it has none. `jpg` goes before `mask.png`."""
    images = [each for each in files if f".{each.rpartition('.')[2]}" in image_extensions()]
    plain = [each for each in images if "." not in each]
    found = plain or images
    if len(found) > 1:
        raise UserError(
            f"tar {printable(path)}: sample {printable(key)} has several images ({', '.join(map(printable, found))}); "
            "its name up to the first dot must be its own, as `tlt pack-images` makes it"
        )
    return found[0] if found else ""


def _class_of(path: str, key: str, extension: str, files: dict[str, Place], descriptor: int, label_key: str) -> int:
    prefix = extension.rpartition(".")[0]
    shown = f"tar {printable(path)}: sample {printable(key)}"
    for name in [f"{prefix}.cls" if prefix else "cls", "cls"] if label_key == LABEL_KEY else []:
        if name in files:
            text = _member(descriptor, files[name]).strip()
            if not text.isdigit() or len(text) > 7 or int(text) > _MAX_CLASS:
                raise UserError(f"{shown}: .{name} is not a class number (0 to {_MAX_CLASS})")
            return int(text)
    if "json" not in files:
        raise UserError(f"{shown} has no class: no .json is there" + ", nor .cls" * (label_key == LABEL_KEY))
    try:
        number = json.loads(_member(descriptor, files["json"]))[label_key]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{shown}: .json has no {label_key!r}") from error
    if type(number) is not int or not 0 <= number <= _MAX_CLASS:
        raise UserError(f"{shown}: {label_key!r} in .json is not a class number (0 to {_MAX_CLASS})")
    return number
