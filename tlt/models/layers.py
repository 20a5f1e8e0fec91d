"""Blocks that VOLO and LV-ViT share, with stochastic depth. Names are those of the published checkpoints.

Stochastic depth (arXiv 1603.09382) drops residual branches for some images. One draw per step decides for all branches.
Mode "mask" multiplies a branch by 0 for the images that drop it, as timm's DropPath does. Mode "subset" computes the
branch for a fixed number of images only.

Shapes: B images, S of which keep a branch; N tokens, C channels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from tlt.models.fast_ops import attention, check_heads, linear

torch.fx.wrap("attention")  # it branches on devices and dtypes, which a traced graph does not have

Grid = tuple[int, int]  # rows and columns of tokens
# The integer that means a share of 1. Changing a model's precision does not round integers, and torch.compile treats
# them as constants; a module's float may become a run-time value, which can't determine a size.
WHOLE = 1 << 24


class Constants(nn.Module):
    """A module with constant tensors that are in no state dict. They are restored if its memory is allocated anew, as
    users of FSDP2 do (build a model on the meta device, call `to_empty`, load the weights)."""

    _constants: dict[str, Tensor | None]

    def hold(self, **constants: Tensor | None) -> None:
        """Register these host tensors as buffers that are not saved."""
        self._constants = constants
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Call torch's method, which `to` and `to_empty` use, then write the constants again."""
        super()._apply(fn, recurse)
        for name, value in self._constants.items():
            if value is not None:
                setattr(self, name, value.to(getattr(self, name)))
        return self


class SelfAttention(nn.Module):
    """Multi-head self-attention over all tokens. `attn_drop` is the dropout rate of the attention weights, `proj_drop`
    that of the output."""

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = False, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.attn_drop = attn_drop
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ..., C) to the same shape; all axes between the first and the last are tokens."""
        tokens = x.flatten(1, -2)  # (B, N, C)
        qkv = linear(self.qkv, tokens).unflatten(-1, (3, self.num_heads, -1))  # (B, N, 3, heads, C / heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, N, C / heads)
        mixed = attention(q, k, v, self.attn_drop if self.training else 0.0)
        mixed = mixed.transpose(1, 2).flatten(2)  # (B, N, C); a tensor-parallel rank has only the channels of its heads
        return self.proj_drop(linear(self.proj, mixed)).reshape(x.shape)


def channels_last(x: Tensor) -> Tensor:
    """Return x (B, C, H, W) with channels last in memory, without memory formats, which `torch.vmap` lacks."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def resize_pos_embed(pos: Tensor, grid: Grid, source: Grid | None = None) -> Tensor:
    """Resize position embeddings (1, H, W, C) to (1, rows, columns, C) as published: bicubic, pixel centres at +0.5, no
    antialiasing. It computes in at least float32 and returns the dtype of `pos`.

    Embeddings with an entry for the class token, (1, 1 + N, C), need their `source` grid of N tokens; the entry stays.
    """
    if (tuple(pos.shape[1:3]) if pos.ndim == 4 else source) == tuple(grid):
        return pos
    if pos.ndim == 3:
        assert source is not None
        resized = resize_pos_embed(pos[:, 1:].unflatten(1, source), grid)
        return torch.cat((pos[:, :1], resized.flatten(1, 2)), dim=1)
    wide = pos if pos.dtype == torch.float64 else pos.float()
    resized = F.interpolate(wide.permute(0, 3, 1, 2), size=tuple(grid), mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1).to(pos.dtype)


class Mlp(nn.Module):
    """Two linear layers with a GELU between them; dropout at rate `drop` after each."""

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop1 = nn.Dropout(drop)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ..., C) to the same shape."""
        return self.drop2(linear(self.fc2, self.drop1(F.gelu(linear(self.fc1, x)))))


def kept_share(rate: float) -> int:
    """Return the share of images that keep a branch with this drop rate, in units of 1 / `WHOLE`."""
    return round((1.0 - rate) * WHOLE)


def kept_images(batch: int, share: int) -> int:
    """Return how many of `batch` images keep a branch in mode "subset": `share` of them, rounded, at least one."""
    return max(1, (batch * share + WHOLE // 2) // WHOLE)


def draw_masks(shares: Tensor, x: Tensor) -> Tensor:
    """Draw, for mode "mask", the factor (branches, B) float32 of each branch for each of the B images of x (B, ...): 0
    or 1 / share. `shares` (branches, 1) are integers from `kept_share`; on another device than x, copying them
    synchronises."""
    keep = shares.to(x.device) / WHOLE
    return torch.bernoulli(keep.expand(-1, x.shape[0])) / keep.clamp_min(1 / WHOLE)


def draw_subsets(shares: Sequence[int], x: Tensor) -> list[Tensor]:
    """Draw, for mode "subset", which of the B images of x (B, ...) keep each branch: int64 (S,), all different."""
    precise = torch.float32 if x.device.type == "mps" else torch.float64  # float32 numbers may tie
    orders = torch.rand(len(shares), x.shape[0], dtype=precise, device=x.device).argsort(dim=1)
    return [order[: kept_images(x.shape[0], share)] for order, share in zip(orders, shares, strict=True)]


def _spread(rows: Tensor, place: Tensor) -> Tensor:
    """Spread rows (S, ...) over (B, ...): image i gets row `place[i]`, or zeros if that is S."""
    gathered = rows.index_select(0, place.clamp(max=rows.shape[0] - 1))
    return torch.where((place < rows.shape[0]).reshape((-1,) + (1,) * (rows.ndim - 1)), gathered, 0)


class _Subset(torch.autograd.Function):
    """Selects `rows` (S,) of x (B, ...), or with `back` spreads such rows again (`_spread`). Each is the derivative of
    the other. Both gather, which takes a GPU a quarter of the time of autograd's `index_add`, and torch.compile fuses
    them into the kernels around them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, place: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(rows, place)
        ctx.back = back
        return _spread(x, place) if back else x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, place = ctx.saved_tensors
        return grad.index_select(0, rows) if ctx.back else _spread(grad, place), None, None, None


def add_branch(
    x: Tensor, branch: Callable[[Tensor], Tensor], keep: Tensor | None = None, divisor: float = 1.0
) -> Tensor:
    """Return x + branch(x) / divisor with stochastic depth, x being (B, ..., C). `branch` must treat images separately.
    A row of `draw_masks` or of `draw_subsets` says which images `keep` the branch; None drops nothing."""
    if keep is not None and not isinstance(keep, torch.fx.Proxy) and not keep.is_floating_point():
        return _add_to_subset(x, branch, keep, divisor)
    update = branch(x)
    if keep is not None:  # a mask, the one mode that torch.fx can trace
        update = update * keep.to(update.dtype).reshape((-1,) + (1,) * (update.ndim - 1))
    return x + (update if divisor == 1.0 else update / divisor)


def _add_to_subset(x: Tensor, branch: Callable[[Tensor], Tensor], rows: Tensor, divisor: float) -> Tensor:
    """Return x + B / S * branch(x) / divisor for the images `rows` (S,), and x for the others. Each image keeps the
    branch with the same probability and factor as under a mask of rate 1 - S / B, so outputs and gradients have the
    same mean."""
    scale = x.shape[0] / (rows.shape[0] * divisor)
    if not x.is_cuda:  # writing only a few rows suits the caches of a CPU
        return x.index_add(0, rows, branch(x.index_select(0, rows)).to(x.dtype) * scale)
    place = rows.new_full((x.shape[0],), rows.shape[0])
    place = place.scatter(0, rows, torch.arange(rows.shape[0], device=x.device))
    scaled = branch(_Subset.apply(x, rows, place, False)).to(x.dtype) * scale
    spread: Tensor = _Subset.apply(scaled, rows, place, True)
    return x + spread


class ResidualBlock(nn.Module):
    """Attention, then an MLP, each with a norm before it, a residual connection and stochastic depth.

    Args:
        drop: Dropout rate in the MLP.
        drop_path: Share of the images that drop each branch in training; `forward` is given the draw.
        residual_scale: Each branch is divided by it before it is added (`skip_lam` of the published LV-ViT).
    """

    # Index among the model's blocks with stochastic depth. Copies of the block and wrappers around it have it, too.
    drop_index: int | None = None

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp_ratio: float,
        norm_layer: type[nn.Module] = nn.LayerNorm,
        drop: float = 0.0,
        drop_path: float = 0.0,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.attn = attn
        self.norm2 = norm_layer(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop)
        self.drop_path = drop_path
        self.residual_scale = residual_scale

    def forward(self, x: Tensor, first: Tensor | None = None, second: Tensor | None = None) -> Tensor:
        """Map (B, ..., C) to the same shape. `first` and `second` are the draws for the two branches, from `draw_masks`
        or `draw_subsets`; None drops nothing."""
        x = add_branch(x, lambda rows: self.attn(self.norm1(rows)), first, self.residual_scale)
        return add_branch(x, lambda rows: self.mlp(self.norm2(rows)), second, self.residual_scale)


def drop_index_of(block: nn.Module) -> int | None:
    """Return the `drop_index` of a block, or of the block inside a wrapper."""
    if not hasattr(block, "drop_index"):  # most wrappers forward attributes
        block = next((module for module in block.modules() if isinstance(module, ResidualBlock)), block)
    return getattr(block, "drop_index", None)


class TransformerBlock(ResidualBlock):
    """A pre-norm transformer block; `options` are other arguments of ResidualBlock."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        **options: Any,
    ) -> None:
        attn = SelfAttention(dim, num_heads, qkv_bias, attn_drop, proj_drop)
        super().__init__(dim, attn, mlp_ratio, drop=proj_drop, **options)


class Stage(nn.Sequential):
    """A sequence of blocks that is one module, so that its hooks are called."""

    def forward(self, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        """Apply `run(block, x)` for each block."""
        for block in self:
            x = run(block, x)
        return x


def init_linear(module: nn.Module) -> None:
    """Initialise a linear layer as published, for `Module.apply`: truncated normal, deviation 0.02; biases zero."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
