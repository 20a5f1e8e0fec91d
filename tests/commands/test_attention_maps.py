"""Recomputed attention weights, times the layer's own values, are the layer's own output."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import volo  # noqa: F401
from tlt.errors import UserError
from tlt.models.layers import SelfAttention
from volo.commands.attention_maps import (
    attention_layers,
    class_attention,
    forward_with_inputs,
    outlook_attention,
    outlook_looked_at,
    outlook_row,
    self_attention,
)
from volo.models.blocks import ClassAttention, OutlookAttention


def _run(name: str, size: tuple[int, int]) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """Every attention layer of a model with its input and its output, in double precision."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=size, num_classes=5).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # weights that are far from even
    layers = list(attention_layers(model).values())
    outputs: dict[nn.Module, Tensor] = {}
    for layer in layers:
        layer.register_forward_hook(lambda layer, _, out: outputs.update({layer: out}))
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    features, inputs = forward_with_inputs(model, images, layers)
    assert torch.equal(features, model.forward_features(images))
    return [(layer, x, outputs[layer]) for layer, x in zip(layers, inputs, strict=True)]


def _heads(layer: nn.Module, v: Tensor) -> Tensor:
    """(B, N, C) -> (B, heads, N, C / heads)."""
    return v.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)


@pytest.mark.parametrize(("name", "size"), [("volo_test", (64, 96)), ("lvvit_test", (48, 64))])
def test_weights_times_values_are_what_the_layer_gives(name: str, size: tuple[int, int]) -> None:
    kinds = set()
    for layer, x, out in _run(name, size):
        kinds.add(type(layer))
        if isinstance(layer, SelfAttention):
            tokens = x.flatten(1, -2)
            values = _heads(layer, layer.qkv(tokens)[..., 2 * x.shape[-1] :])
            mixed = (self_attention(layer, x) @ values).transpose(1, 2).reshape(x.shape)
        elif isinstance(layer, ClassAttention):
            values = _heads(layer, layer.kv(x)[..., x.shape[-1] :])
            mixed = (class_attention(layer, x)[:, :, None] @ values).transpose(1, 2).flatten(2)
        else:
            assert isinstance(layer, OutlookAttention)
            size_of_map = (x.shape[1], x.shape[2])
            weights = outlook_attention(layer, x)
            cells = [(row, col) for row in range(size_of_map[0]) for col in range(size_of_map[1])]
            rows = torch.stack([outlook_row(layer, weights, size_of_map, cell) for cell in cells], 2).flatten(3)
            mixed = (rows @ _heads(layer, layer.v(x).flatten(1, 2))).transpose(1, 2).reshape(x.shape)
        assert torch.allclose(layer.proj(mixed), out, rtol=0, atol=1e-5 * float(out.detach().abs().max()))
    assert kinds == ({SelfAttention, ClassAttention, OutlookAttention} if name == "volo_test" else {SelfAttention})


def test_how_much_a_cell_is_looked_at_is_what_the_windows_places_give_it() -> None:
    layer = OutlookAttention(8, 2).double()
    x = torch.randn(1, 6, 7, 8, dtype=torch.float64)
    weights = outlook_attention(layer, x)  # (1, 2, 3, 4, 9, 9)
    expected, windows = torch.zeros(2, 6, 7, dtype=torch.float64), torch.zeros(6, 7, dtype=torch.float64)
    for i in range(3):
        for j in range(4):
            for place in range(9):
                row, col = 2 * i - 1 + place // 3, 2 * j - 1 + place % 3
                if 0 <= row < 6 and 0 <= col < 7:
                    expected[:, row, col] += weights[0, :, i, j, :, place].sum(-1)
                    windows[row, col] += 1
    assert torch.allclose(outlook_looked_at(layer, weights, (6, 7))[0], expected / windows)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(UserError, match="ResNet has none of the attention layers"):
        attention_layers(timm.create_model("test_resnet"))
