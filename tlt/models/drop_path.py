"""Stochastic depth (arXiv 1603.09382), by a mask over the samples or by leaving out the work of those that are dropped.

B samples, of which S are kept; C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from timm.layers import DropPath
from torch import Tensor, nn

_UNIT = 1 << 16  # of the share of samples that are kept


class StochasticDepth(DropPath):
    """Sets the branch of some samples to 0, as timm's DropPath ("mask"), or leaves it out ("subset"; `add_branch`)."""

    mode = "mask"

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        # In integers: torch.compile may take a module's float for a run-time value, and refuses sizes made of one.
        self._keep = round((1.0 - rate) * _UNIT)

    def kept(self, batch: int) -> int:
        """How many of `batch` samples mode "subset" keeps: the nearest number to the rate's, but at least one."""
        return max(1, (batch * self._keep + _UNIT // 2) // _UNIT)


def drop_path_layer(rate: float) -> nn.Module:
    """Stochastic depth at `rate`; an identity where the rate is zero."""
    return StochasticDepth(rate) if rate > 0.0 else nn.Identity()


def draw_orders(count: int, x: Tensor) -> Tensor:
    """Draw `count` orders of the B samples of x (B, ...), int64 (count, B), independent of each other, at once."""
    precise = torch.float32 if x.device.type == "mps" else torch.float64
    return torch.rand(count, x.shape[0], dtype=precise, device=x.device).argsort(dim=1)  # float32's can tie


def draw_samples(drop_path: nn.Module, x: Tensor, order: Tensor | None = None) -> Tensor | None:
    """Draw which of the B samples of x (B, ...) keep a branch, from torch's generator of the device.

    Args:
        order: Of `draw_orders`, one of those drawn for many branches at once; without it mode "subset" draws its own.

    Returns:
        Mode "mask": (B, 1, ..., 1), what each sample's branch is multiplied by, as in timm's DropPath. Mode "subset":
        int64 (S,), S different samples. None where nothing is ever dropped.
    """
    if not isinstance(drop_path, StochasticDepth) or not drop_path.training:
        return None
    if drop_path.mode == "mask":
        return drop_path(x.new_ones((x.shape[0],) + (1,) * (x.ndim - 1)))
    order = draw_orders(1, x)[0] if order is None else order
    return order[: drop_path.kept(x.shape[0])]


def add_branch(
    x: Tensor, branch: Callable[[Tensor], Tensor], samples: Tensor | None = None, divisor: float = 1.0
) -> Tensor:
    """x + branch(x) / divisor with stochastic depth, x being (B, ..., C); `branch` must treat samples apart.

    Args:
        samples: From `draw_samples`. S drawn samples get B / S times their branch, which is computed for these alone.
            What happens to one sample has the law of DropPath at a rate of 1 - S / B, hence the same mean of output and
            gradients.
    """
    if samples is not None and not isinstance(samples, torch.fx.Proxy) and not samples.is_floating_point():
        # Not in `_Join`: torch 2.13 and 2.14 lose a run-time float (dynamic=True) that is first used in a function.
        factor = x.shape[0] / (samples.shape[0] * divisor)
        skip, rows = _Split.apply(x, samples)
        return _Join.apply(skip, rows, branch(rows), samples, factor)
    update = branch(x)
    if samples is not None:
        update = update * samples.to(update.dtype)
    return x + (update if divisor == 1.0 else update / divisor)


# Autograd's own gradients of index_select and index_add fill a zero tensor of x's size by atomic additions, and add it
# to the gradient of the skip connection in another pass. No index occurs twice, so that plain copies will do.


class _Split(torch.autograd.Function):
    """x (B, ...), index (S,) -> x for the skip connection, and its rows (S, ...)."""

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad_skip: Tensor, grad_rows: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad_skip.index_copy(0, index, grad_skip.index_select(0, index) + grad_rows), None


class _Join(torch.autograd.Function):
    """skip (B, ...) with `factor` times `update` (S, ...) added to the rows of `index`, which `rows` are."""

    @staticmethod
    def forward(skip: Tensor, rows: Tensor, update: Tensor, index: Tensor, factor: float) -> Tensor:
        changed = torch.add(rows, update, alpha=factor)  # of the wider type, as x + update is
        return skip.to(changed.dtype).index_copy(0, index, changed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, _, _, index, ctx.factor = inputs
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad, None, grad.index_select(0, index) * ctx.factor, None, None
