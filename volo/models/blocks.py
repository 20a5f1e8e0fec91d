"""VOLO's own layers. B images, H x W cells, N tokens, C channels; names as in the published checkpoints."""

from __future__ import annotations

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.models.layers import Mlp, ResidualBlock, channels_last
from tlt.models.products import attention, check_heads, linear
from volo.kernels import outlook_attention

# They depend on devices and types, which a traced graph does not have.
torch.fx.wrap("attention")
torch.fx.wrap("outlook_attention")


class PatchEmbed(nn.Module):
    """Three convolutions with BatchNorm at 1 / `stem_stride`, then one of stride `patch_size / stem_stride`."""

    conv_bn_pairs = (("conv.0", "conv.1"), ("conv.3", "conv.4"), ("conv.6", "conv.7"))

    def __init__(self, in_chans: int, stem_dim: int, embed_dim: int, patch_size: int, stem_stride: int) -> None:
        super().__init__()
        if patch_size % stem_stride:
            raise ValueError(f"patch size {patch_size} is no multiple of the stem's stride {stem_stride}")
        layers: list[nn.Module] = []
        for source, kernel, stride in ((in_chans, 7, stem_stride), (stem_dim, 3, 1), (stem_dim, 3, 1)):
            conv = nn.Conv2d(source, stem_dim, kernel, stride=stride, padding=kernel // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(stem_dim), nn.ReLU(inplace=True)]
        self.conv = nn.Sequential(*layers)
        kernel = patch_size // stem_stride
        self.proj = nn.Conv2d(stem_dim, embed_dim, kernel_size=kernel, stride=kernel)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, H / patch, W / patch, C)."""
        # Channels last from the first convolution on, as in the rest of the model, so that no copy is needed later.
        x = channels_last(x)
        return self.proj(self.conv(x)).permute(0, 2, 3, 1)


class Downsample(nn.Module):
    """2x2 convolution of stride 2 from the outlooker stage to the transformer stages."""

    def __init__(self, in_dim: int, out_dim: int, factor: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_dim, out_dim, kernel_size=factor, stride=factor)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H / factor, W / factor, out_dim); a last odd row or column is dropped."""
        return self.proj(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class OutlookAttention(nn.Module):
    """Outlook attention with its projections; a window's weights come from the mean of its 2 x 2 middle cells."""

    kernel_size, stride, padding = 3, 2, 1  # of every VOLO

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = False, attn_drop: float = 0.0) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.attn_drop = attn_drop
        self.kernel = "auto"  # a name in volo.kernels.KERNELS, or the fastest that fits
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.attn = nn.Linear(dim, self.kernel_size**4 * num_heads)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        pooled = F.avg_pool2d(x.permute(0, 3, 1, 2), self.stride, ceil_mode=True).permute(0, 2, 3, 1)
        v, logits = linear(self.v, x), linear(self.attn, pooled)
        dropout = self.attn_drop if self.training else 0.0
        return linear(self.proj, outlook_attention(v, logits, self.scale, dropout, self.kernel))


class Outlooker(ResidualBlock):
    """Pre-norm block of outlook attention and MLP."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_layer: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        attn = OutlookAttention(dim, num_heads, qkv_bias=qkv_bias, attn_drop=attn_drop)
        super().__init__(dim, attn, mlp_ratio, norm_layer, drop_path=drop_path)


class ClassAttention(nn.Module):
    """Attention of the class token over itself and all tokens (CaiT); queries are scaled before the product."""

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = False, attn_drop: float = 0.0) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1 + N, C), class token first -> (B, 1, C)."""
        q = linear(self.q, x[:, :1]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, 1, D)
        kv = linear(self.kv, x).unflatten(-1, (2, self.num_heads, -1))  # (B, 1 + N, 2, heads, D)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = attention(q, k, v, self.attn_drop if self.training else 0.0)
        return linear(self.proj, mixed.transpose(1, 2).flatten(2))


class ClassBlock(nn.Module):
    """Class attention and MLP on the class token; the other tokens pass unchanged. No drop path, as published."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        attn_drop: float = 0.0,
        norm_layer: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.attn = ClassAttention(dim, num_heads, qkv_bias, attn_drop)
        self.norm2 = norm_layer(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1 + N, C) -> (B, 1 + N, C)."""
        cls = x[:, :1] + self.attn(self.norm1(x))
        cls = cls + self.mlp(self.norm2(cls))
        return torch.cat((cls, x[:, 1:]), dim=1)
