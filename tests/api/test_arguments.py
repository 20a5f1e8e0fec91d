"""Arguments of the API that are out of range or do not fit each other are one line; what fits is taken as given."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch

import tlt
from tests.data.conftest import refuses
from tlt.distill import TeacherTargets
from tlt.teacher import TeacherScale


@pytest.fixture
def images(make_dataset: Callable[..., Path]) -> Any:
    return tlt.open_images(str(make_dataset(train=20)), "train")


SIZE, SQUARE = (64, 64), tlt.AugmentConfig((32, 32))
MISTAKES: list[tuple[Callable[..., Any], str]] = [
    (lambda s: tlt.TokenLabelLoss.of(s.plain, SIZE), r"ResNet has no dense head: call tlt.with_dense_head\(model"),
    (lambda s: tlt.with_dense_head(s.plain, 64), "img_size 64: give 2 numbers, at least 1"),
    (lambda s: s.loader(32, world_size=2), "20 images, fewer than one global batch of 64"),
    (lambda s: s.loader(backend="jpg"), "--data-backend jpg: there are torchvision"),
    (lambda s: s.loader(mean=(124, 116, 104)), r"--mean \(124, 116, 104\): give 1 or 3 numbers, at least 0 and at"),
    (lambda s: s.loader(mean=(0.5,)), "--std .*: give 1 number"),
    (lambda s: s.loader(std=(0, 0, 0)), r"--std \(0, 0, 0\): give 3 numbers"),
    (lambda s: s.loader(std=(58.4, 57.1, 57.4)), "--std .* at most 1"),
    (lambda s: s.loader(repeats=0), "--aug-repeats 0: give 1 number, at least 1"),
    (lambda s: s.loader(rank=1), "rank 1: give 1 number, at least 0 and at most 0"),
    (lambda s: s.loader(workers=-1), "--workers -1: give 1 number, at least 0, without a fraction"),
    (lambda s: s.loader(timeout=-5.0), "--loader-timeout -5"),
    (lambda s: tlt.AugmentConfig((224, 224), scale=0.5), "--scale 0.5: give 2"),
    (lambda s: tlt.AugmentConfig((224, 224), ratio=(1.5, 0.5)), r"--ratio \(1.5, 0.5\): give 0 < smallest <= large"),
    (lambda s: tlt.AugmentConfig((224, 224), hflip="0.5"), "--hflip 0.5"),
    (lambda s: tlt.AugmentConfig((224, 224), mean=(0.5,)), "--mean .*: give 3 numbers"),
    (lambda s: tlt.AugmentConfig((224, 224), color_jitter=[0.4, 0.4]), "--color-jitter .*: give 3 numbers"),
    (lambda s: tlt.AugmentConfig((224, 224), remode="noise"), "--remode noise: choose from const, rand, pixel"),
    (lambda s: s.loss(dense_weight=-1), "dense_weight -1"),
    (lambda s: s.loss(gt_weight_agree=50), "gt_weight_agree 50: give 1 number, at least 0 and at most 1"),
    (lambda s: s.loss(smoothing=1.1).targets(s.batch), "--smoothing 1.1"),
    (lambda s: s.loss(uncovered="ignored").targets(s.batch), "--uncovered ignored: choose from ignore, uniform"),
    (lambda s: s.loss(num_classes=3).targets(s.batch), "images are of 4 classes, the model has 3: create it with num"),
    (lambda s: s.compared(tlt.with_dense_head(s.plain, (32, 32)), s.loss()), "other tokens or classes than the targ"),
    (lambda s: s.compared(tlt.with_dense_head(s.plain, (32, 32)), s.loss((1, 1), 5)), "other tokens or classes"),
    (lambda s: s.opened(label_tail="Exact"), "--label-tail Exact: choose from zero, exact"),
    (lambda s: s.opened(bad_label="none"), "--bad-label none: choose from stop, skip"),
    (lambda s: tlt.FeatureTeacher(s.plain, SIZE, mean=(124, 116, 104)), "--mean"),
    (lambda s: s.student(SIZE, "tokens"), "kind tokens: choose from token, feature, logit"),
    (lambda s: s.student(SIZE, dense_loss="l1"), "dense_loss l1: choose from cosine, smooth-l1"),
    (lambda s: s.student(64), "img_size 64: give 2 numbers"),
    (lambda s: tlt.DistillLoss(s.teacher, dense_loss="smooth_l1"), "dense_loss smooth_l1: choose from cosine, smooth-"),
    (lambda s: tlt.DistillLoss(s.teacher, kind="features"), "kind features: choose from token, feature, logit"),
    (lambda s: s.teacher(torch.ones(2, 3, 96, 96)), r"teacher is for images of img_size \(64, 64\), not \(96, 96\)"),
    (lambda s: tlt.TokenLabelLoss.of(tlt.with_dense_head(s.plain, SIZE), 64), "img_size 64: give 2 numbers"),
    (lambda s: tlt.DistillLoss.of(s.plain, 64, s.teacher), "img_size 64: give 2 numbers"),
    (lambda s: tlt.DistillLoss(s.teacher, "logit", temperature=0), "temperature 0"),
    (lambda s: s.lesson("logit", s.batch, s.batch.images), "none that are mixed"),
    (lambda s: s.lesson("logit", s.batch.select(slice(3))), "the images of the batch"),
    (lambda s: s.distilled("feature", torch.ones(8, 2, 3), torch.ones(8, 3)), "the student"),
    # numbers
    (lambda s: s.loader(7.5), "batch_size 7.5: give 1 number, at least 1, without a fraction"),
    (lambda s: s.loader(micro_batches=0), "micro_batches 0: give 1 number, at least 1, without a fraction"),
    (lambda s: s.loader(seed=0.5), "seed 0.5"),
    (lambda s: s.loader(max_bad_images=-1), "max_bad_images -1"),
    (lambda s: s.loader().epoch(0, -1), "start_update -1: .*, at least 0 and at most 3, without a fraction"),
    (lambda s: s.loader().epoch(0.5), "epoch 0.5"),
    (lambda s: tlt.AugmentConfig((224, 224.5)), r"--img-size \(224, 224.5\): give 2 numbers, at least 1, without"),
    (lambda s: tlt.AugmentConfig((224, 224), recount=1.5), "--recount 1.5"),
    (lambda s: tlt.SizeSchedule([32, 64], [8, 8]), "--train-img-sizes 32: give 2 numbers"),
    (lambda s: tlt.SizeSchedule([(32, 32), (64, 64)], [8, 2.5]), "--train-batch-sizes .*2.5.* without a fraction"),
    (lambda s: tlt.SizeSchedule([(32, 32), (64, 64)], [8]), r"one for each of --train-img-sizes\) \[8\]: give 2"),
    (lambda s: s.loss((2, 0)).targets(s.batch), r"grid \(2, 0\): give 2 numbers, at least 1"),
    (lambda s: s.loss(num_classes=4.0).targets(s.batch), "num_classes 4.0"),
    (lambda s: tlt.StepKey(0, 1.5), "update 1.5"),
    (lambda s: tlt.draw_box(tlt.StepKey(0, 0), 14), "grid 14: give 2 numbers"),
    # pairs of arguments that do not fit each other
    (lambda s: s.lesson("logit", s.other), "the images of the batch"),
    (lambda s: s.lesson("feature", s.other), "the images of the batch"),
    (lambda s: s.lesson("logit", None, s.batch.images[:3]), "the images of the batch"),
    (lambda s: s.loader(labels=s.opened_with(["a", "b", "c", "d"])), "other class folders .class 0 is a there"),
    (lambda s: s.loader(labels=s.opened_with(None, 3)), "made for other class folders .3 classes there, 4 here"),
    (lambda s: s.fitted((64, 128)).targets(s.batch), r"loss is for images of \[\(64, 128\)\], not \(32, 32\): name al"),
    (lambda s: s.fitted(SIZE, [(64, 128)]).targets(s.batch), r"images of \[\(64, 64\), \(64, 128\)\], not \(32, 32\)"),
    (lambda s: s.loss().targets(replace(s.batch, classes=s.batch.classes + 4)), "images: class id . is not in 0..3"),
    (lambda s: s.compared(s.model, s.fitted((32, 32)), (0, 0, 50, 50)), r"box \[0, 0, 50, 50\] is not within 1 x 1 to"),
    (lambda s: s.compared(s.model, s.fitted((32, 32)), torch.tensor((0, -1, 1, 1))), "not within 1 x 1 tokens: draw"),
    (lambda s: s.made(4), "LabelBatch: class id 4 is not in 0..3"),
    (lambda s: s.made(-1), "LabelBatch: class id -1 is not 0 or more"),
    (lambda s: s.made(3, 5), "make_targets: labels, .* unequal numbers of images"),
    (lambda s: tlt.LabelBatch(s.maps, s.maps.int()[:, :1], torch.ones(8, 4)), "not values and ids of one shape"),
    (lambda s: tlt.LabelBatch(s.maps, s.maps.int(), torch.ones(4)), "not values and ids of one shape"),
    (lambda s: tlt.open_images(s.data, "train", class_names=[*s.images.class_names, "red"]), "classes are named 'red'"),
]


@pytest.fixture
def setting(images: Any, make_labels: Callable[..., Path]) -> SimpleNamespace:
    """A model of four classes, a teacher, a batch of 8 images and what makes others."""

    def loader(batch_size: int = 8, **options: Any) -> tlt.Loader:
        return tlt.Loader(images, options.pop("labels", None), SQUARE, batch_size, **{"workers": 0, **options})

    def loss(grid: tuple[int, int] = (2, 2), num_classes: int = 4, **options: Any) -> tlt.TokenLabelLoss:
        return tlt.TokenLabelLoss(grid, num_classes, **options)

    def compared(model: Any, criterion: tlt.TokenLabelLoss, *box: Any) -> Any:
        return criterion(model(batch.images, dense=True), criterion.targets(batch), *box)

    def fitted(*sizes: Any) -> tlt.TokenLabelLoss:
        return tlt.TokenLabelLoss.of(model, *sizes)

    def made(class_id: int, count: int = 8) -> Any:
        labels = tlt.LabelBatch(maps[:count], maps[:count].int() * class_id, torch.ones(count, 4))
        return tlt.make_targets(labels, batch.affine, batch.visible, batch.classes, (2, 2), 4)

    def opened_with(class_names: list[str] | None, num_classes: int = 4) -> Any:
        store = opened()
        return replace(store, info=replace(store.info, class_names=class_names, num_classes=num_classes))

    (batch, other, _), plain = loader(), timm.create_model("test_resnet", num_classes=4)
    model, data = tlt.with_dense_head(timm.create_model("test_resnet", num_classes=4), SIZE), Path(images.root).parent
    maps = torch.ones(8, 2, 3, 3)
    labels, teacher = make_labels(Path(images.root).parent), tlt.FeatureTeacher(timm.create_model("test_vit"), SIZE)

    def opened(**options: Any) -> Any:
        return tlt.open_labels(labels, images.paths, **options)

    def student(*arguments: Any, **options: Any) -> Any:
        return tlt.with_projector(plain, teacher, *arguments, **options)

    def lesson(kind: str, *arguments: Any) -> Any:
        return tlt.DistillLoss(teacher, kind).lesson(batch, *arguments)

    def distilled(kind: str, outputs: torch.Tensor, pooled: torch.Tensor) -> Any:
        return tlt.DistillLoss(teacher, kind)(outputs, TeacherTargets(pooled, None))

    return SimpleNamespace(**locals())


def test_fault_41_mistakes_are_one_line(setting):
    for mistake, message in MISTAKES:
        with refuses(message):
            mistake(setting)


def test_what_fits_is_taken_however_it_is_written(setting):
    """Sizes as lists, folders as paths, class ids of other integers; a schedule's loss knows the grid of each size."""
    s, ids = setting, torch.full((8, 2, 3, 3), 3, dtype=torch.uint16)
    (batch, *_) = tlt.Loader(tlt.open_images(s.data, "train"), None, tlt.AugmentConfig([32, 32]), 8, workers=0)
    assert torch.equal(batch.images, s.batch.images) and tlt.AugmentConfig([32, 32]) == SQUARE
    (s.data / "t.csv").write_text(f"path,class\ntrain/{s.images.paths[0]},red\n")
    assert len(tlt.open_images(s.data, "train", "csv/t.csv")) == 1
    sizes, criterion = tlt.SizeSchedule([[32, 32], [96, 64]], [8, 4]), s.fitted([32, 32], [[96, 64]])
    assert sizes == tlt.SizeSchedule([(32, 32), (96, 64)], [8, 4])
    for step, each in enumerate(tlt.Loader(s.images, None, SQUARE, 8, workers=0, sizes=sizes)):
        box = tlt.draw_box(tlt.StepKey(0, step), grid := criterion.place(each.images)[0])
        assert criterion(s.model(each.images, dense=True), criterion.targets(each), box).total.isfinite()
        assert grid == s.model.token_grid(tuple(each.images.shape[2:]))
    teacher = tlt.FeatureTeacher(s.teacher.model, [64, 64])
    assert teacher(torch.zeros(1, 3, 64, 64)).ndim == 3
    student = tlt.with_projector(tlt.with_dense_head(s.plain, [32, 32]), teacher, [32, 32])
    distil = tlt.DistillLoss.of(student, [32, 32], teacher, [[96, 64]])
    assert distil.place(s.batch.images)[0] == s.fitted((32, 32)).grid
    labels = tlt.LabelBatch(s.maps, ids, torch.ones(8, 4))
    made = tlt.make_targets(labels, batch.affine, batch.visible, batch.classes, [2, 2], 4)
    assert made.tokens.ids.max() == 3 and made.grid == (2, 2)


def test_features_of_a_replaced_image_teach_nothing(setting):
    seen = replace(setting.batch, indices=setting.batch.indices.clone())
    seen.indices[2] = 19
    lesson = setting.lesson("feature", seen)
    student = torch.zeros_like(lesson.target)
    whole = setting.distilled("feature", student, lesson.target)
    without = tlt.DistillLoss(setting.teacher, "feature")(student, lesson)
    kept = lesson.target[torch.arange(8) != 2]
    torch.testing.assert_close(without, kept.square().mean() * 7 / 8)
    assert without < whole


def test_a_loader_has_as_many_workers_as_processors(images, monkeypatch):
    monkeypatch.setattr("tlt.io.jobs.available_cpus", lambda process=0: 6)
    for local, expected in (("", 6), ("2", 3), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert tlt.Loader(images, None, SQUARE, 8)._workers.workers == expected
    assert tlt.Loader(images, None, SQUARE, 8, workers=7)._workers.workers == 7


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_defaults_change_no_batch_and_no_target(images, workers):
    def values() -> list[torch.Tensor]:
        (batch, *_), criterion = tlt.Loader(images, None, SQUARE, 8, workers=workers), tlt.TokenLabelLoss((2, 2), 4)
        box = torch.tensor(tlt.draw_box(tlt.StepKey(0, 0), (9, 9)), device="cpu")
        return [*batch.tensors(), criterion.targets(batch).cls, box]

    expected = values()
    for change, default in ((torch.set_default_dtype, torch.bfloat16), (torch.set_default_device, "meta")):
        try:
            change(default)
            actual = values()
            assert TeacherScale(3).mean.dtype == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        for one, other in zip(expected, actual, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), default
