"""Reading a label archive: maps by image, from memory that all workers and ranks of a machine share.

What can be known at the start is checked there: that the archive is complete, that every file has its length and
header, that the names match the images, that no class id is too large. What can't (a flipped bit among 8 GB) is noticed
by the crc32 of a row when it is read. `tlt check` compares the files with their sha256 too.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tlt.archive_format import (
    MANIFEST_NAME,
    NAMES_NAME,
    PARTIAL_NAME,
    Form,
    Header,
    Manifest,
    MappedFile,
    row_crc,
    sha256_of,
    shard_name,
)
from tlt.data.folder import printable
from tlt.errors import UserError
from tlt.label_files import find_labels, find_published
from tlt.label_map import LabelMap
from tlt.label_store import LabelStore
from tlt.store import TreeMetadata
from tlt.tail import relative_to_tail

_HALF_EXPONENT = np.uint16(0x7C00)  # all ones: infinite or not a number
_ASPECT_TOLERANCE = 0.02  # between the image a label was made of and the image now, which may have been made smaller


def is_archive(root: str | Path) -> bool:
    """Whether a folder is a label archive, complete or not."""
    return any(os.path.isfile(os.path.join(root, name)) for name in (MANIFEST_NAME, PARTIAL_NAME))


def read_manifest(root: str | Path) -> Manifest:
    """The manifest of a complete archive.

    Raises:
        UserError: There is none, it is not complete, or damaged.
    """
    shown = printable(os.fspath(root))
    if not is_archive(root):
        raise UserError(f"{shown} is not a label archive (no {MANIFEST_NAME} in it): make one with `tlt pack`")
    if not os.path.isfile(os.path.join(root, MANIFEST_NAME)):
        raise UserError(f"label archive {shown} is not complete: run the command that was making it again")
    return Manifest.read(os.path.join(root, MANIFEST_NAME))


class Rows:
    """The files of an archive, mapped: rows by number.

    Travels to other processes as its path; a forked process uses the same mapping.

    Attributes:
        keys: (records,) crc32 of each row's label file, with which the row's crc32 begins: a row is bound to its name.
    """

    def __init__(self, root: str | Path, header: Header) -> None:
        self.root, self.header = os.fspath(root), header
        self._map()

    def _map(self) -> None:
        header = self.header
        self._names = MappedFile(os.path.join(self.root, NAMES_NAME), header.names_fields())
        self._shards = [
            MappedFile(os.path.join(self.root, shard_name(shard)), header.shard_fields(shard))
            for shard in range(header.shards)
        ]
        block, ends = self._names.tensors["labels"].tobytes(), self._names.tensors["label_ends"].tolist()
        pairs = zip([0, *ends], ends, strict=False)
        self.keys = np.fromiter((zlib.crc32(block[start:end]) for start, end in pairs), np.uint32, header.records)

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "header": self.header}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def label(self, row: int) -> bytes:
        """Label file of a row."""
        return self._name("label", row)

    def image(self, row: int) -> str:
        """Image of a row, relative to the image folder; "" where it is not known."""
        return os.fsdecode(self._name("image", row))

    def _name(self, kind: str, row: int) -> bytes:
        ends = self._names.tensors[f"{kind}_ends"]
        start = int(ends[row - 1]) if row else 0
        return self._names.tensors[f"{kind}s"][start : int(ends[row])].tobytes()

    def all_names(self, kind: str) -> list[str]:
        """All names of a kind, "image" or "label", in row order."""
        block = self._names.tensors[f"{kind}s"].tobytes()
        ends = self._names.tensors[f"{kind}_ends"].tolist()
        return [os.fsdecode(block[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

    def column(self, name: str) -> np.ndarray:
        """A tensor of all shards in one, copied."""
        return np.concatenate([shard.tensors[name] for shard in self._shards])

    def valid(self, row: int) -> bool:
        """Whether a row is what was written."""
        shard, place = self._place(row)
        shard.check_length()
        return int(shard.tensors["crc32"][place]) == row_crc(shard.rows, place, int(self.keys[row]))

    def absent(self, row: int) -> bool:
        """Whether a row says that it has no label."""
        shard, place = self._place(row)
        return int(shard.tensors["form"][place]) == Form.ABSENT

    def tensors(self, row: int) -> tuple[dict[str, np.ndarray], int]:
        """The tensors of a row's shard, and its place in them.

        Raises:
            UserError: The row is damaged.
        """
        shard, place = self._place(row)
        if not self.valid(row):
            raise UserError(
                f"label of {printable(os.fsdecode(self.label(row)))} in {printable(shard.path)}, row {place}, is "
                "damaged (crc32 is wrong): copy the archive again, or pack it again"
            )
        return shard.tensors, place

    def _place(self, row: int) -> tuple[MappedFile, int]:
        shard, place = divmod(row, self.header.shard_records)
        return self._shards[shard], place


class LabelArchive(LabelStore):
    """The label maps of a list of images, out of an archive.

    Images are matched by name, in whatever order the archive has them: by the image's own name where the archive knows
    it, else by label file, with the rule of `PublishedTree`.

    Args and attributes: those of `LabelStore`, and `label_tail`: the logit of classes that a cell doesn't list.
    `"zero"`: 0, as published. `"exact"`: such that they have the share that the annotator gave them (`tlt.tail`).

    Raises:
        UserError: No archive, not complete, damaged, made for other classes or images, without the log-sum-exp that
            `"exact"` needs; with `"stop"` also if any image has no label.
    """

    def __init__(
        self,
        root: str | Path,
        names: Sequence[str],
        area: str | None = None,
        num_classes: int | None = None,
        bad_label: str = "stop",
        class_names: Sequence[str] | None = None,
        published_names: bool = False,
        label_tail: str = "zero",
    ) -> None:
        super().__init__(root, names, num_classes, bad_label, published_names)
        self.manifest = read_manifest(self.root)
        header = self.manifest.header
        self.rows = Rows(self.root, header)
        if sha256_of(os.path.join(self.root, NAMES_NAME)) != header.names_sha256:
            raise UserError(f"label archive {printable(self.root)}: {NAMES_NAME} is damaged; copy the archive again")
        text = header.labels_json
        self.metadata = None if text is None else TreeMetadata.parse(text, f"{self.root}/{MANIFEST_NAME}")
        self._compare(class_names)
        self._check_ids()
        self._tail_classes = self._classes_of_tail(label_tail)
        self._area_asked = area is not None
        self._resolve_area(area, header.area)
        grid = header.grid[::-1] if header.transposed else header.grid
        self.shape = (header.k, *grid)
        self._row_of = self._match(names)  # (images,) int64 row, -1: none
        self._missing = set(np.flatnonzero(self._row_of < 0).tolist())
        self._refuse_missing(names)

    def source(self, index: int) -> str:
        return f"label of {printable(self._names[index])} in {printable(self.root)}"

    def load(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        tensors, place = self.rows.tensors(int(self._row_of[index]))
        values, ids = tensors["values"][place], tensors["ids"][place]
        # Class ids were compared with the manifest's largest one when it was made, and haven't changed since. Values
        # were looked at too, but not by whatever other program may have written the archive.
        if np.maximum.reduce(values.view(np.uint16) & _HALF_EXPONENT, axis=None) == _HALF_EXPONENT:
            raise UserError(f"{self.source(index)}: a label value is NaN or infinite; make this label again")
        if self._tail_classes:
            values = self._relative_to_tail(index, values, tensors["log_sum_exp"][place])
        x0, y0, x1, y1 = tensors["area"][place].tolist()
        if width and height:
            self._compare_size(index, tensors["size"][place].tolist(), width, height)
        if self.manifest.header.transposed:
            values, ids = values.swapaxes(1, 2), ids.swapaxes(1, 2)
        area = self._area_of(width, height) if self._area_asked or x0 < 0 else (x0, y0, x1, y1)
        return LabelMap(values.copy(), ids.astype(np.int32), area)

    def log_sum_exp(self, index: int) -> np.ndarray | None:
        """(h, w) float32 log-sum-exp of all the annotator's logits for image `index`; None: the archive has none."""
        tensors, place = self.rows.tensors(int(self._row_of[index]))
        if "log_sum_exp" not in tensors:
            return None
        values = tensors["log_sum_exp"][place]
        return (values.T if self.manifest.header.transposed else values).copy()

    def _classes_of_tail(self, label_tail: str) -> int:
        """C for `"exact"`, 0 for `"zero"`."""
        if label_tail == "zero":
            return 0
        shown = f"--label-tail {label_tail}: label archive {printable(self.root)}"
        classes = self.num_classes or (self.metadata.num_classes if self.metadata else 0)
        if not self.manifest.header.log_sum_exp:
            raise UserError(f"{shown} has no log-sum-exp: make it with `generate_label.py --format archive`")
        if not classes:
            raise UserError(f"{shown} does not say how many classes there are: give --num-classes")
        return classes

    def _relative_to_tail(self, index: int, values: np.ndarray, log_sum_exp: np.ndarray) -> np.ndarray:
        if not np.isfinite(log_sum_exp).all():
            raise UserError(f"{self.source(index)}: a log-sum-exp is NaN or infinite; make this label again")
        # Tensors want memory that they may write to.
        both = torch.from_numpy(values.copy()), torch.from_numpy(log_sum_exp.copy())
        return relative_to_tail(*both, self._tail_classes).numpy()

    def extra(self) -> list[str]:
        """Label files that belong to none of the images."""
        used = np.zeros(self.manifest.header.records, bool)
        used[self._row_of[self._row_of >= 0]] = True
        used |= self.rows.column("form") == Form.ABSENT
        return [os.fsdecode(self.rows.label(row)) for row in np.flatnonzero(~used).tolist()]

    def damaged_files(self) -> list[str]:
        """Files of the archive whose sha256 is not the manifest's."""
        files = self.manifest.files.items()
        return [name for name, (_, sha256) in files if sha256_of(os.path.join(self.root, name)) != sha256]

    def _check_ids(self) -> None:
        if self.num_classes is not None and self.manifest.max_id >= self.num_classes:
            raise UserError(
                f"--token-label-data {printable(self.root)} has class ids up to {self.manifest.max_id}, which are not "
                f"in 0..{self.num_classes - 1} (--num-classes {self.num_classes}); were these labels made for other "
                "classes?"
            )

    def _compare_size(self, index: int, recorded: list[int], width: int, height: int) -> None:
        was_width, was_height = recorded
        if abs(was_width * height - was_height * width) > _ASPECT_TOLERANCE * max(was_width * height, 1):
            raise UserError(
                f"{self.source(index)} was made of an image of {was_width} x {was_height} pixels, which now has "
                f"{width} x {height}: make this label again"
            )

    def _match(self, names: Sequence[str]) -> np.ndarray:
        forms = self.rows.column("form")
        images, labels = self.rows.all_names("image"), self.rows.all_names("label")
        row_of_image = {} if self.published_names else {name: row for row, name in enumerate(images) if name}
        rows = np.array([row_of_image.get(name, -1) for name in names], np.int64)
        taken = set(rows.tolist())
        row_of_label = {
            label: row for row, label in enumerate(labels) if row not in taken and forms[row] != Form.ABSENT
        }
        rest = np.flatnonzero(rows < 0).tolist()
        rest_names = [names[index] for index in rest]
        find = find_published if self.published_names else find_labels
        found = find(_ArchiveListing(self.root, row_of_label), rest_names)
        for place, index in enumerate(rest):
            if place not in found.missing:
                label = found.other_name.get(place) or os.path.splitext(rest_names[place])[0] + ".pt"
                rows[index] = row_of_label[label]
        rows[forms[rows] == Form.ABSENT] = -1
        return rows


class _ArchiveListing:
    """The label files of an archive, as `find_labels` looks at them."""

    def __init__(self, root: str, labels: dict[str, int]) -> None:
        self.root, self._labels = root, labels
        self._by_folder: dict[str, set[str]] = {}
        for label in labels:
            folder, file = os.path.split(label)
            self._by_folder.setdefault(folder, set()).add(file)

    def files(self, folder: str) -> set[str]:
        return set(self._by_folder.get(folder, ()))

    def has(self, path: str) -> bool:
        return path in self._labels
