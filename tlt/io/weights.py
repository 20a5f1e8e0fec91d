"""Weights from files that may not be trustworthy: the only reader of checkpoints.

`torch.load(weights_only=True)` unpickles tensors and plain data alone. Damage that it accepts is found by the CRC of
each record of the zip archive that `torch.save` writes. Of safetensors, which has no CRCs, the length is checked.
"""

from __future__ import annotations

import argparse
import re
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import safetensors.torch
import torch
from torch import Tensor, nn

from tlt.errors import UserError

WEIGHT_KEYS = ("state_dict", "model")
EMA_KEYS = ("state_dict_ema", "model_ema")

_FOLDER = 0x10  # among the attributes of a record
_NOT_A_CHECKPOINT = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself: run `git lfs pull`"),
    (b"<!doctype", "a web page, not a checkpoint: download the file again"),
    (b"<html", "a web page, not a checkpoint: download the file again"),
    (b"\x1f\x8b", "compressed with gzip: decompress it first"),
)
_UNPACKED = "an unpacked checkpoint: give the .pth.tar as it was downloaded, it is not an archive to unpack"
_UNPICKLER_SAYS = re.compile(r"WeightsUnpickler error:\s*(\S.*)")
_REFUSED = re.compile(r"GLOBAL (\S+)|unrecognized function (\S+)|but got (?:<class ')?([\w.]+)")


class InPartsError(UserError):
    """The tensors of a checkpoint lie beside it, as an earlier version could write them."""


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return everything a checkpoint holds, tensors on the CPU.

    Args:
        path: safetensors, or what `torch.save` writes (a zip archive; before torch 1.6 a pickle). The content tells
            which, not the name's ending.

    Raises:
        UserError: The file is missing, truncated, damaged (naming the record), compressed, something else altogether,
            or holds more than tensors and plain data (naming the class; nothing of it is run).
    """
    with _opened(Path(path)) as file, _one_line_errors(path):
        kind = _kind(file, path)
        if kind == "safetensors":
            return dict(safetensors.torch.load_file(path))
        if kind == "zip":
            verify_zip(file, path)
        return _load(file, path)


def verify_checkpoint(path: str | Path) -> None:
    """Read a checkpoint through and raise as `read_checkpoint` does, without its tensors in memory."""
    with _opened(Path(path)) as file, _one_line_errors(path):
        if _kind(file, path) == "zip":
            verify_zip(file, path)
    peek_checkpoint(path)


def peek_checkpoint(path: str | Path) -> dict[str, Any]:
    """Like `read_checkpoint`, for a look at the numbers: nothing is verified, tensors are mapped and not read."""
    with _opened(Path(path)) as file, _one_line_errors(path):
        if _kind(file, path) == "zip":
            _archive(file, path)
            return _load(path, path, mmap=True)
    return read_checkpoint(path)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            unpacked = any(path.glob("data.pkl")) or any(path.glob("*/data.pkl"))
            raise UserError(f"{path} is {_UNPACKED if unpacked else 'a directory: name a checkpoint file in it'}")
        if not stat.S_ISREG(kind):
            raise UserError(f"{path} is not a regular file")
        file = path.open("rb")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such checkpoint") from error
    except OSError as error:
        raise UserError(f"{path} cannot be opened: {error.strerror}") from error
    with file:
        yield file


@contextmanager
def _one_line_errors(path: str | Path) -> Iterator[None]:
    """Turn whatever a parser raises on foreign bytes into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if name := refused_name(error):
            raise UserError(
                f"{path} is refused: it holds {name}, neither a tensor nor plain data (nothing of it was run); "
                "save it with weights, numbers and text only"
            ) from error
        reason = short_reason(error)
        raise UserError(f"{path} is damaged or not a checkpoint: {type(error).__name__}: {reason}") from error


def refused_name(error: Exception) -> str | None:
    """Name of the class or function because of which `torch.load(weights_only=True)` refused a file, if it was one."""
    refused = _REFUSED.search(str(error)) if isinstance(error, UnpicklingError) else None
    return next(group for group in refused.groups() if group) if refused else None


def short_reason(error: Exception) -> str:
    """The message of a parser's error, on one line."""
    text = str(error)
    if isinstance(error, UnpicklingError):
        # The rest of torch's text advises to load the file without this protection.
        found = _UNPICKLER_SAYS.search(text)
        text = found[1] if found else "neither tensors nor plain data"
    return " ".join(text.split())[:200] or "it ends too early"


def _kind(file: BinaryIO, path: str | Path) -> str:
    """Return "zip", "safetensors" or "pickle" from the first bytes."""
    head = file.read(512)
    file.seek(0)
    if not head:
        raise UserError(f"{path} is empty (zero bytes)")
    for start, meaning in _NOT_A_CHECKPOINT:
        if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(start):
            raise UserError(f"{path} is {meaning}")
    if head[257:262] == b"ustar":
        raise UserError(f"{path} is a tar archive: unpack it and give the checkpoint inside")
    if head.startswith(b"PK"):
        return "zip"
    if head[8:9] == b"{":  # after the 8-byte length of a JSON header
        return "safetensors"
    if head.startswith(b"\x80"):  # a pickle's protocol mark
        return "pickle"
    raise UserError(f"{path} is no checkpoint: neither safetensors nor written by torch.save")


def verify_zip(file: BinaryIO, path: str | Path) -> None:
    """Check that the records are as `torch.save` writes them, and the CRC-32 of each."""
    if damaged := _archive(file, path).testzip():
        raise UserError(f"{path} is damaged: record {damaged} does not match its checksum")
    file.seek(0)


def _archive(file: BinaryIO, path: str | Path) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise UserError(f"{path} is truncated: {error}") from error
    names = [record.filename for record in archive.infolist()]
    if any(name.endswith("constants.pkl") for name in names):
        raise UserError(f"{path} is a TorchScript program, not weights")
    if not any(name.endswith("data.pkl") for name in names):
        raise UserError(f"{path} is a zip archive without a checkpoint in it (no data.pkl)")
    for record in archive.infolist():
        if record.compress_type != zipfile.ZIP_STORED:
            raise UserError(f"{path} is refused: record {record.filename} is compressed, which torch.save never does")
        if record.external_attr & _FOLDER:  # torch reads no byte of it, and takes what the memory held for its numbers
            raise UserError(f"{path} is damaged: record {record.filename} calls itself a folder")
    return archive


def _load(source: BinaryIO | str | Path, path: str | Path, mmap: bool | None = None) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a checkpoint")
    if isinstance(parts := content.get("parts"), dict) and "folder" in parts:
        raise InPartsError(
            f"{path} is refused: its tensors lie beside it in {parts['folder']}, which this version does not read: "
            f"make one file of both with the version that wrote it: volo export -o FILE.pth.tar --checkpoint {path}"
        )
    if isinstance(content.get("args"), argparse.Namespace):  # timm's
        content["args"] = vars(content["args"])
    return content


def weights_entry(checkpoint: dict[str, Any], use_ema: bool | None = None, path: str | Path = "the checkpoint") -> str:
    """Return the key of the weights to use, `""` where the checkpoint itself is the state dict.

    Args:
        use_ema: True: the moving average; False: the plain weights; None: the moving average where there is one.

    Raises:
        UserError: What is asked for isn't there.
    """
    ema, plain = ([k for k in keys if isinstance(checkpoint.get(k), dict)] for keys in (EMA_KEYS, WEIGHT_KEYS))
    if use_ema or (use_ema is None and ema):
        if not ema:
            raise UserError(f"{path} holds no EMA weights ({' or '.join(EMA_KEYS)}): use its plain weights")
        return ema[0]
    if plain:
        return plain[0]
    if checkpoint and all(isinstance(v, Tensor) for v in checkpoint.values()):
        return ""
    if ema:
        raise UserError(f"{path} holds EMA weights only: ask for them")
    names = ", ".join(map(str, list(checkpoint)[:8])) or "nothing"
    raise UserError(f"{path} holds no weights under {', '.join(WEIGHT_KEYS + EMA_KEYS)}; it holds {names}")


def state_dict_of(
    checkpoint: dict[str, Any], use_ema: bool | None = None, path: str | Path = "the checkpoint"
) -> dict[str, Tensor]:
    """Return the weights in a checkpoint under the model's own names: prefixes of DDP and torch.compile removed.

    `use_ema` and errors as in `weights_entry`; also a UserError for an entry that is not a tensor.
    """
    entry = weights_entry(checkpoint, use_ema, path)
    weights = checkpoint[entry] if entry else checkpoint
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{path}: {name} in {entry} is a {type(value).__name__}, not a tensor")
    if not weights:
        raise UserError(f"{path}: {entry} is empty")
    names = clean_names(list(weights))
    if len(set(names)) != len(names):
        raise UserError(f"{path} holds the same weights twice, with and without a wrapper's prefix")
    return dict(zip(names, weights.values(), strict=True))


def count_weights(checkpoint: dict[str, Any]) -> int:
    """Return how many numbers the tensors of a checkpoint hold, its entries' and its own."""
    entries = [checkpoint, *(entry for entry in checkpoint.values() if isinstance(entry, dict))]
    return sum(value.numel() for entry in entries for value in entry.values() if isinstance(value, Tensor))


def clean_names(names: list[str]) -> list[str]:
    """Remove `_orig_mod.` (torch.compile) wherever it stands and `module.` (DDP) where every name starts with it."""
    names = [re.sub(r"(^|\.)(?:_orig_mod\.)+", r"\1", name) for name in names]
    while names and all(name.startswith("module.") for name in names):
        names = [name[len("module.") :] for name in names]
    return names


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, DataParallel and torch.compile wrappers, in any order."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def clean_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state dict under the names of the unwrapped model; tensors are shared, not copied."""
    state = unwrap(model).state_dict()
    return dict(zip(clean_names(list(state)), state.values(), strict=True))


def load_clean(model: nn.Module, state: dict[str, Tensor], strict: bool = True) -> None:
    """Load `state`, named as `clean_state_dict` does, into a model that may be wrapped or hold compiled blocks."""
    target = unwrap(model)
    own = list(target.state_dict())
    names = dict(zip(clean_names(own), own, strict=True))
    target.load_state_dict({names.get(k, k): v for k, v in state.items()}, strict=strict)


def check_finite(state: dict[str, Tensor], path: str | Path = "the checkpoint") -> None:
    """Raise UserError naming the first tensor that holds NaN or infinity."""
    name = first_non_finite(state)
    if name is not None:
        count = int((~torch.isfinite(state[name])).sum())
        raise UserError(f"{path} is refused: {name} holds {count} NaN or infinite of {state[name].numel()} values")


def first_non_finite(state: dict[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a NaN or infinite value. Synchronises once per device at most."""
    floating = {k: v for k, v in state.items() if v.is_floating_point()}
    # A sum is ten times as fast as isfinite(v).all(), and finite only if all values are; large ones may overflow it.
    sums = [v.sum() for v in floating.values()]
    if not sums or bool(torch.isfinite(torch.stack([s.to(sums[0].device, torch.float64) for s in sums])).all()):
        return None
    return next((k for k, v in floating.items() if not bool(torch.isfinite(v).all())), None)
