"""The sizes of all images of a split in one small file beside it: `DATA/train.index` for `DATA/train` (`tlt index`).

A safetensors file: `size` (N, 2) uint16, width and height in the order of the images; 0, 0 for an image that can't be
read. Its metadata says of which images, by a digest of their names. With it no header is read before an image is
decoded, and images that can't be read are known before the first step. Shards have an index of their own, which holds
the same (`tlt.data.shard_index`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tlt.data.folder import printable
from tlt.data.image_file import UNLIMITED, BadImage
from tlt.data.source import ImageSource
from tlt.data.tensor_file import MappedTensors, write_tensors
from tlt.errors import UserError
from tlt.names import Names

ENDING = ".index"
LARGEST_SIDE = 65_535
MAX_FAULTS = 1000  # reasons that are kept
FORMAT = "volo-tlt image sizes, version 1"
_REMEDY = "run `tlt index` again, or remove the file"
_SAMPLES = 8  # images whose header is compared with the index when it is opened


@dataclass(frozen=True)
class SizeIndex:
    """What an index file holds.

    Attributes:
        sizes: (N, 2) uint16 width, height; 0, 0: can't be read.
        faults: Why, by index, for the first `MAX_FAULTS` of them.
    """

    sizes: np.ndarray
    faults: Mapping[int, str]


def index_file(root: str) -> str:
    """Where the index of the images below `root` is."""
    return os.path.abspath(root) + ENDING


def write_index(path: str, names: Sequence[str], index: SizeIndex) -> None:
    """Write an index, replacing `path` in one step, and wait until it is on the disk.

    Raises:
        UserError: The file can't be written.
    """
    faults = sorted(index.faults.items())[:MAX_FAULTS]
    description = {"images": len(names), "names_sha256": _names_digest(names), "faults": faults}
    try:
        write_tensors(os.path.abspath(path), FORMAT, {"size": index.sizes}, description)
    except OSError as error:
        raise UserError(
            f"{printable(path)} can't be written ({error.strerror}): where the data set is read-only, make a folder "
            "with links to its splits and give that as DATA, here and to the programs"
        ) from error


def read_index(path: str, names: Sequence[str]) -> SizeIndex:
    """Read the index of images with these names. Raises UserError: it is damaged, or of others."""
    file = MappedTensors(path, FORMAT, _REMEDY)
    about, sizes = file.description, file.tensors["size"]
    if about["names_sha256"] != _names_digest(names) or sizes.shape != (len(names), 2):
        raise UserError(
            f"{printable(path)} was made of other files ({about['images']} images then, {len(names)} now): {_REMEDY}"
        )
    return SizeIndex(sizes, dict(about["faults"]))


def with_sizes(source: ImageSource) -> ImageSource:
    """The same images with the sizes that their index states, if there is one; with a warning where it does not fit."""
    path = index_file(source.root)
    if not os.path.exists(path):
        return source
    try:
        index = read_index(path, source.paths)
        _compare_samples(path, source, index.sizes)
    except UserError as error:
        return replace(source, warnings=[*source.warnings, f"index not used: {error}"])
    return replace(source, sizes=index.sizes, faults=index.faults)


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


def _names_digest(names: Sequence[str]) -> str:
    names = names if isinstance(names, Names) else Names(names)
    digest = hashlib.sha256(names.ends.tobytes())
    digest.update(names.block)
    return digest.hexdigest()
