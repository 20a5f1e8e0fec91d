"""BatchNorm folded into the convolution before it: for inference, this saves one pass over the model's largest maps."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from tlt.models.token_labeling import TokenLabelModel


def fold_batchnorm(model: nn.Module) -> int:
    """Fold the BatchNorm layers of a VOLO's or LV-ViT's stem into their convolutions, in place.

    Outputs don't change, up to rounding. Names in the state dict do, so load weights before. Any other model, and one
    that is folded already, is left unchanged.

    Args:
        model: In evaluation mode, because the running statistics are folded.

    Returns:
        How many layers were folded.

    Raises:
        ValueError: The model is in training.
    """
    if not isinstance(model, TokenLabelModel):
        return 0
    if model.training:
        raise ValueError("BatchNorm of a model in training has no fixed statistics to fold: call model.eval() before")
    stem: Any = model.patch_embed
    pairs = [(conv, bn) for conv, bn in stem.conv_bn_pairs if not isinstance(stem.get_submodule(bn), nn.Identity)]
    for conv_name, bn_name in pairs:
        conv = stem.get_submodule(conv_name)
        # in double precision, so that folding rounds once
        wide = [copy.deepcopy(stem.get_submodule(name)).double() for name in (conv_name, bn_name)]
        stem.set_submodule(conv_name, fuse_conv_bn_eval(*wide).to(conv.weight.dtype))
        stem.set_submodule(bn_name, nn.Identity())
    return len(pairs)
