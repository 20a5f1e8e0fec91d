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
from safetensors.numpy import load

from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.progress import Progress
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo

_CONTENTS = ("ids", "values", "log_sum_exp", "size", "area", "form")  # of a row's crc32, after its label file's name
_ABSENT = 0xFF  # in `form`: no label, the image could not be read


def convert_old_archive(old: str, out: str, overwrite: bool = False) -> list[str]:
    """Write the labels of an archive of version 1 into one of today; return lines that say what was done.

    Raises:
        UserError: The archive is incomplete or damaged, or `out` can't be written.
    """
    try:
        manifest = json.loads(Path(old, "manifest.json").read_bytes())
        digest = manifest.pop("sha256")
        if digest != hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest():
            raise ValueError("the checksum of manifest.json is wrong")
        content = Path(old, "names.safetensors").read_bytes()
        if manifest["header"]["names_sha256"] != hashlib.sha256(content).hexdigest():
            raise ValueError("the checksum of names.safetensors is wrong")
        return _convert(old, out, overwrite, manifest, load(content))
    except UserError:
        raise
    except Exception as error:  # whatever damaged files lead to
        raise UserError(
            f"label archive {printable(old)} of an earlier version is damaged or not complete ({error}): copy the "
            "archive again, or make it anew"
        ) from error


def _convert(old: str, out: str, overwrite: bool, manifest: dict[str, Any], packed: dict[str, np.ndarray]) -> list[str]:
    header = manifest["header"]
    images, labels = (Names.packed(packed[f"{kind}s"].data, packed[f"{kind}_ends"]) for kind in ("image", "label"))
    names = [image or label for image, label in zip(images, labels, strict=True)]
    writer = ArchiveWriter(out, _info_of(header, old), names, overwrite, large_ids=header["ids"] == "I32")
    if writer.complete:
        raise UserError(f"OUT {printable(out)} is a complete label archive: choose another folder, or --overwrite")
    absent = []
    progress = Progress("converting", len(names), "label")
    for shard, start in enumerate(range(0, len(names), header["shard_records"])):
        tensors = load(Path(old, f"{shard:05d}.safetensors").read_bytes())
        for row in range(start, min(start + header["shard_records"], len(names))):
            arrays = {name: tensors[name][row - start] for name in _CONTENTS if name in tensors}
            content = os.fsencode(labels[row]) + b"".join(array.tobytes() for array in arrays.values())
            if zlib.crc32(content) != tensors["crc32"][row - start]:
                raise ValueError(f"the checksum of {printable(labels[row])} is wrong")
            if arrays["form"] == _ABSENT:
                absent.append(names[row])
                writer.write_absent(row)
            else:
                writer.write(row, _map_of(arrays, header["transposed"], f"label {printable(labels[row])}"))
            progress.step()
    progress.close()
    writer.finish(absent)
    return [f"{len(names) - len(absent)} labels of {printable(old)} written into {printable(out)}"]


def _info_of(header: dict[str, Any], old: str) -> LabelInfo:
    grid = tuple(header["grid"])[::-1] if header["transposed"] else tuple(header["grid"])
    text = header["labels_json"]
    info = LabelInfo.from_json(json.loads(text), f"{old}: labels.json") if text else LabelInfo(header["k"], grid)
    area = header["area"] if isinstance(header["area"], str) else tuple(header["area"])
    return replace(info, k=header["k"], grid=grid, area=area, log_sum_exp=header["log_sum_exp"], skipped=[])


def _map_of(arrays: dict[str, np.ndarray], transposed: bool, source: str) -> LabelMap:
    names = [name for name in ("values", "ids", "log_sum_exp") if name in arrays]
    values, ids, *lse = (arrays[name].swapaxes(-1, -2) if transposed else arrays[name] for name in names)
    return LabelMap(values, ids.astype(np.int32), source=source, log_sum_exp=lse[0] if lse else None)
