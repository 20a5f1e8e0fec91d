"""`volo attention` as a user runs it: pages of the right maps, and one line for a mistake."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from tlt.models.layers import SelfAttention
from volo.commands import attention
from volo.models.volo import ClassAttention, OutlookAttention


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "straße.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(path)
    return path


def test_pictures_are_drawn_and_none_is_replaced(call, image, described, trained_run, tmp_path):
    ended = call("attention", f"--checkpoint {trained_run.run} -o {tmp_path}/page.svg", image)
    assert ended.code == 0 and "wrote" in ended.out and (tmp_path / "page.svg").stat().st_size > 10_000, ended.err
    assert "straße.png: volo_test, 32 x 32 px" in (tmp_path / "page.svg").read_text()
    flags = f"--checkpoint {described('lvvit_test')[1]} --query 1 0 --device cpu"
    ended = call("attention", flags, image, "-o", tmp_path / "page.png").ok()
    with Image.open(tmp_path / "page.png") as page:
        assert min(page.size) > 400
    before = image.read_bytes()
    for words, message in (
        ([image, "-o", image], f"-o {image} exists already: remove it, or choose another name"),
        ([image, "-o", "p.txt"], "end the name in .png"),
        (["nothing.jpg", "-o", "p.png"], "image nothing.jpg: No such file"),
        ([image, "-o", "p.png", "--checkpoint", described("test_resnet")[1]], "has none of the attention layers"),
    ):
        assert call("attention", flags, *words).refused(message)
    assert image.read_bytes() == before


def _inputs_and_outputs(name: str, size: tuple[int, int]) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """Every attention layer of a model with its input and its output, in double precision."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=size, num_classes=5).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # weights that are far from even
    outputs: dict[nn.Module, Tensor] = {}
    for layer in attention.attention_layers(model).values():
        layer.register_forward_hook(lambda layer, _, out: outputs.update({layer: out}))
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    features, inputs = attention.forward_with_inputs(model, images)
    assert torch.equal(features, model.forward_features(images))
    return [(layer, x, outputs[layer]) for layer, x in inputs.items()]


def _heads(layer: nn.Module, v: Tensor) -> Tensor:
    """(B, N, C) -> (B, heads, N, C / heads)."""
    return v.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)


@pytest.mark.parametrize(("name", "size"), [("volo_test", (64, 96)), ("lvvit_test", (48, 64))])
def test_weights_times_values_are_what_the_layer_gives(name, size):
    kinds = set()
    for layer, x, out in _inputs_and_outputs(name, size):
        kinds.add(type(layer))
        if isinstance(layer, SelfAttention):
            tokens = x.flatten(1, -2)
            values = _heads(layer, layer.qkv(tokens)[..., 2 * x.shape[-1] :])
            mixed = (attention.self_attention(layer, x) @ values).transpose(1, 2).reshape(x.shape)
        elif isinstance(layer, ClassAttention):
            values = _heads(layer, layer.kv(x)[..., x.shape[-1] :])
            mixed = (attention.class_attention(layer, x)[:, :, None] @ values).transpose(1, 2).flatten(2)
        else:
            continue  # below
        assert torch.allclose(layer.proj(mixed), out, rtol=0, atol=1e-5 * float(out.detach().abs().max()))
    assert kinds == ({SelfAttention, ClassAttention, OutlookAttention} if name == "volo_test" else {SelfAttention})


def test_cell_weight_is_what_windows_give_it():
    layer = OutlookAttention(8, 2).double()
    x = torch.randn(1, 6, 7, 8, dtype=torch.float64)
    pooled = F.avg_pool2d(x.permute(0, 3, 1, 2), 2, ceil_mode=True).permute(0, 2, 3, 1)
    weights = (layer.attn(pooled) * layer.scale).view(3, 4, 2, 9, 9).softmax(-1)  # written, read
    expected, windows = torch.zeros(2, 6, 7, dtype=torch.float64), torch.zeros(6, 7, dtype=torch.float64)
    for i in range(3):
        for j in range(4):
            for place in range(9):
                row, col = 2 * i - 1 + place // 3, 2 * j - 1 + place % 3
                if 0 <= row < 6 and 0 <= col < 7:
                    expected[:, row, col] += weights[i, j, :, :, place].sum(-1)
                    windows[row, col] += 1
    assert torch.allclose(attention.outlook_attention(layer, x)[0], expected / windows)


def test_maps_belong_to_the_query_and_heads_to_the_model():
    torch.manual_seed(0)
    model = timm.create_model("volo_test", img_size=(64, 96), num_classes=6).eval()
    image, query = torch.randn(1, 3, 64, 96), (0.8, 0.3)  # token (1, 4)
    seen = attention.view(model, image, query)
    assert [len(maps) for maps in seen.maps] == [1, 3, 2]
    (looked,), (first, *_), _ = seen.maps
    assert looked.values.shape == (8, 12) and looked.cell == 8
    assert first.name == "network.2.0" and first.cell == 16
    _, inputs = attention.forward_with_inputs(model, image)
    layer = model.network[2][0].attn
    expected = attention.self_attention(layer, inputs[layer])[0, :, 1 * 6 + 4].mean(0).view(4, 6) * 24
    assert first.values == pytest.approx(expected.detach().numpy(), rel=1e-5)
    with torch.no_grad():
        best = model(image)[0].softmax(-1).topk(5)
        tokens = model(image, dense=True)[1][0].softmax(-1).max(-1)
    assert [class_id for class_id, _ in seen.top] == best.indices.tolist()
    assert [probability for _, probability in seen.top] == pytest.approx(best.values.tolist(), rel=1e-5)
    assert seen.tokens is not None and seen.tokens.ids.ravel().tolist() == tokens.indices.tolist()
    assert seen.tokens.probability.ravel() == pytest.approx(tokens.values.numpy(), rel=1e-5)
    figure = attention.draw_attention(np.zeros((64, 96, 3), np.uint8), seen, query, [], "title")
    (axes,) = [axes for axes in figure.axes if f"\n{first.name}: " in axes.get_title("left")]
    (drawn,) = [each for each in axes.images if each.get_label() == "map"]
    assert drawn.get_extent() == [0, 96, 64, 0]
    maps = [each for axes in figure.axes for each in axes.images if each.get_label() == "map"]
    assert len({(each.norm.vmin, each.norm.vmax) for each in maps}) == 1 < len(maps)  # one scale, whatever is in them
    for value, (red, green, blue, _) in zip((0.99, 1.01), drawn.cmap(drawn.norm([0.99, 1.01])), strict=True):
        assert np.ptp((red, green, blue)) < 0.02, value
    little, much = drawn.cmap(drawn.norm([0.0, 50.0]))
    assert little[2] > little[0] + 0.5 and much[0] > much[2] + 0.5  # blue and yellow, beyond the scale too
    seen.maps[0][0].values[:] = np.linspace(0.99, 1.01, seen.maps[0][0].values.size).reshape(
        seen.maps[0][0].values.shape
    )
    figure = attention.draw_attention(np.zeros((64, 96, 3), np.uint8), seen, query, [], "")
    titles = [a.get_title("left") for a in figure.axes]
    assert [title for title in titles if title.endswith(": 0.99 to 1.01 x even, nearly even")]
