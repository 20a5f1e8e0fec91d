"""Convolutions in bfloat16 on a CPU are compared with float32 at the start of a program.

oneDNN has kernels that return garbage for some shapes on some processors, without an error: 3.13.3 with AMX for windows
that do not overlap at some widths below 32 channels, others for strides above 2 (pytorch/pytorch#169688). No list of
shapes would hold for the next release, so each distinct convolution of a model computes once, at its own shape.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from tlt.models.flops import run_on_meta
from volo.cluster.distributed import from_all

# The largest allowed difference, as a share of the largest value. Rounding gives 0.4 %, sums in bfloat16 give 2 %.
_TOLERANCE = 0.05


def check_convolutions(
    model: nn.Module, input_size: tuple[int, int, int], dtype: torch.dtype | None, device: torch.device
) -> list[str]:
    """Return a warning if this processor computes convolutions of the model wrong in bfloat16; the model is unchanged.

    Every rank must call this, because processors may differ.

    Args:
        model: In float32, on its device and in its memory format.
        input_size: (channels, H, W) of the images.
        dtype: The type that the model is to compute in; only bfloat16 on a CPU is tried.
    """
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _ConvNd)]
    if dtype is not torch.bfloat16 or device.type != "cpu" or not layers:
        return []
    distinct: dict[object, tuple[str, nn.Module, torch.Tensor]] = {}  # name, layer, input without contents

    def note(name: str, layer: nn.Module, x: torch.Tensor) -> None:
        # extra_repr has channels, window, stride, padding, dilation and groups
        distinct.setdefault((layer.extra_repr(), x.shape, x.stride()), (name, layer, x))

    hooks = [
        layer.register_forward_pre_hook(lambda layer, given, name=name: note(name, layer, given[0]))
        for name, layer in layers
    ]
    try:
        run_on_meta(model, input_size)
    finally:
        for hook in hooks:
            hook.remove()
    wrong = [name for name, layer, given in distinct.values() if not _error(layer, given) <= _TOLERANCE]
    if not (found := sorted({name for names in from_all(wrong) for name in names})):
        return []
    return [
        f"warning: torch {torch.__version__} computes {', '.join(found)} and convolutions like it wrong in bfloat16 on "
        "this processor: use float32 (without --amp and --model-dtype), or another version of torch"
    ]


@torch.no_grad()
def _error(layer: nn.Module, given: torch.Tensor) -> float:
    """Return the largest difference of bfloat16 from float32, as a share of the largest value; NaN for NaN values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.empty_strided(given.shape, given.stride()).normal_(generator=generator)
    right = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
    return float((low.float() - right).abs().max() / right.abs().max().clamp_min(1e-30))
