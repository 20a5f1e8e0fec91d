"""Where a timm model keeps its image: the map of its last features, whatever its architecture calls it.

Shapes: B images of (H, W) pixels, maps of `h x w` tokens, C channels, P prefix tokens (class token, registers).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from timm.layers import RmsNorm, RmsNorm2d
from torch import Tensor, nn

from tlt.errors import UserError

_RMS_NORMS = (nn.RMSNorm, RmsNorm, RmsNorm2d)


def feature_map(model: nn.Module, features: Any, img_size: tuple[int, int]) -> Tensor:
    """The output of `model.forward_features` for images of (H, W) as a map, without prefix tokens.

    Args:
        features: (B, C, h, w), (B, h, w, C) of a model whose `output_fmt` says so, or (B, P + h * w, C).

    Returns:
        (B, h, w, C).

    Raises:
        UserError: It is neither, or its tokens are not the patches of the image.
    """
    kind = type(model).__name__
    if not isinstance(features, Tensor) or features.ndim not in (3, 4):
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UserError(f"{kind} has no spatial features: they are {shape}, neither a map nor tokens")
    if features.ndim == 4:
        return features if is_channels_last(model) else features.permute(0, 2, 3, 1)
    layers: list[Any] = [getattr(model, name, None) for name in ("patch_embed", "stem")]
    own = getattr(model, "token_grid", None)  # of VOLO and LV-ViT
    measure = next((layer.dynamic_feat_size for layer in layers if hasattr(layer, "dynamic_feat_size")), own)
    grid, prefix = None if measure is None else tuple(measure(img_size)), prefix_tokens(model)
    if grid is None or features.shape[1] != prefix + grid[0] * grid[1]:
        where = "it doesn't say which patch each shows" if grid is None else f"not {grid[0]} x {grid[1]} patches"
        raise UserError(f"{kind} has no spatial features: {features.shape[1] - prefix} tokens, {where}")
    return features[:, prefix:].unflatten(1, grid)


def prefix_tokens(model: nn.Module) -> int:
    """P: tokens before those of the image."""
    return int(getattr(model, "num_prefix_tokens", None) or 0)


def is_channels_last(model: nn.Module) -> bool:
    """Whether the model's feature map is (B, h, w, C)."""
    return str(getattr(model, "output_fmt", "NCHW")).upper().endswith("NHWC")


def norm_after_pooling(model: nn.Module) -> nn.Module | None:
    """The layer norm or RMS norm that the model applies to its pooled features (ConvNeXt's `head.norm`, a vision
    transformer's `fc_norm`); None where there is none, or one of another kind."""
    for norm in (getattr(model, "fc_norm", None), getattr(getattr(model, "head", None), "norm", None)):
        if isinstance(norm, (nn.LayerNorm, *_RMS_NORMS)):
            return norm
    return None


def norm_with_scale_of(norm: nn.Module, x: Tensor, reference: Tensor) -> Tensor:
    """Normalise `x` by `norm`, dividing by the deviation of `reference` in place of its own.

    With `reference` the mean of `x` over its tokens this is an affine function of each token, whose mean over the
    tokens is `norm(reference)`: centring is linear, and the divisor is one number per image.

    Args:
        norm: From `norm_after_pooling`.
        x: (B, h, w, C).
        reference: (B, C).

    Returns:
        (B, h, w, C), in at least float32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, reference = x.to(dtype), reference.to(dtype)
    if not isinstance(norm, _RMS_NORMS):
        x = x - x.mean(-1, keepdim=True)
        reference = reference - reference.mean(-1, keepdim=True)
    eps = torch.finfo(dtype).eps if norm.eps is None else norm.eps  # torch's RMSNorm takes None for that
    x = x * (reference.square().mean(-1) + cast(float, eps)).rsqrt()[:, None, None, None]
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias
