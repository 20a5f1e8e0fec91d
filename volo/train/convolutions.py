"""Convolutions in bfloat16 on a CPU are compared with float32 at the start of a program.

oneDNN has kernels that return garbage for some shapes on some processors, without an error: 3.13.3 with AMX for windows
that do not overlap at some widths below 32 channels, others for strides above 2 (pytorch/pytorch#169688). No list of
shapes would hold for the next release, so each distinct convolution of a model computes once, at its own shape.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tlt.models.flops import run_on_meta
from volo.cluster.distributed import from_all

# The largest allowed difference, as a share of the largest value. Rounding gives 0.4 %, sums in bfloat16 give 2 %.
_TOLERANCE = 0.05


@torch.no_grad()
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
    if dtype is not torch.bfloat16 or device.type != "cpu":
        return []
    names: dict[nn.Module, str] = {layer: name for name, layer in model.named_modules() if isinstance(layer, _ConvNd)}
    distinct: dict[object, tuple[nn.Module, Tensor]] = {}  # and an input without contents

    def note(layer: nn.Module, given: tuple[Tensor]) -> None:
        if layer in names:
            # extra_repr has channels, window, stride, padding, dilation and groups
            distinct.setdefault((layer.extra_repr(), given[0].shape, given[0].stride()), (layer, given[0]))

    with nn.modules.module.register_module_forward_pre_hook(note):
        run_on_meta(model, input_size)
    wrong = []
    for layer, given in distinct.values():
        x = torch.empty_strided(given.shape, given.stride()).normal_(generator=torch.Generator().manual_seed(0))
        right = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            error = (layer(x).float() - right).abs().max() / right.abs().max().clamp_min(1e-30)
        if not error <= _TOLERANCE:  # NaN is wrong, too
            wrong.append(names[layer])
    if not (found := sorted({name for names in from_all(wrong) for name in names})):
        return []
    return [
        f"warning: torch {torch.__version__} computes {', '.join(found)} and convolutions like it wrong in bfloat16 on "
        "this processor: use float32 (without --amp and --model-dtype), or another version of torch"
    ]
