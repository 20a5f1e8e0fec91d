"""Blocks that compute anew in their backward pass what they don't keep."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tlt.models.recompute import EVERYTHING, LEVELS, NOTHING, POINTWISE

NAMES = ["volo_test", "lvvit_test"]


def build(name: str, **kwargs: float) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=10, **kwargs).train()


def loss_of(model: nn.Module, images: Tensor) -> Tensor:
    return sum(out.square().mean() for out in model(images, dense=True))


@pytest.mark.parametrize("name", NAMES)
def test_levels_give_the_same_gradients(name: str, make_images: Callable[..., Tensor]) -> None:
    model, images = build(name, drop_path_rate=0.5, drop_rate=0.2, attn_drop_rate=0.1), make_images(4, 64)
    names = [block for block, _ in model.named_blocks()]
    mixed = dict(zip(names, itertools.cycle(LEVELS), strict=False))
    found = []
    for levels in (*(dict.fromkeys(names, level) for level in LEVELS), mixed):
        model.set_recompute(levels)
        assert model.recompute == levels
        model.zero_grad()
        torch.manual_seed(3)
        loss_of(model, images).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for gradients in found[1:]:
        torch.testing.assert_close(gradients, found[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_only_recomputing_everything_repeats_linear_layers(name: str, make_images: Callable[..., Tensor]) -> None:
    model, images = build(name), make_images(2, 64)
    counts = {}
    for level in LEVELS:
        model.set_recompute({block: level for block, _ in model.named_blocks()})
        with FlopCounterMode(display=False) as counter:
            loss_of(model, images).backward()
        flops = {str(op): number for op, number in counter.get_flop_counts()["Global"].items()}
        counts[level] = sum(flops.get(op, 0) for op in ("aten.mm", "aten.addmm", "tlt.onednn_linear"))
    assert counts[POINTWISE] == counts[NOTHING] < counts[EVERYTHING]


def test_a_step_that_recomputes_compiles(make_images: Callable[..., Tensor]) -> None:
    torch.compiler.reset()
    model, images = build("lvvit_test", depth=2), make_images(2, 64)
    expected = loss_of(model, images)
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.set_recompute({"blocks.0": POINTWISE, "blocks.1": EVERYTHING})
    compiled = torch.compile(lambda x: loss_of(model, x), fullgraph=True, backend="aot_eager")(images)
    compiled.backward()
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients)
    torch.compiler.reset()
