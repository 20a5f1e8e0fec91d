"""Writing a label archive, row by row, in any order, by any number of processes, any of which may be killed any time.

A row is written with its crc32 last. A row counts once its crc32 matches, so the same command finds what is left to do;
the archive is there when the manifest is. The finished files are a function of the rows alone, not of who wrote them
when.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tlt.errors import UserError
from tlt.io.files import sha256_of, sync_folder, write_whole
from tlt.io.tensor_file import numpy_dtype
from tlt.io.text import printable
from tlt.label_map import Area, LabelMap
from tlt.labels.agreement import Agreement
from tlt.labels.archive import Rows
from tlt.labels.archive_format import (
    MANIFEST_NAME,
    NAMES_NAME,
    PARTIAL_NAME,
    SHARD_RECORDS,
    Form,
    Header,
    Manifest,
    file_header,
    file_places,
    names_fields,
    row_bytes,
    row_crc,
    shard_name,
)
from tlt.labels.metadata import TreeMetadata


def make_header(
    shape: tuple[int, int, int],
    num_classes: int,
    images: Sequence[str],
    labels: Sequence[str],
    area: str | Area = "full",
    metadata: TreeMetadata | str | None = None,
    log_sum_exp: bool = False,
    transposed: bool = False,
    shard_records: int = SHARD_RECORDS,
) -> Header:
    """The header of an archive of maps of `shape` (k, h, w), with class ids below `num_classes`.

    Args:
        images, labels: Image path ("" where not known) and label file of every row.
        metadata: What `labels.json` says, or its text.
    """
    text = metadata.text() if isinstance(metadata, TreeMetadata) else metadata
    content, sizes = _names_file(images, labels)
    return Header(
        k=shape[0],
        grid=shape[1:],
        ids="U16" if num_classes <= 2**16 else "I32",
        log_sum_exp=log_sum_exp,
        records=len(labels),
        shard_records=shard_records,
        name_bytes=sizes,
        names_sha256=hashlib.sha256(content).hexdigest(),
        area=area,
        transposed=transposed,
        labels_json=text,
    )


class ArchiveWriter:
    """An archive that is being written.

    Args:
        root: Its folder; made if need be.
        header: From `make_header`, with the same names.
        images, labels: Image path ("" where not known) and label file of every row.
        overwrite: Begin anew: the archive that is there, complete or not, is removed, and nothing else.

    Raises:
        UserError: The folder holds something else, a complete archive, or the beginning of another one.
    """

    def __init__(
        self, root: str | Path, header: Header, images: Sequence[str], labels: Sequence[str], overwrite: bool = False
    ) -> None:
        self.root, self.header = Path(root), header
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            there = self._archive_there(overwrite)
            self._begin(images, labels, there if overwrite else [])
            self.rows = Rows(self.root, header)
            self._files = [
                os.open(self.root / shard_name(shard), os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
                for shard in range(header.shards)
            ]
        except OSError as error:
            raise self._unwritable(error) from error
        self._places = [file_places(header.shard_fields(shard))[0] for shard in range(header.shards)]

    def pending(self) -> list[int]:
        """Rows that are not written yet."""
        return [row for row in range(self.header.records) if not self.rows.valid(row)]

    def has_label(self, row: int) -> bool:
        """Whether a row is written, and not as absent."""
        return self.rows.valid(row) and not self.rows.absent(row)

    def write(
        self,
        row: int,
        label_map: LabelMap,
        size: tuple[int, int] = (0, 0),
        form: int = 0,
        log_sum_exp: np.ndarray | None = None,
        area: Area | None = None,
    ) -> None:
        """Write a row.

        Args:
            label_map: Values and ids as stored, (k, h, w).
            size: Width and height of the image; 0 where not known.
            form: Bits of `Form`.
            log_sum_exp: (h, w), where the header has it.
            area: Instead of the map's; `UNKNOWN_AREA` where only the image's size would tell.

        Raises:
            UserError: The map can't be trained on, is of another shape, or the disk is full.
        """
        header, label = self.header, os.fsdecode(self.rows.label(row))
        replace(label_map, source=f"label {printable(label)}").validate(None)
        if header.ids == "U16" and label_map.ids.max() >= 2**16:
            raise UserError(
                f"label {printable(label)}: class id {label_map.ids.max()}, but the first label is in a number format "
                "that ends at 65,535: store all labels in one format, such as float32"
            )
        if label_map.shape != (header.k, *header.grid):
            raise UserError(
                f"label {printable(label)}: shape (k, h, w) = {label_map.shape}, but the archive's is "
                f"{(header.k, *header.grid)}; make it again with the others' settings"
            )
        if (log_sum_exp is not None) != header.log_sum_exp:
            raise ValueError("log_sum_exp is given if and only if the header has it")
        tensors = {} if log_sum_exp is None else {"log_sum_exp": log_sum_exp}
        where = area or label_map.area
        self._write_row(row, ids=label_map.ids, values=label_map.values, size=size, area=where, form=form, **tensors)

    def write_absent(self, row: int) -> None:
        """Write that a row has no label."""
        self._write_row(row, form=Form.ABSENT)

    def finish(
        self, labels_json: str | None = None, tally: Agreement | None = None, classes: np.ndarray | None = None
    ) -> Manifest:
        """Read every row again and close the archive.

        Args:
            labels_json: Text of `labels.json` to be recorded instead of the header's.
            tally: Counts how well the labels name `classes`, (records,), -1 where not known.

        Raises:
            UserError: A row is missing or damaged, or the disk fails.
        """
        max_id = absent = 0
        for row in range(self.header.records):
            tensors, place = self.rows.tensors(row)
            if tensors["form"][place] == Form.ABSENT:
                absent += 1
                continue
            ids = tensors["ids"][place].astype(np.int32)
            max_id = max(max_id, int(ids.max()))
            if tally is not None and classes is not None and classes[row] >= 0:
                tally.add(int(classes[row]), LabelMap(tensors["values"][place], ids))
        header = self.header if labels_json is None else replace(self.header, labels_json=labels_json)
        try:
            for descriptor in self._files:
                os.fsync(descriptor)
            sync_folder(self.root)
            names = [NAMES_NAME, *(shard_name(shard) for shard in range(header.shards))]
            files = {name: ((self.root / name).stat().st_size, sha256_of(self.root / name)) for name in names}
            manifest = Manifest(header, files, max_id, absent, tally.summary() if tally else {})
            manifest.write(self.root / MANIFEST_NAME)
            (self.root / PARTIAL_NAME).unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        self.close()
        return manifest

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []

    def _write_row(self, row: int, **tensors: npt.ArrayLike) -> None:
        """Write the tensors of a row, zeros where they are not given."""
        shard, place = divmod(row, self.header.shard_records)
        stored = {
            name: np.array(np.broadcast_to(tensors.get(name, 0), shape[1:]), numpy_dtype(dtype), order="C")[None]
            for name, (dtype, shape) in self.header.shard_fields(shard).items()
            if name != "crc32"
        }
        crc = np.array([row_crc(row_bytes(stored), 0, int(self.rows.keys[row]))], numpy_dtype("U32"))
        try:
            for name, tensor in [*stored.items(), ("crc32", crc)]:  # the crc32 last: it says that the row is there
                # Not through the memory map: a full disk would kill the process there, here it is an error.
                data = tensor.tobytes()
                if os.pwrite(self._files[shard], data, self._places[shard][name] + place * len(data)) != len(data):
                    raise OSError(28, "No space left on device")
        except OSError as error:
            raise self._unwritable(error) from error

    def _archive_there(self, overwrite: bool) -> list[str]:
        """The files of the archive that is there, the manifest last: those that it names. Raises UserError."""
        shown = printable(str(self.root))
        names = sorted(name for name in os.listdir(self.root) if not name.startswith("."))
        manifests = [name for name in (MANIFEST_NAME, PARTIAL_NAME) if name in names]
        headers = [Manifest.read(self.root / name).header for name in manifests]
        ours = [name for name in names if any(header.has_file(name) for header in headers)] + manifests
        for name in names:
            if not name.endswith(".safetensors") and name not in ours:
                raise UserError(f"OUT {shown} holds other things ({printable(name)}): choose another folder")
            if self.header.has_file(name) and name not in ours:
                raise UserError(f"OUT {shown} holds {name}, of no archive that is there: choose another folder")
        if MANIFEST_NAME in names and not overwrite:
            raise UserError(f"OUT {shown} is a complete label archive: choose another folder, or --overwrite")
        if names and PARTIAL_NAME not in names and not overwrite:
            raise UserError(f"OUT {shown} holds files of unknown origin: choose another folder, or --overwrite")
        return ours

    def _begin(self, images: Sequence[str], labels: Sequence[str], old: list[str]) -> None:
        """Remove the `old` files, write the header first, then create the files that are missing or were cut while they
        were created."""
        partial, header = self.root / PARTIAL_NAME, self.header
        for name in old:
            (self.root / name).unlink()
        if not partial.exists():
            Manifest(header).write(partial)
        elif Manifest.read(partial).header != header:
            raise UserError(
                f"OUT {printable(str(self.root))} holds the beginning of another archive: choose another folder, "
                "or --overwrite"
            )
        content, _ = _names_file(images, labels)
        names = self.root / NAMES_NAME
        if not names.exists() or names.read_bytes() != content:
            write_whole(names, content)
        for shard in range(header.shards):
            self._make_shard(self.root / shard_name(shard), shard)

    def _make_shard(self, path: Path, shard: int) -> None:
        fields = self.header.shard_fields(shard)
        start, size = file_header(fields), file_places(fields)[1]
        with open(path, "r+b" if path.exists() else "w+b") as file:
            if file.read(len(start)) != start or path.stat().st_size != size:
                file.seek(0)
                file.write(start)
                file.truncate(size)

    def _unwritable(self, error: OSError) -> UserError:
        where = printable(str(error.filename or self.root))
        return UserError(f"OUT {where} can't be written ({error.strerror}); make room and run the same command again")


def _names_file(images: Sequence[str], labels: Sequence[str]) -> tuple[bytes, tuple[int, int]]:
    """The names' file, and the length of all image paths and of all label files."""
    both = [[os.fsencode(name) for name in names] for names in (images, labels)]
    blocks = [b"".join(names) for names in both]
    ends = [np.cumsum([len(name) for name in names], dtype=np.int64).astype("<i8").tobytes() for names in both]
    sizes = len(blocks[0]), len(blocks[1])
    return b"".join([file_header(names_fields(len(labels), *sizes)), *ends, *blocks]), sizes
