"""Reads weights from files that may not be trustworthy. All checkpoints are read here.

`torch.load(weights_only=True)` unpickles only tensors and plain data. We also check the CRC of each record of the zip
archive that `torch.save` writes, because torch accepts some damage. Safetensors have no CRCs; their length is checked.
"""

import argparse
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.io.files import blamed_on

WEIGHT_KEYS = ("state_dict", "model")
EMA_KEYS = ("state_dict_ema", "model_ema")

# Other programs' names of averaged weights, such as the teacher's in self-distillation.
_AVERAGE = re.compile(r"(?i)(?<![a-z])(ema|teacher|averaged?|avg|swa|momentum|target)(?![a-z])")
_DAMAGED = "is truncated or damaged"
_NUMBERS = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}
_SCALAR = np.float64(0).__reduce__()[0]  # makes a NumPy number from dtype and bytes; NumPy 1 has it in another module
_NUMPY_NUMBERS: list[Any] = [
    np.dtype,
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *{type(np.dtype(letter)) for letter in "?bBhHiIlLqQefd"},
]
_FOLDER = 0x10  # an attribute bit of zip records
_REFUSED = re.compile(r"GLOBAL (\S+)|unrecognized function (\S+)|but got (?:<class ')?([\w.]+)")


def read_checkpoint(path: str | Path, peek: bool = False) -> dict[str, Any]:
    """Return everything a checkpoint holds, tensors on the CPU. It is a safetensors file, or one of `torch.save` (a zip
    archive; before torch 1.6 a pickle); the content decides, not the extension. With `peek`, skip the checksums, and
    map the tensors of a zip archive into memory instead of reading them.

    Raise UserError if the file is missing, truncated, damaged (names the record), compressed, of another kind, or holds
    more than tensors and plain data (names the class; its code does not run).
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory: name a checkpoint in it; a .pth.tar is not to be unpacked")
    if not path.is_file():  # opening a pipe would wait for its writer
        raise UserError(f"{path}: no such checkpoint, or no regular file")
    with blamed_on(path, _DAMAGED), path.open("rb") as file:
        head = file.read(40)
        file.seek(0)
        if head.startswith((b"PK", b"\x80")):  # a zip archive, or a pickle's protocol byte
            return _checkpoint(load_plain(file, path, peek), path)
        if head[8:9] == b"{":  # after the 8-byte length of a JSON header
            return check_plain(dict(safetensors.torch.load_file(path)), path)
    if not head:
        raise UserError(f"{path} is empty (zero bytes)")
    raise UserError(
        f"{path} is no checkpoint, it begins with {head!r}: download it again where that is a web page or git-lfs "
        "pointer, unpack it where it is a tar or gzip file"
    )


def peek_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return `read_checkpoint(path, peek=True)`."""
    return read_checkpoint(path, peek=True)


def load_plain(file: BinaryIO, what: str | Path, peek: bool = False) -> Any:
    """Unpickle a file of `torch.save`: only tensors, plain data, NumPy's numbers and `argparse.Namespace`. `what` names
    it in messages; `peek` and errors are those of `read_checkpoint`."""
    with blamed_on(what, _DAMAGED):
        zipped = file.read(2) == b"PK"  # before torch 1.6 it was a pickle, without checksums
        file.seek(0)
        if zipped:
            _check_records(zipfile.ZipFile(file), what, not peek)
            file.seek(0)
        mapped = zipped and peek
        with torch.serialization.safe_globals([argparse.Namespace, *_NUMPY_NUMBERS]):
            try:
                content = torch.load(file.name if mapped else file, "cpu", weights_only=True, mmap=mapped)
            except UnpicklingError as error:
                if refused := _REFUSED.search(str(error)):
                    raise UserError(
                        f"{what} is refused: it holds {refused[refused.lastindex or 0]}, neither a tensor nor plain "
                        "data (nothing of it was run); save it with tensors, numbers and text only"
                    ) from error
                # torch's message advises to load the file without this protection, so we don't show it
                raise UnpicklingError("neither tensors nor plain data") from error
        return check_plain(content, what)


def check_plain(content: Any, what: str | Path) -> Any:
    """Return the content of a file, whose tensors are detached in place, if programs can compute with all of them.
    Raise UserError if a tensor is sparse, quantized, nested, on `meta`, or has complex or 8-bit floating-point numbers.
    """
    stack = [("", content)]
    seen = set[int]()
    while stack:
        name, value = stack.pop()
        if isinstance(value, Tensor):
            plain = type(value) in (Tensor, nn.Parameter) and value.dtype in _NUMBERS and not value.is_nested
            if not plain or (value.layout, value.device.type) != (torch.strided, "cpu"):
                kind = "nested" if value.is_nested else f"{value.layout}, {value.dtype} on {value.device}"
                raise UserError(
                    f"{what} is refused: {name or 'its tensor'} is no dense tensor of plain numbers, but "
                    f"{kind.replace('torch.', '')}: save it with .to_dense().float().cpu()"
                )
            value.requires_grad_(False)
        elif isinstance(value, (dict, list, tuple, argparse.Namespace)) and id(value) not in seen:
            seen.add(id(value))  # in a hostile file a list may contain itself
            inner = vars(value) if isinstance(value, argparse.Namespace) else value
            stack += inner.items() if isinstance(inner, dict) else ((name, item) for item in inner)
    return content


def _check_records(archive: zipfile.ZipFile, what: str | Path, checksums: bool) -> None:
    """Check that the records are stored as by `torch.save`, and the CRC-32 of each if `checksums` is set."""
    for record in archive.infolist():
        if record.compress_type != zipfile.ZIP_STORED:
            raise UserError(f"{what} is refused: record {record.filename} is compressed, which torch.save never does")
        if record.external_attr & _FOLDER:  # torch would read none of its bytes and return uninitialised memory
            raise UserError(f"{what} is damaged: record {record.filename} calls itself a folder")
    if checksums and (damaged := archive.testzip()):
        raise UserError(f"{what} is damaged: record {damaged} does not match its checksum")


def _checkpoint(content: Any, path: Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a checkpoint")
    if isinstance(content.get("args"), argparse.Namespace):  # timm stores its arguments so
        content["args"] = vars(content["args"])
    return content


def weights_entry(
    checkpoint: dict[str, Any],
    use_ema: bool | None = None,
    path: str | Path = "the checkpoint",
    wanted: Collection[str] = (),
) -> str:
    """Return the key of the weights to use, or `""` if the checkpoint itself is the state dict. Raise UserError if the
    checkpoint has no such weights. `use_ema` True takes the moving average, False the plain weights, None the moving
    average if there is one. Among several entries, the one that has most of the model's names, `wanted`, is used; of
    equal ones, an average or a teacher before others, unless `use_ema` is False, then the first."""
    ema, plain = ([k for k in keys if isinstance(checkpoint.get(k), dict)] for keys in (EMA_KEYS, WEIGHT_KEYS))
    if use_ema and not ema:
        raise UserError(f"{path} holds no EMA weights ({' or '.join(EMA_KEYS)}): use its plain weights")
    dicts = [k for k, v in checkpoint.items() if isinstance(v, dict) and v and all(map(torch.is_tensor, v.values()))]
    candidates = ema if use_ema else plain if use_ema is False else ema + plain
    entries = candidates if use_ema else candidates + [k for k in dicts if k not in EMA_KEYS + WEIGHT_KEYS]
    if candidates or len(entries) == 1 or (entries and wanted):
        return max(entries, key=lambda k: (_fitting(checkpoint[k], wanted)[1], _preferred(k, use_ema)))
    if checkpoint and all(isinstance(v, Tensor) for v in checkpoint.values()):
        return ""
    names = ", ".join(map(str, list(checkpoint)[:8])) or "nothing"
    raise UserError(f"{path} holds no weights under {' or '.join(WEIGHT_KEYS)}; it holds {names}")


def state_dict_of(
    checkpoint: dict[str, Any],
    use_ema: bool | None = None,
    path: str | Path = "the checkpoint",
    wanted: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the weights in a checkpoint under the model's own names, without the prefixes of DDP and torch.compile
    and, if the model's names are given, without any other prefix that most names have.

    Arguments and errors are those of `weights_entry`; an entry that is not a tensor is also a UserError.
    """
    entry = weights_entry(checkpoint, use_ema, path, wanted)
    weights = checkpoint[entry] if entry else checkpoint
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(f"{path}: {name} in {entry} is a {type(value).__name__}, not a tensor with a name")
    clean = dict(zip(clean_names(list(weights)), weights.values(), strict=True))
    prefix = foreign_prefix(clean, wanted, use_ema)
    return {name[len(prefix) :]: value for name, value in clean.items() if name.startswith(prefix)}


def foreign_prefix(names: Collection[str], wanted: Collection[str], use_ema: bool | None = None) -> str:
    """Return the prefix (`model.`, `encoder_q.`) with which most of a foreign file's `names`, or most of the `wanted`
    ones, appear there; "" if there is none. Names without it, such as a counter's, are no weights of the model."""
    prefix, count = _fitting(names, wanted, use_ema)
    return prefix if 2 * count > min(len(wanted), len(names)) else ""


def _preferred(name: str, use_ema: bool | None) -> bool:
    """Return whether an entry or a prefix is, by its name, of the kind of weights that are asked for."""
    return (_AVERAGE.search(str(name)) is not None) != (use_ema is False)


def _fitting(names: Iterable[str], wanted: Collection[str], use_ema: bool | None = None) -> tuple[str, int]:
    """Return the prefix whose removal makes the most names the model's own, and how many these are."""
    counts = Counter({"": 0})
    known = set(wanted)
    for parts in (str(name).split(".") for name in names) if known else ():
        counts.update("".join(f"{p}." for p in parts[:n]) for n in range(len(parts)) if ".".join(parts[n:]) in known)
    return max(counts.items(), key=lambda item: (item[1], not item[0], _preferred(item[0], use_ema)))


def count_weights(checkpoint: dict[str, Any]) -> int:
    """Return how many numbers the tensors of a checkpoint and of its entries hold."""
    entries = [checkpoint, *(entry for entry in checkpoint.values() if isinstance(entry, dict))]
    return sum(value.numel() for entry in entries for value in entry.values() if isinstance(value, Tensor))


# Where wrappers have their model: torch.compile's; DistributedDataParallel, DataParallel, timm's ModelEmaV3; FSDP1.
_WRAPPED = ("_orig_mod", "module", "_fsdp_wrapped_module")


def clean_names(names: list[str]) -> list[str]:
    """Remove `_orig_mod.` (torch.compile) everywhere, and `module.` (DDP) if every name starts with it."""
    names = [re.sub(r"(^|\.)(?:_orig_mod\.)+", r"\1", name) for name in names]
    while names and all(name.startswith("module.") for name in names):
        names = [name[len("module.") :] for name in names]
    return names


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers of torch and timm, in any order."""
    inner = next((model._modules[name] for name in _WRAPPED if name in model._modules), None)
    return model if inner is None else unwrap(inner)


def clean_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state dict under the names of the unwrapped model. Its tensors are shared, not copied."""
    state = unwrap(model).state_dict()
    return dict(zip(clean_names(list(state)), state.values(), strict=True))


def load_clean(model: nn.Module, state: dict[str, Tensor], strict: bool = True) -> None:
    """Load `state`, with names of `clean_state_dict`, into a model that may be wrapped or have compiled blocks."""
    target = unwrap(model)
    target_names = list(target.state_dict())
    names = dict(zip(clean_names(target_names), target_names, strict=True))
    target.load_state_dict({names.get(k, k): v for k, v in state.items()}, strict=strict)


def check_finite(state: dict[str, Tensor], path: str | Path = "the checkpoint") -> None:
    """Raise UserError, which names the first tensor with NaN or infinity, if there is one."""
    if name := first_non_finite(state):
        count = int((~torch.isfinite(state[name])).sum())
        raise UserError(f"{path} is refused: {name} holds {count} NaN or infinite of {state[name].numel()} values")


def first_non_finite(state: dict[str, Tensor]) -> str | None:
    """Return the name of the first tensor with NaN or infinity, or None. A single infinite value is none: models keep
    bounds that bound nothing so (Gemma 4 in timm). Synchronises with the device once."""
    numbers = {name: value for name, value in state.items() if value.is_floating_point()}
    broken = [(value.isnan() if value.numel() == 1 else ~value.isfinite()).any() for value in numbers.values()]
    found = torch.stack(broken).tolist() if broken else []
    return next((name for name, is_broken in zip(numbers, found, strict=True) if is_broken), None)
