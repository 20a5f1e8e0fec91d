"""Every model entry of the golden file: outputs of the published implementations, reproduced to 1e-4."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from tests.models.conftest import deviation, fill, make_images

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
