"""The published names, against what the published code computes (roi_align, softmax, one-hot) and against timm."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.ops import roi_align

import tlt.data
from tlt.errors import UserError
from tlt.loss import TokenLabelCrossEntropy
from tlt.upstream.functions import TokenLabels

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


def test_the_published_names_are_there() -> None:
    for name in tlt.data.__all__:
        assert callable(getattr(tlt.data, name))
    with pytest.raises(AttributeError, match="no attribute 'create_nothing'"):
        _ = tlt.data.create_nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name,first",
    [
        ("create_token_label_target", ["target", "num_classes", "lam", "smoothing", "device", "label_size"]),
        ("create_token_label_dataset", ["dataset", "root", "label_root"]),
        (
            "TokenLabelMixup",
            [
                *("mixup_alpha", "cutmix_alpha", "cutmix_minmax", "prob", "switch_prob", "mode", "correct_lam"),
                *("label_smoothing", "num_classes", "label_size"),
            ],
        ),
    ],
)
def test_published_arguments_keep_their_place(name: str, first: list[str]) -> None:
    assert list(inspect.signature(getattr(tlt.data, name)).parameters)[: len(first)] == first


def test_targets_equal_roi_align_with_the_true_box() -> None:
    target, boxes, classes = published_target(4)
    dense = tlt.data.create_token_label_target(target, CLASSES, smoothing=0.1, device="cpu", label_size=4)
    assert dense.shape == (4, CLASSES, 2 + 16)
    truth = smoothed(torch.nn.functional.one_hot(classes, CLASSES).float())
    torch.testing.assert_close(dense[:, :, 0], truth)
    torch.testing.assert_close(dense[:, :, 1:2], smoothed(reference(target, boxes, 1, 8)), rtol=0, atol=1e-5)
    torch.testing.assert_close(dense[:, :, 2:], smoothed(reference(target, boxes, 4, 2)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_size_one_and_class_ids(batch: int) -> None:
    target, boxes, classes = published_target(batch)
    pair = tlt.data.create_token_label_target(target, CLASSES, smoothing=0.1)
    assert pair.shape == (batch, CLASSES, 2)
    fine = smoothed(reference(target, boxes, 1, 64))
    torch.testing.assert_close(pair[:, :, 1:], fine, rtol=0, atol=2e-2)
    plain = tlt.data.create_token_label_target(classes, CLASSES, smoothing=0.1)
    assert torch.equal(plain, pair[:, :, 0])


def test_the_same_tensor_gives_the_same_target_twice() -> None:
    target, _, _ = published_target(2)
    first, second = (tlt.data.create_token_label_target(target, CLASSES, label_size=3) for _ in range(2))
    assert torch.equal(first, second)


def test_lam_mixes_with_the_partner() -> None:
    target, _, _ = published_target(3)
    plain = tlt.data.create_token_label_target(target, CLASSES, label_size=2)
    mixed = tlt.data.create_token_label_target(target, CLASSES, 0.25, label_size=2)
    torch.testing.assert_close(mixed, 0.25 * plain + 0.75 * plain.flip(0))
    per_sample = tlt.data.create_token_label_target(target, CLASSES, torch.tensor([1.0, 0.5, 0.0]), label_size=2)
    torch.testing.assert_close(per_sample[0], plain[0])
    torch.testing.assert_close(per_sample[2], plain[0])


def test_a_part_that_no_label_covers_weighs_nothing_in_the_published_loss() -> None:
    target, _, _ = published_target(2)
    labels = TokenLabels.from_published(target)
    half = TokenLabels(labels.labels, labels.affine, labels.visible.clone(), labels.classes)
    half.visible[:, 2] = labels.visible[:, ::2].mean(1)  # the crop's right half shows the fill
    dense = tlt.data.create_token_label_target(half, CLASSES, label_size=2)
    assert dense[:, :, [2, 4]].sum(1).flatten().tolist() == pytest.approx([1.0] * 4)
    assert not dense[:, :, [3, 5]].any()
    logits = torch.randn(2, 4, CLASSES, requires_grad=True)
    TokenLabelCrossEntropy()((torch.randn(2, CLASSES), logits, (0, 0, 0, 0)), dense).backward()
    assert logits.grad is not None and not logits.grad[:, [1, 3]].any() and logits.grad[:, [0, 2]].any()


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
    assert torch.equal(images[1], torch.ones(3, 8, 8))  # the caller's batch is left alone
    shares = dense[:, :, 0] @ torch.arange(CLASSES).float()
    torch.testing.assert_close(mixed.mean((1, 2, 3)), shares, rtol=0, atol=1e-4)
    assert (mixed.mean((1, 2, 3)) != classes).any()
    mixup.mixup_enabled = False
    same, pure = mixup(images, target)
    assert torch.equal(same, images)
    assert torch.equal(pure, tlt.data.create_token_label_target(target, CLASSES, label_size=2))


def test_fast_collate_mixes_uint8_batches() -> None:
    target, _, _ = published_target(4)
    batch = [(np.full((3, 8, 8), 60 * i, np.uint8), target[i]) for i in range(4)]
    collate = tlt.data.FastCollateTokenLabelMixup(label_smoothing=0.0, num_classes=CLASSES, label_size=2, seed=1)
    images, dense = collate(batch)
    assert images.dtype == torch.uint8 and images.shape == (4, 3, 8, 8) and dense.shape == (4, CLASSES, 6)
    pixels = images[:, 0, 0, 0].float()
    assert 0 < pixels[0] < 180 and pixels[0] + pixels[3] == pytest.approx(180, abs=1)


def test_what_cannot_be_honoured_is_refused(make_dataset: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="correct_lam"):
        tlt.data.TokenLabelMixup(correct_lam=False)
    with pytest.raises(ValueError, match=r"W of at least 6"):
        tlt.data.create_token_label_target(torch.zeros(2, 3, 1, 4, 4), CLASSES)
    dataset = tlt.data.create_token_label_dataset(root=str(make_dataset()))
    for option in ("re_split", "num_aug_splits", "tf_preprocessing"):
        with pytest.raises(UserError, match=option):
            tlt.data.create_token_label_loader(dataset, 32, 4, **{option: 2})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="label_root"):
        tlt.data.create_token_label_loader(dataset, 32, 4, use_token_label=True)
    with pytest.raises(UserError, match="only image folders"):
        tlt.data.create_token_label_dataset("tfds/imagenet2012")


def test_loader_yields_epochs_that_differ_and_repeat(
    make_dataset: Callable[..., Path], make_labels: Callable[..., Path]
) -> None:
    root = make_dataset()
    dataset = tlt.data.create_token_label_dataset("", root=str(root), label_root=str(make_labels(root)))
    assert len(dataset) == 16
    image, class_id, label_map = dataset[5]
    assert image.shape == (3, 36, 40) and label_map is not None and label_map.ids[0, 0, 0] == class_id
    options = {"is_training": True, "num_workers": 0, "use_token_label": True, "auto_augment": "rand-m9-mstd0.5-inc1"}
    loader = tlt.data.create_token_label_loader(dataset, (3, 32, 32), 5, **options)
    first, second = list(loader), list(loader)
    assert len(loader) == len(first) == 3 and first[0][0].shape == (5, 3, 32, 32)
    assert not torch.equal(first[0][0], second[0][0])
    loader.sampler.set_epoch(0)
    for (images, labels), (again, same) in zip(first, loader, strict=True):
        assert torch.equal(images, again)
        assert isinstance(labels, TokenLabels) and isinstance(same, TokenLabels)
        assert torch.equal(labels.affine, same.affine) and labels.shape == (5, 3, 6, 6)
        dense = tlt.data.create_token_label_target(labels, 4, smoothing=0.1, label_size=2)
        assert torch.equal(dense[:, :, 1].argmax(1), labels.classes)  # every map's top class is the folder's


def test_loader_with_mixing_and_for_evaluation(
    make_dataset: Callable[..., Path], make_labels: Callable[..., Path]
) -> None:
    root = make_dataset()
    dataset = tlt.data.create_token_label_dataset(root=str(root), label_root=str(make_labels(root)))
    mix = tlt.data.FastCollateTokenLabelMixup(num_classes=4, label_size=2)
    loader = tlt.data.create_token_label_loader(
        dataset, 32, 8, True, num_workers=0, collate_fn=mix, use_token_label=True, fp16=True
    )
    images, dense = next(iter(loader))
    assert images.dtype == torch.float16 and isinstance(dense, Tensor) and dense.shape == (8, 4, 6)
    assert loader.mixup_enabled
    loader.mixup_enabled = False
    assert not mix.mixup_enabled
    seen = list(tlt.data.create_token_label_loader(dataset, 32, 6, num_workers=0))
    assert [len(images) for images, _ in seen] == [6, 6, 4]
    assert torch.cat([classes for _, classes in seen]).tolist() == sorted(dataset.folder.classes.tolist())
