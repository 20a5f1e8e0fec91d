"""Stochastic depth (arXiv 1603.09382): which images keep which residual branch is drawn once a step for all branches.

Two modes: "mask" multiplies a branch by 0 for the images that are dropped, as timm's DropPath does; "subset" computes
it for a fixed number of images alone. B images, of which S are kept; C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.fx
from timm.layers import DropPath
from torch import Tensor, nn

# A share of 1. Shares are integers: no change of a model's precision rounds them, and torch.compile takes them for
# constants, where a module's float may become a run-time value that sizes can't be made of.
WHOLE = 1 << 24


def drop_path_layer(rate: float) -> nn.Module:
    """timm's DropPath, which states the rate of a branch and is never called; an identity where the rate is zero."""
    return DropPath(rate) if rate > 0.0 else nn.Identity()


def kept_share(drop_path: nn.Module) -> int:
    """The share of the images that keep the branch of this layer, in parts of `WHOLE`."""
    return round((1.0 - drop_path.drop_prob) * WHOLE) if isinstance(drop_path, DropPath) else WHOLE


def kept_images(batch: int, share: int) -> int:
    """How many of `batch` images mode "subset" keeps: the nearest number to their share, but at least one."""
    return max(1, (batch * share + WHOLE // 2) // WHOLE)


def draw_masks(shares: Tensor, x: Tensor) -> Tensor:
    """Draw for mode "mask" what each of the B images of x (B, ...) multiplies each branch by: 0, or 1 / its share.

    Args:
        shares: (branches, 1) integers of `kept_share`; a copy waits for the device where they are on another than x.

    Returns:
        (branches, B) float32.
    """
    keep = shares.to(x.device) / WHOLE
    return torch.bernoulli(keep.expand(-1, x.shape[0])) / keep.clamp_min(1 / WHOLE)


def draw_subsets(shares: Sequence[int], x: Tensor) -> list[Tensor]:
    """Draw for mode "subset" which of the B images of x (B, ...) keep each branch: int64 (S,), all different."""
    precise = torch.float32 if x.device.type == "mps" else torch.float64  # float32's can tie
    orders = torch.rand(len(shares), x.shape[0], dtype=precise, device=x.device).argsort(dim=1)
    return [order[: kept_images(x.shape[0], share)] for order, share in zip(orders, shares, strict=True)]


def add_branch(
    x: Tensor, branch: Callable[[Tensor], Tensor], drawn: Tensor | None = None, divisor: float = 1.0
) -> Tensor:
    """x + branch(x) / divisor with stochastic depth, x being (B, ..., C); `branch` must treat images apart.

    Args:
        drawn: One branch's of `draw_masks` or `draw_subsets`; None: nothing is dropped. Of a subset, S images get B / S
            times their branch. Each image is kept as often, and multiplied by the same number, as by a mask at a rate
            of 1 - S / B, so that outputs and gradients have the same mean.
    """
    if drawn is None:
        update = branch(x)
    elif isinstance(drawn, torch.fx.Proxy) or drawn.is_floating_point():  # what torch.fx traces is a mask
        update = branch(x)
        update = update * drawn.to(update.dtype).reshape((-1,) + (1,) * (update.ndim - 1))
    else:
        update = branch(x.index_select(0, drawn))
        scaled = update.to(x.dtype) * (x.shape[0] / (drawn.shape[0] * divisor))
        return x.index_add(0, drawn, scaled)
    return x + (update if divisor == 1.0 else update / divisor)
