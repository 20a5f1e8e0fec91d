"""Tokens lie where gradients say that they look, at every image size, and their labels are read there."""

from __future__ import annotations

import random

import numpy as np
import pytest
import timm
import torch
from torch import nn

import volo  # noqa: F401
from tests.labels.brute_force import brute_force
from tests.models.token_looks import measure
from tlt.label_map import FULL_AREA, LabelBatch
from tlt.mix import MixRatios
from tlt.models.token_positions import TokenGrid, positions_of, shrinking_layers
from tlt.models.wrap import with_dense_head
from tlt.targets import make_targets


@pytest.mark.parametrize(
    ("name", "size", "equal_part"),
    [
        ("lvvit_test", 46, 11.0),
        ("volo_test", 54, 5.5),
        ("regnety_002", 112, 13.5),
        ("regnety_002", 118, 14.25),
        ("resnet18d", 76, 15.17),
        ("test_convnext", 120, 20.0),
    ],
)
def test_tokens_look_at_their_positions(name: str, size: int, equal_part: float) -> None:
    # The shortcuts of a ResNet-D average where its branches stride: tokens look in between, nearer to either.
    found = measure(name, size, branches=name != "resnet18d")
    assert abs(found.off) < max(0.5, 2 * found.error), found
    model = timm.create_model(name, num_classes=4)
    grid = with_dense_head(model, (size, size)).token_grid(size)
    last = found.positions.first[0] + (grid[0] - 1) * found.positions.pitch[0]
    away = [
        abs(position - (token + 0.5) * size / grid[0])
        for token, position in ((0, found.positions.first[0]), (grid[0] - 1, last))
    ]
    assert max(away) == pytest.approx(equal_part, abs=0.01)  # where the labels were taken from once


# Small models of many families that take images of any size.
FAMILIES = """
volo_d1 lvvit_t resnet18 resnet18d seresnext26d_32x4d res2net50_26w_4s skresnet18 regnetx_002 regnety_002 gernet_s
resnetv2_18 nf_resnet26 convnext_atto convnextv2_atto inception_next_tiny mambaout_femto starnet_s1 efficientnet_b0
tf_efficientnet_b0 mnasnet_050 mobilenetv2_050 tf_mobilenetv3_small_100 mobilenetv4_conv_small fbnetc_100 ghostnet_100
hardcorenas_a rexnet_100 lcnet_050 repvgg_a0 repghostnet_050 fastvit_t8 densenet121 vgg11 darknet17 cs3darknet_s
vovnet39a hgnetv2_b0 selecsls42 edgenext_xx_small pvt_v2_b0 poolformer_s12 mobilevit_xxs efficientvit_b0
focalnet_tiny_srf davit_tiny
"""
# Pixels by which tokens look beside their place; docs/alignment.md says why.
BESIDE = {"resnet18d": -12.65, "seresnext26d_32x4d": -1.52, "hgnetv2_b0": 0.97}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES.split())
def test_tokens_of_every_family_look_at_their_positions(name: str) -> None:
    found = measure(name, 230)
    assert abs(found.off - BESIDE.get(name, 0.0)) < max(0.5, 2 * found.error), found


def test_a_map_that_is_padded_and_made_small_again_is_not_gone_through_for_ever() -> None:
    layers = nn.Sequential(
        nn.Conv2d(3, 3, 3, 2, 1), nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 3, 2), nn.Conv2d(3, 3, 3, 2, 1)
    )
    with shrinking_layers(layers) as found:
        grid = layers(torch.zeros(1, 3, 64, 64)).shape[2:]
    positions = positions_of(found, (grid[0], grid[1]), (64, 64))
    # The second convolution sees half a cell of 2 px to the right.
    assert (positions.pitch, positions.first) == ((4.0, 4.0), (1.5, 1.5))


def _random_layers(draw: random.Random) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(draw.randint(1, 4)):
        kernel, dilation = draw.randint(1, 4), draw.choice([1, 1, 2])
        stride, padding = draw.randint(1, 3), draw.randint(0, dilation * (kernel - 1) // 2)
        layers.append(nn.Conv2d(3, 3, kernel, stride, padding, dilation))
    return nn.Sequential(*layers)


@pytest.mark.parametrize("seed", range(40))
def test_positions_are_the_middle_of_what_a_token_sees(seed: int) -> None:
    draw = random.Random(seed)
    layers = _random_layers(draw).double()
    size = draw.randint(90, 130), draw.randint(90, 130)
    images = torch.randn(1, 3, *size, dtype=torch.float64, requires_grad=True)
    with shrinking_layers(layers) as found:
        output = layers(images)
    grid = output.shape[2], output.shape[3]
    positions = positions_of(found, grid, size)
    row, column = grid[0] // 2, grid[1] // 2
    output[0, :, row, column].sum().backward()
    assert images.grad is not None
    seen = images.grad[0].abs().sum(0) > 0
    for axis, token in ((0, row), (1, column)):
        lines = seen.any(1 - axis).nonzero()
        middle = (int(lines.min()) + int(lines.max()) + 1) / 2
        assert positions.first[axis] + token * positions.pitch[axis] == middle
    assert not layers[0]._forward_hooks


def test_volo_drops_six_of_230_pixels() -> None:
    model = timm.create_model("volo_d1", img_size=224)
    assert model.token_positions() == TokenGrid((16, 16), (7.5, 7.5))
    window = model.token_positions((230, 300)).window(model.token_grid((230, 300)), (230, 300))
    assert window == pytest.approx((-0.5 / 300, -0.5 / 230, 287.5 / 300, 223.5 / 230))


def _labels(batch: int, cells: int, classes: int) -> LabelBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(classes, (batch, 2, cells, cells), generator=generator, dtype=torch.int32)
    values = torch.randn(batch, 2, cells, cells, generator=generator)
    return LabelBatch(values, ids, torch.tensor([[0.0, 0.0, 1.0, 1.0]] * batch))


AFFINE = torch.tensor([[[0.5, 0.1, 0.2], [-0.1, 0.6, 0.25]], [[-0.4, 0.0, 0.7], [0.0, 0.5, 0.1]]], dtype=torch.float64)
VISIBLE = torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2, dtype=torch.float64)


def test_what_is_outside_of_the_crop_has_no_label_even_where_the_image_goes_on() -> None:
    # A ResNet at 64 pixels: half of the first row and column of tokens, and all beyond the last.
    arguments = (_labels(2, 4, 6), AFFINE, VISIBLE, torch.tensor([1, 2]), (2, 2), 6)
    found = make_targets(*arguments, window=(-0.25, -0.25, 0.75, 0.75))
    assert found.tokens is not None and found.tokens.weight.tolist() == [[0.25, 0.5, 0.5, 1.0]] * 2


@pytest.mark.parametrize("uncovered", ["ignore", "uniform"])
def test_targets_of_a_window_are_those_of_their_definition_and_the_class_is_that_of_the_whole_crop(
    uncovered: str,
) -> None:
    window = (-0.2, -0.1, 0.9, 0.8)
    arguments = (_labels(2, 5, 200), AFFINE, VISIBLE, torch.tensor([1, 2]), (3, 4), 200, 0.1)
    whole, found = make_targets(*arguments, True, uncovered), make_targets(*arguments, True, uncovered, window)
    expected = brute_force(*arguments, uncovered, window)
    assert found.window == window and found.tokens is not None and whole.tokens is not None
    torch.testing.assert_close(found.cls, whole.cls)
    torch.testing.assert_close(found.tokens.dense(200), expected.tokens)
    torch.testing.assert_close(found.tokens.weight, expected.weight)
    assert not torch.allclose(expected.tokens, whole.tokens.dense(200))


def test_shares_of_mixed_images_are_those_of_the_pixels_of_a_token() -> None:
    pixels = torch.rand(2, 1, 20, 30, dtype=torch.float64)
    ratios = MixRatios(torch.rand(2, 1), pixels)
    window = (-0.1, 0.05, 0.8, 1.2)
    fine = pixels[:, 0].repeat_interleave(60, 1).repeat_interleave(60, 2)  # (2, 1200, 1800)
    edges = [np.clip(np.linspace(low, high, 4) * side, 0, side).round().astype(int)
             for low, high, side in ((0.05, 1.2, 1200), (-0.1, 0.8, 1800))]  # fmt: skip
    for token, found in enumerate(ratios.of_tokens((3, 3), window, pixels).unbind(1)):
        (top, bottom), (left, right) = (
            each[place : place + 2] for each, place in zip(edges, divmod(token, 3), strict=True)
        )
        torch.testing.assert_close(found, fine[:, top:bottom, left:right].mean((1, 2)), rtol=0, atol=1e-3)
    whole = ratios.of_tokens((4, 5), FULL_AREA, pixels)
    torch.testing.assert_close(whole, nn.functional.adaptive_avg_pool2d(pixels, (4, 5)).flatten(1))
