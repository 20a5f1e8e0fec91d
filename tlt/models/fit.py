"""Fit a state dict to a model of another image size, class count or channel count; no file and no model is changed."""

from __future__ import annotations

from dataclasses import dataclass

from timm.models import adapt_input_conv
from torch import Tensor, nn

from tlt.io.weights import clean_state_dict, unwrap
from tlt.models.pos_embed import adapt_state_dict, source_grid
from tlt.models.token_labeling import TokenLabelModel
from tlt.models.wrap import DENSE_LAYERS, WithDenseHead


@dataclass
class Fit:
    """What of a state dict a model can take. Every name of the file is in one of the first three lists."""

    weights: dict[str, Tensor]  # ready for `load_clean(..., strict=False)`
    kept: list[str]  # taken as they are
    resized: list[str]  # taken after a change of shape
    dropped: list[str]
    missing: list[str]  # names of the model that get nothing
    notes: dict[str, str]  # of resized and dropped names: what and why
    changeable: set[str]  # names of heads and input convolution, which other classes or channels explain
    replaced_heads: set[str]  # names of heads, where the class counts differ


def fit_state_dict(model: nn.Module, state: dict[str, Tensor], source_size: tuple[int, int] | None = None) -> Fit:
    """Find out what of `state` the model can take; the model is left as it is.

    Heads of another class count are dropped, both of them; the input convolution is adapted to other channel counts as
    timm does; the position embedding is resized to the model's grid; what then has another name or shape is dropped.

    Args:
        state: Clean names, as `state_dict_of` returns.
        source_size: (H, W) pixels that the weights were trained on, if known. Only LV-ViT weights of a grid that is not
            square need it.
    """
    own, left = clean_state_dict(model), dict(state)
    notes: dict[str, str] = {}
    dropped = _drop_heads(model, own, left, notes)
    heads = tuple(f"{layer}." for layer in head_names(model)) if dropped else ()
    resized, unfit = _adapt_input(model, own, left, notes)
    dropped += unfit
    if isinstance(target := unwrap(model), TokenLabelModel):
        before = left
        left, names = adapt_state_dict(target, left, source_grid(target, left, source_size))
        resized += names
        notes.update({n: f"{_shape(before[n])} -> {_shape(left[n])}" for n in names})
    for name in [n for n, value in left.items() if n not in own or own[n].shape != value.shape]:
        notes[name] = (
            f"the model's is {_shape(own[name])}, not {_shape(left[name])}" if name in own else "not in the model"
        )
        dropped.append(name)
        del left[name]
    resized = [n for n in resized if n in left]
    kept = [n for n in left if n not in resized]
    ends = tuple(f"{layer}." for layer in head_names(model) + input_names(model))
    changeable, replaced = ({n for n in [*own, *state] if n.startswith(starts)} for starts in (ends, heads))
    return Fit(left, kept, resized, dropped, [n for n in own if n not in left], notes, changeable, replaced)


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
    """Return the names of the convolutions that see the image."""
    first = (getattr(unwrap(model), "pretrained_cfg", None) or {}).get("first_conv") or ()
    return (first,) if isinstance(first, str) else tuple(first)


def _drop_heads(model: nn.Module, own: dict[str, Tensor], left: dict[str, Tensor], notes: dict[str, str]) -> list[str]:
    """Take the heads out of `left` if one of them has another class count than the model's; return the names."""
    heads = head_names(model)
    weights = [n for h in heads if (n := f"{h}.weight") in left]
    counts = [(left[n].shape[:1].numel(), own[n].shape[:1].numel() if n in own else 0) for n in weights]
    differing = [pair for pair in counts if pair[0] != pair[1]]
    if not differing:
        return []
    theirs, ours = differing[0]
    names = [n for n in left if n.startswith(tuple(f"{h}." for h in heads))]
    for name in names:
        notes[name] = f"{theirs} classes, the model has {ours}"
        del left[name]
    return names


def _adapt_input(
    model: nn.Module, own: dict[str, Tensor], left: dict[str, Tensor], notes: dict[str, str]
) -> tuple[list[str], list[str]]:
    """Adapt the input convolution in `left` to the model's channel count; return the names (adapted, dropped)."""
    adapted: list[str] = []
    dropped: list[str] = []
    for layer in input_names(model):
        name = f"{layer}.weight"
        if name not in left or name not in own or left[name].ndim != own[name].ndim:
            continue
        if left[name].shape[1] == own[name].shape[1]:
            continue
        theirs, ours = left[name].shape[1], own[name].shape[1]
        try:
            left[name] = adapt_input_conv(ours, left[name])
            adapted.append(name)
            notes[name] = f"{theirs} -> {ours} input channels"
        except (NotImplementedError, ValueError, AssertionError):  # channel counts it knows no rule for
            del left[name]
            dropped.append(name)
            notes[name] = f"{theirs} input channels, the model has {ours}"
    return adapted, dropped


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
