"""Fits the weights of a checkpoint to a model with another image size, class count or channel count.

The dense head of a WithDenseHead and the projector of a student (`tlt.distill`) have their own entry beside the
weights, which plain timm does not read. No function here changes a file, and only `number_classes` changes a model.
"""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.io.text import first_difference
from tlt.io.weights import (
    EMA_KEYS,
    WEIGHT_KEYS,
    clean_names,
    clean_state_dict,
    foreign_prefix,
    load_clean,
    state_dict_of,
    unwrap,
    weights_entry,
)
from tlt.models.layers import Grid, resize_pos_embed
from tlt.models.token_labeling import TokenLabelModel
from tlt.models.transformers_vit import from_transformers
from tlt.models.wrap import DENSE_LAYERS, WithDenseHead

DENSE_ENTRIES = {WEIGHT_KEYS[0]: "dense_head", EMA_KEYS[0]: "dense_head_ema"}  # entry of the weights -> of the head
LEARNER = ("kd_projector", "kd_scale")  # prefixes of what `tlt.distill.with_projector` adds to a model


Classes = Sequence[str]  # names of classes in the order of their numbers; those beyond its end have no name
Changes = dict[str, tuple[Tensor | None, str]]  # name -> what its tensor becomes, None if it is dropped; and why


@dataclass
class Fit:
    """The part of a state dict that a model can take. Every name of the file is in one of the first three lists."""

    weights: dict[str, Tensor]  # ready for `load_clean(..., strict=False)`
    kept: list[str]  # names taken unchanged
    resized: list[str]  # names taken after a change of shape
    dropped: list[str]
    missing: list[str]  # names of the model that the file lacks
    notes: dict[str, str]  # resized or dropped name -> what happened and why
    changeable: set[str]  # names in heads and the input convolution; other classes or channels explain their misfit
    replaced_heads: set[str]  # names in heads, if the class counts differ
    of_other_size: list[str]  # dropped names whose shape may belong to another image size
    reordered: bool  # whether the heads were resized only in the order of their classes


def fit_state_dict(
    model: nn.Module, state: dict[str, Tensor], source_size: Grid | None = None, there: Classes = (), here: Classes = ()
) -> Fit:
    """Find the part of `state`, weights under clean names, that the model can take. The model is not changed.

    Rows of heads go by the names of the classes, if both sides have names (`there`, `here`). Otherwise all heads are
    dropped if the class count differs. The input convolution is adapted to another channel count as timm does it.
    Tensors that depend on the image size (position embeddings, tables of relative positions) are resized, for timm
    models by timm's own rules; only a position embedding (1, N, C) of a grid that is not square needs the
    `source_size`, (H, W) in pixels, at which the weights were trained. Tensors that the model lacks or that still
    differ in shape are dropped.
    """
    expected = clean_state_dict(model)
    target = unwrap(model)
    changed_heads, reordered = _fit_heads(model, expected, state, there, here)
    changes = changed_heads | _adapt_input(model, expected, _changed(state, changed_heads))
    weights = _changed(state, changes)
    has_own_sizes = bool((getattr(target, "pretrained_cfg", None) or {}).get("fixed_input_size"))
    is_sized_by_timm = has_own_sizes and not isinstance(target, TokenLabelModel)
    if isinstance(target, TokenLabelModel):
        adapted, names = adapt_state_dict(target, weights, source_grid(target, weights, source_size))
        changes |= {n: (adapted[n], f"{_shape(weights[n])} -> {_shape(adapted[n])}") for n in names}
    elif is_sized_by_timm:
        changes |= _resize_as_timm(target, expected, weights, source_size)
    for name, value in _changed(state, changes).items():
        if name not in expected:
            changes[name] = (None, "not in the model")
        elif expected[name].shape != value.shape:
            changes[name] = (None, f"the model's is {_shape(expected[name])}, not {_shape(value)}")
    weights = _changed(state, changes)
    notes = {name: note for name, (_, note) in changes.items()}
    kept = [n for n in weights if n not in notes]
    resized = [n for n in notes if n in weights]
    dropped = [n for n in notes if n not in weights]
    missing = [n for n in expected if n not in weights]
    heads = tuple(f"{layer}." for layer in head_names(model)) if changed_heads else ()
    ends = tuple(f"{layer}." for layer in head_names(model) + input_names(model))
    changeable, replaced = ({n for n in [*expected, *state] if n.startswith(starts)} for starts in (ends, heads))
    of_other_size = [n for n in dropped if n in expected and n not in changeable] if is_sized_by_timm else []
    return Fit(weights, kept, resized, dropped, missing, notes, changeable, replaced, of_other_size, reordered)


def _changed(state: dict[str, Tensor], changes: Changes) -> dict[str, Tensor]:
    """Return the tensors of a state dict that are left after changes."""
    tensors = state | {name: tensor for name, (tensor, _) in changes.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers whose output is one number per class, the dense head and its norm included."""
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


def rows_by_name(there: Classes, here: Classes, counts: tuple[int, int]) -> list[int] | None:
    """Return for each of `counts[1]` classes the number of the class of the same name among `counts[0]`, or -1.

    Classes without a name are equal if their numbers are. The result is None if names decide nothing: the lists agree,
    one is empty or of a single name for all classes, or one is of numbers that the other lacks.
    """
    for names, count in ((there, counts[0]), (here, counts[1])):
        numbers = [*names] == [str(number) for number in range(len(names))]
        if len(names) > count or len(names) == 1 < count or (numbers and {*there}.isdisjoint(here)):
            return None
    row_of: dict[str | int, int] = {key: row for row, key in enumerate((*there, *range(len(there), counts[0])))}
    rows = [row_of.get(key, -1) for key in (*here, *range(len(here), counts[1]))]
    return None if rows == [*range(counts[0])] else rows


def _fit_heads(
    model: nn.Module, expected: dict[str, Tensor], state: dict[str, Tensor], there: Classes, here: Classes
) -> tuple[Changes, bool]:
    """Fit all heads to the model's classes by name, or else drop them if a class count differs. Return also whether the
    order of the classes alone has changed."""
    heads = tuple(f"{layer}." for layer in head_names(model))
    weights = [n for head in heads if (n := f"{head}weight") in state and state[n].ndim > 1]
    counts = [(len(state[n]), len(expected[n]) if n in expected else 0) for n in weights]
    rows = rows_by_name(there, here, counts[0]) if counts else None
    if rows is None:
        differing = [f"{count} classes, the model has {own}" for count, own in counts if count != own]
        return {n: (None, differing[0]) for n in state if differing and n.startswith(heads)}, False
    found = [number for number, row in enumerate(rows) if row >= 0]
    note = f"by the names of the classes, of which the file has {len(found)} of {len(rows)}"
    note += f" ({first_difference(there, here)})"
    changes: Changes = {}
    names = [n for weight in weights for n in (weight, f"{weight.removesuffix('weight')}bias")]
    for name in (n for n in names if n in state and n in expected and state[n].shape[1:] == expected[n].shape[1:]):
        new = expected[name].clone()
        new[found] = state[name][[rows[number] for number in found]].to(new)
        changes[name] = (new if found else None, note)
    return changes, sorted(rows) == [*range(counts[0][0])]


def number_classes(model: Any, there: Classes, here: Classes, count: int) -> tuple[list[str], list[str]]:
    """Give a model the classes `here`, of `count` in all, in place of `there`, by their names. Return a line for the
    user, unless names decide nothing (`rows_by_name`), and the classes that are new to the model."""
    if (rows := rows_by_name(there, here, (model.num_classes, count))) is None:
        return [], []
    before = {name: value.clone() for name, value in clean_state_dict(model).items()}
    if sorted(rows) != [*range(model.num_classes)]:
        model.reset_classifier(count)
    load_clean(model, fit_state_dict(model, before, None, there, here).weights, strict=False)
    new = [[*here, *map(str, range(len(here), count))][number] for number, row in enumerate(rows) if row < 0]
    line = f"its {len(there)} classes are numbered by their names: {count - len(new)} of {count} are kept"
    return [f"{line}, {len(new)} are new"], new


def _adapt_input(model: nn.Module, expected: dict[str, Tensor], state: dict[str, Tensor]) -> Changes:
    """Adapt the input convolution to the model's channel count, or drop it if there is no rule."""
    changes: Changes = {}
    for name in [f"{layer}.weight" for layer in input_names(model)]:
        if name not in state or name not in expected or state[name].ndim != expected[name].ndim:
            continue
        file_channels, channels = state[name].shape[1], expected[name].shape[1]
        if file_channels == channels:
            continue
        try:
            changes[name] = (adapt_input_conv(channels, state[name]), f"{file_channels} -> {channels} input channels")
        except (NotImplementedError, ValueError, AssertionError):  # timm has no rule for these channel counts
            changes[name] = (None, f"{file_channels} input channels, the model has {channels}")
    return changes


def _resize_as_timm(
    model: Any, expected: dict[str, Tensor], state: dict[str, Tensor], source_size: Grid | None
) -> Changes:
    """Resize the tensors that have another shape in a timm model, with the function of timm that loads files.

    That function assumes square grids. So if `source_size` is given, we first resample the position embedding with
    timm's resampling and the actual grid.
    """
    modules = [sys.modules[kind.__module__] for kind in type(model).__mro__]
    family: Any = next((module for module in modules if hasattr(module, "checkpoint_filter_fn")), None)
    if family is None:
        return {}
    resized = dict(state)
    try:
        if source_size and "pos_embed" in resized and hasattr(family, "resample_abs_pos_embed"):
            rows, cols = model.patch_embed.dynamic_feat_size(source_size)
            pos = resized["pos_embed"]
            prefix = pos.shape[1] - rows * cols
            resized["pos_embed"] = resample_abs_pos_embed(pos, model.patch_embed.grid_size, [rows, cols], prefix)
        resized |= family.checkpoint_filter_fn(dict(resized), model)
    except Exception:  # timm's functions raise anything on weights for which they have no rule
        return {}
    inputs = tuple(f"{layer}." for layer in input_names(model))
    misfits = [n for n in state if n in expected and not n.startswith(inputs) and state[n].shape != expected[n].shape]
    names = dict.fromkeys([*misfits, *(n for n in state if n == "pos_embed")])
    changed = [n for n in names if resized[n] is not state[n] and resized[n].shape == expected[n].shape]
    return {n: (resized[n], f"{_shape(state[n])} -> {_shape(resized[n])}") for n in changed}


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def adapt_state_dict(
    model: TokenLabelModel, state_dict: Mapping[str, Tensor], source_grid: Grid | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Resize the position embedding of weights that were trained at another image size, in a copy. Return it with the
    names of the entries that were resized.

    The token grid of the weights is `source_grid`. Only (1, 1 + N, C) embeddings need it, and only if it is not square.
    Without it we assume a square grid, as in all published weights, even if the model has as many tokens in another
    grid; if N is no square number, we assume the model's aspect ratio. Raise UserError if N fits neither of these
    grids.
    """
    adapted = dict(state_dict)
    pos = adapted.get("pos_embed")
    target = model.pos_embed
    if pos is None or target is None or pos.ndim != target.ndim or pos.shape[-1] != target.shape[-1]:
        return adapted, []
    if not (pos if pos.ndim == 4 else pos[:, 1:]).numel():  # it has no tokens
        return adapted, []
    grid = None if pos.ndim == 4 else source_grid or _guess_grid(pos.shape[1] - 1, model.pos_grid)
    adapted["pos_embed"] = resize_pos_embed(pos, model.pos_grid, grid)
    return adapted, ["pos_embed"] if adapted["pos_embed"] is not pos else []


def source_grid(
    model: TokenLabelModel, state_dict: Mapping[str, Tensor], img_size: tuple[int, int] | None
) -> Grid | None:
    """Return the grid of weights that were trained at (H, W) pixels; None if unknown, not needed, or not fitting."""
    pos = state_dict.get("pos_embed")
    if img_size is None or pos is None or pos.ndim != 3:
        return None
    rows, cols = model.token_grid(img_size)
    return (rows, cols) if rows * cols == pos.shape[1] - 1 else None


def _guess_grid(tokens: int, target: Grid) -> Grid:
    """Return the grid of a checkpoint's tokens: a square, else one with the aspect ratio of `target`. Raise UserError
    if neither grid has so many tokens."""
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
    """Split the clean state dict of a model into the weights of the plain model and those of the dense head and the
    projector. The second is empty except for a WithDenseHead and a student."""
    layers = DENSE_LAYERS if isinstance(unwrap(model), WithDenseHead) else ()
    dense = {n: value for n, value in state.items() if n.partition(".")[0] in layers or n.startswith(LEARNER)}
    return {name: value for name, value in state.items() if name not in dense}, dense


def joined_state_dict(
    model: nn.Module, checkpoint: dict[str, Any], use_ema: bool | None = None, path: Any = "the checkpoint"
) -> dict[str, Tensor]:
    """Return what `state_dict_of` returns, plus the dense head and the projector of these weights if `model` has them.

    Weights of a ViT from Hugging Face's Transformers get timm's names.
    """
    expected = clean_state_dict(model)
    state = from_transformers(state_dict_of(checkpoint, use_ema, path, expected))
    extra = dense_head_of(checkpoint, use_ema, path, expected)
    return state | {name: v for name, v in extra.items() if hasattr(unwrap(model), name.partition(".")[0])}


def place_of(model: nn.Module, checkpoint: dict[str, Any], use_ema: bool | None, path: Any) -> tuple[str, str]:
    """Return the entry from which `joined_state_dict` takes the weights, and the foreign prefix that it removes from
    their names; "" for none."""
    expected = clean_state_dict(model)
    entry = weights_entry(checkpoint, use_ema, path, expected)
    return entry, foreign_prefix(clean_names(list(checkpoint[entry] if entry else checkpoint)), expected, use_ema)


def dense_head_of(
    checkpoint: dict[str, Any], use_ema: bool | None = None, path: Any = "the checkpoint", wanted: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the dense head and the projector that a checkpoint holds beside the weights; empty if it has none. The
    arguments are those of `weights_entry`. Raise UserError if the entry holds something else."""
    entry = DENSE_ENTRIES.get(weights_entry(checkpoint, use_ema, path, wanted), "")
    state = checkpoint.get(entry)
    if state is None:
        return {}
    if not isinstance(state, dict) or not all(is_dense_head(n) and isinstance(v, Tensor) for n, v in state.items()):
        raise UserError(f"{path}: its {entry} is not the dense head of a model")
    return cast(dict[str, Tensor], state)


def is_dense_head(name: Any) -> bool:
    """Return whether a parameter name belongs to the dense head of a WithDenseHead, or to a projector."""
    return str(name).partition(".")[0] in DENSE_LAYERS or str(name).startswith(LEARNER)
