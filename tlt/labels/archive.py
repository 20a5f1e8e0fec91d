"""Reading a label archive: maps by image, from memory that all workers and ranks of a machine share.

What can be known at the start is checked there: that the archive is complete, that every file has its length and
header, that the names match the images, that no class id is too large. The crc32 of a row, compared when the row is
read, finds what can't be checked at the start (a flipped bit among 8 GB). `tlt check` compares the files' sha256 too.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tlt.errors import UserError
from tlt.io.files import sha256_of
from tlt.io.names import Names
from tlt.io.text import printable
from tlt.labels.archive_format import (
    MANIFEST_NAME,
    NAMES_NAME,
    PARTIAL_NAME,
    Form,
    Header,
    Manifest,
    MappedFile,
    names_fields,
    row_crc,
    shard_name,
)
from tlt.labels.label_files import find_labels, published_label_name, usual_label_name
from tlt.labels.records import GRID_FIELDS, MapForm, Record


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

    It is pickled as its path; a forked process uses the same mapping.

    Attributes:
        keys: (records,) crc32 of each row's label file, with which the row's crc32 begins: a row is bound to its name.
    """

    def __init__(self, root: str | Path, header: Header) -> None:
        self.root, self.header = os.fspath(root), header
        self._map()

    def _map(self) -> None:
        header = self.header
        self._names = MappedFile(os.path.join(self.root, NAMES_NAME), names_fields(header.records, *header.name_bytes))
        self._shards = [
            MappedFile(os.path.join(self.root, shard_name(shard)), header.shard_fields(shard))
            for shard in range(header.shards)
        ]
        self.keys = np.fromiter(map(zlib.crc32, self.all_names("label").encoded()), np.uint32, header.records)

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "header": self.header}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def label(self, row: int) -> bytes:
        """Label file of a row."""
        ends = self._names.tensors["label_ends"]
        start = int(ends[row - 1]) if row else 0
        return self._names.tensors["labels"][start : int(ends[row])].tobytes()

    def all_names(self, kind: str) -> Names:
        """All names of a kind, "image" ("" where not known) or "label", in row order."""
        return Names.packed(self._names.tensors[f"{kind}s"].data, self._names.tensors[f"{kind}_ends"])

    def column(self, name: str) -> np.ndarray:
        """A copy of one tensor of all shards, concatenated."""
        return np.concatenate([shard.tensors[name] for shard in self._shards])

    def valid(self, row: int) -> bool:
        """Whether the checksum of a row is right."""
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


class ArchiveReader:
    """The rows of an archive that belong to a list of images. A `tlt.labels.records.Reader`.

    Images are matched by name, in whatever order the archive has them: by the image's own name where the archive knows
    it, else by label file, with the rule of `tlt.labels.tree.TreeReader`.

    Args:
        names: Image paths relative to the image folder.
        published_names: As for `TreeReader`.

    Raises:
        UserError: No archive, not complete, or damaged.
    """

    def __init__(self, root: str, names: Names, published_names: bool = False) -> None:
        self.root, self.published_names, self._names = root, published_names, names
        self.manifest = read_manifest(root)
        header = self.manifest.header
        self.rows = Rows(root, header)
        if sha256_of(os.path.join(root, NAMES_NAME)) != header.names_sha256:
            raise UserError(f"label archive {printable(root)}: {NAMES_NAME} is damaged; copy the archive again")
        grid = header.grid[::-1] if header.transposed else header.grid
        self.form = MapForm(
            (header.k, *grid), self.manifest.max_id, header.area, header.log_sum_exp, header.labels_json
        )
        self._row_of = self._match(names)  # (images,) int64 row, -1: none
        self.missing = set(np.flatnonzero(self._row_of < 0).tolist())

    def source(self, index: int) -> str:
        return f"label of {printable(self._names[index])} in {printable(self.root)}"

    def usual_label(self, name: str) -> str:
        return published_label_name(name) if self.published_names else usual_label_name(name)

    def identity(self) -> bytes:
        return Path(self.root, MANIFEST_NAME).read_bytes()

    def record(self, index: int) -> Record:
        tensors, place = self.rows.tensors(int(self._row_of[index]))
        record = {name: tensors[name][place] for name in Record._fields if name in tensors}
        if self.manifest.header.transposed:
            record |= {name: record[name].swapaxes(-1, -2) for name in GRID_FIELDS if name in record}
        return Record(**record)

    def extra(self) -> list[str]:
        used = np.zeros(self.manifest.header.records, bool)
        used[self._row_of[self._row_of >= 0]] = True
        used |= self.rows.column("form") == Form.ABSENT
        return [os.fsdecode(self.rows.label(row)) for row in np.flatnonzero(~used).tolist()]

    def damaged_files(self) -> list[str]:
        files = self.manifest.files.items()
        return [name for name, (_, sha256) in files if sha256_of(os.path.join(self.root, name)) != sha256]

    def _match(self, names: Sequence[str]) -> np.ndarray:
        forms = self.rows.column("form")
        images, labels = self.rows.all_names("image"), self.rows.all_names("label")
        if not self.published_names and (images == names or _are_labels_of(labels, names)):
            rows = np.arange(len(names))
            rows[forms == Form.ABSENT] = -1
            return rows
        row_of_image = {} if self.published_names else {name: row for row, name in enumerate(images) if name}
        rows = np.array([row_of_image.get(name, -1) for name in names], np.int64)
        taken = set(rows.tolist())
        row_of_label = {
            label: row for row, label in enumerate(labels) if row not in taken and forms[row] != Form.ABSENT
        }
        rest = np.flatnonzero(rows < 0).tolist()
        rest_names = [names[index] for index in rest]
        files: dict[str, set[str]] = {}  # by folder
        for label in row_of_label:
            files.setdefault(os.path.dirname(label), set()).add(os.path.basename(label))
        found = find_labels(lambda folder: files.get(folder, set()), self.root, rest_names, self.published_names)
        for place, index in enumerate(rest):
            if place not in found.missing:
                rows[index] = row_of_label[found.label(place, rest_names[place])]
        rows[forms[rows] == Form.ABSENT] = -1
        return rows


def _are_labels_of(labels: Names, names: Sequence[str]) -> bool:
    """Whether each label file is called after the image in its place. Label files have different names, so then no two
    images share a stem."""
    pairs = zip(labels, names, strict=False)
    return len(labels) == len(names) and all(usual_label_name(name) == label for label, name in pairs)
