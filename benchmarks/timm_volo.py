"""timm's VOLO as the peer of ours: the same weights, and as much work."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

import timm
import torch
from torch import Tensor, nn

from benchmarks.phases import synchronize
from benchmarks.timing import interleaved
from tlt.errors import UserError
from tlt.mixtoken import Box, mix_tokens, unmix_tokens
from volo.train.precision import Precision

_ROUNDS = 3


class TimmVolo(nn.Module):
    """timm's VOLO, called as ours is.

    The parts are timm's and run in the order of its `forward_train`, which draws its own box and leaves the class head
    out: the box is an argument here, as a tensor, so that the whole compiles to one graph, and the head is applied.
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, dense: bool = False, mix_box: Box | None = None) -> Any:
        """Images -> (B, K), or with `dense` (B, K) and (B, N, K)."""
        net = self.net
        if not dense:
            return net(x)
        x = net.patch_embed(x).permute(0, 2, 3, 1)
        grid = x.shape[1] // net.pooling_scale, x.shape[2] // net.pooling_scale
        if mix_box is not None:
            x = mix_tokens(x, mix_box, net.pooling_scale)
        x = net.norm(net.forward_cls(net.forward_tokens(x)))
        aux = net.aux_head(x[:, 1:])
        if mix_box is not None:
            aux = unmix_tokens(aux, mix_box, grid)
        return net.head(x[:, 0]), aux

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        """Both heads."""
        return self.net.head, self.net.aux_head


def timm_name(name: str) -> str:
    """timm's name of one of our models at its first size.

    Raises:
        UserError: It is no VOLO that timm has, too.
    """
    found = f"{name}_224"
    if not timm.is_model(found) or not name.startswith("volo"):
        raise UserError(
            f"--peer timm is timm's VOLO D1 to D5, of which {name} is none: its peers are reference and eager"
        )
    return found


def timm_volo(model: Any, flags: Namespace) -> TimmVolo:
    """timm's model of the sizes of `model`, one of our VOLOs, with weights that would fit it."""
    rate = flags.drop_path or 0.0
    net = timm.create_model(
        timm_name(flags.model), img_size=model.img_size, num_classes=model.num_classes, drop_path_rate=rate
    )
    return TimmVolo(net)


def channels_last_is_faster(stem: nn.Module, images: Tensor, precision: Precision) -> bool:
    """Whether forward and backward pass of `stem` take less time with its weights in that memory format."""

    def arm(memory_format: torch.memory_format) -> Any:
        module = copy.deepcopy(stem).to(memory_format=memory_format)

        def work(number: int) -> int:
            with precision.autocast():
                loss = module(images).float().mean()
            loss.backward()
            synchronize(precision.device)
            return 1

        return work

    found = interleaved({"": arm(torch.contiguous_format), "last": arm(torch.channels_last)}, _ROUNDS)
    return found["last"].median < found[""].median
