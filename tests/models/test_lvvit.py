"""LV-ViT against published counts and against timm's vision transformer block."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.vision_transformer import Block

from tlt.models.layers import TransformerBlock
from tlt.models.lvvit import WEIGHTS

# Blocks, channels, heads and residual scale (skip_lam) of the published models, crop ratio; sizes, with the millions of
# parameters in the table of the published weights.
PUBLISHED = {
    "lvvit_t": ((12, 240, 4, 1.0), 0.9, {224: 8.53}),
    "lvvit_s": ((16, 384, 6, 2.0), 0.9, {224: 26.15, 384: 26.30}),
    "lvvit_m": ((20, 512, 8, 2.0), 1.0, {224: 55.83, 384: 56.03, 448: 56.13}),
    "lvvit_l": ((24, 768, 12, 3.0), 1.0, {448: 150.47, 512: 150.66}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_weight_has_a_tag_with_its_size_shape_and_parameters(name):
    shape, crop_pct, sizes = PUBLISHED[name]
    assert {size for model, size in WEIGHTS if model == name} == {*sizes}
    for size, millions in sizes.items():
        with torch.device("meta"):
            model = timm.create_model(f"{name}.in1k" if size == 224 else f"{name}.in1k_{size}")
        block = model.blocks[0]
        assert (len(model.blocks), model.num_features, block.attn.num_heads, block.residual_scale) == shape
        assert model.img_size == (size, size) and model.pretrained_cfg["crop_pct"] == crop_pct
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.006)
        assert model.pretrained_cfg["url"] == WEIGHTS[name, size]


def test_a_model_without_weights_at_the_size_of_the_table_has_that_size():
    with torch.device("meta"):
        model = timm.create_model("lvvit_l")
    assert model.img_size == (224, 224) == model.pretrained_cfg["input_size"][1:]


def test_stochastic_depth_rises_linearly_from_zero():
    model = timm.create_model("lvvit_test", drop_path_rate=0.2)
    assert [block.drop_path for block in model.blocks] == [0.0, 0.1, 0.2]


def test_block_equals_timms_and_residual_scale_divides_both_branches():
    torch.manual_seed(0)
    theirs = Block(24, num_heads=3, mlp_ratio=3.0, norm_layer=torch.nn.LayerNorm).double()
    ours, scaled = (TransformerBlock(24, 3, residual_scale=scale).double() for scale in (1.0, 4.0))
    ours.load_state_dict(theirs.state_dict())
    scaled.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    with torch.no_grad():
        theirs.attn.proj.weight /= 4
        theirs.attn.proj.bias /= 4
        theirs.mlp.fc2.weight /= 4
        theirs.mlp.fc2.bias /= 4
    torch.testing.assert_close(scaled(x), theirs(x))
