"""What `volo predict` finds, a row for each image that could be read, and the files it becomes."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from tlt.errors import require
from tlt.io.text import table
from tlt.tools.drawing import shorten
from volo.checkpoint.checkpoint import explained, install

COLUMNS = ("path", "rank", "class_id", "class_name", "probability")
Rows = Sequence[tuple[str, int, int, str, float]]
_WIDTH = 60  # characters of a class name on the terminal


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
        with staged.open("wb") as file:
            np.savez(file, **{"paths": np.array(shown)}, **{name: rows.numpy() for name, rows in embeddings.items()})  # type: ignore[arg-type]

    _replace(path, fill, sum(tensor.numel() * tensor.element_size() for tensor in embeddings.values()))


def in_text(path: str) -> str:
    """Return a path as UTF-8 can hold it: other bytes of a file's name are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _replace(path: Path, fill: Callable[[Path], None], size: int) -> None:
    with explained(path, lambda: size):
        path.parent.mkdir(parents=True, exist_ok=True)
        install(path, fill)
