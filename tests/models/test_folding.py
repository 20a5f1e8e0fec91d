"""BatchNorm folded into the stem: the same outputs, from the same weights."""

import pytest
import timm
import torch
from torch import nn

from tests.models.conftest import fill, make_images
from tlt.models.folding import fold_batchnorm


@pytest.mark.parametrize("name", ["volo_test", "lvvit_test"])
def test_a_model_in_training_is_refused_and_one_is_folded_once(name):
    model, x = fill(timm.create_model(name)), make_images(2, 72, 40)
    with pytest.raises(ValueError, match="eval"):
        fold_batchnorm(model)
    expected = model.eval()(x)
    assert fold_batchnorm(model) == 3 and not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    torch.testing.assert_close(model(x), expected)
    assert fold_batchnorm(model) == 0


def test_half_precision_keeps_its_type_and_other_models_stay():
    model = timm.create_model("volo_test").eval().bfloat16()
    fold_batchnorm(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    resnet = timm.create_model("resnet10t").eval()
    assert fold_batchnorm(resnet) == 0 and isinstance(resnet.bn1, nn.BatchNorm2d)
