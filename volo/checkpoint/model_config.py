"""The `model_config` of a checkpoint: how to build the model and how to prepare its images."""

import math
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo

from tlt.data.backends.decode import RESIZE_FILTERS
from tlt.data.dataset import CROP_MODES
from tlt.errors import UserError
from tlt.io.text import printable


def model_config_of(checkpoint: dict[str, Any], path: str | Path = "the checkpoint") -> dict[str, Any] | None:
    """Return the checked `model_config` of a checkpoint, or None if it has none (published files, timm's).

    All keys are optional: name, kwargs, num_classes, img_size (H, W), val_img_size (H, W), in_chans, dense_head,
    crop_pct, crop_mode, mean, std, interpolation, class_names, labels. Keys that later versions add are ignored. Raises
    UserError if a value has the wrong type or range.
    """
    config = checkpoint.get("model_config")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise UserError(f"{path}: model_config is a {type(config).__name__}, not a table")
    known = {key: value for key, value in config.items() if key in _CHECKS and value is not None}
    for key, value in known.items():
        if not _CHECKS[key](value):
            raise UserError(f"{path}: model_config has {key} {reprlib.repr(value)[:60]}, which cannot be")
    return known


def own_names(recorded: dict[str, Any], others: Sequence[str]) -> list[str]:
    """Return the names of the classes in a checkpoint or a description; [] without them. A description's names of 1000
    classes count only if one of them is in `others`: ImageNet's folders are not named as its classes are. `LABEL_0` is
    what Transformers writes without names."""
    names = recorded.get("class_names")
    described = recorded.get("label_names") or ()
    if "LABEL_0" in described or (len(described) == 1000 and {*described}.isdisjoint(others)):
        described = ()
    return [*(names or described)]


def check_numbers(flag: str, given: Sequence[str], recorded: Sequence[str]) -> None:
    """Raise UserError if the list of a flag gives a class another number than the checkpoint does."""
    numbers = {name: number for number, name in enumerate(recorded)}
    for number, name in enumerate(given):
        if numbers.get(name, number) != number:
            raise UserError(
                f"{flag}: class {number} is {printable(name)}, which is class {numbers[name]} of the checkpoint: leave "
                "the flag out, or give the list in the checkpoint's order"
            )


def class_names(recorded: dict[str, Any], num_classes: int) -> list[str]:
    """Return the class names in a checkpoint or description; without them ImageNet's for 1000 classes, else []."""
    if names := recorded.get("class_names") or recorded.get("label_names"):
        return list(names)
    if num_classes != 1000:
        return []
    imagenet = ImageNetInfo()  # reads a file, so it is made only when needed
    return [imagenet.index_to_description(number) for number in range(num_classes)]


def _whole(value: Any, least: int = 1, most: int = 8192) -> bool:
    return type(value) is int and least <= value <= most


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _small(value: Any, depth: int = 4) -> bool:
    """Whether the numbers in a model argument are small enough to build the model, and its nesting is not deep."""
    if isinstance(value, (dict, list, tuple)) and (len(value) > 100 or not depth):
        return False
    if isinstance(value, dict):
        layers = [value.get(key) or 0 for key in ("layers", "depth", "depths")]
        totals = [sum(item) if isinstance(item, (list, tuple)) else item for item in layers if _small(item, depth - 1)]
        return all(_small(item, depth - 1) for item in value.values()) and all(total <= 500 for total in totals)
    if isinstance(value, (list, tuple)):
        return all(_small(item, depth - 1) for item in value)
    return not isinstance(value, (int, float)) or abs(value) <= 8192


def _channels(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(v) in (int, float) and math.isfinite(v) for v in value)


# These arguments could make the model's constructor read other files or use the network.
_SOURCES = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
_CHECKS = {
    "name": lambda v: isinstance(v, str),
    "kwargs": lambda v: isinstance(v, dict) and all(isinstance(k, str) and k not in _SOURCES for k in v) and _small(v),
    "num_classes": lambda v: _whole(v, 0, 200_000),
    **dict.fromkeys(
        ("img_size", "val_img_size"), lambda v: isinstance(v, (list, tuple)) and len(v) == 2 and all(map(_whole, v))
    ),
    "in_chans": _whole,
    "dense_head": lambda v: isinstance(v, bool),
    "crop_pct": lambda v: _positive(v) and 0.1 <= v <= 10,
    "mean": _channels,
    "std": lambda v: _channels(v) and all(map(_positive, v)),
    "interpolation": lambda v: v in RESIZE_FILTERS,
    "crop_mode": lambda v: v in CROP_MODES,
    "class_names": lambda v: isinstance(v, (list, tuple)) and all(isinstance(n, str) for n in v),
    "labels": lambda v: isinstance(v, (dict, str)),
}
