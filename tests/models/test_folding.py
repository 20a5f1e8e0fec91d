"""BatchNorm folded into the stem: the same outputs, from the same weights."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from tlt.models.folding import fold_batchnorm


@pytest.mark.parametrize("name", ["volo_test", "lvvit_test"])
def test_a_folded_stem_equals_in_double_precision_and_is_folded_once(name, fill, make_images, deviation):
    """Borders, where the padding of the next convolution starts, included."""
    model, x = fill(timm.create_model(name, img_size=64, num_classes=5)).double(), make_images(2, 72, 40).double()
    with pytest.raises(ValueError, match="eval"):
        fold_batchnorm(model)
    expected = model.eval().patch_embed(x)
    assert fold_batchnorm(model) == 3 and not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert deviation(model.patch_embed(x), expected) < 1e-14
    assert fold_batchnorm(model) == 0


def test_half_precision_keeps_its_type_and_other_models_stay(make_images):
    model = timm.create_model("volo_test").eval().bfloat16()
    fold_batchnorm(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    resnet = timm.create_model("resnet10t").eval()
    assert fold_batchnorm(resnet) == 0 and isinstance(resnet.bn1, nn.BatchNorm2d)
