"""VOLO: Vision Outlooker for Visual Recognition (arXiv 2106.13112): D1 to D5, and two small models.

    timm.create_model("volo_d1", img_size=384, num_classes=10)

State-dict names and shapes equal those of the published checkpoints and of timm's `volo_dN_SIZE`.

In shapes: B images, H x W cells, N tokens, C channels.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from tlt.models.fast_ops import attention, check_heads, linear
from tlt.models.layers import Mlp, ResidualBlock, Stage, TransformerBlock, channels_last, init_linear
from tlt.models.pretrained import Entrypoint, create, published_cfgs, register
from tlt.models.token_labeling import RunBlock, TokenLabelModel
from volo.kernels import outlook_attention

# torch.fx must not trace into these: they depend on devices and dtypes, which a traced graph doesn't have.
torch.fx.wrap("attention")
torch.fx.wrap("outlook_attention")

CLASS_BLOCKS = 2  # blocks of class attention at the end, in all variants
POOLING = 2  # factor of the downsampling between the outlooker stage and the transformer stages


@dataclass(frozen=True)
class Variant:
    """One row of the table of models below."""

    layers: tuple[int, int, int, int]  # number of outlookers, then of transformer blocks in three stages
    dims: tuple[int, int]  # channels of the outlooker stage, then of the transformer stages
    heads: tuple[int, int]
    mlp_ratio: float
    stem_dim: int
    stem_stride: int
    patch_size: int  # pixels per cell of the outlooker stage; a final token covers twice as many
    img_size: int  # default image size in pixels
    crop_pct: float
    params: float  # millions, with 1000 classes, to 0.01


# fmt: off
VARIANTS = {
    #                    layers            dims        heads     mlp stem stride patch  img  crop  params
    "volo_d1":   Variant((4, 4, 8, 2),    (192, 384), (6, 12),  3.0,  64,  2,   8,  224, 0.96,  26.63),
    "volo_d2":   Variant((6, 4, 10, 4),   (256, 512), (8, 16),  3.0,  64,  2,   8,  224, 0.96,  58.68),
    "volo_d3":   Variant((8, 8, 16, 4),   (256, 512), (8, 16),  3.0,  64,  2,   8,  224, 0.96,  86.33),
    "volo_d4":   Variant((8, 8, 16, 4),   (384, 768), (12, 16), 3.0,  64,  2,   8,  224, 1.15, 192.96),
    "volo_d5":   Variant((12, 12, 20, 4), (384, 768), (12, 16), 4.0, 128,  2,   8,  224, 1.15, 295.46),
    # For small images (32 to 64 px) and for tests; without published weights.
    "volo_d0":   Variant((2, 2, 2, 1),    (96, 192),  (3, 6),   3.0,  32,  2,   4,   32, 1.0,    3.29),
    "volo_test": Variant((1, 1, 1, 1),    (32, 64),   (2, 4),   2.0,  16,  2,   8,   64, 1.0,    0.33),
}
# fmt: on


class PatchEmbed(nn.Module):
    """Three convolutions with BatchNorm (the first of `stem_stride`), then one of stride `patch_size / stem_stride`."""

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
        """Map (B, in_chans, H, W) to (B, H / patch, W / patch, C)."""
        # Channels last from the first convolution on, as in the rest of the model, so that no copy is needed later.
        x = channels_last(x)
        return self.proj(self.conv(x)).permute(0, 2, 3, 1)


class Downsample(nn.Module):
    """2x2 convolution of stride 2 from the outlooker stage to the transformer stages."""

    def __init__(self, in_dim: int, out_dim: int, factor: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_dim, out_dim, kernel_size=factor, stride=factor)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, H / factor, W / factor, out_dim); an odd last row or column is dropped."""
        return self.proj(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class OutlookAttention(nn.Module):
    """Outlook attention with its projections; a window's weights come from the mean of its centre 2 x 2 cells."""

    kernel_size = 3
    stride = 2
    padding = 1  # in every VOLO

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = False, attn_drop: float = 0.0) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.attn_drop = attn_drop
        self.kernel = "auto"  # a name in volo.kernels.KERNELS; "auto" takes the fastest that fits
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.attn = nn.Linear(dim, self.kernel_size**4 * num_heads)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        pooled = F.avg_pool2d(x.permute(0, 3, 1, 2), self.stride, ceil_mode=True).permute(0, 2, 3, 1)
        v = linear(self.v, x)
        logits = linear(self.attn, pooled)
        dropout = self.attn_drop if self.training else 0.0
        return linear(self.proj, outlook_attention(v, logits, self.scale, dropout, self.kernel))


class Outlooker(ResidualBlock):
    """Pre-norm block of outlook attention and MLP; `options` are other arguments of ResidualBlock."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        attn_drop: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(dim, OutlookAttention(dim, num_heads, qkv_bias, attn_drop), mlp_ratio, **options)


class ClassAttention(nn.Module):
    """Attention of the class token to itself and all tokens (CaiT); queries are scaled before the product."""

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = False, attn_drop: float = 0.0) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 1 + N, C), class token first, to (B, 1, C)."""
        q = linear(self.q, x[:, :1]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, 1, D)
        kv = linear(self.kv, x).unflatten(-1, (2, self.num_heads, -1))  # (B, 1 + N, 2, heads, D)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = attention(q, k, v, self.attn_drop if self.training else 0.0)
        return linear(self.proj, mixed.transpose(1, 2).flatten(2))


class ClassBlock(nn.Module):
    """Class attention and MLP on the class token; other tokens stay unchanged. As published, without drop path."""

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
        """Map (B, 1 + N, C) to (B, 1 + N, C)."""
        cls = x[:, :1] + self.attn(self.norm1(x))
        cls = cls + self.mlp(self.norm2(cls))
        return torch.cat((cls, x[:, 1:]), dim=1)


class VOLO(TokenLabelModel):
    """Outlookers on cells of `patch_size`, transformer blocks on cells twice as wide, class attention and two heads.

    Args:
        layers: Number of blocks in the outlooker stage and in the three transformer stages.
        embed_dims: Channels of the four stages; the last three are equal.
        num_heads: Attention heads of the four stages.
        patch_size: Width of a cell of the outlooker stage in pixels.
        stem_hidden_dim: Channels of the stem's convolutions.
        stem_stride: Stride of the stem's first convolution.
        drop_rate: Dropout after the position embedding, the only place where the published code has dropout.
        attn_drop_rate: Dropout of attention weights.
        drop_path_rate: Stochastic depth of the last transformer block; it falls linearly towards the first layer.
            Class-attention blocks have none.
        outlooker_drop_path: Whether outlookers have stochastic depth; the published recipes trained without it.
        img_size, global_pool, dense_head: See `TokenLabelModel`.
    """

    block_types = (Outlooker, TransformerBlock, ClassBlock)
    mix_scale = POOLING

    def __init__(
        self,
        layers: tuple[int, ...],
        embed_dims: tuple[int, ...],
        num_heads: tuple[int, ...],
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        patch_size: int = 8,
        stem_hidden_dim: int = 64,
        stem_stride: int = 2,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        outlooker_drop_path: bool = False,
        dense_head: bool = True,
        norm_layer: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__(embed_dims[-1], img_size, in_chans, num_classes, global_pool, dense_head)
        self.patch_size = patch_size
        self.stem_stride = stem_stride
        self.pos_grid = self.token_grid()
        self.patch_embed = PatchEmbed(in_chans, stem_hidden_dim, embed_dims[0], patch_size, stem_stride)
        self.pos_embed = nn.Parameter(torch.zeros(1, *self.pos_grid, self.num_features))
        self.pos_drop = nn.Dropout(drop_rate)
        shared: dict[str, Any] = {"mlp_ratio": mlp_ratio, "qkv_bias": qkv_bias, "norm_layer": norm_layer}
        shared["attn_drop"] = attn_drop_rate
        rates = _drop_path_rates(layers, drop_path_rate, outlooker_drop_path)
        self.network = _network(embed_dims, num_heads, rates, shared)
        blocks = [ClassBlock(self.num_features, num_heads[-1], **shared) for _ in range(CLASS_BLOCKS)]
        self.post_network: nn.ModuleList | None = nn.ModuleList(blocks)
        self.cls_token: nn.Parameter | None = nn.Parameter(torch.zeros(1, 1, self.num_features))
        self.norm = norm_layer(self.num_features)
        self.feature_info = [{"num_chs": embed_dims[0], "reduction": patch_size, "module": "network.0"}]
        for index, dim in enumerate(embed_dims[1:], start=2):
            info = {"num_chs": dim, "reduction": patch_size * POOLING, "module": f"network.{index}"}
            self.feature_info.append(info)
        self.apply(init_linear)
        trunc_normal_(self.pos_embed, std=0.02)
        trunc_normal_(self.cls_token, std=0.02)
        self._find_drop_paths()
        self._init_heads()

    def set_outlook_kernel(self, kernel: str) -> None:
        """Set the implementation of outlook attention: a name in `volo.kernels.KERNELS`, or "auto"."""
        for module in self.modules():
            if isinstance(module, OutlookAttention):
                module.kernel = kernel

    def stage(self, x: Tensor, index: int, run: RunBlock) -> Tensor:
        # Indices of `network`: 0 outlookers, 1 downsampling, 2 to 4 stages of transformer blocks.
        if index == 0:
            return self.network[0](x, run)
        if index == 1:
            x = self.network[1](x)
            x = self.pos_drop(x + self.resized_pos_embed((x.shape[1], x.shape[2])))
        return self.network[index + 1](x, run)

    def stage_map(self, x: Tensor, index: int, grid: tuple[int, int], norm: bool) -> tuple[Tensor, None]:
        return self.norm(x) if norm and index > 0 else x, None

    def finish(self, x: Tensor, run: RunBlock) -> Tensor:
        x = x.flatten(1, 2)  # (B, N, C)
        if self.post_network is not None and self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
            for block in self.post_network:
                x = run(block, x)
        return self.norm(x)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what `forward_intermediates` doesn't need for these stages; timm's `features_only` calls this."""
        wanted, last = feature_take_indices(len(self.feature_info), indices)
        pruned_end = last < len(self.feature_info) - 1
        self.network = self.network[: last + 2 if last else 1]
        self.feature_info = self.feature_info[: last + 1]
        self._find_drop_paths()
        if last == 0:
            self.pos_embed = None
        if prune_norm or last == 0:
            self.norm = nn.Identity()
        if prune_head or pruned_end:
            self.num_features = self.head_hidden_size = self.embed_dim = self.feature_info[last]["num_chs"]
            self.post_network = self.cls_token = None
            self.reset_classifier(0, "")
        return wanted

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group layers by depth for layer-wise learning rates; `coarse` groups by stage."""
        fine = [(r"^network\.(\d+)\.(\d+)", None), (r"^network\.(\d+)", (0,))]
        end = [(r"^cls_token", (0,)), (r"^post_network\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^patch_embed|^pos_embed", "blocks": r"^network\.(\d+)" if coarse else fine, "end": end}


def _drop_path_rates(layers: tuple[int, ...], rate: float, outlooker_drop_path: bool) -> list[list[float]]:
    """Return a list of rates per stage: `rate * depth / (total - 1)`, over outlookers and transformer blocks."""
    depths = iter(range(sum(layers)))
    last = max(sum(layers) - 1, 1)
    rates = [[rate * depth / last for depth in islice(depths, count)] for count in layers]
    return rates if outlooker_drop_path else [[0.0] * layers[0], *rates[1:]]


def _network(
    dims: tuple[int, ...], heads: tuple[int, ...], rates: list[list[float]], shared: dict[str, Any]
) -> nn.ModuleList:
    outlookers = Stage(*[Outlooker(dims[0], heads[0], drop_path=rate, **shared) for rate in rates[0]])
    network = [outlookers, Downsample(dims[0], dims[1], POOLING)]
    for dim, head, stage in zip(dims[1:], heads[1:], rates[1:], strict=True):
        network.append(Stage(*[TransformerBlock(dim, head, drop_path=rate, **shared) for rate in stage]))
    return nn.ModuleList(network)


_REPOSITORY = "https://github.com/sail-sg/volo"
_RELEASE = f"{_REPOSITORY}/releases/download/volo_1"
# (model, image size): address of the file
WEIGHTS = {
    ("volo_d1", 224): f"{_RELEASE}/d1_224_84.2.pth.tar",
    ("volo_d1", 384): f"{_RELEASE}/d1_384_85.2.pth.tar",
    ("volo_d2", 224): f"{_RELEASE}/d2_224_85.2.pth.tar",
    ("volo_d2", 384): f"{_RELEASE}/d2_384_86.0.pth.tar",
    ("volo_d3", 224): f"{_RELEASE}/d3_224_85.4.pth.tar",
    ("volo_d3", 448): f"{_RELEASE}/d3_448_86.3.pth.tar",
    ("volo_d4", 224): f"{_RELEASE}/d4_224_85.7.pth.tar",
    ("volo_d4", 448): f"{_RELEASE}/d4_448_86.79.pth.tar",
    ("volo_d5", 224): f"{_RELEASE}/d5_224_86.10.pth.tar",
    ("volo_d5", 448): f"{_RELEASE}/d5_448_87.0.pth.tar",
    ("volo_d5", 512): f"{_RELEASE}/d5_512_87.07.pth.tar",
}
default_cfgs = published_cfgs(
    VARIANTS, WEIGHTS, "sail_in1k", "patch_embed.conv.0", paper_ids="arXiv:2106.13112", origin_url=_REPOSITORY
)


def _create(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    row = VARIANTS[name]
    args = {
        "layers": row.layers,
        "embed_dims": (row.dims[0], *[row.dims[1]] * 3),
        "num_heads": (row.heads[0], *[row.heads[1]] * 3),
        "mlp_ratio": row.mlp_ratio,
        "stem_hidden_dim": row.stem_dim,
        "stem_stride": row.stem_stride,
        "patch_size": row.patch_size,
    }
    # The pyramid is the outlooker stage and the last stage; the two between have the last one's size.
    return create(VOLO, name, pretrained, pyramid=(0, 3), **{**args, **kwargs})


ENTRYPOINTS: dict[str, Entrypoint] = register(__name__, VARIANTS, _create)
