"""Dense logits from an annotator network: what it sees at every place of its last feature map.

A ConvNet that averages its last map and puts a linear layer on the mean can put that layer on every place instead: the
mean of these dense logits is then its ordinary output. Where that does not hold (a norm or an activation behind the
pooling, attention pooling, a class token), the dense logits are nobody's opinion, and `check_dense` refuses the
network. VOLO and LV-ViT have a head that was trained to label their tokens, and use that.

Shapes: B images, C classes, maps of `h x w` places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.models.token_labeling import TokenLabelModel

_SUGGESTION = "use a ConvNet such as resnet50, regnety_016, efficientnet_b0 or dm_nfnet_f0, or a VOLO or LV-ViT model"
# Of the largest logit. Linear heads agree to about 1e-6 in float32, and to a few 1e-4 in TF32.
_TOLERANCE = 1e-3


@torch.no_grad()
def dense_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Logits of every place.

    Args:
        model: A TokenLabelModel, or a timm model with `forward_features` and `forward_head`, in evaluation mode.
        images: (B, 3, H, W), normalised.

    Returns:
        (B, h, w, C).

    Raises:
        UserError: The model's features are not a map, or its dense head is switched off.
    """
    if isinstance(model, TokenLabelModel):
        _, tokens = model(images, dense=True)  # (B, h * w, C)
        return tokens.unflatten(1, model.token_grid((images.shape[-2], images.shape[-1])))
    return _head_everywhere(model, _feature_map(model, images))


def check_dense(model: nn.Module, images: Tensor, name: str = "the annotator") -> None:
    """Refuse an annotator whose mean over its dense logits is not its own output.

    Args:
        model: In evaluation mode. A TokenLabelModel passes: its dense head is a head of its own.
        images: (B, 3, H, W), normalised; two or more real images are enough. Compared in float32.
        name: How the message calls the model.

    Raises:
        UserError: They differ; the message names the model and both sizes.
    """
    if isinstance(model, TokenLabelModel):
        return
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        features = _feature_map(model, images)
        # Untrained or small features can leave a nonlinear head in its nearly linear range, and small images can leave
        # a map of one place: large features of both signs do neither.
        probe = torch.randn((2, 3, 3, features.shape[-1]), generator=torch.Generator().manual_seed(0)).to(features)
        pairs = [
            (model(images), _head_everywhere(model, features)),
            (_head(model, 10 * probe), _head_everywhere(model, 10 * probe)),
        ]
    for own, dense in pairs:
        _compare(own, dense.mean((1, 2)), name)


def top_classes(dense: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of every place, or all C where there are fewer classes.

    Args:
        dense: (B, h, w, C).

    Returns:
        values (B, k, h, w) float16 and ids (B, k, h, w) int32, the largest first, on the device of `dense`.
    """
    values, ids = dense.float().topk(min(k, dense.shape[-1]), dim=-1)  # (B, h, w, k)
    return values.permute(0, 3, 1, 2).half(), ids.permute(0, 3, 1, 2).int()


def _compare(own: Tensor, mean: Tensor, name: str) -> None:
    if mean.shape != own.shape:
        raise UserError(f"{name}: dense logits of {mean.shape[1]} classes, own of {tuple(own.shape)}; {_SUGGESTION}")
    difference, largest = float((mean - own).abs().max()), float(own.abs().max())
    if not difference <= _TOLERANCE * largest:
        raise UserError(
            f"{name} can't annotate: the mean of its dense logits is up to {difference:.3g} away from its own logits "
            f"(largest {largest:.3g}), because its head is more than a linear layer on averaged features; {_SUGGESTION}"
        )


def _feature_map(model: nn.Module, images: Tensor) -> Tensor:
    """(B, h, w, channels) of a timm model's last features."""
    kind = type(model).__name__
    if not hasattr(model, "forward_features") or not hasattr(model, "forward_head"):
        raise UserError(f"{kind} has no forward_features and forward_head; {_SUGGESTION}")
    features = cast(Callable[[Tensor], Any], model.forward_features)(images)
    if not isinstance(features, Tensor) or features.ndim != 4:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UserError(f"{kind} can't annotate: its features are {shape}, not a map (B, C, h, w); {_SUGGESTION}")
    return features if _is_channels_last(model) else features.permute(0, 2, 3, 1)


def _head(model: nn.Module, features: Tensor) -> Tensor:
    """(B, h, w, channels) -> (B, C): the model's own way from its features to its output."""
    head = cast(Callable[[Tensor], Tensor], model.forward_head)
    return head(features if _is_channels_last(model) else features.permute(0, 3, 1, 2))


def _head_everywhere(model: nn.Module, features: Tensor) -> Tensor:
    """(B, h, w, channels) -> (B, h, w, C): the head on every place as if it were an image of its own, so that whatever
    the head does is done."""
    batch, h, w, channels = features.shape
    return _head(model, features.reshape(batch * h * w, 1, 1, channels)).view(batch, h, w, -1)


def _is_channels_last(model: nn.Module) -> bool:
    return str(getattr(model, "output_fmt", "NCHW")).upper().endswith("NHWC")
