"""Converts vision transformers of Hugging Face's Transformers (`google/vit-...`) to timm's VisionTransformer."""

import re
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.models.layers import init_linear

# Names in files of Transformers 4 and 5, and of the modules of version 5, with timm's names.
_NAMES = (
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.(?:intermediate\.dense|mlp\.fc1)\.", ".mlp.fc1."),
    (r"\.(?:output\.dense|mlp\.fc2)\.", ".mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
)
_PART = re.compile(r"\.attention\.(?:attention\.)?(query|q_proj|key|k_proj|value|v_proj)\.(weight|bias)$")
_PATCHES = "embeddings.patch_embeddings.projection.weight"

NAME = "vit_transformers"
_EPS = 1e-12  # added to the variances of LayerNorm; timm's models add 1e-6
_RESAMPLING = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def from_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of a ViT from Transformers under timm's names; return any other `state` itself. Queries, keys and
    values are joined, as in timm. Tensors that timm's model lacks keep their names: the pooler (a second layer of the
    pre-training head) and the mask token."""
    prefix = next((p for p in ("vit.", "") if p + _PATCHES in state), None)
    if prefix is None:
        return state
    renamed: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        name = name.removeprefix(prefix)
        for pattern, timm_name in _NAMES:
            name = re.sub(pattern, timm_name, name)
        if part := _PART.search(name):
            joined = f"{name[: part.start()]}.attn.qkv.{part[2]}"
            parts.setdefault(joined, {})[part[1][0]] = value  # q, k or v
        else:
            renamed[name] = value
    return renamed | {name: torch.cat([qkv[key] for key in "qkv"]) for name, qkv in parts.items() if len(qkv) == 3}


def describes_vit(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a ViT of Transformers."""
    return config.get("model_type") == "vit" and "architecture" not in config


def timm_config(config: Mapping[str, Any], processor: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `vit_transformers` for a config.json, and its `pretrained_cfg` without a source.
    `processor` is the preprocessor_config.json beside it; empty if there is none. Raise UserError, which names the
    setting, if timm has no such model."""
    if config.get("hidden_act", "gelu") != "gelu":
        raise UserError(f"its config.json has hidden_act {config['hidden_act']}, this ViT has gelu")
    width = config["hidden_size"]
    size = config["image_size"]
    channels = config.get("num_channels", 3)
    classifies = "ViTForImageClassification" in (config.get("architectures") or ())
    names = {int(number): name for number, name in config.get("id2label", {0: "", 1: ""}).items()}
    kwargs = {
        **{"img_size": size, "patch_size": config["patch_size"], "in_chans": channels, "embed_dim": width},
        **{"depth": config["num_hidden_layers"], "num_heads": config["num_attention_heads"]},
        **{"mlp_ratio": config["intermediate_size"] / width, "qkv_bias": config.get("qkv_bias", True)},
        "norm_eps": config.get("layer_norm_eps", _EPS),
    }
    # The image processor resizes both sides to the model's size. Without one, images are scaled to [-1, 1].
    half = [0.5] * channels
    cfg = {
        **_CFG,
        **{"input_size": (channels, size, size), "num_classes": len(names) if classifies else 0},
        **{"mean": tuple(processor.get("image_mean") or half), "std": tuple(processor.get("image_std") or half)},
        "interpolation": _RESAMPLING.get(processor.get("resample", 2), "bilinear"),
        "label_names": [names[number] for number in sorted(names)] if classifies else None,
    }
    return kwargs | ({"num_classes": cfg["num_classes"]} if classifies else {}), cfg


class TwoLayerHeadViT(VisionTransformer):
    """timm's VisionTransformer, optionally with the two-layer head with which ViT (arXiv:2010.11929, section 3.1) is
    pre-trained: `head.pre_logits`, tanh, `head.logits`, with `representation_size` features between the two layers.
    Size 0 gives timm's head of one layer, as does `reset_classifier`, for fine-tuning."""

    head: nn.Module

    def __init__(self, *args: Any, representation_size: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (representation_size and self.num_classes):
            return
        pre_logits = nn.Linear(self.embed_dim, representation_size)
        logits = nn.Linear(representation_size, self.num_classes)
        self.head = nn.Sequential(OrderedDict(pre_logits=pre_logits, tanh=nn.Tanh(), logits=logits))
        self.head.apply(init_linear)


_CFG = {
    **{"input_size": (3, 224, 224), "fixed_input_size": True, "crop_pct": 1.0, "crop_mode": "squash"},
    **{"interpolation": "bilinear", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
    **{"first_conv": "patch_embed.proj", "classifier": "head", "num_classes": 1000},
}
default_cfgs = generate_default_cfgs({NAME: _CFG})


@register_model
def vit_transformers(pretrained: bool = False, norm_eps: float = _EPS, **kwargs: Any) -> nn.Module:
    """Build timm's VisionTransformer with the LayerNorm of Transformers; `kwargs` are those of `TwoLayerHeadViT`.
    `norm_eps` is added to the variances of LayerNorm. At timm's 1e-6 logits differ by up to 5e-4."""
    return build_model_with_cfg(
        TwoLayerHeadViT,
        NAME,
        pretrained,
        pretrained_filter_fn=_filter,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        norm_layer=partial(nn.LayerNorm, eps=norm_eps),
        **kwargs,
    )


def _filter(state: dict[str, Tensor], model: VisionTransformer) -> dict[str, Tensor]:
    """Convert a file's weights to the model's names and image size, as timm does for its own models."""
    weights = {n: v for n, v in from_transformers(state).items() if not n.startswith(("pooler.", "embeddings.mask"))}
    return cast(dict[str, Tensor], checkpoint_filter_fn(weights, model))
