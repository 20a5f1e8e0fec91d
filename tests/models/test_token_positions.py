"""Tokens lie in the middle of what gradients say that they see."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.layers import HardSwish, Swish
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.lambda_layer import LambdaLayer
from torch import Tensor, nn

import volo  # noqa: F401
from tlt.label_map import FULL_AREA
from tlt.mix import MixRatios
from tlt.models.spatial import downsampling_layers, feature_map, positions_of
from tlt.models.token_labeling import TokenLabelModel
from tlt.models.wrap import find_tokens

_GATES = ("SelectiveKernelAttn", "SE", "Squeeze", "EffectiveSE", "Eca", "GlobalContext")
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Hardswish, Swish, HardSwish)


def without_choices(model: Any) -> Any:
    """The same layers, but each output depends on all pixels that it may depend on, and on no others: without gates of
    the whole image, and what activations and maxima leave out is let through."""
    for module in list(model.modules()):
        for child, layer in list(module.named_children()):
            if isinstance(layer, _ACTIVATIONS) or type(layer).__name__.startswith(_GATES):
                setattr(module, child, nn.Identity())
            elif isinstance(layer, nn.MaxPool2d):
                setattr(module, child, nn.AvgPool2d(layer.kernel_size, layer.stride, layer.padding, layer.ceil_mode))
    for parameter in model.parameters():  # of normalisation and branches that begin at 0, too
        nn.init.uniform_(parameter, 0.5, 1.0)
    return model


def middle_of_what_is_seen(cell: Tensor, images: Tensor) -> list[float]:
    """(down, across) the middle of the pixels of `images` that the number `cell` depends on; it must see no border."""
    (gradient,) = torch.autograd.grad(cell, images)
    middle = []
    for axis in (0, 1):
        lines = (gradient[0].abs().sum(0) > 0).any(1 - axis).nonzero()
        assert lines.min() > 0 and lines.max() < images.shape[2 + axis] - 1
        middle.append((int(lines.min()) + int(lines.max()) + 1) / 2)
    return middle


CASES = [("volo_test", 70), ("lvvit_test", 70), ("regnety_002", 646), ("resnet18", 550)]
CASES += [("tf_mobilenetv3_small_100", 838)]


@pytest.mark.parametrize("name, size", CASES)
def test_a_token_lies_in_the_middle_of_what_it_sees(name, size):
    torch.manual_seed(0)
    narrow = {"channels": (16, 16, 16, 16)} if name == "resnet18" else {}
    model, images = timm.create_model(name, num_classes=4, **narrow).eval(), torch.randn(1, 3, size, size + 40).double()
    ours, shape = isinstance(model, TokenLabelModel), (size, size + 40)
    grid, positions = (model.token_grid(shape), model.token_positions(shape)) if ours else find_tokens(model, shape)[:2]
    seen = without_choices(model).double()
    images.requires_grad_()
    token = [count // 2 for count in grid]
    if ours:  # what attention mixes comes later
        scale = model.mix_scale
        cells = seen.patch_embed(images)[0, :, :, 0]
        cell = cells[token[0] * scale : (token[0] + 1) * scale, token[1] * scale : (token[1] + 1) * scale].sum()
    else:
        cell = feature_map(seen, seen.forward_features(images), shape)[0, token[0], token[1], 0]
    middle = middle_of_what_is_seen(cell, images)
    assert middle == [positions.first[axis] + token[axis] * positions.pitch[axis] for axis in (0, 1)]


class Through(nn.Module):
    """In place of a block: gives back what it is given."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return x


def emptied(model: Any, images: Tensor) -> Any:
    """The layers that change the size of maps alone: what keeps its input's shape, as attention does, is left out."""
    kept: dict[str, bool] = {}

    def note(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        kept[name] = isinstance(output, Tensor) and output.ndim > 2 and output.shape == inputs[0].shape

    modules = [(name, module) for name, module in model.named_modules() if name]
    hooks = [module.register_forward_hook(partial(note, name)) for name, module in modules]
    model.forward_features(images)
    for hook in hooks:
        hook.remove()
    for name in [name for name, keeps in kept.items() if keeps]:
        model.set_submodule(name, Through())
    for module in model.modules():  # that pools what it mixes, which tells no place
        if isinstance(module, (BottleneckAttn, LambdaLayer)):
            module.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.0)
    return model.double()


SWIN = {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}


@pytest.mark.parametrize(
    ("name", "settings", "size"),
    [
        ("swin_tiny_patch4_window7_224", SWIN, (118, 133)),  # appends to odd maps
        ("swin_tiny_patch4_window7_224", SWIN, (112, 144)),
        ("swinv2_tiny_window8_256", SWIN, (208, 118)),
        ("swinv2_cr_tiny_224", SWIN, (118, 133)),
        ("davit_tiny", {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 8, 8), "num_heads": (1,) * 4}, (118, 133)),
        ("cpubone_nano", {}, (118, 133)),  # pads in front
        ("mobilevitv2_050", {}, (256, 265)),  # interpolates to even maps
        ("botnet26t_256", {}, (256, 256)),  # pools in attention, beside a shortcut that does not
        ("lambda_resnet26t", {}, (128, 160)),
        ("volo_test", {}, (118, 133)),
        ("lvvit_test", {}, (118, 133)),
    ],
)
def test_tokens_of_padding_networks_lie_right(name, settings, size):
    torch.manual_seed(0)
    sized = {"img_size": size} if name.startswith(("swin", "volo", "lvvit")) else {}
    model = timm.create_model(name, num_classes=4, **settings, **sized).eval()
    (rows, cols), positions = find_tokens(model, size)[:2]
    images = torch.randn(1, 3, *size).double().requires_grad_()
    features = feature_map(model, emptied(model, images.detach().float()).forward_features(images), size)
    for row, col in [(rows // 2, cols // 2), (rows // 2 - 1, cols // 2 - 1)]:
        (gradient,) = torch.autograd.grad(features[0, row, col, 0], images, retain_graph=True)
        for axis, number in enumerate((row, col)):
            seen = gradient[0].abs().sum(0).sum(1 - axis)
            middle = float((seen * (torch.arange(size[axis]) + 0.5)).sum() / seen.sum())
            assert middle == pytest.approx(positions.first[axis] + number * positions.pitch[axis], abs=1)


def test_padding_that_is_undone_ends_the_walk():
    halves = [nn.Conv2d(3, 3, 3, 2, 1) for _ in range(2)]
    layers = nn.Sequential(halves[0], nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 3, 2), halves[1])
    with downsampling_layers(layers) as downsampling:
        grid = layers(torch.zeros(1, 3, 64, 64)).shape[2:]
    positions = positions_of(downsampling, (grid[0], grid[1]), (64, 64))
    # The second convolution sees half a cell of 2 px to the right.
    assert (positions.pitch, positions.first) == ((4.0, 4.0), (1.5, 1.5))


def _random_layers(draw: random.Random) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(draw.randint(1, 4)):
        kernel, dilation = draw.randint(1, 4), draw.choice([1, 1, 2])
        stride, padding = draw.randint(1, 3), draw.randint(0, dilation * (kernel - 1) // 2)
        layers.append(nn.Conv2d(3, 3, kernel, stride, padding, dilation))
    return nn.Sequential(*layers)


@pytest.mark.parametrize("seed", range(8))
def test_positions_are_the_middle_of_what_a_token_sees(seed):
    draw = random.Random(seed)
    layers = _random_layers(draw).double()
    size = draw.randint(90, 130), draw.randint(90, 130)
    images = torch.randn(1, 3, *size, dtype=torch.float64, requires_grad=True)
    with downsampling_layers(layers) as downsampling:
        output = layers(images)
    grid = output.shape[2], output.shape[3]
    positions = positions_of(downsampling, grid, size)
    token = grid[0] // 2, grid[1] // 2
    middle = middle_of_what_is_seen(output[0, :, token[0], token[1]].sum(), images)
    assert middle == [positions.first[axis] + token[axis] * positions.pitch[axis] for axis in (0, 1)]
    assert not layers[0]._forward_hooks


def test_shares_of_a_mix_are_those_of_a_tokens_pixels():
    pixels = torch.rand(2, 1, 20, 30, dtype=torch.float64)
    ratios = MixRatios(torch.rand(2, 1), pixels)
    window = (-0.1, 0.05, 0.8, 1.2)
    fine = pixels[:, 0].repeat_interleave(60, 1).repeat_interleave(60, 2)  # (2, 1200, 1800)
    edges = [np.clip(np.linspace(low, high, 4) * side, 0, side).round().astype(int)
             for low, high, side in ((0.05, 1.2, 1200), (-0.1, 0.8, 1800))]  # fmt: skip
    for token, share in enumerate(ratios.of_tokens((3, 3), window, pixels).unbind(1)):
        row, col = divmod(token, 3)
        (top, bottom), (left, right) = edges[0][row : row + 2], edges[1][col : col + 2]
        torch.testing.assert_close(share, fine[:, top:bottom, left:right].mean((1, 2)), rtol=0, atol=1e-3)
    whole = ratios.of_tokens((4, 5), FULL_AREA, pixels)
    torch.testing.assert_close(whole, nn.functional.adaptive_avg_pool2d(pixels, (4, 5)).flatten(1))
