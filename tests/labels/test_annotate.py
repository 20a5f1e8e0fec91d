"""Dense logits from real timm models and from ours."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch

import volo  # noqa: F401  (registers the models)
from tlt.annotate import check_dense, dense_logits, top_classes
from tlt.errors import UserError


def build(name: str, **kwargs: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=7, **kwargs).eval()


@pytest.mark.parametrize("name", ["resnet10t", "regnety_002", "efficientnet_b0", "test_nfnet"])
def test_the_mean_of_a_convnet_s_dense_logits_is_its_output(name: str) -> None:
    model, images = build(name), torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        dense, own = dense_logits(model, images), model(images)
    assert dense.ndim == 4 and dense.shape[0] == 2 and dense.shape[1] > dense.shape[2] > 1
    torch.testing.assert_close(dense.mean((1, 2)), own, rtol=1e-4, atol=1e-6)
    check_dense(model, images)


def test_places_are_where_the_linear_layer_sees_them() -> None:
    model, images = build("resnet10t"), torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        features = model.forward_features(images)
        expected = torch.einsum("bchw,kc->bhwk", features, model.fc.weight) + model.fc.bias
    torch.testing.assert_close(dense_logits(model, images), expected)


@pytest.mark.parametrize("name", ["convnext_atto", "mobilenetv3_small_050", "ghostnet_050"])
def test_heads_that_are_not_linear_are_refused_by_name(name: str) -> None:
    """ghostnet's untrained head is linear to 2e-4 on its own features."""
    with pytest.raises(UserError, match=f"{name} can't annotate: the mean of its dense logits"):
        check_dense(build(name), torch.randn(2, 3, 64, 64), name)


def test_a_class_token_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"features are \(2, \d+, \d+\), not a map"):
        check_dense(build("test_vit"), torch.randn(2, 3, 160, 160))


@pytest.mark.parametrize("name", ["volo_test", "lvvit_test"])
def test_our_models_annotate_with_their_dense_head(name: str) -> None:
    model, images = build(name, img_size=64), torch.randn(2, 3, 64, 96)
    check_dense(model, images)
    dense = dense_logits(model, images)
    with torch.no_grad():
        _, tokens = model(images, dense=True)
    rows, cols = model.token_grid((64, 96))
    assert dense.shape == (2, rows, cols, 7) and rows < cols
    torch.testing.assert_close(dense[:, 1, 2], tokens[:, cols + 2])
    model.set_dense_head(False)
    with pytest.raises(UserError):
        dense_logits(model, images)


@pytest.mark.parametrize("k", [3, 5, 9])
def test_top_classes_are_sorted_and_never_more_than_there_are(k: int) -> None:
    dense = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    values, ids = top_classes(dense, k)
    assert values.shape == ids.shape == (2, min(k, 5), 3, 4)
    assert (values.dtype, ids.dtype) == (torch.float16, torch.int32)
    order = np.argsort(-dense.numpy(), axis=-1)[..., :k].transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(ids.numpy(), order)
    np.testing.assert_array_equal(
        values.numpy(), np.take_along_axis(dense.numpy().transpose(0, 3, 1, 2), order, 1).astype(np.float16)
    )
