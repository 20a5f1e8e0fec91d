"""Dense logits from real timm models and from ours."""

from typing import Any

import pytest
import timm
import torch

import volo  # noqa: F401  (registers the models)
from tlt.errors import UserError
from tlt.labels.annotate import _classify, _features, _head, check_dense


@torch.no_grad()
def dense_logits(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    return _classify(model, *_features(model, images))


def build(name: str, **kwargs: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=7, **kwargs).eval()


SWIN = {"img_size": 64, "window_size": 2, "embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
AVERAGING: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "test_nfnet": {},
    "test_convnext": {},  # norm in the head
    "test_vit2": {"img_size": (64, 96)},  # class token, average of the patches, layer norm behind it
    "test_vit4": {"img_size": (64, 96)},  # registers, RMS norm behind the average
    "test_vit": {"img_size": (64, 96), "global_pool": "avg", "class_token": False},
    "deit3_small_patch16_224": {
        "img_size": (64, 96), "embed_dim": 32, "depth": 1, "num_heads": 2, "global_pool": "avg", "fc_norm": False,
    },  # norm before the average
    "swin_tiny_patch4_window7_224": {**SWIN, "img_size": (64, 96), "window_size": 2},  # channels last
    "swinv2_cr_tiny_224": {**SWIN, "img_size": (64, 96)},  # a Swin with channels first
}  # fmt: skip


def shaken(name: str, **kwargs: Any) -> torch.nn.Module:
    """A model whose norms have weights and biases of their own; as initialised they hide mistakes."""
    model = build(name, **kwargs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("name", AVERAGING)
def test_mean_of_dense_logits_is_the_output_of_averages(name):
    model, images = shaken(name, **AVERAGING[name]), torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        dense, own = dense_logits(model, images), model(images)
    assert dense.shape[0] == 2 and dense.shape[2] > dense.shape[1] > 1 and dense.shape[3] == 7
    torch.testing.assert_close(dense.mean((1, 2)), own, rtol=1e-5, atol=1e-5)
    check_dense(model, images)


@pytest.mark.parametrize("name", ["test_convnext", "test_vit2", "test_vit4"])
def test_position_behind_average_and_norm_is_right_to_a_factor(name):
    """The logits less the constant term differ by one positive number per position, the same for every class."""
    model, images = shaken(name, **AVERAGING[name]), torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        features, tokens = _features(model, images)
        inputs = (x.reshape(-1, 1, 1, features.shape[-1]) for x in (features, torch.zeros(features.shape[-1])))
        alone, constant = (_head(model, x, tokens) for x in inputs)
    alone, dense = alone - constant, dense_logits(model, images).flatten(0, 2) - constant
    factor = (dense * alone).sum(-1, keepdim=True) / alone.square().sum(-1, keepdim=True)
    assert (factor > 0).all() and (factor - 1).abs().max() > 1e-3
    torch.testing.assert_close(dense, factor * alone, rtol=0, atol=1e-5)


REFUSED = {
    "mobilenetv3_small_050": "the mean of its dense logits",
    "ghostnet_050": "the mean of its dense logits",  # whose untrained head is linear to 2e-4 on its own features
    "test_vit2": "the mean of its dense logits",  # whose average has the class token
    "test_vit": "its global pooling is 'token' and no average",
    "test_mambaout": "another layer between the norm of its head and its classifier",
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_beyond_linear_on_average_are_refused(name):
    model = build(name, **{"pool_include_prefix": True} if name == "test_vit2" else {})
    size = model.pretrained_cfg["input_size"] if name.startswith("test") else (3, 64, 64)
    with pytest.raises(UserError, match=f"^{name}.* can't annotate: .*{REFUSED[name]}"):
        check_dense(model, torch.randn(2, *size), name)


@pytest.mark.parametrize("name", ["volo_test", "lvvit_test"])
def test_our_models_annotate_with_their_dense_head(name):
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
