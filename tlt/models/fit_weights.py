"""Weights of a checkpoint for a model: of another image size, class count or channel count, and with its dense head.

The dense head of a WithDenseHead and the projector of a student (`tlt.distill`) are an entry of their own beside the
weights, which plain timm does not look at. No file and no model is changed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.io.weights import (
    EMA_KEYS,
    WEIGHT_KEYS,
    clean_names,
    clean_state_dict,
    foreign_prefix,
    state_dict_of,
    unwrap,
    weights_entry,
)
from tlt.models.layers import Grid, resize_pos_embed
from tlt.models.token_labeling import TokenLabelModel
from tlt.models.transformers_vit import from_transformers
from tlt.models.wrap import DENSE_LAYERS, WithDenseHead

DENSE_ENTRIES = {WEIGHT_KEYS[0]: "dense_head", EMA_KEYS[0]: "dense_head_ema"}  # beside the weights in its entries
LEARNER = ("kd_projector", "kd_scale")  # how names begin of what `tlt.distill.with_projector` adds


@dataclass
class Fit:
    """The part of a state dict that a model can take. Every name of the file is in one of the first three lists."""

    weights: dict[str, Tensor]  # ready for `load_clean(..., strict=False)`
    kept: list[str]  # taken as they are
    resized: list[str]  # taken after a change of shape
    dropped: list[str]
    missing: list[str]  # names of the model that get nothing
    notes: dict[str, str]  # of resized and dropped names: what and why
    changeable: set[str]  # names of heads and input convolution, which other classes or channels explain
    replaced_heads: set[str]  # names of heads, where the class counts differ
    bound: list[str]  # of those dropped, the ones whose shape may be that of another image size


def fit_state_dict(model: nn.Module, state: dict[str, Tensor], source_size: tuple[int, int] | None = None) -> Fit:
    """Find the part of `state` that the model can take; the model is not changed.

    Heads of another class count are dropped, both of them; the input convolution is adapted to other channel counts as
    timm does; what belongs to an image size (position embeddings, tables of relative positions) is resized to the
    model's, in timm's models by timm's own rules; what then has another name or shape is dropped.

    Args:
        state: Clean names, as `state_dict_of` returns.
        source_size: (H, W) pixels that the weights were trained on, if known. Only position embeddings (1, N, C) of a
            grid that is not square need it.
    """
    expected, left, sized = clean_state_dict(model), dict(state), False
    notes: dict[str, str] = {}  # of every name that is not taken as it is
    heads = _drop_heads(model, expected, left, notes)
    _adapt_input(model, expected, left, notes)
    if isinstance(target := unwrap(model), TokenLabelModel):
        before = left
        left, names = adapt_state_dict(target, left, source_grid(target, left, source_size))
        notes |= {n: f"{_shape(before[n])} -> {_shape(left[n])}" for n in names}
    elif sized := bool((getattr(target, "pretrained_cfg", None) or {}).get("fixed_input_size")):
        _resize_as_timm(target, expected, left, notes, source_size)
    for name in [n for n, value in left.items() if n not in expected or expected[n].shape != value.shape]:
        notes[name] = "not in the model"
        if name in expected:
            notes[name] = f"the model's is {_shape(expected[name])}, not {_shape(left[name])}"
        del left[name]
    kept, resized = [n for n in left if n not in notes], [n for n in notes if n in left]
    dropped, missing = [n for n in notes if n not in left], [n for n in expected if n not in left]
    ends = tuple(f"{layer}." for layer in head_names(model) + input_names(model))
    changeable, replaced = ({n for n in [*expected, *state] if n.startswith(starts)} for starts in (ends, heads))
    bound = [n for n in dropped if n in expected and n not in changeable] if sized else []
    return Fit(left, kept, resized, dropped, missing, notes, changeable, replaced, bound)


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers whose output is one number per class, the dense head included."""
    model = unwrap(model)
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    names = [classifier] if isinstance(classifier, str) else list(classifier)
    if isinstance(model, TokenLabelModel):
        names += ["head", "aux_head"]
    if isinstance(model, WithDenseHead):
        names += DENSE_LAYERS
    return tuple(dict.fromkeys(names))


def input_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the convolutions whose input is the image."""
    first = (getattr(unwrap(model), "pretrained_cfg", None) or {}).get("first_conv") or ()
    return (first,) if isinstance(first, str) else tuple(first)


def _drop_heads(
    model: nn.Module, expected: dict[str, Tensor], left: dict[str, Tensor], notes: dict[str, str]
) -> tuple[str, ...]:
    """Take the heads out of `left` if one of them has another class count than the model's; return how they begin."""
    heads = tuple(f"{head}." for head in head_names(model))
    weights = [n for head in heads if (n := f"{head}weight") in left]
    counts = [(left[n].shape[:1].numel(), expected[n].shape[:1].numel() if n in expected else 0) for n in weights]
    if not (differing := [pair for pair in counts if pair[0] != pair[1]]):
        return ()
    for name in [n for n in left if n.startswith(heads)]:
        notes[name] = f"{differing[0][0]} classes, the model has {differing[0][1]}"
        del left[name]
    return heads


def _adapt_input(model: nn.Module, expected: dict[str, Tensor], left: dict[str, Tensor], notes: dict[str, str]) -> None:
    """Adapt the input convolution in `left` to the model's channel count, or take it out where there is no rule."""
    for name in [f"{layer}.weight" for layer in input_names(model)]:
        if name not in left or name not in expected or left[name].ndim != expected[name].ndim:
            continue
        theirs, ours = left[name].shape[1], expected[name].shape[1]
        if theirs == ours:
            continue
        try:
            left[name] = adapt_input_conv(ours, left[name])
            notes[name] = f"{theirs} -> {ours} input channels"
        except (NotImplementedError, ValueError, AssertionError):  # channel counts it knows no rule for
            del left[name]
            notes[name] = f"{theirs} input channels, the model has {ours}"


def _resize_as_timm(
    model: Any, expected: dict[str, Tensor], left: dict[str, Tensor], notes: dict[str, str], source_size: Grid | None
) -> None:
    """Resize what `left` has in another shape than a timm model by the function with which timm loads its own files.

    That takes all grids for square: a position embedding of a `source_size` is given to timm's resampling with its own.
    """
    modules = [sys.modules[kind.__module__] for kind in type(model).__mro__]
    family: Any = next((module for module in modules if hasattr(module, "checkpoint_filter_fn")), None)
    if family is None:
        return
    resized = dict(left)
    try:
        if source_size and "pos_embed" in resized and hasattr(family, "resample_abs_pos_embed"):
            (rows, cols), pos = model.patch_embed.dynamic_feat_size(source_size), resized["pos_embed"]
            prefix = pos.shape[1] - rows * cols
            resized["pos_embed"] = resample_abs_pos_embed(pos, model.patch_embed.grid_size, [rows, cols], prefix)
        resized |= family.checkpoint_filter_fn(dict(resized), model)
    except Exception:  # whatever it raises on weights that it has no rule for
        return
    other = tuple(f"{layer}." for layer in input_names(model))
    misfits = [n for n in left if n in expected and not n.startswith(other) and left[n].shape != expected[n].shape]
    for name in dict.fromkeys([*misfits, *(n for n in left if n == "pos_embed")]):
        if resized[name] is not left[name] and resized[name].shape == expected[name].shape:
            notes[name] = f"{_shape(left[name])} -> {_shape(resized[name])}"
            left[name] = resized[name]


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def adapt_state_dict(
    model: TokenLabelModel, state_dict: Mapping[str, Tensor], source_grid: Grid | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Convert the position embedding of weights that were trained at another image size.

    Args:
        model: The model that is to load them.
        state_dict: Weights under the published names; left unchanged.
        source_grid: Token grid that the weights were trained on. Only (1, 1 + N, C) embeddings need it, and only where
            it is not square: without it a square grid is assumed, as all published weights have it, even where the
            model has as many tokens in another grid; then one of the model's own aspect ratio.

    Returns:
        The converted copy and the names of the entries that were resized.

    Raises:
        UserError: N fits no grid that could be guessed.
    """
    adapted = dict(state_dict)
    pos, target = adapted.get("pos_embed"), model.pos_embed
    if pos is None or target is None or pos.ndim != target.ndim or pos.shape[-1] != target.shape[-1]:
        return adapted, []
    if not (pos if pos.ndim == 4 else pos[:, 1:]).numel():  # of no token
        return adapted, []
    grid = None if pos.ndim == 4 else source_grid or _guess_grid(pos.shape[1] - 1, model.pos_grid)
    adapted["pos_embed"] = resize_pos_embed(pos, model.pos_grid, grid)
    return adapted, ["pos_embed"] if adapted["pos_embed"] is not pos else []


def source_grid(
    model: TokenLabelModel, state_dict: Mapping[str, Tensor], img_size: tuple[int, int] | None
) -> Grid | None:
    """The grid of weights that were trained at (H, W) pixels, None if it is unknown, not needed or does not fit."""
    pos = state_dict.get("pos_embed")
    if img_size is None or pos is None or pos.ndim != 3:
        return None
    rows, cols = model.token_grid(img_size)
    return (rows, cols) if rows * cols == pos.shape[1] - 1 else None


def _guess_grid(tokens: int, target: Grid) -> Grid:
    """The grid of a checkpoint's tokens: a square, else one of the aspect ratio of `target`.

    Raises:
        UserError: Neither has so many tokens.
    """
    side = math.isqrt(tokens)
    if side * side == tokens:
        return side, side
    rows = round(math.sqrt(tokens * target[0] / target[1]))
    if rows > 0 and tokens % rows == 0 and rows * target[1] * rows == tokens * target[0]:
        return rows, tokens // rows
    raise UserError(
        f"pos_embed of the checkpoint has {tokens} tokens, which is not a square grid: load it into a model built with "
        "the image size it was trained at, then change the size with set_input_size"
    )


def split_state_dict(model: nn.Module, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights under the names of the plain model, those of the dense head and the projector) of a model's clean state
    dict; the second is empty but for a WithDenseHead and a student."""
    layers = DENSE_LAYERS if isinstance(unwrap(model), WithDenseHead) else ()
    dense = {n: value for n, value in state.items() if n.partition(".")[0] in layers or n.startswith(LEARNER)}
    return {name: value for name, value in state.items() if name not in dense}, dense


def joined_state_dict(
    model: nn.Module, checkpoint: dict[str, Any], use_ema: bool | None = None, path: Any = "the checkpoint"
) -> dict[str, Tensor]:
    """As `state_dict_of`, with the dense head and the projector that belong to those weights if `model` has them.

    The weights of a ViT of Hugging Face's Transformers get timm's names.
    """
    expected = clean_state_dict(model)
    state = from_transformers(state_dict_of(checkpoint, use_ema, path, expected))
    beside = dense_head_of(checkpoint, use_ema, path, expected)
    return state | {name: v for name, v in beside.items() if hasattr(unwrap(model), name.partition(".")[0])}


def prefix_of(model: nn.Module, checkpoint: dict[str, Any], use_ema: bool | None, path: Any) -> str:
    """Return what `joined_state_dict` takes off the names in somebody's file, which is told; "" for nothing."""
    expected = clean_state_dict(model)
    entry = weights_entry(checkpoint, use_ema, path, expected)
    return foreign_prefix(clean_names(list(checkpoint[entry] if entry else checkpoint)), expected)


def dense_head_of(
    checkpoint: dict[str, Any], use_ema: bool | None = None, path: Any = "the checkpoint", wanted: Collection[str] = ()
) -> dict[str, Tensor]:
    """The dense head and the projector that a checkpoint holds beside the weights, empty where it holds none.
    Arguments as in `weights_entry`.

    Raises:
        UserError: There is something else in its place.
    """
    entry = DENSE_ENTRIES.get(weights_entry(checkpoint, use_ema, path, wanted), "")
    state = checkpoint.get(entry)
    if state is None:
        return {}
    if not isinstance(state, dict) or not all(is_dense_head(n) and isinstance(v, Tensor) for n, v in state.items()):
        raise UserError(f"{path}: its {entry} is not the dense head of a model")
    return cast(dict[str, Tensor], state)


def is_dense_head(name: Any) -> bool:
    """Whether a parameter of this name belongs to the dense head of a WithDenseHead, or to a projector."""
    return str(name).partition(".")[0] in DENSE_LAYERS or str(name).startswith(LEARNER)
