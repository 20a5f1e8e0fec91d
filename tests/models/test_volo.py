"""VOLO against timm's port of it, LV-ViT against published counts; every model entry of the golden file, outputs of the
published implementations, to 1e-4; published weights found in torch's hub folder, converted, or refused in one line."""

import re
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models.volo import VOLO as TimmVOLO

from tests.commands.conftest import ROOT
from tests.models.conftest import deviation, fill, make_images
from tlt.errors import UserError
from tlt.models.layers import ResidualBlock
from tlt.models.lvvit import VARIANTS as LVVITS
from tlt.models.lvvit import WEIGHTS as LVVIT_WEIGHTS
from volo.models.volo import VARIANTS, WEIGHTS


def heads_of(model):
    return [module.num_heads for module in model.modules() if hasattr(module, "num_heads")]


@pytest.mark.parametrize("name", [*VARIANTS, *LVVITS])
def test_variant_is_its_row_with_timms_names_and_shapes(name):
    row = (VARIANTS | LVVITS)[name]
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=1000)
    blocks = sum(row.layers) + 2 if name in VARIANTS else row.depth
    assert len(list(model.named_blocks())) == blocks and model.pretrained_cfg["crop_pct"] == row.crop_pct
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert round(millions, 2) == row.params
    assert model.img_size == (row.img_size,) * 2 == model.pretrained_cfg["input_size"][1:]
    if name in VARIANTS:
        cells = f"{str(row.layers)[1:-1]} | {row.dims[0]}/{row.dims[1]} | {row.heads[0]}/{row.heads[1]}"
    else:
        cells = f"{row.depth} | {row.embed_dim} | {row.num_heads}"
    page = (ROOT / "docs" / "models.md").read_text()
    assert re.search(rf"\| {name} \| [^|]+ \| {millions:.1f} M \| {cells} \|\n", page)
    if (name, 224) not in WEIGHTS:
        return
    with torch.device("meta"):
        theirs = timm.create_model(f"{name}_224")
    shapes, expected = ({k: v.shape for k, v in m.state_dict().items()} for m in (model, theirs))
    assert shapes == expected
    assert heads_of(model) == heads_of(theirs)  # shapes do not show them
    assert model.no_weight_decay() == theirs.no_weight_decay()


# Blocks, channels, heads and residual scale (skip_lam) of the published models, crop ratio; sizes, with the millions of
# parameters in the table of the published weights.
PUBLISHED = {
    "lvvit_t": ((12, 240, 4, 1.0), 0.9, {224: 8.53}),
    "lvvit_s": ((16, 384, 6, 2.0), 0.9, {224: 26.15, 384: 26.30}),
    "lvvit_m": ((20, 512, 8, 2.0), 1.0, {224: 55.83, 384: 56.03, 448: 56.13}),
    "lvvit_l": ((24, 768, 12, 3.0), 1.0, {448: 150.47, 512: 150.66}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights_have_tags_with_size_and_shape(name):
    shape, crop_pct, sizes = PUBLISHED[name]
    assert {size for model, size in LVVIT_WEIGHTS if model == name} == {*sizes}
    for size, millions in sizes.items():
        with torch.device("meta"):
            model = timm.create_model(f"{name}.in1k" if size == 224 else f"{name}.in1k_{size}")
        block = model.blocks[0]
        assert (len(model.blocks), model.num_features, block.attn.num_heads, block.residual_scale) == shape
        assert model.img_size == (size, size) and model.pretrained_cfg["crop_pct"] == crop_pct
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.006)
        assert model.pretrained_cfg["url"] == LVVIT_WEIGHTS[name, size]


@pytest.mark.parametrize(("name", "size"), WEIGHTS)
def test_weights_and_preprocessing_are_timms(name, size):
    tag = "sail_in1k" if size == 224 else f"sail_in1k_{size}"
    ours, theirs = (timm.get_pretrained_cfg(model) for model in (f"{name}.{tag}", f"{name}_{size}.sail_in1k"))
    for key in ("url", "input_size", "mean", "std", "interpolation", "first_conv", "classifier"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.crop_pct == (1.15 if name in ("volo_d4", "volo_d5") else 0.96)


@pytest.mark.parametrize("training", [False, True])
def test_forward_and_gradients_equal_timms(training):
    like = {"layers": (1, 1, 1, 1), "embed_dims": (32, 64, 64, 64), "num_heads": (2, 4, 4, 4), "stem_hidden_dim": 16}
    theirs = TimmVOLO(**like, mlp_ratio=2.0, patch_size=8, img_size=64, num_classes=50)
    ours, theirs = (fill(m).train(training) for m in (timm.create_model("volo_test", num_classes=50), theirs))
    images = make_images(2, 64)
    weights = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    results = []
    for model in (ours, theirs):
        logits = model(images)
        (logits * weights).sum().backward()
        results.append((logits, {name: p.grad for name, p in model.named_parameters()}))
    (logits, grads), (expected, expected_grads) = results
    assert deviation(logits, expected) < 1e-5
    scale = max(g.abs().max() for g in expected_grads.values())
    assert grads.keys() == expected_grads.keys()
    worst = max((grads[n] - expected_grads[n]).abs().max() / scale for n in grads)
    assert worst < 1e-5


@pytest.mark.parametrize(("side", "grid"), [(224, 14), (230, 14), (239, 15), (384, 24), (16, 1), (33, 2)])
def test_grid_is_what_the_convolutions_leave(side, grid):
    model = timm.create_model("volo_test", img_size=side, num_classes=3).eval()
    assert model.token_grid() == (grid, grid) == tuple(model.pos_embed.shape[1:3])
    with torch.no_grad():
        assert model(make_images(1, side), dense=True)[1].shape == (1, grid * grid, 3)


def drop_path_rates(module):
    return [m.drop_path for m in module.modules() if isinstance(m, ResidualBlock) and m.drop_path]


def test_stochastic_depth_is_timms_and_spares_outlookers():
    with torch.device("meta"):
        ours, theirs = (timm.create_model(name, drop_path_rate=0.3) for name in ("volo_d1", "volo_d1_224"))
        everywhere = timm.create_model("volo_d1", drop_path_rate=0.3, outlooker_drop_path=True)
    rates = drop_path_rates(ours)
    assert rates == pytest.approx([m.drop_prob for m in theirs.modules() if isinstance(m, DropPath)][::2])
    assert not drop_path_rates(ours.network[0])
    expected = [0.3 * depth / 17 for depth in range(1, 4)]  # the first outlooker has rate 0
    assert drop_path_rates(everywhere.network[0]) == pytest.approx(expected)
    assert drop_path_rates(everywhere.network[2:]) == pytest.approx(rates)
    lvvit = timm.create_model("lvvit_test", drop_path_rate=0.2)
    assert [block.drop_path for block in lvvit.blocks] == [0.0, 0.1, 0.2]


def test_initial_weights_are_the_published_ones():
    torch.manual_seed(0)
    model = timm.create_model("volo_test")
    for values in (model.get_submodule("network.0.0.attn.attn").weight, model.aux_head.weight, model.pos_embed):
        assert values.std().item() == pytest.approx(0.02, rel=0.15)
    assert all(not m.bias.any() for m in model.modules() if isinstance(m, torch.nn.Linear) and m.bias is not None)


with np.load(Path(__file__).parents[1] / "golden" / "upstream.npz") as file:
    GOLDEN = dict(file)
TOLERANCE = 1e-4


@pytest.mark.parametrize("key", [key for key in GOLDEN if key.startswith(("eval/", "finetune/"))])
def test_logits(key):
    """At the model's size or another; test_interface.py shows that other ways to a size are this one."""
    _, name, sizes = key.split("/")
    built, *_, size = map(int, sizes.split("-") * 2)
    model = fill(timm.create_model(name, img_size=built)).eval()
    with torch.no_grad():
        assert deviation(model(make_images(2, size)), GOLDEN[key]) < TOLERANCE


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
def test_training_forward_with_mixtoken(name):
    prefix, size = f"train/{name}/224", 224
    model = fill(timm.create_model(name, img_size=size)).train()
    box = torch.from_numpy(GOLDEN[f"{prefix}/box"])
    with torch.no_grad():
        cls, tokens = model(make_images(4, size), dense=True, mix_box=box)
    assert tokens.shape == (4, 14 * 14, 1000)
    assert deviation(cls, GOLDEN[f"{prefix}/cls"]) < TOLERANCE
    assert deviation(tokens[:, ::13, ::37], GOLDEN[f"{prefix}/aux"]) < TOLERANCE


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.mark.parametrize(
    ("name", "file"), [("volo_d1.sail_in1k_384", "d1_384_85.2.pth.tar"), ("lvvit_s", "lvvit_s-26M-224-83.3.pth.tar")]
)
def test_without_network_the_file_and_its_place_are_named(no_network, name, file):
    with torch.device("meta"), pytest.raises(UserError) as raised:
        timm.create_model(name, pretrained=True)
    message = str(raised.value)
    assert "\n" not in message and str(no_network / file) in message and "--" not in message
    assert "no route to host" in message and "https://github.com/" in message


def test_models_without_published_weights(no_network):
    with pytest.raises(UserError, match="volo_d0.*pretrained=False"):
        timm.create_model("volo_d0", pretrained=True)
    with pytest.raises(UserError, match="lvvit_l: .*lvvit_l.in1k_448 and lvvit_l.in1k_512"):
        timm.create_model("lvvit_l", pretrained=True)


@pytest.fixture
def release(no_network):
    """Weights under the name of LV-ViT-T's release file, in the place that the message names."""
    torch.manual_seed(1)
    model = timm.create_model("lvvit_t").eval()
    torch.save({"state_dict": model.state_dict(), "arch": "lvvit_t"}, no_network / "lvvit_t.pth")
    return model


def test_weights_are_converted_to_size_channels_and_classes(release):
    loaded = timm.create_model("lvvit_t", pretrained=True, img_size=(64, 96), in_chans=1, num_classes=10)
    torch.testing.assert_close(loaded.blocks[3].attn.qkv.weight, release.blocks[3].attn.qkv.weight)
    assert loaded.pos_embed.shape == (1, 1 + 4 * 6, 240)
    torch.testing.assert_close(loaded.pos_embed[:, 0], release.pos_embed[:, 0])
    summed = release.patch_embed.conv1.weight.sum(1, keepdim=True)
    torch.testing.assert_close(loaded.patch_embed.conv1.weight, summed)
    assert loaded.head.out_features == loaded.aux_head.out_features == 10
    features = timm.create_model("lvvit_t", pretrained=True, features_only=True, out_indices=(2,))
    torch.testing.assert_close(features.model.blocks[2].mlp.fc1.weight, release.blocks[2].mlp.fc1.weight)
