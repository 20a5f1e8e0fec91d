"""Outlook attention without unfold and fold: plain torch, mainly for CPUs.

A window's middle row is an even row of the map. Its last row and the first row of the window below are the same odd
row. So windows are a strided view of the padded map, and two additions of slices sum them.

Images are processed in chunks that fit into the processor's caches and share scratch memory, so that each tensor of the
size of the batch is read or written only once. torch.compile sees this loop as one opaque operator.

In shapes: B images, N of them in a chunk, H x W cells, h x w windows, D channels per head.
"""

import torch
from torch import Tensor

from tlt.io.chunks import image_chunks
from volo.kernels.operators import define_operator

_PIXELS = 9  # per window


def outlook_attention(v: Tensor, logits: Tensor, scale: float, dropout: float) -> Tensor:
    """Compute `volo.kernels.outlook_attention`; the softmax and its gradient are in float32 at least."""
    return _operator(v, logits, scale)


def why_unsupported(v: Tensor, logits: Tensor, dropout: float) -> str | None:
    """Return why this implementation doesn't support the call, or None: it has no dropout."""
    return "it has no dropout of its weights" if dropout else None


def _attend(v: Tensor, logits: Tensor, scale: float) -> Tensor:
    out = _map_of_pairs(v, logits)
    scratch = _Scratch(v, logits)
    for part in scratch.chunks:
        weights = _softmax(logits[part], scale, v.dtype)
        values = scratch.cut(v[part], scratch.first)
        _add_up(scratch.product(weights, values, scratch.second), out[part])
    return out[:, : v.shape[1], : v.shape[2]].contiguous()


def _attend_backward(grad: Tensor, v: Tensor, logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of v and the logits. Recomputing the weights is as fast as storing them."""
    grad_v = _map_of_pairs(v, logits)
    grad_logits = logits.new_empty(logits.shape)
    scratch = _Scratch(v, logits)
    for part in scratch.chunks:
        weights = _softmax(logits[part], scale, _accurate(logits))
        grads = scratch.cut(grad[part], scratch.first)
        _add_up(scratch.product(weights.to(v.dtype).mT, grads, scratch.second), grad_v[part])
        values = scratch.cut(v[part], scratch.second)  # overwrites sums that are no longer needed
        grad_weights = torch.bmm(_matrices(grads), _matrices(values).mT).view_as(weights)
        _softmax_backward(grad_weights, weights, scale, grad_logits[part])
    return grad_v[:, : v.shape[1], : v.shape[2]].contiguous(), grad_logits


_operator = define_operator("outlook_windows", _attend, _attend_backward)


class _Scratch:
    """Scratch memory for one chunk of images: a padded map and two sets of windows."""

    def __init__(self, v: Tensor, logits: Tensor) -> None:
        batch, rows, columns, heads = len(v), *logits.shape[1:3], _heads(logits)
        depth = v.shape[-1] // heads
        self.chunks = image_chunks(batch, rows * columns * _PIXELS * v.shape[-1], v.device)
        images = min(self.chunks[0].stop, batch) if self.chunks else 0
        padded = v.new_zeros(images, heads, 2 * rows + 1, 2 * columns + 1, depth)
        self._pixels = padded[:, :, 1 : v.shape[1] + 1, 1 : v.shape[2] + 1].permute(0, 2, 3, 1, 4)
        self._windows = padded.unfold(2, 3, 2).unfold(3, 3, 2).permute(0, 1, 2, 3, 5, 6, 4)
        self.first = v.new_empty(self._windows.shape)
        self.second = v.new_empty(self._windows.shape)

    def cut(self, x: Tensor, out: Tensor) -> Tensor:
        """Cut maps (N, H, W, heads * D) into windows (N, heads, h, w, 3, 3, D)."""
        images = len(x)
        self._pixels[:images] = x.unflatten(-1, self._pixels.shape[-2:])
        return out[:images].copy_(self._windows[:images])

    def product(self, weights: Tensor, windows: Tensor, out: Tensor) -> Tensor:
        """Multiply (N, heads, h, w, 9, 9) by (N, heads, h, w, 3, 3, D)."""
        out = out[: len(windows)]
        torch.bmm(weights.flatten(0, 3), _matrices(windows), out=_matrices(out))
        return out


def _heads(logits: Tensor) -> int:
    return logits.shape[-1] // _PIXELS**2


def _matrices(windows: Tensor) -> Tensor:
    """View (N, heads, h, w, 3, 3, D) as (N * heads * h * w, 9, D)."""
    return windows.view(-1, _PIXELS, windows.shape[-1])


def _map_of_pairs(v: Tensor, logits: Tensor) -> Tensor:
    """Return an empty map (B, 2h, 2w, C): where a side of `v` is odd, it has one more row or column."""
    return v.new_empty(v.shape[0], 2 * logits.shape[1], 2 * logits.shape[2], v.shape[3])


def _add_up(windows: Tensor, out: Tensor) -> None:
    """Sum windows (N, heads, h, w, 3, 3, D) into maps (N, 2h, 2w, heads * D). The windows are overwritten."""
    windows[:, :, :, :-1, :, 2].add_(windows[:, :, :, 1:, :, 0])
    windows[:, :, :-1, :, 2, 1:].add_(windows[:, :, 1:, :, 0, 1:])
    images, heads, rows, columns = windows.shape[:4]
    pairs = out.view(images, rows, 2, columns, 2, heads, -1)
    pairs.copy_(windows[..., 1:, 1:, :].permute(0, 2, 4, 3, 5, 1, 6))


def _softmax(logits: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Map logits (N, h, w, heads * 81) to weights (N, heads, h, w, 9, 9)."""
    rows = logits.unflatten(-1, (_heads(logits), _PIXELS, _PIXELS)).permute(5, 0, 3, 1, 2, 4)
    # Put the softmax axis first: torch processes rows of nine one by one, but many columns at once.
    columns = torch.empty(rows.shape, dtype=_accurate(logits), device=logits.device).copy_(rows)
    weights = columns.mul_(scale).softmax(0).permute(1, 2, 3, 4, 5, 0)
    return torch.empty(weights.shape, dtype=dtype, device=logits.device).copy_(weights)


def _softmax_backward(grad: Tensor, weights: Tensor, scale: float, out: Tensor) -> None:
    """Map two tensors (N, heads, h, w, 9, 9) to the logits' gradient (N, h, w, heads * 81), written to `out`."""
    weighted = weights * grad
    result = weighted.addcmul_(weights, weighted.sum(-1, keepdim=True), value=-1).mul_(scale)
    out.unflatten(-1, (weights.shape[1], _PIXELS, _PIXELS)).copy_(result.permute(0, 2, 3, 1, 4, 5))


def _accurate(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
