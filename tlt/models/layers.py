"""Blocks that VOLO and LV-ViT share. B samples, N tokens, C channels; names as in the published checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from tlt.models.attention import attention, check_heads
from tlt.models.drop_path import add_branch, drop_path_layer
from tlt.models.linear import linear

torch.fx.wrap("attention")  # it looks at devices and types, which a traced graph does not have

Grid = tuple[int, int]  # rows and columns of tokens


class SelfAttention(nn.Module):
    """Multi-head self-attention over all tokens.

    Args:
        dim: Channels, a multiple of `num_heads`.
        attn_drop: Dropout rate on the attention weights.
        proj_drop: Dropout rate on the output.
    """

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
        """(B, ..., C) -> the same shape; every axis between the first and the last counts as tokens."""
        tokens = x.flatten(1, -2)  # (B, N, C)
        qkv = linear(self.qkv, tokens).unflatten(-1, (3, self.num_heads, -1))  # (B, N, 3, heads, C / heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, N, C / heads)
        mixed = attention(q, k, v, self.attn_drop if self.training else 0.0)
        mixed = mixed.transpose(1, 2).flatten(2)  # (B, N, C); a tensor-parallel rank has the columns of its own heads
        return self.proj_drop(linear(self.proj, mixed)).reshape(x.shape)


def channels_last(x: Tensor) -> Tensor:
    """x (B, C, H, W) with its channels last in memory. Not by memory format, which `torch.vmap` does not have."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def resize_pos_embed(pos: Tensor, grid: Grid) -> Tensor:
    """Resize position embeddings (1, H, W, C) to (1, rows, columns, C) as published: bicubic, pixel centres at +0.5, no
    antialiasing. They are computed in float32 or better, and returned in the dtype of `pos`."""
    if tuple(pos.shape[1:3]) == tuple(grid):
        return pos
    wide = pos if pos.dtype == torch.float64 else pos.float()
    resized = F.interpolate(wide.permute(0, 3, 1, 2), size=tuple(grid), mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1).to(pos.dtype)


def resize_token_pos_embed(pos: Tensor, grid: Grid, target: Grid) -> Tensor:
    """Like `resize_pos_embed` for (1, 1 + N, C), N = rows * columns of `grid`; the class token's entry is unchanged."""
    if tuple(grid) == tuple(target):
        return pos
    resized = resize_pos_embed(pos[:, 1:].unflatten(1, grid), target)
    return torch.cat((pos[:, :1], resized.flatten(1, 2)), dim=1)


class Mlp(nn.Module):
    """Two linear layers with a GELU between them; dropout at rate `drop` after each."""

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop1 = nn.Dropout(drop)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ..., C) -> the same shape."""
        return self.drop2(linear(self.fc2, self.drop1(F.gelu(linear(self.fc1, x)))))


class ResidualBlock(nn.Module):
    """Attention, then an MLP, each behind a norm of its own and added to what it was given, with stochastic depth.

    A subclass sets the modules.
    """

    norm1: nn.Module
    attn: nn.Module
    drop_path1: nn.Module
    norm2: nn.Module
    mlp: nn.Module
    drop_path2: nn.Module
    residual_scale = 1.0  # each branch is divided by it before it is added (`skip_lam`)

    def forward(self, x: Tensor, first: Tensor | None = None, second: Tensor | None = None) -> Tensor:
        """(B, ..., C) -> the same shape. `first` and `second` are what was drawn for the two branches, by
        `draw_masks` or `draw_subsets`; without them nothing is dropped."""
        x = add_branch(x, lambda rows: self.attn(self.norm1(rows)), first, self.residual_scale)
        return add_branch(x, lambda rows: self.mlp(self.norm2(rows)), second, self.residual_scale)


class TransformerBlock(ResidualBlock):
    """Pre-norm transformer block; each branch is divided by `residual_scale` before it is added (`skip_lam`)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        residual_scale: float = 1.0,
        norm_layer: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.residual_scale = residual_scale
        self.norm1 = norm_layer(dim)
        self.attn = SelfAttention(dim, num_heads, qkv_bias, attn_drop, proj_drop)
        self.drop_path1 = drop_path_layer(drop_path)
        self.norm2 = norm_layer(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop)
        self.drop_path2 = drop_path_layer(drop_path)


class Stage(nn.Sequential):
    """Blocks one after the other, as a module of its own, whose hooks are called."""

    def forward(self, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        """Apply `run(block, x)` for each block."""
        for block in self:
            x = run(block, x)
        return x


def init_linear(module: nn.Module) -> None:
    """The published initialisation, for `Module.apply`: truncated normal of deviation 0.02, biases zero."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
