"""Tensors that lie in a folder beside their checkpoint, in the parts that the ranks of a run have written.

`--checkpoint-format dcp` writes them: each rank's parts are a safetensors file as torch.distributed.checkpoint has it,
and the checkpoint holds everything else, a place holder for each of these tensors, and sizes and checksums of the
files. Nothing here is pickled.
"""

from __future__ import annotations

import math
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.errors import UserError

PARTS_KEY = "parts"  # of a checkpoint: {"folder": name, "files": {name: [bytes, CRC-32]}}
IN_PARTS = "<in parts>"  # in place of a tensor
FOLDERS = re.compile(r"parts-(\d+)-[0-9a-f]{8}")  # the update, and a number that is drawn for each save

Path_ = tuple[Any, ...]  # the keys that lead to a value in nested dicts


def leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield everything in nested dicts that is no dict, with the keys that lead to it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def replaced(value: Any, new: Mapping[Path_, Any], path: Path_ = ()) -> Any:
    """Return nested dicts with the values of `new` in the places that its keys lead to."""
    if isinstance(value, Mapping):
        return {key: replaced(item, new, (*path, key)) for key, item in value.items()}
    return new.get(path, value)


def part_name(path: Path_) -> str:
    """Return the name of a tensor in the files of parts."""
    return "/".join(map(str, path))


def folder_of(checkpoint: Mapping[str, Any], path: str | Path) -> Path | None:
    """Return the folder with the parts of a checkpoint that was read from `path`; None if it is whole.

    Raises:
        UserError: The checkpoint names no such folder, or the folder is not there.
    """
    if PARTS_KEY not in checkpoint:
        return None
    record = checkpoint[PARTS_KEY]
    name = record.get("folder") if isinstance(record, dict) else None
    if not isinstance(name, str) or not FOLDERS.fullmatch(name) or not isinstance(record.get("files"), dict):
        raise UserError(f"{path} is refused: its entry {PARTS_KEY!r} names no folder of parts")
    folder = Path(path).parent / name
    if not folder.is_dir():
        raise UserError(
            f"{path}: its tensors lie in {folder}, which is not there: copy that folder along with the checkpoint, or "
            "make one file of both with `volo export`"
        )
    return folder


def verify_parts(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Compare the files of a checkpoint's parts with their recorded sizes and checksums; nothing for a whole one.

    Raises:
        UserError: A file is missing or damaged, or there is one that the checkpoint does not know.
    """
    folder = folder_of(checkpoint, path)
    if folder is None:
        return
    files = checkpoint[PARTS_KEY]["files"]
    if unknown := {each.name for each in folder.glob("*.safetensors")} - files.keys():
        raise UserError(f"{path} is refused: {folder / min(unknown)} is none of its parts")
    for name, recorded in files.items():
        try:
            found = size_and_checksum(folder / Path(name).name)
        except OSError as error:
            raise UserError(f"{path}: {folder / name} cannot be read: {error.strerror}") from error
        if found != recorded:
            raise UserError(f"{path} is damaged: {folder / name} does not match its checksum")


def size_and_checksum(file: Path) -> list[int]:
    """Return the bytes of a file and their CRC-32."""
    size = checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return [size, checksum]


def with_shapes(checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Return a checkpoint with tensors on the device `meta` in place of those in parts.

    Raises:
        UserError: The parts are not those of this checkpoint.
    """
    folder = folder_of(checkpoint, path)
    return checkpoint if folder is None else replaced(checkpoint, _empty(checkpoint, folder, path, "meta"))


def with_tensors(checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Return a checkpoint with whole tensors on the CPU in place of those in parts. Raises as `with_shapes`."""
    folder = folder_of(checkpoint, path)
    if folder is None:
        return checkpoint
    tensors = _empty(checkpoint, folder, path, "cpu")
    read_parts(tensors, folder, path)
    return {key: value for key, value in replaced(checkpoint, tensors).items() if key != PARTS_KEY}


def read_parts(tensors: Mapping[Path_, Tensor], folder: Path, path: str | Path) -> None:
    """Fill tensors, whole ones or DTensors, with what the files in a folder of parts hold for their places.

    Nothing is sent: each rank reads what it needs of the files. `path` is the checkpoint's, for messages.

    Raises:
        UserError: The files don't hold a tensor in this shape.
    """
    import torch.distributed.checkpoint as dcp

    wanted = {part_name(place): tensor for place, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
        try:
            dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
        except dcp.CheckpointException as error:  # derived from BaseException
            reason = "; ".join(str(cause) for cause, _ in error.failures.values())
            raise UserError(f"{path} is damaged: {folder} does not hold its tensors ({reason[:200]})") from error


def _empty(checkpoint: Mapping[str, Any], folder: Path, path: str | Path, device: str) -> dict[Path_, Tensor]:
    """Return a tensor on `device` for each place holder of a checkpoint, in the size that the files of parts have."""
    import torch.distributed.checkpoint as dcp

    there = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    _check_complete(there, folder)
    found = {}
    for place in [place for place, value in leaves(checkpoint) if isinstance(value, str) and value == IN_PARTS]:
        if part_name(place) not in there:
            raise UserError(f"{path} is damaged: {part_name(place)} is missing in {folder}")
        saved: Any = there[part_name(place)]
        found[place] = torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
    return found


def _check_complete(there: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError unless the parts of every tensor fill it, so that no memory is shown that nothing was read into,
    and no more memory is taken than the files have bytes."""
    for name, tensor in there.items():
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            raise UserError(f"{folder} is damaged: parts of {name} are missing")
