"""What the attention layers of VOLO and LV-ViT look at, recomputed from the layers' own inputs.

The models never hold their attention weights (`scaled_dot_product_attention`), so a forward hook keeps what goes into a
layer, and the weights are computed again with the layer's own projections. Pure functions; drawing is elsewhere.

Shapes: B images, H x W cells of the outlooker stage, h x w windows, K the kernel's side, N tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.models.layers import SelfAttention
from volo.models.blocks import ClassAttention, OutlookAttention

LAYERS = (OutlookAttention, SelfAttention, ClassAttention)


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers in the order of the model, by the name of their block.

    Raises:
        UserError: There is none whose weights can be computed here.
    """
    found: dict[str, nn.Module] = {
        name.removesuffix(".attn"): module for name, module in model.named_modules() if isinstance(module, LAYERS)
    }
    if not found:
        raise UserError(
            f"--model: {type(model).__name__} has none of the attention layers of VOLO and LV-ViT, whose maps are shown"
        )
    return found


@torch.no_grad()
def forward_with_inputs(model: Any, images: Tensor, layers: Iterable[nn.Module]) -> tuple[Tensor, list[Tensor]]:
    """`model.forward_features(images)`, and what went into each of the layers."""
    inputs: dict[nn.Module, Tensor] = {}
    layers = list(layers)
    hooks = [layer.register_forward_hook(lambda layer, x, _: inputs.update({layer: x[0]})) for layer in layers]
    try:
        return model.forward_features(images), [inputs[layer] for layer in layers]
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def self_attention(layer: SelfAttention, x: Tensor) -> Tensor:
    """Input (B, ..., C) -> weights (B, heads, N, N), rows sum to 1."""
    qkv = layer.qkv(x.flatten(1, -2)).unflatten(-1, (3, layer.num_heads, -1))  # (B, N, 3, heads, C / heads)
    q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)


@torch.no_grad()
def class_attention(layer: ClassAttention, x: Tensor) -> Tensor:
    """Input (B, 1 + N, C) -> weights of the class token (B, heads, 1 + N), itself first; they sum to 1."""
    q = layer.q(x[:, :1]).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)  # (B, heads, 1, C / heads)
    k = layer.kv(x).unflatten(-1, (2, layer.num_heads, -1))[:, :, 0].transpose(1, 2)  # (B, heads, 1 + N, C / heads)
    return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)[:, :, 0]


@torch.no_grad()
def outlook_attention(layer: OutlookAttention, x: Tensor) -> Tensor:
    """Input (B, H, W, C) -> weights (B, heads, h, w, K * K written, K * K read); the last axis sums to 1."""
    pooled = F.avg_pool2d(x.permute(0, 3, 1, 2), layer.stride, ceil_mode=True).permute(0, 2, 3, 1)
    logits = layer.attn(pooled) * layer.scale  # (B, h, w, heads * K^4)
    places = layer.kernel_size**2
    return logits.unflatten(-1, (layer.num_heads, places, places)).softmax(dim=-1).permute(0, 3, 1, 2, 4, 5)


def outlook_row(layer: OutlookAttention, weights: Tensor, size: tuple[int, int], cell: tuple[int, int]) -> Tensor:
    """The weight with which each cell goes into the output at one cell: what that cell looks at.

    Args:
        weights: Of `outlook_attention`.
        size: H, W.
        cell: Row and column.

    Returns:
        (B, heads, H, W). It sums to the number of windows that the cell lies in (1, 2 or 4), less what falls on the
        padding.
    """
    batch, heads, rows, cols, places, _ = weights.shape
    marked = weights.new_zeros(1, 1, *size)
    marked[0, 0, cell[0], cell[1]] = 1
    written = _unfold(layer, marked).view(1, 1, places, rows * cols)  # which place of which window is the cell
    read = torch.einsum("bhlpq,bhpl->bhql", weights.flatten(2, 3), written.expand(batch, heads, -1, -1))
    return _fold(layer, read, size)


def outlook_looked_at(layer: OutlookAttention, weights: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, heads, H, W): how much a cell is looked at by all the places of its windows; 1 where all look evenly."""
    read = weights.sum(dim=-2).flatten(2, 3).transpose(2, 3)  # (B, heads, places read, windows)
    return _fold(layer, read, size) / _fold(layer, torch.ones_like(read), size)


def _unfold(layer: OutlookAttention, x: Tensor) -> Tensor:
    return F.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride)


def _fold(layer: OutlookAttention, values: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, heads, places, windows) -> (B, heads, H, W), overlapping places added up."""
    out = F.fold(values.flatten(1, 2), size, layer.kernel_size, padding=layer.padding, stride=layer.stride)
    return out.view(*values.shape[:2], *size)
