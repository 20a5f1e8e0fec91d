"""The index of tar shards: made by reading every byte of them once.

A safetensors file. N images, in natural order of their names, S shards:

| tensor | | |
|---|---|---|
| `shard` | uint32 (N) | number of the shard |
| `offset`, `length` | int64 (N) | where in the shard the image lies, in bytes; length 0: an empty file |
| `crc32` | uint32 (N) | of the image |
| `size` | uint16 (N, 2) | width, height; 0, 0 where the image can't be read |
| `class` | int64 (N) | |
| `names`, `name_ends` | uint8, int64 (N) | all names in one, and where each ends |
| `label_offset`, `label_length`, `label_crc32` | as above | only with labels; length 0: this image has none |
| `shard_length`, `shard_head` | int64, uint32 (S) | bytes of a shard; crc32 of its first 4,096 |
| `shard_sha256` | uint8 (S, 32) | of the whole shard |

Its metadata (JSON): `shards`, their paths beside the index; `class_names` by number; `folder_names`, those of them
that are there; `named`, whether classes have names or but numbers; `whole_folder`, whether all tar files beside the
index are of it; `warnings`; `broken`, row and reason of images that can't be read; `labels`, what the maps are;
`packed`, what was packed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt.data.sources.shard_scan import ShardRows, scan_shard
from tlt.data.sources.shards import FORMAT, INDEX_NAME, ShardIndex, tar_files
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.natural import natural_key
from tlt.io.processes import in_processes
from tlt.io.tensor_file import refuse_other_file, write_tensors
from tlt.io.text import printable


@dataclass
class Contents:
    """What an index says of its images besides where they are, in the order of the shards.

    Attributes:
        names: `CLASS/FILE`.
        classes: (N,) int64.
        class_names, folder_names, named: See this module's text.
        labels: What the maps are.
        packed: What the shards were packed from.
    """

    names: Sequence[str]
    classes: np.ndarray
    class_names: list[str]
    folder_names: list[str]
    named: bool = True
    labels: dict[str, Any] | None = None
    packed: dict[str, Any] | None = None


def index_shards(
    source: str | Sequence[str], out: str | None = None, workers: int = 1, label_key: str = "label"
) -> list[str]:
    """Make the index of tar files in WebDataset's layout, whoever wrote them.

    A sample is one image, and its class as `KEY.cls` or as the number `label_key` in `KEY.json`. Classes are named
    after the keys' folders where each class has one of its own, else by their number.

    Args:
        source: A folder of tar files, or the files.
        out: The index; None: `shards.safetensors` in the folder. The tar files must lie in its folder or below.
        workers: Processes.

    Returns:
        Lines that say what was found.

    Raises:
        UserError: No tar files, one is cut or damaged, a sample without class, two images of one name, or shards that
            `tlt pack-images` made.
    """
    paths = [os.path.join(source, name) for name in _tars(source)] if isinstance(source, str) else list(source)
    for path in paths:
        if path.startswith("pipe:") or "://" in path:
            raise UserError(f"shard {printable(path)}: local files alone are read; copy it to a disk first")
    folder = (
        source if isinstance(source, str) else os.path.commonpath([os.path.dirname(path) for path in paths] or [""])
    )
    out = out or os.path.join(folder, INDEX_NAME)
    _keep_packed(out)
    shards = list(in_processes(_scan, label_key, paths, workers, "indexing", "shard"))
    contents = _contents(shards)
    order = sorted(range(len(contents.names)), key=lambda row: (natural_key(contents.names[row]), contents.names[row]))
    whole = isinstance(source, str) and os.path.dirname(os.path.abspath(out)) == os.path.abspath(source)
    return write_index(out, shards, contents, np.array(order, np.int64), whole)


def _tars(folder: str) -> list[str]:
    try:
        names = tar_files(folder)
    except OSError as error:
        raise UserError(f"{printable(folder)} can't be read ({error.strerror})") from error
    if not names:
        raise UserError(f"{printable(folder)} holds no tar files (*.tar)")
    return names


def _keep_packed(path: str) -> None:
    """Raise UserError if what is there is no index, or that of `tlt pack-images`, which knows names and labels."""
    refuse_other_file(path, FORMAT)
    if not os.path.isfile(path):
        return
    try:
        packed = ShardIndex(path).description["packed"]
    except UserError:  # it is damaged
        return
    if packed is not None:
        raise UserError(
            f"{printable(path)} was made by `tlt pack-images`, and knows names and labels that are not in the shards: "
            "run that again with --overwrite, or remove the index"
        )


def _scan(label_key: str, path: str) -> ShardRows:
    try:
        return scan_shard(path, label_key)
    except OSError as error:
        raise UserError(f"tar {printable(path)} can't be read ({error.strerror})") from error


def _contents(shards: list[ShardRows]) -> Contents:
    """Names and classes of samples that others wrote."""
    names = [name for shard in shards for name in shard.names]
    if not names:
        raise UserError(f"no image in {len(shards)} tar files, such as {printable(shards[0].path)}")
    classes = np.concatenate([shard.classes for shard in shards])
    folders = [os.path.basename(os.path.dirname(name)) for name in names]
    pairs = set(zip(folders, classes.tolist(), strict=True))
    named = all(folders) and len(pairs) == len(set(folders)) == len(np.unique(classes))
    class_names = [str(number) for number in range(int(classes.max()) + 1)]
    if named:
        for folder, number in pairs:
            class_names[number] = folder
    names = [
        name if folder else f"{number}/{name}" for name, folder, number in zip(names, folders, classes, strict=True)
    ]
    found = [class_names[number] for number in np.unique(classes)]
    return Contents(names, classes, class_names, found, named)


def write_index(
    out: str, shards: Sequence[ShardRows], contents: Contents, order: np.ndarray, whole_folder: bool
) -> list[str]:
    """Write the index.

    Args:
        order: (N,) int64, the images in the index's order.

    Returns:
        Lines that say what is there.

    Raises:
        UserError: Two images of one name, a shard outside of the index's folder, or the disk is full.
    """
    twice = [name for name, count in Counter(contents.names).items() if count > 1]
    if twice:
        raise UserError(
            f"{len(twice)} images are there more than once, such as {printable(twice[0])}: make shards anew"
        )
    folder = os.path.dirname(out) or "."
    paths = [os.path.relpath(shard.path, folder) for shard in shards]
    outside = [path for path in paths if path.startswith("..")]
    if outside:
        raise UserError(f"index {printable(out)}: shard {printable(outside[0])} is not beside it or below")
    starts = np.cumsum([0, *map(len, shards)])
    place = {int(row): number for number, row in enumerate(order)}
    broken: list[list[Any]] = sorted(
        [place[int(start) + row], reason]
        for start, shard in zip(starts, shards, strict=False)
        for row, reason in shard.broken.items()
    )
    names = [contents.names[row] for row in order]
    warnings = _left_out(shards)
    description = {
        "shards": paths,
        "class_names": contents.class_names,
        "folder_names": contents.folder_names,
        "named": contents.named,
        "whole_folder": whole_folder,
        "warnings": warnings,
        "broken": broken,
        "labels": contents.labels,
        "packed": contents.packed,
    }
    try:
        write_tensors(out, FORMAT, _tensors(shards, Names(names), contents, order), description)
    except OSError as error:
        raise UserError(f"{printable(out)} can't be written ({error.strerror}): mend that and run it again") from error
    counts = f"{len(names)} images of {len(contents.folder_names)} classes in {len(shards)} shards"
    lines = [f"warning: {text}" for text in warnings]
    lines += [f"{printable(names[row])}: {reason}" for row, reason in broken]
    return [*lines, f"{printable(out)}: {counts}, {len(broken)} can't be read"]


def _tensors(shards: Sequence[ShardRows], names: Names, contents: Contents, order: np.ndarray) -> dict[str, np.ndarray]:
    def images(attribute: str) -> np.ndarray:
        return np.concatenate([getattr(shard, attribute) for shard in shards])[order]

    places, labels = images("places"), images("label_places")
    number = np.repeat(np.arange(len(shards), dtype=np.uint32), [len(shard) for shard in shards])[order]
    tensors = {
        "shard": number,
        "offset": places[:, 0],
        "length": places[:, 1],
        "crc32": images("crc32"),
        "size": images("sizes"),
        "class": contents.classes[order],
        "names": np.frombuffer(names.block, np.uint8),
        "name_ends": names.ends,
        "shard_length": np.array([shard.length for shard in shards], np.int64),
        "shard_head": np.array([shard.head for shard in shards], np.uint32),
        "shard_sha256": np.array([list(shard.sha256) for shard in shards], np.uint8),
    }
    if contents.labels is not None:
        tensors |= {"label_offset": labels[:, 0], "label_length": labels[:, 1], "label_crc32": images("label_crc32")}
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _left_out(shards: Sequence[ShardRows]) -> list[str]:
    counts: Counter[str] = sum((shard.listing.left_out for shard in shards), Counter())
    examples = {kind: name for shard in shards[::-1] for kind, name in shard.listing.example.items()}
    return [f"left out {count} {kind}, such as {printable(examples[kind])}" for kind, count in counts.items()]
