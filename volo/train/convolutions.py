"""Convolutions in bfloat16 on a CPU are compared with float32 before they are used.

oneDNN has kernels that return garbage for some shapes on some processors, without an error: 3.13.3 with AMX for windows
that do not overlap at some widths below 32 channels, others for strides above 2 (pytorch/pytorch#169688). No list of
shapes would hold for the next release, so each convolution of a model is tried once, at its own shape.
"""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tlt.models.flops import run_without_contents
from volo.cluster.distributed import from_all

# The largest allowed difference, as a share of the largest value. Rounding gives 0.4 %, sums in bfloat16 give 2 %.
_TOLERANCE = 0.05


class Input(NamedTuple):
    """Describes the input of a convolution."""

    size: torch.Size
    stride: tuple[int, ...]
    needs_grad: bool


def check_convolutions(
    model: nn.Module, input_size: tuple[int, int, int], dtype: torch.dtype | None, device: torch.device
) -> list[str]:
    """Try the convolutions of a model in bfloat16 on the CPU, and let those that are wrong compute in float32.

    Convolutions that differ only in their weights are tried once; if the model is in training mode, their gradients are
    tried, too. A convolution that computes in float32 converts inputs and weights in each pass, whatever type the model
    gets later, and returns the same type as before. Weights and random generators stay unchanged. Every rank must call
    this, because processors may differ.

    Args:
        model: On its device, in its memory format.
        input_size: (channels, H, W) of the images.
        dtype: The type that the model computes in; only bfloat16 is tried.

    Returns:
        A line for the log for each kind of convolution that is wrong on any rank.
    """
    if dtype is not torch.bfloat16 or device.type != "cpu":
        return []
    lines: dict[str, str] = {}
    for names, given in _kinds(model, input_size):
        layers = [model.get_submodule(name) for name in names]
        error = _error(layers[0], given)
        if error <= _TOLERANCE:  # false for NaN, too
            continue
        low, right = (_milliseconds(layers[0], given, low) for low in (True, False))
        for layer in layers:
            compute_in_float32(layer)
        more = f" and {len(names) - 1} like it" if len(names) > 1 else ""
        lines[names[0]] = (
            f"warning: {names[0]}{more}: {_library()} computes this convolution wrong in bfloat16 on this processor "
            f"({100 * error:.0f} % off); float32 computes it, which takes {right:.3g} ms an image in place of {low:.3g}"
        )
    merged: dict[str, str] = {}
    for each in from_all(lines):
        merged = each | merged
    return list(merged.values())


def compute_in_float32(layer: nn.Module) -> None:
    """Let a convolution compute in float32, whatever the types of its weights, its inputs and autocast."""
    if not isinstance(layer, _Float32):
        # As in torch.nn.utils.parametrize: names, weights and hooks stay, and copies of the layer do the same.
        kind = type(layer)
        layer.__class__ = type(f"Float32{kind.__name__}", (_Float32, kind), {})


class _Float32:
    """Mixed into a class of convolutions to let it compute in float32."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        return value.float() if isinstance(value, nn.Parameter) else value

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):
            result: Tensor = super().forward(x.float(), *more)  # type: ignore[misc]
            return result.to(dtype)


def _kinds(model: nn.Module, input_size: tuple[int, int, int]) -> list[tuple[list[str], Input]]:
    """Return groups of equal convolutions: their names, and their input in a pass of the model."""
    kinds: dict[tuple[Any, ...], tuple[list[str], Input]] = {}

    def note(name: str, layer: nn.Module, x: Tensor) -> None:
        given = Input(x.shape, x.stride(), x.requires_grad)
        # extra_repr has channels, window, stride, padding, dilation and groups
        key = type(layer), layer.extra_repr(), given
        names, _ = kinds.setdefault(key, ([], given))
        names.append(name)

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _ConvNd)}
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs, name=name: note(name, layer, inputs[0]))
        for name, layer in layers.items()
    ]
    try:
        if layers:
            run_without_contents(model, input_size, model.training)
    finally:
        for hook in hooks:
            hook.remove()
    return list(kinds.values())


def _error(layer: nn.Module, given: Input) -> float:
    """Return the largest difference of bfloat16 from float32, as a share of the largest value; NaN for NaN values."""
    pairs = zip(_values(layer, given, True), _values(layer, given, False), strict=True)
    errors = torch.stack([(low - right).abs().max() / right.abs().max() for low, right in pairs])
    return errors.max().item()


def _values(layer: nn.Module, given: Input, low: bool) -> list[Tensor]:
    """Return output and gradients of a layer, as float32, for fixed random numbers that bfloat16 represents exactly."""
    generator = torch.Generator().manual_seed(0)

    def draw(size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        return torch.empty_strided(size, stride).normal_(generator=generator).bfloat16().float()

    named = dict(layer.named_parameters())
    parameters = {name: draw(p.shape, p.stride()).requires_grad_(layer.training) for name, p in named.items()}
    x = draw(given.size, given.stride).requires_grad_(layer.training and given.needs_grad)
    with torch.set_grad_enabled(layer.training), torch.autocast("cpu", torch.bfloat16, enabled=low):
        result = torch.func.functional_call(layer, parameters, (x,))
    values = [result.detach()]
    if layer.training:
        wanted = [each for each in (x, *parameters.values()) if each.requires_grad]
        values += torch.autograd.grad(result, wanted, draw(result.shape, result.stride()).to(result.dtype))
    return [value.float() for value in values]


def _milliseconds(layer: nn.Module, given: Input, low: bool) -> float:
    """Return the milliseconds per image."""
    began = time.perf_counter()
    _values(layer, given, low)
    return 1000 * (time.perf_counter() - began) / given.size[0]


def _library() -> str:
    """Return the versions of torch and oneDNN."""
    found = re.search(r"(?:MKL-DNN|oneDNN) v([\d.]+)", torch.__config__.show())
    return f"torch {torch.__version__}" + (f" with oneDNN {found[1]}" if found else "")
