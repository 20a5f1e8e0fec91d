"""The sizes of all images of a split in one small file beside it: `DATA/train.index` for `DATA/train` (`tlt index`).

A safetensors file: `sizes` (N, 2) uint16, width and height in the order of the images; 0, 0 for an image that can't be
read. It belongs to the images whose names it was made of. With it no header is read before an image is decoded, and
images that can't be read are known before the first step.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tlt.archive_format import sync_folder
from tlt.data.decode import BadImage
from tlt.data.folder import printable
from tlt.data.source import ImageSource
from tlt.errors import UserError
from tlt.names import Names

ENDING = ".index"
LARGEST_SIDE = 65_535
MAX_FAULTS = 1000  # reasons that are kept
_FORMAT = "volo-tlt image sizes, version 1"
_KEY = "about"  # one text: safetensors writes several in any order
_SAMPLES = 8  # images whose header is compared with the index when it is opened
_NO_LIMIT = 2**62


class Misfit(Exception):
    """An index that can't be used. The text is the reason."""


@dataclass(frozen=True)
class SizeIndex:
    """What an index file holds.

    Attributes:
        sizes: (N, 2) uint16 width, height; 0, 0: can't be read.
        faults: Why, by index, for the first `MAX_FAULTS` of them.
        decoded: Whether the images were decoded, and not their headers alone read.
    """

    sizes: np.ndarray
    faults: Mapping[int, str]
    decoded: bool = False


def index_file(root: str) -> str:
    """Where the index of the images below `root` is."""
    return os.path.abspath(root) + ENDING


def write_index(path: str, names: Sequence[str], index: SizeIndex) -> None:
    """Write an index, replacing `path` in one step, and wait until it is on the disk.

    Raises:
        UserError: The file can't be written.
    """
    about = {
        "format": _FORMAT,
        "images": len(names),
        "names_sha256": _names_digest(names),
        "sizes_sha256": hashlib.sha256(index.sizes.tobytes()).hexdigest(),
        "decoded": index.decoded,
        "faults": dict(sorted(index.faults.items())[:MAX_FAULTS]),
    }
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(save({"sizes": index.sizes}, {_KEY: json.dumps(about)}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(folder)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise UserError(
            f"{printable(path)} can't be written ({error.strerror}): where the data set is read-only, make a folder "
            "with links to its splits and give that as DATA, here and to the programs"
        ) from error


def read_index(path: str, names: Sequence[str]) -> SizeIndex:
    """Read the index of images with these names. Raises Misfit: it is damaged, or of others."""
    try:
        with safe_open(path, "numpy") as file:
            about, sizes = json.loads((file.metadata() or {}).get(_KEY, "{}")), file.get_tensor("sizes")
        if about.get("format") != _FORMAT:
            raise Misfit(f"it is no file of {_FORMAT!r}")
        faults = {int(row): str(reason) for row, reason in about["faults"].items()}
        if hashlib.sha256(sizes.tobytes()).hexdigest() != about["sizes_sha256"]:
            raise Misfit("it is damaged (its checksum is wrong)")
        if about["names_sha256"] != _names_digest(names) or sizes.shape != (len(names), 2):
            raise Misfit(f"it was made of other files ({about['images']} images then, {len(names)} now)")
    except (SafetensorError, OSError, KeyError, ValueError, AttributeError) as error:
        raise Misfit(f"it can't be read ({str(error).splitlines()[0]})") from error
    return SizeIndex(sizes, faults, about["decoded"])


def with_sizes(source: ImageSource) -> ImageSource:
    """The same images with the sizes that their index states, if there is one; with a warning where it does not fit."""
    path = index_file(source.root)
    if not os.path.exists(path):
        return source
    try:
        index = read_index(path, source.paths)
        _compare_samples(source, index.sizes)
    except Misfit as misfit:
        warning = f"{printable(path)} is not used: {misfit}; run tlt index again, or remove the file"
        return replace(source, warnings=[*source.warnings, warning])
    return replace(source, sizes=index.sizes, faults=index.faults)


def _compare_samples(source: ImageSource, sizes: np.ndarray) -> None:
    """A few images spread over the data set: all of them were replaced, if any, under their names."""
    for row in np.unique(np.linspace(0, len(source) - 1, _SAMPLES).round().astype(int)).tolist():
        expected = (int(sizes[row, 0]), int(sizes[row, 1]))
        try:
            found = source.read_size(row, _NO_LIMIT)
        except BadImage:
            continue
        if 0 not in expected and found != expected:
            now, then = (f"{width} x {height}" for width, height in (found, expected))
            raise Misfit(f"{printable(source.path(row))} has {now} pixels now and had {then}")


def _names_digest(names: Sequence[str]) -> str:
    names = names if isinstance(names, Names) else Names(names)
    digest = hashlib.sha256(names.ends.tobytes())
    digest.update(names.block)
    return digest.hexdigest()
