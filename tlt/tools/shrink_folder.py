"""A class folder of smaller images, or of tiles, out of one of huge images (`tlt shrink`).

    OUT/SPLIT/CLASS/IMAGE.jpg    as in DATA; an image that is small enough keeps its bytes and its name
    OUT/shrink.json              the settings, written first; at the end also which images could not be read

Every file is complete or absent, so a command that was killed can be run again and continues.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from tlt.data.sources.folder import TRAIN_SPLITS, VALIDATION_SPLITS, ImageFolder, find_split, scan_folder
from tlt.data.sources.image_file import JPEG_SUFFIXES, BadImage
from tlt.errors import UserError
from tlt.io.files import locked, sync_folder, write_whole
from tlt.io.names import Names
from tlt.io.processes import available_cpus, in_processes
from tlt.io.text import printable
from tlt.tools.shrink import DEFAULT_MEMORY, DEFAULT_QUALITY, MAX_JPEG_SIDE, Picture, fitted_size, tile_starts

RECORD_NAME = "shrink.json"
_TILE = re.compile(r"(.*)_\d+_\d+")
_BROKEN_SHOWN = 20
_WORDS = {
    "shrunk": "made smaller",
    "tiled": "cut into tiles",
    "copied": "small enough, copied",
    "there": "there already",
    "broken": "left out",
}


@dataclass(frozen=True)
class ShrinkSettings:
    """How images are made smaller. Either `max_side` or `tile` is given.

    Attributes:
        max_side: Longest side of an image, pixels.
        tile: Side of a tile, pixels.
        overlap: Of neighbouring tiles, pixels; the last ones of a row or column overlap more.
        quality: Of the JPEGs.
    """

    max_side: int = 0
    tile: int = 0
    overlap: int = 0
    quality: int = DEFAULT_QUALITY

    @property
    def side(self) -> int:
        """The longest side, in pixels, of an image that is copied unchanged."""
        return self.max_side or self.tile

    def __post_init__(self) -> None:
        if bool(self.max_side) == bool(self.tile):
            raise UserError("give one of --max-side and --tile")
        if self.overlap and not 0 < self.overlap < self.tile:
            raise UserError(f"--overlap {self.overlap} is of tiles, and less than their side: give a larger --tile")
        if not 0 < self.side <= MAX_JPEG_SIDE:
            raise UserError(f"--max-side and --tile are at most {MAX_JPEG_SIDE} pixels, a JPEG's limit")
        if not 1 <= self.quality <= 100:
            raise UserError(f"--quality {self.quality} is not from 1 to 100")


@dataclass(frozen=True)
class _SplitJob:
    """The images of a split and the folder `out` to write. A copied image keeps its name; a smaller one has its name in
    `jpegs`, and tiles are named after that."""

    folder: ImageFolder
    out: str
    jpegs: Sequence[str]
    settings: ShrinkSettings
    memory: int


@dataclass(frozen=True, slots=True)  # one an image
class ImageOutcome:
    """What was done with an image, one of `_WORDS`; why, if it is broken."""

    what: str
    reason: str = ""
    bytes_read: int = 0
    bytes_written: int = 0


def shrink_folder(
    data: str,
    out: str,
    settings: ShrinkSettings,
    split: str | None = None,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
) -> list[str]:
    """Write OUT, or the part of it that is missing; return lines that say what was done.

    Args:
        data: Folder with splits, or with class folders.
        split: This one only.
        workers: Processes; None: one per core.
        memory: Bytes that each may take for what can't be streamed.

    Raises:
        UserError: There are no images, OUT holds something else or can't be written, or no image of a split can be
            read.
    """
    folders = _source_folders(data, split)
    _make_folder(out, folders)
    with locked(out, f"OUT {printable(out)} is being written by another `tlt shrink`: wait for it"):
        _begin(out, settings)
        lines: list[str] = []
        broken: dict[str, str] = {}
        for name, root in folders.items():
            folder, target = scan_folder(root), os.path.join(out, name)
            outcomes = _shrink_split(folder, target, settings, workers or available_cpus(), memory)
            failed = {folder.path(row): made.reason for row, made in enumerate(outcomes) if made.what == "broken"}
            lines += [*folder.warnings, *_summary(target, outcomes, failed)]
            broken |= failed
            if len(failed) == len(folder):
                path, reason = min(failed.items())
                raise UserError(f"no image in {printable(root)} can be read: {printable(path)}: {reason}")
        _record(out, settings, complete=True, broken=broken)
    return lines


def _source_folders(data: str, split: str | None) -> dict[str, str]:
    """Where class folders are: path relative to `data`, and path."""
    if split:
        found = [find_split(data, split, allow_root=True)]
    else:
        names = (os.path.join(data, name) for name in TRAIN_SPLITS + VALIDATION_SPLITS)
        found = [path for path in names if os.path.isdir(path)] or [data]
    return {os.path.relpath(path, data): path for path in found}


def _make_folder(out: str, folders: dict[str, str]) -> None:
    """Make OUT, which must not lie in a folder of the images."""
    shown = printable(out)
    for name, source in folders.items():
        target = os.path.realpath(os.path.join(out, name))
        if os.path.commonpath([target, os.path.realpath(source)]) == os.path.realpath(source):
            raise UserError(f"OUT {shown} is in the folder of the images, {printable(source)}: give another one")
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise UserError(f"OUT {shown} can't be made ({error.strerror}): give another folder") from error


def _begin(out: str, settings: ShrinkSettings) -> None:
    path = os.path.join(out, RECORD_NAME)
    if not os.path.exists(path):
        if os.listdir(out):
            raise UserError(f"OUT {printable(out)} is not empty, and not made by `tlt shrink`: give another folder")
        _record(out, settings, complete=False, broken={})
        return
    try:
        with open(path, encoding="utf-8") as file:
            made = dict(json.load(file)["settings"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{printable(path)} can't be read ({error}): give another folder") from error
    if made != asdict(settings):
        flags = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in made.items() if value)
        raise UserError(f"OUT {printable(out)} was begun with {flags}: give the same, or another folder")


def _record(out: str, settings: ShrinkSettings, complete: bool, broken: dict[str, str]) -> None:
    content = {"settings": asdict(settings), "complete": complete, "broken": broken}
    _write(os.path.join(out, RECORD_NAME), (json.dumps(content, indent=1) + "\n").encode())
    sync_folder(out)


def _shrink_split(
    folder: ImageFolder, out: str, settings: ShrinkSettings, workers: int, memory: int
) -> list[ImageOutcome]:
    """Make the images of a split; what was done with each, in row order."""
    jpegs = jpeg_names(folder.paths)
    _refuse_clashes(folder, jpegs, settings)
    places = {os.path.dirname(name) for name in folder.paths}
    empty = set(folder.folder_names) - {os.path.basename(place) for place in places}
    try:
        for place in places | empty:
            os.makedirs(os.path.join(out, place), exist_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from error
    split = _SplitJob(folder, out, Names(jpegs), settings, memory)
    outcomes = list(in_processes(make, split, range(len(folder)), workers, "shrinking", "image"))
    for place in places:
        sync_folder(os.path.join(out, place))
    return outcomes


def jpeg_names(names: Sequence[str]) -> list[str]:
    """What images are called as JPEGs: `a/x.tiff` -> `a/x.jpg`; where `a/x.png` exists as well, `a/x.tiff.jpg` and
    `a/x.png.jpg`, so that each is found with its own label file (`tlt.labels.label_files`)."""
    shared = Counter(os.path.splitext(name)[0] for name in names)
    return [_jpeg_name(name, shared[os.path.splitext(name)[0]] > 1) for name in names]


def _jpeg_name(name: str, shared: bool) -> str:
    stem, suffix = os.path.splitext(name)
    return name if suffix.lower() in JPEG_SUFFIXES else (name if shared else stem) + ".jpg"


def _refuse_clashes(folder: ImageFolder, jpegs: Sequence[str], settings: ShrinkSettings) -> None:
    """Two images must not go to one file."""
    own = dict(zip(jpegs, folder.paths, strict=True))
    clashes = [name for name in folder.paths if own.get(name, name) != name]
    if len(own) < len(jpegs):
        clashes += [name for name, jpeg in zip(folder.paths, jpegs, strict=True) if own[jpeg] != name]
    if settings.tile:
        stems = {os.path.splitext(jpeg)[0] for jpeg in jpegs}
        looks = ((name, _TILE.fullmatch(os.path.splitext(name)[0])) for name in folder.paths)
        clashes += [name for name, look in looks if look and look[1] in stems]
    if clashes:
        shown = printable(os.path.join(folder.root, clashes[0]))
        raise UserError(f"{shown} has the name that another image would get as a JPEG or tile: rename it")


def make(split: _SplitJob, row: int) -> ImageOutcome:
    """Write the files of an image unless they exist already. Raises UserError: nothing can be written."""
    source = split.folder.path(row)
    try:
        with Picture(source, split.memory) as picture:
            what, names = _plan(split, row, picture)
            paths = [os.path.join(split.out, name) for name in names]
            if all(os.path.exists(path) for path in paths):
                return ImageOutcome("there")
            try:
                contents = _contents(picture, split.settings)
                written = [_write(path, data) for path, data in zip(paths, contents, strict=True)]
            except BadImage:  # the file is cut: the tiles above the cut are written already
                for path in paths:
                    with suppress(OSError):
                        os.unlink(path)
                raise
            return ImageOutcome(what, bytes_read=os.path.getsize(source), bytes_written=sum(written))
    except BadImage as error:
        return ImageOutcome("broken", str(error))


def _plan(split: _SplitJob, row: int, picture: Picture) -> tuple[str, list[str]]:
    """What is done with an image, and the names of the files that are made of it."""
    settings, jpeg = split.settings, split.jpegs[row]
    if max(picture.size) <= settings.side:
        return "copied", [split.folder.paths[row]]
    if not settings.tile:
        return "shrunk", [jpeg]
    across, down = (tile_starts(length, settings.tile, settings.overlap) for length in picture.size)
    return "tiled", [f"{os.path.splitext(jpeg)[0]}_{y}_{x}.jpg" for y in down for x in across]


def _contents(picture: Picture, settings: ShrinkSettings) -> Iterator[bytes]:
    """The contents of these files, one at a time."""
    if max(picture.size) <= settings.side:
        yield picture.encoded()
    elif not settings.tile:
        yield picture.resized(fitted_size(*picture.size, settings.max_side), settings.quality)
    else:
        yield from (jpeg for _, _, jpeg in picture.tiles(settings.tile, settings.overlap, settings.quality))


def _write(path: str, data: bytes) -> int:
    """Write a file, whole or not at all; returns its length."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise _unwritable(path, error) from error
    return len(data)


def _unwritable(path: str, error: OSError) -> UserError:
    return UserError(
        f"{printable(path)} can't be written ({error.strerror}): mend that, and run the same command again: it goes on"
    )


def _summary(out: str, outcomes: Sequence[ImageOutcome], broken: dict[str, str]) -> list[str]:
    """Lines that say what was done with the images of a split; `broken` has the reason by image."""
    counts = Counter(outcome.what for outcome in outcomes)
    done = ", ".join(f"{counts[what]} {text}" for what, text in _WORDS.items() if counts[what])
    read, written = sum(each.bytes_read for each in outcomes), sum(each.bytes_written for each in outcomes)
    lines = [f"left out {printable(path)}: {reason}" for path, reason in sorted(broken.items())[:_BROKEN_SHOWN]]
    if len(broken) > _BROKEN_SHOWN:
        lines.append(f"and {len(broken) - _BROKEN_SHOWN} more, all of them in {RECORD_NAME}")
    moved = f"{read / 1e6:.1f} MB -> {written / 1e6:.1f} MB"
    return [*lines, f"{printable(out)}: {len(outcomes)} images: {done}; {moved}"]
