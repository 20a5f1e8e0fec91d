"""Folds BatchNorm into the convolution before it, which saves inference one pass over the model's largest maps."""

import copy
from typing import Any

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from tlt.models.token_labeling import TokenLabelModel


def fold_batchnorm(model: nn.Module) -> int:
    """Fold the BatchNorm layers of a VOLO's or LV-ViT's stem into their convolutions, in place; return their number.
    Outputs stay the same up to rounding. Names in the state dict change, so load weights first. Any other model, and a
    folded one, stays unchanged. Raise ValueError in training mode, because the running statistics are folded."""
    if not isinstance(model, TokenLabelModel):
        return 0
    if model.training:
        raise ValueError("BatchNorm of a model in training has no fixed statistics to fold: call model.eval() before")
    stem: Any = model.patch_embed
    pairs = [(conv, bn) for conv, bn in stem.conv_bn_pairs if not isinstance(stem.get_submodule(bn), nn.Identity)]
    for conv_name, bn_name in pairs:
        conv = stem.get_submodule(conv_name)
        # We fold in double precision, so that the result is rounded only once.
        wide = [copy.deepcopy(stem.get_submodule(name)).double() for name in (conv_name, bn_name)]
        stem.set_submodule(conv_name, fuse_conv_bn_eval(*wide).to(conv.weight.dtype))
        stem.set_submodule(bn_name, nn.Identity())
    return len(pairs)
