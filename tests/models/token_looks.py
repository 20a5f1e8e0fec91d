"""Where the tokens of a model look, to be compared with where `token_positions` says that they are.

The position that a token sees is measured as the centroid, over the pixels of a noise image, of the squared gradient of
its features in a random direction; over tokens, directions and random weights. Edges cut off a token's field of view,
so the image is larger by a multiple of every pitch, which changes no remainder, and tokens of its middle are taken.
Attention to the whole image pulls the centroid to the centre, in proportion to the distance from it; this part is
removed by a fit. Kernels are made equal to their mirror images and activations are removed; both move no token and
reduce the noise. Gates that depend on the whole image (squeeze and excite) are held constant, as they have no position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import HardSwish, Swish
from torch import Tensor, nn

import volo.models  # noqa: F401, registers them with timm, which `import volo` leaves to programs
from tlt.models.spatial import feature_map
from tlt.models.token_labeling import TokenLabelModel
from tlt.models.token_positions import Size, TokenGrid
from tlt.models.wrap import find_tokens

_GATES = ("SelectiveKernelAttn", "SE", "Squeeze", "EffectiveSE", "Eca", "GlobalContext")
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Hardswish, Swish, HardSwish)
_BATCH, _ROUNDS, _ENOUGH = 2, 24, 0.15  # images, sets of weights at most, px of standard error
_LARGER, _MIDDLE = 256, 1  # px; tokens on each side of the centre


class FamilyRow(NamedTuple):
    """The distance in pixels between the measured and the stated positions of tokens, and its standard error."""

    model: str
    size: int
    positions: TokenGrid
    off: float
    error: float


def measure(name: str, size: int, branches: bool = True) -> FamilyRow:
    """Measure with one set of random weights after the other, until the error is small or `_ROUNDS` sets were used.

    Args:
        branches: Give residual branches that are nearly zero at the start a weight of 1, as training may.
    """
    generator, shares, found = torch.Generator().manual_seed(1), torch.zeros(0), torch.zeros(0)
    off, error, canvas = 0.0, math.inf, size + _LARGER
    model = _random_model(name, 0, branches)
    _, positions = _tokens(model, size)
    grid, there = _tokens(model, canvas)
    if positions != there:
        raise ValueError(f"{name}: {positions} at {size} px, {there} at {canvas}")
    for seed in range(_ROUNDS):
        model = _random_model(name, seed, branches)
        with gates_held(model):
            tokens, centroids = looks(model, (canvas, canvas), grid, generator)
        centres = torch.tensor(positions.first) + tokens * torch.tensor(positions.pitch)
        shares = torch.cat([shares, (tokens / (torch.tensor(grid) - 1) - 0.5).flatten()])
        found = torch.cat([found, (centroids - centres).flatten()])
        off, error = _at_centre(shares, found)
        if seed and error < _ENOUGH:
            break
    return FamilyRow(name, size, positions, off, error)


def _at_centre(shares: Tensor, found: Tensor) -> tuple[float, float]:
    """Return `found` at the centre, by a linear fit over the share of the side, and its standard error."""
    terms = torch.stack([torch.ones_like(shares), shares], 1).double()
    inverse = torch.linalg.pinv(terms.T @ terms)
    fitted = inverse @ terms.T @ found.double()
    variance = (found - terms @ fitted).square().sum() / (len(found) - 2)
    return float(fitted[0]), float((variance * inverse[0, 0]).sqrt())


def _tokens(model: Any, size: int) -> tuple[Size, TokenGrid]:
    if isinstance(model, TokenLabelModel):
        return model.token_grid(size), model.token_positions(size)
    grid, positions, *_ = find_tokens(model, (size, size))
    return grid, positions


def _random_model(name: str, seed: int, branches: bool) -> Any:
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=4).eval()
    for parameter, value in model.named_parameters():
        scale = value.ndim == 1 and parameter.endswith(("weight", "gamma"))
        if branches and scale and value.abs().max() < 1e-3:
            value.data.fill_(1.0)
    for module in list(model.modules()):
        for child, activation in list(module.named_children()):
            if isinstance(activation, _ACTIVATIONS):
                setattr(module, child, nn.Identity())
    for weight in (module.weight.data for module in model.modules() if isinstance(module, nn.Conv2d)):
        mirrored = weight + weight.flip(-1) + weight.flip(-2) + weight.flip(-1, -2)
        weight.copy_(mirrored * weight.norm() / mirrored.norm())
    return model


def looks(model: nn.Module, size: Size, grid: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens (B, 2) near the middle as row and column, and the centroids (B, 2) of their fields of view in
    pixels, down and across."""
    images = torch.randn(_BATCH, 3, *size, generator=generator).requires_grad_()
    features = _map(model, images)  # (B, h, w, C)
    middle = [torch.randint(-_MIDDLE, _MIDDLE + 1, (_BATCH,), generator=generator) + count // 2 for count in grid]
    tokens = torch.stack(middle, 1)
    chosen = features[torch.arange(_BATCH), tokens[:, 0], tokens[:, 1]]  # (B, C)
    (chosen * torch.randn(chosen.shape, generator=generator)).sum().backward()
    assert images.grad is not None
    energy = images.grad.double().square().sum(1)  # (B, H, W)
    energy /= energy.sum((1, 2), keepdim=True)
    down = energy.sum(2) @ (torch.arange(size[0]).double() + 0.5)
    across = energy.sum(1) @ (torch.arange(size[1]).double() + 0.5)
    return tokens, torch.stack([down, across], 1).float()


def _map(model: Any, images: Tensor) -> Tensor:
    size = images.shape[-2], images.shape[-1]
    features = model.forward_features(images)
    if isinstance(model, TokenLabelModel):
        return features[:, 1:].unflatten(1, model.token_grid(size))
    return feature_map(model, features, size)


@contextmanager
def gates_held(model: nn.Module) -> Iterator[None]:
    """Treat the factor by which a gate multiplies its input as a constant."""

    def hold(gate: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if output.shape != inputs[0].shape:  # factors that are applied elsewhere
            return output.detach()
        factor = (output / inputs[0]).detach().nan_to_num(0.0, 0.0, 0.0)
        return output.detach() + factor * (inputs[0] - inputs[0].detach())

    gates = [module for module in model.modules() if type(module).__name__.startswith(_GATES)]
    handles = [gate.register_forward_hook(hold) for gate in gates]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
