"""The published names, against what the published code computes (roi_align, softmax, one-hot)."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.ops import roi_align

import tlt.data
from tlt.errors import UserError

CLASSES = 9


def published_target(batch: int, h: int = 6, w: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(B, 3, k, H, W) with true crops off the diagonal; their boxes (B, 4) x0, y0, x1, y1 in shares; classes."""
    rng = np.random.default_rng(seed)
    target = torch.zeros(batch, 3, 2, h, w)
    target[:, 0] = torch.from_numpy(rng.standard_normal((batch, 2, h, w)) * 4)
    target[:, 1] = torch.from_numpy(np.argsort(rng.random((batch, CLASSES, h, w)), axis=1)[:, :2])
    size = 0.2 + 0.5 * rng.random((batch, 2))
    start = rng.random((batch, 2)) * (1 - size)
    classes = torch.from_numpy(rng.integers(0, CLASSES, batch))
    target[:, 2, 0, 0, :4] = torch.from_numpy(np.concatenate([start[:, ::-1], size[:, ::-1]], 1))  # y, x, h, w
    target[:, 2, 0, 0, 5] = classes
    return target, torch.from_numpy(np.concatenate([start, start + size], 1)), classes


def reference(target: Tensor, boxes: Tensor, size: int, points: int) -> Tensor:
    """(B, C, size^2) class probabilities by roi_align of the dense map with the true box."""
    batch, _, _, h, w = target.shape
    dense = torch.zeros(batch, CLASSES, h, w).scatter_(1, target[:, 1].long(), target[:, 0])
    cells = boxes * torch.tensor([w, h, w, h])
    rois = torch.cat([torch.arange(batch)[:, None], cells], 1).float()
    return roi_align(dense, rois, (size, size), sampling_ratio=points, aligned=True).flatten(2).softmax(1)


def smoothed(probabilities: Tensor, smoothing: float = 0.1) -> Tensor:
    return probabilities * (1 - smoothing) + smoothing / CLASSES


def test_published_arguments_keep_their_place() -> None:
    for name, first in {
        "create_token_label_target": ["target", "num_classes", "lam", "smoothing", "device", "label_size"],
        "TokenLabelMixup": [
            *("mixup_alpha", "cutmix_alpha", "cutmix_minmax", "prob", "switch_prob", "mode", "correct_lam"),
            *("label_smoothing", "num_classes", "label_size"),
        ],
    }.items():
        assert list(inspect.signature(getattr(tlt.data, name)).parameters)[: len(first)] == first
    with pytest.raises(AttributeError, match="no attribute 'create_nothing'"):
        _ = tlt.data.create_nothing


def test_targets_equal_roi_align_with_the_true_box() -> None:
    target, boxes, classes = published_target(4)
    dense = tlt.data.create_token_label_target(target, CLASSES, smoothing=0.1, device="cpu", label_size=4)
    assert dense.shape == (4, CLASSES, 2 + 16)
    truth = smoothed(torch.nn.functional.one_hot(classes, CLASSES).float())
    torch.testing.assert_close(dense[:, :, 0], truth)
    torch.testing.assert_close(dense[:, :, 1:2], smoothed(reference(target, boxes, 1, 8)), rtol=0, atol=1e-5)
    torch.testing.assert_close(dense[:, :, 2:], smoothed(reference(target, boxes, 4, 2)), rtol=0, atol=1e-5)
    pair = tlt.data.create_token_label_target(target, CLASSES, smoothing=0.1)
    assert pair.shape == (4, CLASSES, 2)
    torch.testing.assert_close(pair[:, :, 1:], smoothed(reference(target, boxes, 1, 8)), rtol=0, atol=1e-5)
    assert torch.equal(tlt.data.create_token_label_target(classes, CLASSES, smoothing=0.1), pair[:, :, 0])


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("batch", [4, 5])
@pytest.mark.parametrize("alphas", [(1.0, 0.0), (0.0, 1.0)])
def test_images_and_targets_are_mixed_alike(mode: str, batch: int, alphas: tuple[float, float]) -> None:
    """Image i is the constant i, so its mean tells the share of each partner; the truth column must agree."""
    images = torch.arange(batch).float()[:, None, None, None].expand(batch, 3, 8, 8).clone()
    target, _, classes = published_target(batch)
    target[:, 2, 0, 0, 5] = classes = torch.arange(batch)
    mixup = tlt.data.TokenLabelMixup(*alphas, mode=mode, label_smoothing=0.0, num_classes=CLASSES, label_size=2, seed=3)
    mixed, dense = mixup(images, target)
    shares = dense[:, :, 0] @ torch.arange(CLASSES).float()
    torch.testing.assert_close(mixed.mean((1, 2, 3)), shares, rtol=0, atol=1e-4)
    assert (mixed.mean((1, 2, 3)) != classes).any()
    mixup.mixup_enabled = False
    same, pure = mixup(images, target)
    assert torch.equal(same, images)
    assert torch.equal(pure, tlt.data.create_token_label_target(target, CLASSES, label_size=2))


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(UserError, match="correct_lam"):
        tlt.data.TokenLabelMixup(correct_lam=False)
    with pytest.raises(ValueError, match=r"W of at least 6"):
        tlt.data.create_token_label_target(torch.zeros(2, 3, 1, 4, 4), CLASSES)
