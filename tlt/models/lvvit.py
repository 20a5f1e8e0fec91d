"""LV-ViT: All Tokens Matter, Token Labeling for Training Better Vision Transformers (arXiv 2104.10858).

    timm.create_model("lvvit_s", img_size=384, num_classes=10)

State-dict names and shapes are those of the published checkpoints.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from tlt.models.layers import TransformerBlock, channels_last, init_linear
from tlt.models.pretrained import Entrypoint, create, published_cfgs, register
from tlt.models.token_labeling import RunBlock, TokenLabelModel

STEM_STRIDE = 2


@dataclass(frozen=True)
class Variant:
    """One row of the table below."""

    depth: int
    embed_dim: int
    num_heads: int
    residual_scale: float  # divisor of each branch (skip_lam)
    stem_hidden_dim: int
    patch_size: int
    img_size: int  # default image size in pixels
    crop_pct: float
    params: float  # millions, with 1000 classes


# fmt: off
VARIANTS = {
    #                      depth dim heads scale stem patch img crop  params
    "lvvit_t":    Variant(12, 240,  4, 1.0,  64, 16, 224, 0.9,   8.53),
    "lvvit_s":    Variant(16, 384,  6, 2.0,  64, 16, 224, 0.9,  26.15),
    "lvvit_m":    Variant(20, 512,  8, 2.0,  64, 16, 224, 1.0,  55.83),
    "lvvit_l":    Variant(24, 768, 12, 3.0, 128, 16, 224, 1.0, 150.02),
    # For tests; there are no published weights.
    "lvvit_test": Variant(3,   64,  2, 2.0,  16, 16,  64, 1.0,   0.33),
}
# fmt: on


class PatchEmbed(nn.Module):
    """Three convolutions with BatchNorm at half the resolution, then one that embeds the patches."""

    conv_bn_pairs = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"))

    def __init__(self, in_chans: int, stem_dim: int, embed_dim: int, patch_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, stem_dim, 7, stride=STEM_STRIDE, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(stem_dim)
        self.conv2 = nn.Conv2d(stem_dim, stem_dim, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(stem_dim)
        self.conv3 = nn.Conv2d(stem_dim, stem_dim, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(stem_dim)
        self.relu = nn.ReLU(inplace=True)
        kernel = patch_size // STEM_STRIDE
        self.proj = nn.Conv2d(stem_dim, embed_dim, kernel_size=kernel, stride=kernel)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_chans, H, W) to (B, H / patch, W / patch, C)."""
        x = channels_last(x)
        for conv, bn in ((self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)):
            x = self.relu(bn(conv(x)))
        return self.proj(x).permute(0, 2, 3, 1)


class LVViT(TokenLabelModel):
    """A plain vision transformer with a convolutional stem, scaled residuals and a dense head.

    Args:
        patch_size: Pixels per token and axis.
        stem_hidden_dim: Channels of the convolutions before the patches.
        residual_scale: The divisor of every residual branch (`skip_lam` of the published code).
        drop_rate: Dropout after the position embedding, in the MLPs and after the attention's projection, as published.
        attn_drop_rate: Dropout on attention weights.
        drop_path_rate: Stochastic depth rate of the last block; it decreases linearly to zero at the first.
        img_size, global_pool, dense_head: See `TokenLabelModel`.
    """

    num_prefix_tokens = 1
    stem_stride = STEM_STRIDE

    def __init__(
        self,
        depth: int,
        embed_dim: int,
        num_heads: int,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        patch_size: int = 16,
        stem_hidden_dim: int = 64,
        mlp_ratio: float = 3.0,
        residual_scale: float = 1.0,
        qkv_bias: bool = False,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        dense_head: bool = True,
        norm_layer: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__(embed_dim, img_size, in_chans, num_classes, global_pool, dense_head)
        self.patch_size = patch_size
        self.pos_grid = self.token_grid()
        self.patch_embed = PatchEmbed(in_chans, stem_hidden_dim, embed_dim, patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        tokens = self.pos_grid[0] * self.pos_grid[1]
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + tokens, embed_dim))
        self.pos_drop = nn.Dropout(drop_rate)
        shared: dict[str, Any] = {"mlp_ratio": mlp_ratio, "qkv_bias": qkv_bias, "norm_layer": norm_layer}
        shared |= {"proj_drop": drop_rate, "attn_drop": attn_drop_rate, "residual_scale": residual_scale}
        rates = [drop_path_rate * index / max(depth - 1, 1) for index in range(depth)]
        self.blocks = nn.ModuleList(TransformerBlock(embed_dim, num_heads, drop_path=rate, **shared) for rate in rates)
        self.norm = norm_layer(embed_dim)
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"blocks.{index}"} for index in range(depth)
        ]
        self.apply(init_linear)
        trunc_normal_(self.pos_embed, std=0.02)
        trunc_normal_(self.cls_token, std=0.02)
        self._find_drop_paths()
        self._init_heads()

    def stage(self, x: Tensor, index: int, run: RunBlock) -> Tensor:
        if index == 0:
            pos = self.resized_pos_embed((x.shape[1], x.shape[2]))
            cls = self.cls_token.expand(x.shape[0], -1, -1)
            x = self.pos_drop(torch.cat((cls, x.flatten(1, 2)), dim=1) + pos)
        return run(self.blocks[index], x)

    def stage_map(self, x: Tensor, index: int, grid: tuple[int, int], norm: bool) -> tuple[Tensor, Tensor]:
        x = self.norm(x) if norm else x
        return x[:, 1:].unflatten(1, grid), x[:, :1]

    def finish(self, x: Tensor, run: RunBlock) -> Tensor:
        return self.norm(x)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove layers that `forward_intermediates` does not need for these blocks, for timm's `features_only`."""
        stages, last = feature_take_indices(len(self.feature_info), indices)
        self.blocks = self.blocks[: last + 1]
        self.feature_info = self.feature_info[: last + 1]
        self._find_drop_paths()
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return stages

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the layers in order of depth, for layer-wise learning rates."""
        stem = r"^cls_token|^pos_embed|^patch_embed"
        return {"stem": stem, "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}


_REPOSITORY = "https://github.com/zihangJiang/TokenLabeling"
_RELEASE = f"{_REPOSITORY}/releases/download"
# (model, image size) -> file
WEIGHTS = {
    ("lvvit_t", 224): f"{_RELEASE}/v0.2.0/lvvit_t.pth",
    ("lvvit_s", 224): f"{_RELEASE}/1.0/lvvit_s-26M-224-83.3.pth.tar",
    ("lvvit_s", 384): f"{_RELEASE}/1.0/lvvit_s-26M-384-84.4.pth.tar",
    ("lvvit_m", 224): f"{_RELEASE}/1.0/lvvit_m-56M-224-84.0.pth.tar",
    ("lvvit_m", 384): f"{_RELEASE}/1.0/lvvit_m-56M-384-85.4.pth.tar",
    ("lvvit_m", 448): f"{_RELEASE}/1.1/lvvit_m-56M-448-85.5.pth.tar",
    ("lvvit_l", 448): f"{_RELEASE}/1.0/lvvit_l-150M-448-86.2.pth.tar",
    ("lvvit_l", 512): f"{_RELEASE}/1.0/lvvit_l-150M-512-86.4.pth.tar",
}
default_cfgs = published_cfgs(
    VARIANTS, WEIGHTS, "in1k", "patch_embed.conv1", paper_ids="arXiv:2104.10858", origin_url=_REPOSITORY
)


def _create(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    row = asdict(VARIANTS[name])
    built = ("depth", "embed_dim", "num_heads", "residual_scale", "stem_hidden_dim", "patch_size")
    return create(LVViT, name, pretrained, pyramid=3, **({key: row[key] for key in built} | kwargs))


ENTRYPOINTS: dict[str, Entrypoint] = register(__name__, VARIANTS, _create)
