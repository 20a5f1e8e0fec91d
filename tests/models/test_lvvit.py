"""LV-ViT against published counts."""

import pytest
import timm
import torch

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


def test_stochastic_depth_rises_linearly_from_zero():
    model = timm.create_model("lvvit_test", drop_path_rate=0.2)
    assert [block.drop_path for block in model.blocks] == [0.0, 0.1, 0.2]
