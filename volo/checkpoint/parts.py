"""`--checkpoint-format dcp`: the ranks write their parts of the weights side by side, and none holds the whole.

The files are those of torch.distributed.checkpoint's safetensors format, with which any number of ranks read them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tlt.errors import NonFiniteError, UserError
from tlt.io.files import sync_folder
from tlt.io.parts import (
    FOLDERS,
    IN_PARTS,
    PARTS_KEY,
    folder_of,
    leaves,
    part_name,
    read_parts,
    replaced,
    size_and_checksum,
)
from tlt.io.weights import first_non_finite, peek_checkpoint
from tlt.models.wrap import DENSE_ENTRIES
from volo.checkpoint.checkpoint_file import explained
from volo.cluster.distributed import from_all, from_primary


def write_parts(content: dict[str, Any], directory: Path, update: int) -> dict[str, Any]:
    """Write the divided tensors in nested dicts into a new folder; every rank calls this.

    Returns `content` with place holders for them, copies of the other tensors on the CPU, and the record of the files.

    Raises:
        NotWrittenError: Some rank can't write; all ranks raise it. Other folders are untouched.
        NonFiniteError: Weights hold NaN or infinity on some rank; all ranks raise it.
    """
    tensors = {place: value for place, value in leaves(content) if isinstance(value, Tensor)}
    divided = {place: value for place, value in tensors.items() if isinstance(value, DTensor)}
    saved = ("state_dict", DENSE_ENTRIES["state_dict"])
    weights = {part_name(place): value.to_local() for place, value in divided.items() if place[0] in saved}
    if broken := next(filter(None, from_all(first_non_finite(weights))), None):
        raise NonFiniteError(f"{broken} holds NaN or infinite values: not saved")
    name = from_primary(f"parts-{update}-{secrets.token_hex(4)}")
    folder = directory / name
    size = sum(value.numel() * value.element_size() for value in divided.values())
    with explained(folder, lambda: size):
        found = from_all(_write_own(divided, folder))
        if failed := [each for each in found if isinstance(each, str)]:
            raise OSError(failed[0])
        if dist.get_rank() == 0:
            sync_folder(folder)
            sync_folder(directory)
    files = {file: entry for each in found if isinstance(each, dict) for file, entry in each.items()}
    others = {place: value.detach().to("cpu", copy=True) for place, value in tensors.items() if place not in divided}
    content = replaced(content, {**others, **dict.fromkeys(divided, IN_PARTS)})
    return content | {PARTS_KEY: {"folder": name, "files": files}}


def _write_own(tensors: Mapping[Any, DTensor], folder: Path) -> dict[str, list[int]] | str:
    """Write this rank's parts into a file of `folder`; return its size and checksum by its name, or why it can't be.

    torch's own writer sends pickled plans between the ranks, which nothing here unpickles. Of several copies of the
    model (hybrid sharding) the first one is written.
    """
    own, offsets = {}, {}
    for place, value in tensors.items():
        mesh, part = value.device_mesh, value.to_local()
        if part.numel() and not (mesh.ndim == 2 and mesh.get_local_rank(0)):
            own[part_name(place)] = part.detach().to("cpu", copy=True).contiguous()
            offsets[part_name(place)] = {"saved_offsets": list(value.__create_chunk_list__()[0].offsets)}
    file = folder / f"rank-{dist.get_rank():05d}.safetensors"
    try:
        folder.mkdir(exist_ok=True)
        if not own:
            return {}
        safetensors.torch.save_file(own, file, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)})
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        return {file.name: size_and_checksum(file)}
    except (OSError, safetensors.SafetensorError) as error:
        return f"rank {dist.get_rank()}: {getattr(error, 'strerror', None) or error}"


def own_parts_read(checkpoint: dict[str, Any], path: str | Path, like: Mapping[Any, DTensor]) -> dict[str, Any]:
    """Return a checkpoint with this rank's parts in place of the tensors on `meta` that `like` has by their place."""
    folder = folder_of(checkpoint, path)
    if folder is None:
        return checkpoint
    own = {
        place: torch.empty_like(like[place], dtype=value.dtype)
        for place, value in leaves(checkpoint)
        if isinstance(value, Tensor) and value.is_meta and place in like and like[place].shape == value.shape
    }
    read_parts(own, folder, path)
    return replaced(checkpoint, own)


def parts_bytes(payload: Mapping[str, Any]) -> int:
    """Return the bytes of the files of parts that belong to a payload."""
    return sum(size for size, _ in payload.get(PARTS_KEY, {}).get("files", {}).values())


def remove_unused_parts(directory: Path, update: int) -> None:
    """Remove the folders of parts from before `update` to which no checkpoint in `directory` belongs any more."""
    folders = [each for each in directory.glob("parts-*") if FOLDERS.fullmatch(each.name)]
    try:
        used = {peek_checkpoint(file).get(PARTS_KEY, {}).get("folder") for file in directory.glob("*.pth.tar")}
    except UserError:  # a file that can't be read may belong to any of them
        return
    for folder in folders:
        match = FOLDERS.fullmatch(folder.name)
        if match and int(match[1]) < update and folder.name not in used:
            shutil.rmtree(folder, ignore_errors=True)
