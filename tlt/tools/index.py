"""Reading all images once (`tlt index`): sizes of those in folders (`tlt.data.sources.size_index`), places and
checksums too of those in shards (`tlt.data.sources.shard_index`)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from tlt.data.backends.decode import TorchvisionBackend
from tlt.data.sources.dataset_kinds import parse_kind
from tlt.data.sources.folder import find_split, image_folder
from tlt.data.sources.folder_listing import list_folder
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, JPEG_SUFFIXES, UNLIMITED, BadImage
from tlt.data.sources.open_images import find_files
from tlt.data.sources.shard_index import index_shards
from tlt.data.sources.shards import is_sharded
from tlt.data.sources.size_index import FORMAT, LARGEST_SIDE, SizeIndex, index_file, write_index
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.processes import available_cpus, in_processes
from tlt.io.tensor_file import refuse_other_file
from tlt.io.text import printable

SPLITS = ("train", "validation")
_BLOCK = 64  # images
_HEAVY_PIXELS = 10_000_000
_BYTES_PER_PIXEL = 14  # at the peak of decoding and cropping: PNG 12, WebP 16


def index(
    data: str,
    split: str | None = None,
    workers: int | None = None,
    out: str | None = None,
    decode: bool = False,
    dataset: str = "",
) -> list[str]:
    """Write the index of a split, or of all that are there; return lines that say what was done.

    Args:
        data: Folder of the data set, or of a split.
        split: None: training and validation.
        workers: Processes that read; None: one per CPU, 1: none but this one.
        out: File instead of `DATA/SPLIT.index` or the shards' own; a split must be named.
        decode: Decode every image of a folder, which finds the truncated ones too.
        dataset: Kind of data set (`--dataset`); "": image folders or shards.

    Raises:
        UserError: No images, or the index can't be written, also because another file is there; a flag that a kind of
            data set has no use for.
    """
    if parse_kind(dataset)[0]:
        return _index_files(data, split, workers, out, decode, dataset)
    roots = _roots(data, split)
    if out is not None and len(roots) > 1:
        raise UserError(f"-o {printable(out)}: one file holds the sizes of one split; name it with --split")
    lines: list[str] = []
    for root in roots:
        if not is_sharded(root):
            lines += _index_folder(root, workers, out or index_file(root), decode)
        elif decode:
            shown = printable(root)
            raise UserError(f"--decode: {shown} holds shards, of whose images the headers are read; leave it out")
        else:
            lines += index_shards(root, out, available_cpus() if workers is None else workers)
    return lines


def _roots(data: str, split: str | None) -> list[str]:
    """The folders of the splits."""
    if split is not None:
        return [find_split(data, split, allow_root=True)]
    found = []
    for name in SPLITS:
        try:
            found.append(find_split(data, name))
        except UserError:
            continue
    return found or [find_split(data, SPLITS[0], allow_root=True)]


def _index_files(
    data: str, split: str | None, workers: int | None, out: str | None, decode: bool, dataset: str
) -> list[str]:
    if split is None:
        raise UserError(f"--dataset {dataset}: name the split with --split")
    if decode or out is not None:
        raise UserError(
            f"--dataset {dataset}: the index lies beside the files, made of headers; leave out --decode, -o"
        )
    return find_files(data, split, dataset).make_index(available_cpus() if workers is None else workers)


def _index_folder(root: str, workers: int | None, out: str, decode: bool) -> list[str]:
    refuse_other_file(out, FORMAT)
    listing = list_folder(root)
    source = image_folder(listing)
    found = read_sizes(source, workers, decode)
    write_index(out, SizeIndex(found.sizes, found.faults, listing))
    width, height = found.sizes[found.sizes.astype(np.int64).prod(axis=1).argmax()].tolist()
    lines = [f"warning: {warning}" for warning in source.warnings]
    lines += [f"{printable(source.path(row))}: {reason}" for row, reason in sorted(found.faults.items())]
    lines.append(
        f"{printable(out)}: {len(source)} images, {len(found.faults)} can't be {'decoded' if decode else 'read'}, "
        f"largest {width} x {height}, {os.path.getsize(out)} bytes"
    )
    lines += _heavy(source, found.sizes)
    if found.not_decoded:
        lines.append(f"{found.not_decoded} images of more than {DEFAULT_MAX_PIXELS} pixels were not decoded")
    return lines


def _heavy(source: ImageSource, sizes: np.ndarray) -> list[str]:
    """A warning if decoding takes much memory; JPEG images are decoded at a smaller size."""
    pixels = sizes.astype(np.int64).prod(axis=1)
    heavy = [
        row
        for row in np.flatnonzero(pixels > _HEAVY_PIXELS).tolist()
        if not source.paths[row].lower().endswith(JPEG_SUFFIXES)
    ]
    if not heavy:
        return []
    most = int(pixels[heavy].max())
    return [
        f"{len(heavy)} images that are no JPEGs have more than {_HEAVY_PIXELS} pixels, up to {most}: decoding that one "
        f"takes about {most * _BYTES_PER_PIXEL / 2**20:.0f} MiB in a data worker; make them smaller: `tlt pack-images`"
    ]


@dataclass
class ImageSizes:
    """The sizes (n, 2) uint16 of consecutive images, and why some can't be read, by index."""

    sizes: np.ndarray
    faults: dict[int, str] = field(default_factory=dict)
    not_decoded: int = 0


def read_sizes(source: ImageSource, workers: int | None = None, decode: bool = False) -> ImageSizes:
    """Read the size of every image.

    Raises:
        UserError: A worker process was killed.
    """
    count = len(source)
    blocks = [range(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]
    whole = ImageSizes(np.zeros((count, 2), np.uint16))
    workers = available_cpus() if workers is None else workers
    what = f"{printable(source.root)}, {_BLOCK} images each"
    parts = in_processes(_read_block, (source, decode), blocks, workers, what, "block")
    for rows, part in zip(blocks, parts, strict=True):
        whole.sizes[rows.start : rows.stop] = part.sizes
        whole.faults |= part.faults
        whole.not_decoded += part.not_decoded
    return whole


def _read_block(job: tuple[ImageSource, bool], rows: range) -> ImageSizes:
    """Read the sizes of some images of a source; decode the images too if that is the job."""
    source, decode = job
    found = ImageSizes(np.zeros((len(rows), 2), np.uint16))
    for place, row in enumerate(rows):
        try:
            width, height = source.read_size(row, UNLIMITED)  # what is too large the programs say
            if max(width, height) > LARGEST_SIDE:
                raise BadImage(f"{width} x {height} pixels: no side may have more than {LARGEST_SIDE}")
            if decode and width * height > DEFAULT_MAX_PIXELS:
                found.not_decoded += 1
            elif decode:
                backend = TorchvisionBackend()
                encoded = backend.open(source.path(row), source.read(row), (width, height))
                backend.decode(encoded, None, (height, width), "bilinear")
            found.sizes[place] = width, height
        except BadImage as error:
            found.faults[row] = str(error)
    return found
