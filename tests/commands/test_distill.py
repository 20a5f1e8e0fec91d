"""A student learns what a teacher says of the place of each of its tokens: geometry, losses, runs of `volo train`."""

from __future__ import annotations

import copy
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tlt
import volo  # noqa: F401
from tests.commands.conftest import QUICK, Call, Ended, TrainedRun, metrics, same_weights
from tlt.data.augment.plan import AugmentConfig, Plan, make_plan
from tlt.data.batch import Batch
from tlt.distill import DistillLoss, TeacherTargets, with_projector
from tlt.io.weights import read_checkpoint
from tlt.models.wrap import find_tokens
from tlt.teacher import FeatureTeacher
from volo.commands import validate
from volo.commands.validate import knn_accuracy

AUGMENT = "rand-m9-n3-mstd0.5-inc1"
FILES = [(500, 375), (333, 517), (420, 420), (97, 640)]  # width, height
# Students and where their tokens look, in pixels: the first, and the distance to the next.
STUDENTS = {"volo_test": (7.5, 16), "vit_tiny_patch16_224": (8, 16), "resnet18": (0.5, 32)}
ANY_SIZE = {"dynamic_img_size": True, "dynamic_img_pad": True}


LAYERS = {
    "patches of 14": [(14, 14, 0)],
    "ResNet": [(7, 2, 3)] + [(3, 2, 1)] * 4,
    "ConvNeXt": [(4, 4, 0)] + [(2, 2, 0)] * 3,
}


class Position(nn.Module):
    """A teacher whose features are the mean colour of what they see, or where it has padding that of the middle: of an
    image whose colours are positions, the position."""

    pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (2.0, 2.0, 2.0)}

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, *shape, bias=False) for shape in LAYERS[kind]))
        for layer, (side, _, padding) in zip(self.layers, LAYERS[kind], strict=True):
            kernel = torch.full((side, side), 0.0 if padding else 1 / side**2)
            kernel[side // 2, side // 2] += 1.0 if padding else 0.0
            layer.weight.data = torch.eye(3)[:, :, None, None] * kernel
        self.forward_features = self.layers.forward


def positions(plan: Plan) -> Batch:
    """A batch whose first two colours are the position in the file, in pixels, of what the pixel shows."""
    height, width = plan.size
    y, x = np.mgrid[:height, :width] + 0.5
    pixels = np.stack([x, y, np.ones_like(x)])
    there = np.einsum("bij,jhw->bihw", plan.pixel_affine, pixels)
    images = np.concatenate([there, np.zeros_like(there[:, :1])], 1)
    affine, visible = (torch.from_numpy(part).float() for part in (plan.normalised_affine(), plan.visible()))
    numbers, rest = torch.arange(len(plan)), torch.from_numpy(plan.image_sizes)
    return Batch(torch.from_numpy(images).float(), numbers, numbers, affine, visible, None, [], [], rest, plan)


@pytest.mark.parametrize(
    ("name", "kind", "view"),
    [  # each student with each teacher's padding, each view with each student
        ("volo_test", "patches of 14", "crop"),
        ("volo_test", "ResNet", "size"),
        ("volo_test", "ConvNeXt", "whole"),
        ("vit_tiny_patch16_224", "ResNet", "crop"),
        ("vit_tiny_patch16_224", "patches of 14", "size"),
        ("vit_tiny_patch16_224", "ConvNeXt", "whole"),
        ("resnet18", "ResNet", "crop"),
        ("resnet18", "ConvNeXt", "size"),
        ("resnet18", "patches of 14", "whole"),
    ],
)
def test_a_token_learns_what_the_teacher_says_of_its_place(name: str, kind: str, view: str) -> None:
    (first, pitch), size, shape = STUDENTS[name], (118, 133), np.array(FILES * 8)
    other = size if view == "crop" else (230, 150)
    student = timm.create_model(name, num_classes=4, **(ANY_SIZE if name.startswith("vit") else {}))
    plans = [
        make_plan(AugmentConfig(each, auto_augment=AUGMENT, no_aug=whole), seed, 0, np.arange(32), *shape.T)
        for each, whole, seed in ((size, False, 3), (other, view == "whole", 4 if view == "size" else 3))
    ]
    batch, seen = map(positions, plans)
    teacher = FeatureTeacher(Position(kind), other, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    loss = DistillLoss.of(student, size, teacher)
    target, weight = loss.lesson(batch, None if view == "crop" else seen)
    assert weight is not None
    counted = (weight == 1).reshape(-1, *loss.grid).numpy()
    y, x = (np.arange(count) * pitch + first for count in loss.grid)
    where = np.einsum("bij,jhw->bhwi", plans[0].pixel_affine, np.stack([*np.meshgrid(x, y), np.ones((len(y), len(x)))]))
    per_pixel = np.sqrt(np.abs(np.linalg.det(plans[0].pixel_affine[:, :, :2])))[:, None, None]  # student's
    low, high = np.split((seen.visible.numpy() * np.tile(shape, 2))[:, None, None], 2, axis=-1)
    assert ((where > low) & (where < high)).all(-1)[counted].all()  # what the teacher sees of the file

    def off(features: Tensor) -> np.ndarray:
        found = (features * 2 + 0.5)[..., :2].double().numpy().reshape(where.shape)  # its pixels are normalised
        return (np.linalg.norm(found - where, axis=-1) / per_pixel)[counted]

    maps = teacher(seen.images).mT.unflatten(2, teacher.tokens[0])
    resized = F.interpolate(maps, loss.grid, mode="bilinear").permute(0, 2, 3, 1)  # as others do it
    assert counted.mean() > 0.1 and off(target).max() <= 0.01
    assert off(resized).max() > 0.5 or (name, kind, view) == ("resnet18", "ResNet", "crop")


def random_lesson() -> tuple[Tensor, TeacherTargets]:
    generator = torch.Generator().manual_seed(0)
    own, target = torch.randn(2, 3, 5, 7, generator=generator, dtype=torch.float64)
    return own, TeacherTargets(target, torch.rand(3, 5, generator=generator, dtype=torch.float64))


def brute_force(loss: str, own: np.ndarray, target: np.ndarray, weight: np.ndarray) -> float:
    images = []
    for s, t, w in zip(own, target, weight, strict=True):
        tokens = range(len(s))
        if loss == "cosine":
            terms = [w[i] * (1 - s[i] @ t[i] / np.sqrt((s[i] @ s[i]) * (t[i] @ t[i]))) for i in tokens]
        elif loss == "smooth-l1":
            terms = [w[i] * np.mean([0.5 * d * d if abs(d) < 1 else abs(d) - 0.5 for d in s[i] - t[i]]) for i in tokens]
        else:
            s, t = (x / np.linalg.norm(x, axis=1)[:, None] for x in (s, t))
            terms = [w[i] * w[j] * (s[i] @ s[j] - t[i] @ t[j]) ** 2 for i in tokens for j in tokens]
        images.append(np.mean(terms))
    return float(np.mean(images))


@pytest.mark.parametrize("name", ["cosine", "smooth-l1", "gram"])
def test_dense_losses_are_their_definitions(name: str) -> None:
    own, lesson = random_lesson()
    assert lesson.weight is not None
    found = DistillLoss(None, dense_loss=name)(own, lesson)  # type: ignore[arg-type]
    assert float(found) == pytest.approx(brute_force(name, own.numpy(), lesson.target.numpy(), lesson.weight.numpy()))


def test_logits_and_pooled_features_are_timms_and_mixed_by_share() -> None:
    own, lesson = random_lesson()
    for kind in ("logit", "feature"):
        apart = DistillLoss(None, kind, temperature=2.0)  # type: ignore[arg-type]
        student, target = own[:, 0], lesson.target[:, 0]
        if kind == "feature":
            expected = [F.mse_loss(student, each) for each in (target, target.flip(0))]
        else:  # timm.task.LogitDistillationTask
            logs = [(each / 2).log_softmax(-1) for each in (target, target.flip(0))]
            own_logs = (student / 2).log_softmax(-1)
            expected = [F.kl_div(own_logs, each, reduction="batchmean", log_target=True) * 4 for each in logs]
        targets = TeacherTargets(target, None)
        torch.testing.assert_close(apart(student, targets), expected[0])
        torch.testing.assert_close(apart(student, targets, 0.25), 0.75 * expected[0] + 0.25 * expected[1])


@pytest.mark.parametrize(
    ("name", "dense"), [("volo_test", True), ("vit_tiny_patch16_224", True), ("resnet10t", True), ("resnet10t", False)]
)
def test_mixed_tokens_are_those_of_the_image_they_show(name: str, dense: bool) -> None:
    student = timm.create_model(name, num_classes=4, **({} if name == "resnet10t" else {"img_size": 64}))
    student = tlt.with_dense_head(student, (64, 64)) if dense else student
    teacher, names = FeatureTeacher(timm.create_model("test_convnext"), (64, 64)), set(student.state_dict())
    student = copy.deepcopy(with_projector(student, teacher, (64, 64))).eval()
    images, options = torch.randn(2, 3, 64, 64), {"dense": True} if dense else {}
    outputs, tokens = student(images, taught=True, **options)
    assert tokens.shape == (2, math.prod(find_tokens(student, (64, 64)).grid), 64)
    assert {name.partition(".")[0] for name in student.state_dict().keys() - names} == {"kd_projector"}
    torch.testing.assert_close(student(images, **options), outputs)
    if dense:  # all tokens are the partner's, who gets its own back
        mixed = student(images, taught=True, mix_box=(0, 0, *student.token_grid((64, 64))), **options)[1]
        torch.testing.assert_close(mixed, tokens)


def learn(call: Call, trained_run: TrainedRun, root: Path, name: str, flags: str) -> tuple[Ended, Path]:
    """Train a student of that run, in `root / name`."""
    flags = f"{QUICK} --epochs 2 --kd-model-name {trained_run.run} --output {root} --experiment {name} {flags}"
    return call("train", f"{trained_run.data} {flags}"), root / name


TOKENS = "--kd-distill-type token"


@pytest.mark.parametrize(
    "flags",
    [
        "--kd-distill-type feature --token-label --model-ema --kd-size 48 --amp",
        f"{TOKENS} --kd-view whole --kd-dense-loss smooth-l1 --token-label --token-label-size 2 --grad-accum-steps 2",
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in (
                "--mixup 0.8 --cutmix 1.0 --model-dtype bfloat16 --kd-temperature 2",
                f"{TOKENS} --model test_vit --kd-dense-loss gram --channels-last --distill-loss-weight 3",
            )
        ),
    ],
)
def test_stopped_run_goes_on_to_the_same_weights(
    call: Call, trained_run: TrainedRun, tmp_path: Path, flags: str
) -> None:
    ended, run = learn(call, trained_run, tmp_path, "a", flags)
    assert ended.code == 0 and " % of the epoch's training" in ended.out, ended.err
    assert learn(call, trained_run, tmp_path, "b", f"{flags} --resume {run}/checkpoint-0.pth.tar")[0].code == 0
    whole = same_weights(run / "last.pth.tar", tmp_path / "b" / "last.pth.tar")
    assert len(whole["data"]["teacher"]) == 64 and not any("kd_" in each for each in whole["state_dict"])
    learned = any(name.startswith("kd_projector.") for name in whole.get("dense_head", {}))
    assert learned == ("gram" not in flags and "--kd-distill-type" in flags)
    if "--kd-view" in flags:
        file = f"--kd-size 32 48 --kd-model-name {trained_run.run}/last.pth.tar"
        ended, _ = learn(call, trained_run, tmp_path, "d", f"{flags} {file} --dry-run")
        assert ended.code == 0 and "M parameters, 32 x 48 px" in ended.out, ended.err
        ended, _ = learn(call, trained_run, tmp_path, "d", f"{flags} --dry-run")
        assert ended.code == 0 and "GiB, 0." in ended.out.partition("teacher: weights 0.")[2], ended.err
        ended, _ = learn(
            call, trained_run, tmp_path, "c", f"{flags} --resume {run}/checkpoint-0.pth.tar --kd-model-name {run}"
        )
        assert ended.refused("--kd-model-name"), ended


def test_accumulated_losses_are_those_of_one_batch(call: Call, trained_run: TrainedRun, tmp_path: Path) -> None:
    losses = []
    for name, batch in (("one", "-b 8"), ("two", "-b 4 --grad-accum-steps 2"), ("crop", "-b 8 --kd-view crop")):
        flags = f"{TOKENS} --kd-view whole --freeze-bn --drop-path 0 --lr 1e-3 {batch}"
        losses.append([record["loss"] for record in metrics(learn(call, trained_run, tmp_path, name, flags)[1])])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) != pytest.approx(losses[2], rel=1e-4)


def test_without_labels_and_then_with_them(call: Call, trained_run: TrainedRun, tmp_path: Path) -> None:
    data, teacher = trained_run
    (tmp_path / "flat" / "below").mkdir(parents=True)
    for number, image in enumerate(sorted((data / "train").rglob("*.jpg"))):
        shutil.copy(image, tmp_path / "flat" / ("below" if number % 2 else ""))
    student = f"--model volo_test --img-size 32 -b 8 -j 0 --epochs 1 --gp avg --output {tmp_path}"
    flags = f"{student} --experiment only --kd-model-name {teacher} {TOKENS} --kd-only"
    ended, checkpoint = call("train", f"{tmp_path}/flat {flags}"), tmp_path / "only" / "last.pth.tar"
    assert ended.code == 0 and "validation:" not in ended.out, ended.err
    assert call("validate", f"{data} --checkpoint {checkpoint} -j 0").refused("no class head, only features")
    row = call("validate", f"{data} --checkpoint {checkpoint} -j 0 --knn {data}").row
    assert (row["images"], row["train_images"]) == (8, 16) and 0 <= row["knn20"] <= 100
    ended = call("train", f"{data} {student} --finetune {checkpoint} --freeze")
    assert ended.code == 0 and "100.0 % of the values before its heads" in ended.out, ended.err
    ended = call("export", f"-o {tmp_path}/it.pt2 --checkpoint {checkpoint} --format torch-export").ok()
    flags = f"{student} --experiment logits --num-classes 4 --kd-model-name {teacher} --kd-only"
    call("train", f"{tmp_path}/flat {flags}").ok()
    recorded = (read_checkpoint(tmp_path / name / "last.pth.tar")["model_config"] for name in ("only", "logits"))
    assert [config["class_names"] for config in recorded] == [[], sorted(os.listdir(data / "train"))]


@pytest.mark.parametrize("most", [2**28, 250, 1])
def test_nearest_neighbours_vote_by_their_cosine(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many cosines are compared at a time."""
    compared, topk = list[int](), Tensor.topk
    monkeypatch.setattr(validate, "_COSINES", most)
    monkeypatch.setattr(Tensor, "topk", lambda self, k: compared.append(self.numel()) or topk(self, k))
    generator = torch.Generator().manual_seed(0)
    bank, features = torch.randn(2, 60, 5, generator=generator)
    classes, truth = torch.arange(60) % 4, torch.arange(60) % 3
    correct = 0
    for image in range(60):
        cosines = F.cosine_similarity(features[image, None], bank).double().numpy()
        votes = np.zeros(4)
        for each in np.argsort(-cosines)[:10]:
            votes[each % 4] += np.exp(cosines[each] / 0.07)
        correct += votes.argmax() == image % 3
    assert knn_accuracy(bank, classes, features, truth, 10) == pytest.approx(correct / 60)
    assert max(compared) <= max(most, len(bank)) and sum(compared) == len(bank) * len(features)
