"""Label archives of version 1 (safetensors shards with manifest.json) into one of today: `tlt pack OLD NEW`.

For one version of this software; nothing else reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load

from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.progress import Progress
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo

FORMAT = "volo-tlt label archive, version 1"
_CONTENTS = ("ids", "values", "log_sum_exp", "size", "area", "form")  # of a row's crc32, after its label file's name
_ABSENT = 0xFF  # in `form`: no label, the image could not be read


def convert_old_archive(old: str, out: str, overwrite: bool = False) -> list[str]:
    """Write the labels of an archive of version 1 into one of today; return lines that say what was done.

    Raises:
        UserError: The archive is incomplete or damaged, or `out` can't be written.
    """
    manifest = _read_manifest(os.path.join(old, "manifest.json"))
    header = manifest["header"]
    images, labels = _read_names(os.path.join(old, "names.safetensors"), header["names_sha256"])
    names = [image or label for image, label in zip(images, labels, strict=True)]
    writer = ArchiveWriter(out, _info_of(header, old), Names(names), overwrite, large_ids=header["ids"] == "I32")
    if writer.complete:
        raise UserError(f"OUT {printable(out)} is a complete label archive: choose another folder, or --overwrite")
    pending, absent = set(writer.pending()), []
    progress = Progress("converting", len(pending), "label")
    for shard, start in enumerate(range(0, len(names), header["shard_records"])):
        path = os.path.join(old, f"{shard:05d}.safetensors")
        tensors = _read_shard(path)
        for place in range(min(header["shard_records"], len(names) - start)):
            row, has_label = start + place, tensors["form"][place] != _ABSENT
            absent += [] if has_label else [names[row]]
            if row not in pending:
                continue
            _check_row(tensors, place, labels[row], path)
            if has_label:
                writer.write(row, _map_of(tensors, place, header["transposed"], labels[row]))
            else:
                writer.write_absent(row)
            progress.step()
    progress.close()
    writer.finish(absent, manifest["accuracy"])
    return [f"{len(names) - len(absent)} labels of {printable(old)} written into {printable(out)}"]


def _read_manifest(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_bytes())
        digest = content.pop("sha256")
        if content["format"] != FORMAT or digest != hashlib.sha256(_sorted(content)).hexdigest():
            raise ValueError("its checksum is wrong")
        return content
    except FileNotFoundError as error:
        raise UserError(f"{printable(path)} is not there: the old archive is not complete; make one anew") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{printable(path)} can't be read ({error!r}): copy the archive again") from error


def _sorted(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _info_of(header: dict[str, Any], old: str) -> LabelInfo:
    grid = tuple(header["grid"])[::-1] if header["transposed"] else tuple(header["grid"])
    text = header["labels_json"]
    info = LabelInfo.parse(text, f"{old}: labels.json") if text else LabelInfo(header["k"], grid)
    area = header["area"] if isinstance(header["area"], str) else tuple(header["area"])
    return replace(info, k=header["k"], grid=grid, area=area, log_sum_exp=header["log_sum_exp"], skipped=[])


def _read_names(path: str, sha256: str) -> list[Names]:
    """Images ("" where not known) and label files."""
    content = Path(path).read_bytes() if os.path.isfile(path) else b""
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{printable(path)} is missing or damaged: copy the archive again")
    tensors = load(content)
    return [Names.packed(tensors[f"{kind}s"].data, tensors[f"{kind}_ends"]) for kind in ("image", "label")]


def _read_shard(path: str) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{printable(path)} can't be read ({error}): copy the archive again") from error


def _check_row(tensors: dict[str, np.ndarray], place: int, label: str, path: str) -> None:
    crc = zlib.crc32(os.fsencode(label))
    for name in _CONTENTS:
        if name in tensors:
            crc = zlib.crc32(tensors[name][place].tobytes(), crc)
    if crc != tensors["crc32"][place]:
        raise UserError(
            f"label of {printable(label)} in {printable(path)}, row {place}, is damaged (crc32 is wrong): copy the "
            "archive again"
        )


def _map_of(tensors: dict[str, np.ndarray], place: int, transposed: bool, label: str) -> LabelMap:
    names = [name for name in ("values", "ids", "log_sum_exp") if name in tensors]
    values, ids, *sums = (
        tensors[name][place].swapaxes(-1, -2) if transposed else tensors[name][place] for name in names
    )
    source = f"label {printable(label)}"
    return LabelMap(values, ids.astype(np.int32), source=source, log_sum_exp=sums[0] if sums else None)
