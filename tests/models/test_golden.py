"""Every model entry of the golden file: outputs of the published implementations, reproduced to 1e-4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from tlt.models import adapt_state_dict

GOLDEN = Path(__file__).parents[1] / "golden" / "upstream.npz"
TOLERANCE = 1e-4

with np.load(GOLDEN) as file:
    KEYS = [key for key in file.files if key.split("/")[0] in ("eval", "finetune", "train")]
TRAIN = sorted({key.rsplit("/", 1)[0] for key in KEYS if key.startswith("train/")})


def of_kind(kind):
    return [key for key in KEYS if key.startswith(f"{kind}/")]


@pytest.mark.parametrize("key", of_kind("eval"))
def test_eval_logits(key, golden, fill, make_images, deviation):
    _, name, size = key.split("/")
    model = fill(timm.create_model(name, img_size=int(size))).eval()
    with torch.no_grad():
        logits = model(make_images(2, int(size)))
    assert deviation(logits, golden[key]) < TOLERANCE


@pytest.mark.parametrize("key", of_kind("finetune"))
def test_finetune_logits_by_all_three_ways_to_another_size(key, golden, fill, make_images, deviation):
    _, name, sizes = key.split("/")
    small, large = map(int, sizes.split("-"))
    source = fill(timm.create_model(name, img_size=small)).eval()
    loaded = timm.create_model(name, img_size=large).eval()
    state, resized = adapt_state_dict(loaded, source.state_dict())
    loaded.load_state_dict(state)
    assert resized == ["pos_embed"]
    images = make_images(2, large)
    with torch.no_grad():
        at_run_time = source(images)
        assert deviation(loaded(images), golden[key]) < TOLERANCE
        assert deviation(at_run_time, golden[key]) < TOLERANCE
    source.set_input_size(large)
    torch.testing.assert_close(source.pos_embed, loaded.pos_embed)
    assert source.img_size == (large, large)


@pytest.mark.parametrize("prefix", TRAIN)
def test_training_forward_with_mixtoken(prefix, golden, fill, make_images, deviation):
    _, name, size = prefix.split("/")
    model = fill(timm.create_model(name, img_size=int(size))).train()
    box = torch.from_numpy(golden[f"{prefix}/box"])
    with torch.no_grad():
        cls, tokens = model(make_images(4, int(size)), dense=True, mix_box=box)
    assert tokens.shape == (4, 14 * 14, 1000)
    assert deviation(cls, golden[f"{prefix}/cls"]) < TOLERANCE
    assert deviation(tokens[:, ::13, ::37], golden[f"{prefix}/aux"]) < TOLERANCE
