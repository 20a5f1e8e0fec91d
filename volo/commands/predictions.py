"""What `volo predict` finds, a row for each image that could be read, and the files it becomes."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt.errors import UserError, require
from tlt.io.text import table
from tlt.tools.drawing import shorten
from volo.checkpoint.checkpoint_file import explained, install

COLUMNS = ("path", "rank", "class_id", "class_name", "probability")
Rows = Sequence[tuple[str, int, int, str, float]]
_WIDTH = 60  # characters of a class name on the terminal


class Table:
    """Rows of several tensors, in memory that is taken once.

    Args:
        most: Number of rows that there is room for.
    """

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self._tensors: dict[str, Tensor] = {}

    def add(self, rows: dict[str, Tensor]) -> None:
        """Append B rows to each tensor, all of them (B, ...). Raises UserError if the machine has too little memory."""
        for name, values in rows.items():
            if name not in self._tensors:
                self._tensors[name] = self._room(name, values)
            self._tensors[name][self.count : self.count + len(values)] = values
        self.count += len(next(iter(rows.values())))

    def tensors(self) -> dict[str, Tensor]:
        """The rows added so far, by name; nothing if none was."""
        return {name: tensor[: self.count] for name, tensor in self._tensors.items()}

    def _room(self, name: str, values: Tensor) -> Tensor:
        shape = (self.most, *values.shape[1:])
        gib = float(np.prod(shape, dtype=np.float64)) * values.element_size() / 2**30
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        told = f"{name} of {self.most} images take {gib:,.1f} GiB of memory"
        if gib > memory:
            raise UserError(
                f"--embeddings: {told}, this machine has {memory:,.1f}: --embeddings-pooled-only leaves the tokens "
                "out; or take fewer images at a time"
            )
        if gib > 1:
            print(told, flush=True)
        return torch.empty(shape, dtype=values.dtype)


def prediction_rows(paths: Sequence[str], ids: Tensor, probabilities: Tensor, names: Sequence[str]) -> Rows:
    """Return the values of `COLUMNS`, k rows for each image; rank 1 is the most probable class.

    Args:
        paths: N of them.
        ids, probabilities: (N, k), the most probable class first.
        names: Of all classes.
    """
    return [
        (in_text(path), rank, class_id, names[class_id], round(value, 8))
        for path, own_ids, values in zip(paths, ids.tolist(), probabilities.tolist(), strict=True)
        for rank, (class_id, value) in enumerate(zip(own_ids, values, strict=True), start=1)
    ]


def prediction_table(rows: Rows) -> list[str]:
    """Return the lines of a table for the terminal."""
    shown = [
        (path if rank == 1 else "", str(class_id), shorten(name, _WIDTH), f"{100 * value:5.1f} %")
        for path, rank, class_id, name, value in rows
    ]
    return table([("image", "id", "class", "probability"), *shown])


def write_predictions(path: Path, rows: Rows) -> None:
    """Write the rows as .csv, .json (a list of objects) or .parquet, in one step.

    Raises:
        NotWrittenError: The old file is unchanged.
    """

    def fill(staged: Path) -> None:
        if path.suffix == ".parquet":
            columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
            arrow = require("pyarrow", extra="parquet").table(columns)
            return require("pyarrow.parquet", extra="parquet").write_table(arrow, staged)
        with staged.open("w", newline="", encoding="utf-8") as file:
            if path.suffix == ".csv":
                csv.writer(file).writerows([COLUMNS, *rows])
            else:
                json.dump([dict(zip(COLUMNS, row, strict=True)) for row in rows], file, ensure_ascii=False, indent=0)

    _replace(path, fill, 100 * len(rows))


def write_embeddings(path: Path, paths: Sequence[str], embeddings: dict[str, Tensor]) -> None:
    """Write (N, ...) tensors and the N paths of their rows, in one step.

    The paths are the array `paths` in .npz, and in .safetensors the JSON list `paths` of the metadata.

    Raises:
        NotWrittenError: The old file is unchanged.
    """
    shown = list(map(in_text, paths))

    def fill(staged: Path) -> None:
        if path.suffix == ".safetensors":
            return save_file(embeddings, staged, metadata={"paths": json.dumps(shown)})
        arrays = {"paths": np.array(shown), **{name: tensor.numpy() for name, tensor in embeddings.items()}}
        with staged.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    _replace(path, fill, sum(tensor.numel() * tensor.element_size() for tensor in embeddings.values()))


def in_text(path: str) -> str:
    """Return a path as UTF-8 can hold it: other bytes of a file's name are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _replace(path: Path, fill: Callable[[Path], None], size: int) -> None:
    with explained(path, lambda: size):
        path.parent.mkdir(parents=True, exist_ok=True)
        install(path, fill)
