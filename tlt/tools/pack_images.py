"""An image folder, or any other source of images, into tar shards with an index (`tlt pack-images`).

OUT/SPLIT/00000.tar ...       images in the folder's order: KEY.jpg (bytes unchanged), KEY.cls, KEY.labels.safetensors
OUT/SPLIT/shards.safetensors  the index (`tlt.data.sources.shard_index`); written last
OUT/SPLIT/packing.json        what is being packed; only until the index is there

A shard that has its name is whole, and an index makes a split whole. The same command goes on where a killed one was;
what it then finds is read again, every byte of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tlt.data.sources.folder import TRAIN_SPLITS, VALIDATION_SPLITS
from tlt.data.sources.open_images import open_images
from tlt.data.sources.shard_index import Contents, write_index
from tlt.data.sources.shard_scan import ShardRows
from tlt.data.sources.shards import INDEX_NAME, PARTIAL_NAME, ShardIndex
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.files import locked, sync_folder, write_whole
from tlt.io.processes import in_processes
from tlt.io.text import printable
from tlt.labels.store import LabelStore, open_labels
from tlt.tools.shard_writer import ShardedSplit, describe_labels, make_shard, member_names, read_image
from tlt.tools.shrink_folder import ShrinkSettings

_SAMPLED = 256  # images whose bytes say how many make a shard


def pack_images(
    data: str,
    out: str,
    splits: Sequence[str] = (),
    labels: str | None = None,
    shard_mb: int = 512,
    workers: int = 1,
    overwrite: bool = False,
    shrinking: ShrinkSettings | None = None,
    dataset: str = "",
) -> list[str]:
    """Pack the images of a data set into shards; return lines that say what was done.

    Args:
        splits: What is packed, the training set first: its classes number the others. (): train and, where it is there,
            validation.
        labels: Label maps of the first split's images.
        shard_mb: About so many megabytes make a shard.
        overwrite: Begin anew.
        dataset: Kind of data set (`--dataset`).

    Raises:
        UserError: No images, an image or label that can't be read, or `out` can't be written or holds something else.
    """
    lines: list[str] = []
    class_names: list[str] | None = None
    for split in splits or _splits_of(data):
        source = open_images(data, split, dataset, class_names)
        first = class_names is None
        store = open_labels(labels, source.paths, None, None, "skip", source.class_names) if labels and first else None
        class_names = source.class_names
        packing = Packing(os.path.join(out, split), source, store, shard_mb, shrinking)
        lines += [*(f"warning: {warning}" for warning in source.warnings), *packing.run(workers, overwrite)]
    return lines


def _splits_of(data: str) -> list[str]:
    both = ("train", TRAIN_SPLITS), ("validation", VALIDATION_SPLITS)
    there = [split for split, names in both if any(os.path.isdir(os.path.join(data, name)) for name in names)]
    return there or ["train"]  # which is then missing


class Packing:
    """Writes the shards of one split.

    Args:
        folder: Of the shards; made if need be.
        source: The images.
        labels: Their label maps.
        shard_mb, shrinking: See `pack_images`.
    """

    def __init__(
        self,
        folder: str,
        source: ImageSource,
        labels: LabelStore | None,
        shard_mb: int,
        shrinking: ShrinkSettings | None,
    ) -> None:
        self.folder, self.source, self.labels, self.shrinking = folder, source, labels, shrinking
        self.shard_mb, self.shown = shard_mb, f"OUT {printable(folder)}"
        self.state = self._state()

    def run(self, workers: int, overwrite: bool) -> list[str]:
        """Write the shards that are missing, and the index. Returns lines that say what was done."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            with locked(self.folder, f"{self.shown}: another command is packing into it; wait until it ends"):
                self._refuse_other(overwrite)
                if overwrite:
                    self._remove()
                if (index := self._complete()) is not None:
                    return [f"{len(index)} images are packed in {printable(self.folder)} already"]
                split = self._begin()
                for temporary in Path(self.folder).glob(".*.tmp"):  # of a killed command
                    temporary.unlink()
                made = in_processes(make_shard, split, range(split.shards), workers, "packing", "shard")
                return self._finish(*zip(*made, strict=True))
        except OSError as error:
            where = printable(str(error.filename or self.folder))
            raise UserError(
                f"OUT {where} can't be written ({error.strerror}): mend that and run the same command again"
            ) from error

    def _state(self) -> dict[str, Any]:
        """The settings that must be equal for a command to continue what another one began."""
        names = hashlib.sha256("\0".join(self.source.class_names).encode(errors="surrogateescape"))
        for path, number in zip(self.source.paths, self.source.classes.tolist(), strict=True):
            names.update(f"\n{path}\0{number}".encode(errors="surrogateescape"))
        labels, shrinking = self.labels, self.shrinking
        digest = hashlib.sha256(repr((labels.shape, labels.area)).encode() + labels.identity()) if labels else None
        return {
            "images": names.hexdigest(),
            "labels": digest.hexdigest() if digest else None,
            "shard_mb": self.shard_mb,
            "shrinking": [shrinking.max_side, shrinking.quality] if shrinking else None,
        }

    def _refuse_other(self, overwrite: bool) -> None:
        names = os.listdir(self.folder)
        other = sorted(name for name in names if not _is_ours(name))
        if other:
            raise UserError(f"{self.shown} holds other things ({printable(other[0])}): choose another folder")
        begun = INDEX_NAME in names or PARTIAL_NAME in names
        if not begun and not overwrite and any(name.endswith(".tar") for name in names):
            raise UserError(f"{self.shown} holds tar files of unknown origin: choose another folder, or --overwrite")

    def _remove(self) -> None:
        for name in [INDEX_NAME, *os.listdir(self.folder)]:  # the index first: without it nothing is whole
            Path(self.folder, name).unlink(missing_ok=True)

    def _complete(self) -> ShardIndex | None:
        """The index of a split that is packed already, else None."""
        path = os.path.join(self.folder, INDEX_NAME)
        if not os.path.isfile(path):
            return None
        index = ShardIndex(path)
        index.check_shards()
        if index.description.get("packed") != self.state:
            raise UserError(
                f"{self.shown} holds shards of other images or labels, or packed in another way: choose another "
                "folder, or --overwrite"
            )
        Path(self.folder, PARTIAL_NAME).unlink(missing_ok=True)
        return index

    def _begin(self) -> ShardedSplit:
        """Plan the shards; the plan is saved, or compared with the one that another command saved."""
        path = Path(self.folder, PARTIAL_NAME)
        if not path.exists():
            content = {"state": self.state, "per_shard": self._images_per_shard()}
            write_whole(path, json.dumps(content).encode())
            sync_folder(self.folder)
        try:
            begun = json.loads(path.read_text())
            state, per_shard = begun["state"], int(begun["per_shard"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"OUT {printable(str(path))} is damaged ({error}): begin anew with --overwrite") from error
        if state != self.state:
            raise UserError(f"{self.shown} holds the beginning of other shards: choose another folder, or --overwrite")
        source, labels = self.source, self.labels
        missing = frozenset(labels.missing()) if labels else frozenset()
        return ShardedSplit(self.folder, source, member_names(source.paths), per_shard, labels, missing, self.shrinking)

    def _images_per_shard(self) -> int:
        rows = np.unique(np.linspace(0, len(self.source) - 1, _SAMPLED).astype(np.int64)).tolist()
        image = sum(len(read_image(self.source, row)) for row in rows) / len(rows)
        label = 4 * int(np.prod(self.labels.shape)) + tarfile.BLOCKSIZE if self.labels else 0
        return max(1, int(self.shard_mb * 1e6 / (image + label + 3 * tarfile.BLOCKSIZE)))

    def _finish(self, shards: Sequence[ShardRows], max_ids: Sequence[int]) -> list[str]:
        source, labels = self.source, None
        if self.labels is not None:
            labels = describe_labels(self.labels, max(max_ids))
        contents = Contents(
            source.paths, source.classes, source.class_names, source.folder_names, labels=labels, packed=self.state
        )
        lines = write_index(
            os.path.join(self.folder, INDEX_NAME), shards, contents, np.arange(len(source)), whole_folder=True
        )
        Path(self.folder, PARTIAL_NAME).unlink()
        size = sum(shard.length for shard in shards)
        return [*lines, f"{size} bytes, every one of them read back and compared"]


def _is_ours(name: str) -> bool:
    stem, extension = os.path.splitext(name.removeprefix(".").removesuffix(".tmp"))
    return stem + extension in (INDEX_NAME, PARTIAL_NAME) or (stem.isdigit() and extension == ".tar")
