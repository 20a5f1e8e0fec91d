"""BatchNorm folded into the stem: the same outputs, from the same weights."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.volo import VOLO as TimmVOLO
from torch import nn

from tlt.models.folding import fold_batchnorm

MODELS = ["volo_test", "lvvit_test"]


@pytest.fixture(params=MODELS)
def model(request, fill):
    """Weights, and running statistics that are not those of a new model."""
    return fill(timm.create_model(request.param, img_size=64, num_classes=5)).eval()


def batchnorms(model):
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def test_the_stem_equals_in_double_precision(model, make_images, deviation):
    """Borders, where the padding of the next convolution starts, included."""
    model, x = model.double(), make_images(2, 72, 40).double()
    expected = model.embed(x)
    fold_batchnorm(model)
    assert deviation(model.embed(x), expected) < 1e-14


def test_half_precision_keeps_its_type(model, make_images):
    model = model.bfloat16()
    fold_batchnorm(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(make_images(1, 64).bfloat16()).dtype == torch.bfloat16


def test_folding_twice_and_other_models_change_nothing(model):
    fold_batchnorm(model)
    assert fold_batchnorm(model) == 0
    resnet = timm.create_model("resnet10t").eval()
    assert fold_batchnorm(resnet) == 0 and batchnorms(resnet) > 0


def test_a_model_in_training_is_refused(model):
    with pytest.raises(ValueError, match="eval"):
        fold_batchnorm(model.train())
    assert batchnorms(model) == 3


def test_timms_weights_folded_give_timms_logits(make_images, deviation, fill):
    """The same published layout, evaluated by timm's own code."""
    small = {"layers": (1, 1, 1, 1), "img_size": 64, "num_classes": 7, "stem_hidden_dim": 16}
    theirs = fill(TimmVOLO(embed_dims=(32, 64, 64, 64), num_heads=(2, 4, 4, 4), **small)).eval()
    ours = timm.create_model("volo_test", mlp_ratio=3.0, **small).eval()
    ours.load_state_dict(theirs.state_dict())
    fold_batchnorm(ours)
    x = make_images(1, 64)
    assert deviation(ours(x), theirs(x)) < 5e-6
