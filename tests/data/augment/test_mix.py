"""Mixup and CutMix against timm's, fed with the same draws."""

import types
from typing import Any

import numpy as np
import pytest
import timm.data.mixup as timm_mixup
import torch
from torch import Tensor

from tlt.errors import UserError
from tlt.mix import Mixup

SETTINGS: list[dict[str, Any]] = [
    {"mixup_alpha": 0.8, "cutmix_alpha": 0.0},
    {"mixup_alpha": 0.0, "cutmix_alpha": 1.0},
    {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "switch_prob": 0.4, "prob": 0.7},
    {"mixup_alpha": 0.0, "cutmix_minmax": (0.2, 0.8)},
    {"mixup_alpha": 0.5, "cutmix_minmax": (0.3, 0.9), "prob": 0.6},
]


def mixed(mixup: Mixup, images: Tensor, classes: Tensor, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    ratios = mixup.draw(images, generator)
    return ratios.blend_images(images), mixup.soft_targets(classes, ratios, images.dtype)


def drawing_from(generator: np.random.Generator) -> types.SimpleNamespace:
    """numpy.random's old functions on top of a Generator."""
    return types.SimpleNamespace(
        rand=lambda *size: generator.random(size or None),
        beta=lambda a, b, size=None: generator.beta(a, b, size=size),
        randint=lambda low, high, size=None: generator.integers(low, high, size=size),
    )


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_same_draws_give_timms(monkeypatch, mode, settings):
    options: dict[str, Any] = {"mode": mode, "label_smoothing": 0.1, "num_classes": 7, **settings}
    images = torch.randn(6, 3, 12, 17, generator=torch.Generator().manual_seed(0))
    classes = torch.tensor([0, 3, 6, 6, 2, 1])
    mixed_at_all = 0
    for seed in range(8):
        ours_x, ours_y = mixed(Mixup(**options), images, classes, np.random.default_rng(seed))
        shim = types.SimpleNamespace(**{**vars(np), "random": drawing_from(np.random.default_rng(seed))})
        monkeypatch.setattr(timm_mixup, "np", shim)
        theirs_x, theirs_y = timm_mixup.Mixup(**options)(images.clone(), classes)
        torch.testing.assert_close(ours_x, theirs_x, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours_y, theirs_y, rtol=0, atol=1e-6)
        mixed_at_all += not torch.equal(ours_x, images)
    assert mixed_at_all > 0


def test_wrong_settings_name_the_flag():
    with pytest.raises(UserError, match="--mixup-mode bogus"):
        Mixup(mode="bogus")
    with pytest.raises(UserError, match="--mixup and --cutmix"):
        Mixup(0.0, 0.0)
    with pytest.raises(UserError, match="--cutmix-minmax 0.8 0.2"):
        Mixup(cutmix_minmax=(0.8, 0.2))


@pytest.mark.gpu
@pytest.mark.parametrize(("number", "mode"), [*enumerate(["batch", "pair", "elem", "batch", "elem"])])
def test_cuda_mixes_as_the_cpu_without_waiting_for_the_host(number, mode):
    images, settings = torch.randn(6, 3, 12, 17), SETTINGS[number]
    mixup, on_device = Mixup(mode=mode, **settings), images.cuda()
    mixup.draw(on_device, np.random.default_rng(0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixed_images = mixup.draw(on_device, np.random.default_rng(1)).blend_images(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = mixup.draw(images, np.random.default_rng(1)).blend_images(images)
    torch.testing.assert_close(mixed_images.cpu(), expected, rtol=0, atol=1e-6)
