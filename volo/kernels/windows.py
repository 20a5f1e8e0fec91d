"""Outlook attention for windows of 3 x 3 at stride 2, without unfold and fold: plain torch, for CPUs above all.

At stride 2 a place of a window writes exactly one pixel: a window's middle row falls on an even row of the map, its
last row and the first of the window below on the odd row between. So windows are a strided view of the padded map, and
adding them up takes two additions of slices.

Images are worked off in groups that fit the processor's caches, in scratch memory which the groups share: what is as
large as the batch is read or written once. That loop is opaque to compilers, which take it as one operation.

In shapes: B images, N of them in a group, H x W cells, h x w windows, D channels per head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tlt.groups import image_groups

_PLACES = 9


def outlook_attention(
    v: Tensor, logits: Tensor, kernel_size: int, stride: int, padding: int, scale: float, dropout: float
) -> Tensor:
    """As `volo.kernels.outlook_attention`; the softmax and its gradient are computed in float32 at least."""
    out: Tensor = _attend(v, logits, scale)
    return out


def unfit(v: Tensor, logits: Tensor, kernel_size: int, stride: int, padding: int, dropout: float) -> str | None:
    """Other windows than VOLO's, and dropout."""
    if (kernel_size, stride, padding) != (3, 2, 1):
        return f"is for kernel 3, stride 2, padding 1, not {kernel_size}, {stride}, {padding}"
    if dropout:
        return "has no dropout of its weights"
    return None


@torch.library.custom_op("volo::outlook_windows", mutates_args=())
def _attend(v: Tensor, logits: Tensor, scale: float) -> Tensor:
    out = v.new_empty(v.shape)
    scratch = _Scratch(v, logits)
    with torch.autocast(v.device.type, enabled=False):
        for part in scratch.groups:
            weights = scratch.softmax(logits[part], scale).to(v.dtype)
            mixed = _product(weights, scratch.cut(v[part], scratch.first), scratch.second)
            _add_up(mixed, out[part])
    return out


@torch.library.custom_op("volo::outlook_windows_backward", mutates_args=())
def _attend_backward(grad: Tensor, v: Tensor, logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Gradients of v and of the logits. Weights are computed anew: that takes less than keeping them."""
    grad_v, grad_logits = v.new_empty(v.shape), logits.new_empty(logits.shape)
    scratch = _Scratch(v, logits)
    with torch.autocast(v.device.type, enabled=False):
        for part in scratch.groups:
            weights = scratch.softmax(logits[part], scale)
            grads = scratch.cut(grad[part], scratch.first)
            mixed = _product(weights.to(v.dtype).mT, grads, scratch.second)
            _add_up(mixed, grad_v[part])
            values = scratch.cut(v[part], scratch.second)
            grad_weights = torch.bmm(grads.flatten(0, 3).flatten(1, 2), values.flatten(0, 3).flatten(1, 2).mT)
            _softmax_backward(grad_weights.view_as(weights), weights, scale, grad_logits[part])
    return grad_v, grad_logits


class _Scratch:
    """Memory for one group of images after the other: a padded map and two sets of windows."""

    def __init__(self, v: Tensor, logits: Tensor) -> None:
        batch, height, width = logits.shape[:3]
        heads = self.heads = logits.shape[-1] // _PLACES**2
        depth = v.shape[-1] // heads
        self.groups = image_groups(batch, height * width * _PLACES * v.shape[-1], v.device)
        images = min(self.groups[0].stop, batch) if self.groups else 0
        # Zero but for the pixels inside, which every group writes anew.
        self.padded = v.new_zeros(images, heads, 2 * height + 1, 2 * width + 1, depth)
        self.first = v.new_empty(images, heads, height, width, 3, 3, depth)
        self.second = torch.empty_like(self.first)

    def cut(self, x: Tensor, out: Tensor) -> Tensor:
        """Cut maps (N, H, W, heads * D) into windows (N, heads, h, w, 3, 3, D)."""
        images, height, width = x.shape[:3]
        padded, out = self.padded[:images], out[:images]
        by_head = x.unflatten(-1, (padded.shape[1], -1)).permute(0, 3, 1, 2, 4)
        padded[:, :, 1 : height + 1, 1 : width + 1] = by_head
        return out.copy_(padded.unfold(2, 3, 2).unfold(3, 3, 2).permute(0, 1, 2, 3, 5, 6, 4))

    def softmax(self, logits: Tensor, scale: float) -> Tensor:
        """(N, h, w, heads * 81) -> weights (N, heads, h, w, 9, 9) in float32 or float64."""
        rows = logits.unflatten(-1, (self.heads, _PLACES, _PLACES)).permute(5, 0, 3, 1, 2, 4)
        # The nine to be normalised come first: torch takes rows of nine one by one, but many columns at once.
        rows = torch.empty(rows.shape, dtype=_accurate(rows), device=rows.device).copy_(rows)
        return rows.mul_(scale).softmax(0).permute(1, 2, 3, 4, 5, 0).contiguous()


def _product(weights: Tensor, windows: Tensor, out: Tensor) -> Tensor:
    """(N, heads, h, w, 9, 9) times (N, heads, h, w, 3, 3, D)."""
    out = out[: len(windows)]
    torch.bmm(weights.flatten(0, 3), windows.flatten(0, 3).flatten(1, 2), out=out.flatten(0, 3).flatten(1, 2))
    return out


def _add_up(windows: Tensor, out: Tensor) -> None:
    """Add windows (N, heads, h, w, 3, 3, D) up to maps (N, H, W, heads * D). The windows are overwritten."""
    windows[:, :, :, :-1, :, 2] += windows[:, :, :, 1:, :, 0]
    windows[:, :, :-1, :, 2, 1:] += windows[:, :, 1:, :, 0, 1:]
    maps = out.unflatten(-1, (windows.shape[1], -1))
    for row in range(2):
        for column in range(2):
            pixels = maps[:, row::2, column::2]  # of an odd map, one fewer than there are windows
            pixels.copy_(
                windows[:, :, : pixels.shape[1], : pixels.shape[2], 1 + row, 1 + column].permute(0, 2, 3, 1, 4)
            )


def _softmax_backward(grad: Tensor, weights: Tensor, scale: float, out: Tensor) -> None:
    """Both (N, heads, h, w, 9, 9) -> (N, h, w, heads * 81)."""
    weighted = weights * grad
    inner = weighted.sum(-1, keepdim=True)
    result = torch.addcmul(weighted, weights, inner, value=-1).mul_(scale)
    out.unflatten(-1, (weights.shape[1], _PLACES, _PLACES)).copy_(result.permute(0, 2, 3, 1, 4, 5))


def _accurate(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@_attend.register_fake
def _(v: Tensor, logits: Tensor, scale: float) -> Tensor:
    return v.new_empty(v.shape)


@_attend_backward.register_fake
def _(grad: Tensor, v: Tensor, logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    v, logits, ctx.scale = inputs
    ctx.save_for_backward(v, logits)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_v, grad_logits = _attend_backward(grad, *ctx.saved_tensors, ctx.scale)
    return grad_v, grad_logits, None


_attend.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.volo.outlook_windows)
def _flops(v_shape: Sequence[int], logits_shape: Sequence[int], scale: float, **_: Any) -> int:
    """Each logit's weight multiplies the D values of a pixel; one multiply-add is two."""
    return 2 * math.prod(logits_shape) * v_shape[-1] * _PLACES**2 // logits_shape[-1]


@register_flop_formula(torch.ops.volo.outlook_windows_backward)
def _backward_flops(
    grad_shape: Sequence[int], v_shape: Sequence[int], logits_shape: Sequence[int], scale: float, **_: Any
) -> int:
    return 2 * _flops(v_shape, logits_shape, scale)
