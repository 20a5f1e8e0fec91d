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

from safetensors.numpy import load

from tlt.errors import UserError
from tlt.io.files import blamed_on
from tlt.io.names import Names
from tlt.io.text import printable
from tlt.label_map import LabelMap, whole_ids
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo

_CONTENTS = ("ids", "values", "log_sum_exp", "size", "area", "form")  # of a row's crc32, after its label file's name
_ABSENT = 0xFF  # in `form`: no label, the image could not be read


def convert_old_archive(old: str, out: str, overwrite: bool = False) -> list[str]:
    """Write the labels of an archive of version 1 into one of today; return lines that say what was done.

    Raises:
        UserError: The archive is incomplete or damaged, or `out` can't be written.
    """
    shown = f"label archive {printable(old)} of an earlier version"
    with blamed_on(shown, "is damaged or not complete", "copy the archive again, or make it anew"):
        return _convert(Path(old), out, overwrite)


def _convert(old: Path, out: str, overwrite: bool) -> list[str]:
    manifest, content = json.loads((old / "manifest.json").read_bytes()), (old / "names.safetensors").read_bytes()
    header, digest = manifest["header"], manifest.pop("sha256")
    checksums = [hashlib.sha256(each).hexdigest() for each in (json.dumps(manifest, sort_keys=True).encode(), content)]
    if checksums != [digest, header["names_sha256"]]:
        raise ValueError("the checksum of manifest.json or names.safetensors is wrong")
    packed = load(content)
    images, labels = (Names.packed(packed[f"{kind}s"].data, packed[f"{kind}_ends"]) for kind in ("image", "label"))
    names = [image or label for image, label in zip(images, labels, strict=True)]
    turned, text, area = header["transposed"], header["labels_json"], header["area"]
    grid = tuple(header["grid"][::-1] if turned else header["grid"])
    info = LabelInfo.from_json(json.loads(text), f"{old}: labels.json") if text else LabelInfo(header["k"], grid)
    area = area if isinstance(area, str) else tuple(area)
    info = replace(info, k=header["k"], grid=grid, area=area, log_sum_exp=header["log_sum_exp"], skipped=[])
    writer, absent = ArchiveWriter(out, info, names, overwrite), []
    if writer.complete:
        raise UserError(f"OUT {printable(out)} is a complete label archive: choose another folder, or --overwrite")
    for row, (name, label) in enumerate(zip(names, labels, strict=True)):
        shard, place = divmod(row, header["shard_records"])
        if place == 0:
            tensors = load((old / f"{shard:05d}.safetensors").read_bytes())
        arrays = {key: tensors[key][place] for key in _CONTENTS if key in tensors}
        row_bytes = os.fsencode(label) + b"".join(array.tobytes() for array in arrays.values())
        if zlib.crc32(row_bytes) != tensors["crc32"][place]:
            raise ValueError(f"the checksum of {printable(label)} is wrong")
        if arrays["form"] == _ABSENT:
            absent.append(name)
            writer.write_absent(row)
            continue
        maps = {key: array.swapaxes(-1, -2) if turned else array for key, array in arrays.items() if array.ndim > 1}
        source = f"label {printable(label)}"
        ids = whole_ids(maps["ids"], source)
        writer.write(row, LabelMap(maps["values"], ids, source=source, log_sum_exp=maps.get("log_sum_exp")))
    writer.finish(absent)
    return [f"{len(names) - len(absent)} labels of {printable(str(old))} written into {printable(out)}"]
