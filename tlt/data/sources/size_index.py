"""Names and sizes of all images of a split in one file beside it: `DATA/train.index` for `DATA/train` (`tlt index`).

A safetensors file: `size` (N, 2) uint16, width and height in the order of the images, 0, 0 for an image that can't be
read; and the listing of the folders with their times of change. With it no folder is listed that has not changed, and
images that can't be read are known before the first step. Shards have an index of their own, which holds the same
(`tlt.data.sources.shard_index`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tlt.data.sources.folder import ImageFolder, image_folder, scan_folder
from tlt.data.sources.folder_listing import FolderListing
from tlt.data.sources.image_file import UNLIMITED, BadImage, image_extensions
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.tensor_file import MappedTensors, write_tensors
from tlt.io.text import printable

ENDING = ".index"
LARGEST_SIDE = 65_535
MAX_FAULTS = 1000  # reasons that are kept
FORMAT = "volo-tlt image sizes, version 2"
_REMEDY = "run `tlt index` again, or remove the file"
_SAMPLES = 8  # images whose header is compared with the index when it is opened


@dataclass(frozen=True)
class SizeIndex:
    """What an index file holds.

    Attributes:
        sizes: (N, 2) uint16 width, height; 0, 0: can't be read.
        faults: Why, by index, for the first `MAX_FAULTS` of them.
        listing: The images.
    """

    sizes: np.ndarray
    faults: Mapping[int, str]
    listing: FolderListing


def index_file(root: str) -> str:
    """Where the index of the images below `root` is."""
    return os.path.abspath(root) + ENDING


def write_index(path: str, index: SizeIndex) -> None:
    """Write an index, replacing `path` in one step, and wait until it is on the disk.

    Raises:
        UserError: The file can't be written.
    """
    listing = index.listing
    description = {
        "faults": sorted(index.faults.items())[:MAX_FAULTS],
        "leaves": listing.leaves,
        "warnings": listing.warnings,
        "visited": listing.visited,
        "suffixes": sorted(image_extensions()),
    }
    tensors = {
        "size": index.sizes,
        "names": np.frombuffer(listing.names.block, np.uint8),
        "name_ends": listing.names.ends,
        "leaf": listing.leaf,
        "changed": listing.changed,
    }
    try:
        write_tensors(os.path.abspath(path), FORMAT, tensors, description)
    except OSError as error:
        raise UserError(
            f"{printable(path)} can't be written ({error.strerror}): where the data set is read-only, make a folder "
            "with links to its splits and give that as DATA, here and to the programs"
        ) from error


def read_index(path: str, root: str) -> SizeIndex:
    """Read the index of the images below `root`. Raises UserError: it is damaged."""
    file = MappedTensors(path, FORMAT, _REMEDY)
    about, tensors = file.description, file.tensors
    # Read with other suffixes, the folders would show other images.
    current = about["suffixes"] == sorted(image_extensions())
    listing = FolderListing(
        root,
        Names.packed(tensors["names"].data, tensors["name_ends"]),
        tensors["leaf"],
        about["leaves"],
        about["warnings"],
        about["visited"],
        tensors["changed"] * current,
    )
    return SizeIndex(tensors["size"], dict(about["faults"]), listing)


def open_folder(
    root: str, class_names: Sequence[str] | None = None, found: Callable[[str, int], None] | None = None
) -> ImageFolder:
    """Find all images under `root`, with the sizes that their index states, if there is one; with a warning where it
    does not fit. Folders that have not changed since the index was made are not listed. Arguments and errors are those
    of `scan_folder`."""
    path = index_file(root)
    if not os.path.exists(path):
        return scan_folder(root, class_names, found)
    try:
        index = read_index(path, root)
    except UserError as error:
        return _without_index(scan_folder(root, class_names, found), error)
    if index.listing.unchanged():
        folder = image_folder(index.listing, class_names)
    else:
        folder = scan_folder(root, class_names, found)
    try:
        if folder.paths != index.listing.names:
            raise UserError(
                f"{printable(path)} was made of other files ({len(index.sizes)} images then, {len(folder)} now): "
                f"{_REMEDY}"
            )
        _compare_samples(path, folder, index.sizes)
    except UserError as error:
        return _without_index(folder, error)
    return replace(folder, sizes=index.sizes, faults=index.faults)


def _without_index(folder: ImageFolder, error: UserError) -> ImageFolder:
    return replace(folder, warnings=[*folder.warnings, f"index not used: {error}"])


def _compare_samples(path: str, source: ImageSource, sizes: np.ndarray) -> None:
    """A few images spread over the data set: where files were replaced under their names, all of them were."""
    for row in np.unique(np.linspace(0, len(source) - 1, _SAMPLES).round().astype(int)).tolist():
        then = tuple(sizes[row].tolist())
        try:
            now = source.read_size(row, UNLIMITED)
        except BadImage:
            continue
        if 0 not in then and now != then:
            raise UserError(
                f"{printable(path)} says that {printable(source.path(row))} has {then[0]} x {then[1]} pixels, and it "
                f"has {now[0]} x {now[1]}: {_REMEDY}"
            )
