"""A student of several teachers, of unlike grids: each has its projector, its loss, its view, and a size."""

import copy
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

import tlt
import volo  # noqa: F401
from tests.commands.conftest import QUICK, Call, Ended, launch, metrics, same_weights
from tests.commands.test_distill import brute_force
from tests.conftest import write_dataset
from tlt.distill import DistillLoss, DistillLosses, TeacherTargets, with_projector
from tlt.kinds import KINDS, Forward, Kind, Tokens
from tlt.teacher import FeatureTeacher, TeacherScale, View

# The unlike teachers: stride 16 at 48 px, stride 32 at 32 px, patches of 14 at 42 px.
VIT = {"patch_size": 14, "embed_dim": 24, "depth": 1, "num_heads": 2}
TEACHERS = {"volo_test": (48, {}), "resnet10t": (32, {}), "vit_tiny_patch16_224": (42, VIT)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images (`data`), and weights of three teachers of their four classes."""
    root = tmp_path_factory.mktemp("teachers")
    write_dataset(root / "data")
    torch.manual_seed(0)
    for name, (side, kwargs) in TEACHERS.items():
        sized = {} if name == "resnet10t" else {"img_size": (side, side)}
        model = timm.create_model(name, num_classes=4, **kwargs, **sized)
        config = {"name": name, "kwargs": kwargs, "num_classes": 4, "img_size": [side, side], "in_chans": 3}
        torch.save({"state_dict": model.state_dict(), "model_config": config}, root / f"{name}.pth.tar")
    return root


def flags_of(root: Path, *names: str, more: str = "") -> str:
    return f"--kd-model-name {' '.join(f'{root}/{name}.pth.tar' for name in names or TEACHERS)} {more}"


SIZES = f"--kd-size {' '.join(str(side) for side, _ in TEACHERS.values())}"
ALL = f"--kd-distill-type token feature token --kd-loss-weight 1 0.5 2 --kd-dense-loss smooth-l1 {SIZES}"


@pytest.mark.parametrize(("kind", "loss"), [("token", "cosine"), ("token", "smooth-l1"), ("feature", "cosine")])
def test_loss_is_normalised_by_all_its_teacher_said(kind: str, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of its features; batches that are not finite are as if they had not been."""
    monkeypatch.setattr(DistillLoss, "place_shares", lambda *_: (torch.eye(5).expand(3, -1, -1), torch.ones(3, 5)))
    rng, shape, seen = np.random.default_rng(0), (3, 5, 7) if kind == "token" else (3, 7), list[np.ndarray]()
    teacher: Any = Mock(see=lambda batch, kind, *_: View(batch.images, *torch.zeros(3, 3)))
    part = DistillLoss(teacher, kind, loss, scale=TeacherScale(7))
    for factor in (1.0, 30.0, np.inf, 5.0):
        own, said = rng.normal(size=shape), 3 + rng.normal(size=shape) * factor * np.arange(1, 8)
        targets = part.lesson(Mock(images=torch.from_numpy(said).float()))
        if np.isinf(factor):
            continue
        seen.append(said)
        rows = np.concatenate([features.reshape(-1, 7) for features in seen])
        wanted = (said - rows.mean(0)) / np.sqrt(((rows - rows.mean(0)) ** 2).mean())
        expected = (
            ((own - wanted) ** 2).mean() if kind == "feature" else brute_force(loss, own, wanted, np.ones((3, 5)))
        )
        assert float(part(torch.from_numpy(own), targets)) == pytest.approx(expected, rel=1e-4)
    assert part.scale is not None and float(part.scale.count) == sum(each.size for each in seen) / 7


def test_ranks_have_one_size_that_of_all_their_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with batches of unlike numbers of images, of which one is computed with what the other sends."""
    features = torch.randn(10, 6, 5, generator=torch.Generator().manual_seed(0)) * 40 + 7
    alone, scale = TeacherScale(5), TeacherScale(5)
    for batch in (features[:5], features[5:]):
        alone.update(batch)
        sent: list[Tensor] = []
        with monkeypatch.context() as patch:
            patch.setattr("torch.distributed.is_initialized", lambda: True)
            patch.setattr("torch.distributed.all_reduce", lambda values, sent=sent: sent.append(values.clone()))
            copy.deepcopy(scale).update(batch[:2])
            patch.setattr("torch.distributed.all_reduce", lambda values, sent=sent: values.add_(sent[0]))
            scale.update(batch[2:])
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(scale.state_dict()[name], value)


def test_an_image_leaves_out_teachers_but_never_the_farthest() -> None:
    """As UNIC; the others weigh as much as without, on average."""
    own = torch.randn(3, 4000, 6, generator=torch.Generator().manual_seed(0))
    targets = [TeacherTargets(torch.zeros(4000, 6), None)] * 3
    part: Any = DistillLoss(None, "feature")  # type: ignore[arg-type]
    whole, dropped = (DistillLosses([part] * 3, [1.0, 0.5, 2.0], drop) for drop in (0.0, 0.7))
    of_images = own.square().mean(-1)
    torch.manual_seed(5)
    total, losses = dropped.terms(list(own), targets)
    torch.manual_seed(5)
    drawn = torch.rand(3, 4000)
    expected = 0.0
    for image in range(4000):
        for teacher, weight in enumerate(whole.weight):
            farthest = of_images[:, image].argmax() == teacher
            expected += weight * float(of_images[teacher, image]) * bool(farthest or drawn[teacher, image] >= 0.7)
    kept = (1 + 2 * 0.3) / 3
    assert float(total) == pytest.approx(expected / 4000 / kept, rel=1e-5)
    assert losses == pytest.approx(of_images.mean(1).tolist()) and float(whole(list(own), targets)) == pytest.approx(
        float(sum(weight * loss for weight, loss in zip(whole.weight, losses, strict=True)))
    )


@pytest.mark.parametrize("dense", [False, True])
def test_a_list_of_teachers_is_taken_where_one_is(root: Path, dense: bool) -> None:
    images = tlt.open_images(f"{root}/data", "train")
    batches, *views = (tlt.Loader(images, None, tlt.AugmentConfig((n, n)), 4, workers=0) for n in (32, 48, 32, 42))
    made = (
        timm.create_model(name, num_classes=4, **kwargs, **({} if name == "resnet10t" else {"img_size": side}))
        for name, (side, kwargs) in TEACHERS.items()
    )
    teachers = [FeatureTeacher(model, (side, side)) for model, (side, _) in zip(made, TEACHERS.values(), strict=True)]
    student = timm.create_model("volo_test", num_classes=4, img_size=32)
    plain, kinds = set(student.state_dict()), ["token", "feature", "logit"]
    with pytest.raises(tlt.UserError, match="give `with_projector` these 3 teachers"):
        DistillLoss.of(student, (32, 32), teachers, kind=kinds)
    with pytest.raises(tlt.UserError, match="dense_loss: 2 values for 3 teachers: give one for all, or one for each"):
        with_projector(student, teachers, (32, 32), kinds, ["cosine"] * 2)
    student = with_projector(student, teachers, (32, 32), kinds)
    assert {name.partition(".")[0] for name in student.state_dict().keys() - plain} == {
        *("kd_projector", "kd_projector_2", "kd_scale", "kd_scale_2")
    }
    distil = DistillLoss.of(student, (32, 32), teachers, kind=kinds, weight=[1.0, 0.5, 2.0], drop=0.2)
    batch, seen = next(iter(batches)), [next(iter(view)) for view in views]
    options = {"dense": True, "mix_box": (0, 0, 1, 1)} if dense else {}
    outputs, features = student(batch.images, taught=True, **options)
    assert features[2] is (outputs[0] if dense else outputs)
    loss = distil(features, distil.lesson(batch, [seen[0], None, seen[2]]), 0.25 if dense else 0.0)
    loss.backward()
    assert loss.shape == () and all(getattr(student, f"kd_projector{n}")[1].weight.grad.abs().sum() for n in ("", "_2"))


def test_a_new_kind_is_one_class_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spread(Kind):
        @staticmethod
        def of_pass(forward: Forward) -> Tensor:
            return Tokens.of_pass(forward).std(1)

    monkeypatch.setitem(KINDS, "spread", Spread)
    images, teacher = torch.randn(2, 3, 64, 64), FeatureTeacher(timm.create_model("test_resnet"), (64, 64))
    student = with_projector(timm.create_model("test_convnext"), teacher, (64, 64), "spread")
    lesson = (distil := DistillLoss.of(student, (64, 64), teacher, kind="spread")).lesson(Mock(images=images))
    torch.testing.assert_close(lesson.target, teacher(images).std(1))
    features = student.kd_projector(student.forward_features(images).flatten(2).std(2))
    expected = (features - lesson.target).square().mean()
    torch.testing.assert_close(distil(student(images, taught=True)[1], lesson), expected)


def train(call: Call, root: Path, name: str, flags: str) -> tuple[Ended, Path]:
    return call("train", f"{root}/data {QUICK} --epochs 2 --output {root} --experiment {name} {flags}"), root / name


@pytest.mark.parametrize(
    "more",
    [
        "--token-label --model-ema",
        pytest.param("--model-dtype bfloat16 --kd-view whole crop crop", marks=pytest.mark.slow),
    ],
)
def test_run_with_three_teachers_resumes_to_the_same_bits(
    call: Call, root: Path, tmp_path: Path, stop_at: Callable[[set[int]], None], more: str
) -> None:
    flags = flags_of(root, more=f"{ALL} {more} --kd-drop 0.4 --resume auto --drop-path 0.2")
    ended, whole = train(call, root, f"{tmp_path.name}-whole", flags)
    assert ended.code == 0 and "(class " in ended.out and ", resnet10t.pth.tar " in ended.out, ended.err
    stop_at({3})
    ends = [train(call, root, f"{tmp_path.name}-cut", flags)[0].code for _ in range(2)]
    saved = same_weights(*(root / f"{tmp_path.name}-{run}" / "last.pth.tar" for run in ("whole", "cut")))
    assert ends == [130, 0] and {"kd_scale_3.variance", "kd_projector_2.1.weight"} <= saved["dense_head"].keys()
    (row, *_) = csv.DictReader((whole / "summary.csv").read_text().splitlines())
    losses = {name: float(value) for name, value in row.items() if "kd_loss" in name}
    assert list(losses) == [f"train_kd_loss_{name}.pth.tar" for name in TEACHERS] and min(losses.values()) > 0
    total = float(row["train_cls_loss"]) + sum(w * x for w, x in zip((1, 0.5, 2), losses.values(), strict=True))
    assert total == pytest.approx(float(row["train_loss"]), rel=0.5)  # some were left out
    recorded = [
        [{n: v for n, v in each.items() if "loss" in n} for each in metrics(root / f"{tmp_path.name}-{run}")]
        for run in ("whole", "cut")
    ]
    assert recorded[0] == recorded[1] and "kd_loss_resnet10t.pth.tar" in recorded[0][0]


@pytest.mark.slow
def test_one_teacher_twice_has_two_names(call: Call, root: Path) -> None:
    more = "--kd-distill-type token logit --kd-loss-weight 3"
    ended, run = train(call, root, "twice", flags_of(root, "resnet10t", "resnet10t", more=more))
    assert ended.code == 0, ended.err
    record = metrics(run)[-1]
    losses = [record[f"kd_loss_{number}-resnet10t.pth.tar"] for number in (1, 2)]
    assert record["loss"] == pytest.approx(record["cls_loss"] + 3 * sum(losses), rel=1e-5)
    ended, _ = train(call, root, "dry", flags_of(root, "resnet10t", "resnet10t", more=f"{more} --dry-run"))
    for number in (1, 2):
        line = ended.out.partition(f"teacher {number}-resnet10t.pth.tar: weights 0.02 GiB, ")[2].partition("\n")[0]
        assert "a forward pass of 8 images 0." in line and line.endswith(" % of a step's operations"), ended.out


@pytest.mark.usefixtures("unpublished")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--kd-loss-weight 1 2", "--kd-loss-weight has 2 values for 3 teachers: give one for all or for each"),
        ("--kd-size 32 48", "--kd-size has 2 values for 3 teachers: give one, or a height and a width, for all or for"),
        ("--kd-distill-type token token logit --kd-view whole", "--kd-view whole: "),
        ("--kd-distill-type token logit logit --kd-model-name {0} {0} resnet18", "resnet18: it has 1000 classes, --mo"),
        ("--kd-distill-type token --kd-size 48 32 8", "vit_tiny_patch16_224.pth.tar: "),
        ("--kd-drop 1.2", "--kd-drop"),
    ],
)
def test_mistakes_with_several_teachers_are_one_line(call: Call, root: Path, flags: str, told: str) -> None:
    ended, _ = train(call, root, "bad", flags_of(root, more=flags.format(f"{root}/resnet10t.pth.tar")))
    assert ended.refused(told), ended


@pytest.mark.slow
def test_two_ranks_learn_from_three_teachers_what_one_does(call: Call, root: Path) -> None:
    flags = flags_of(root, more=f"{ALL} --freeze-bn --lr 1e-3 --no-aug")
    ended, one = train(call, root, "one", f"{flags} -b 8")
    assert ended.code == 0, ended.err
    shared = f"{root}/data {QUICK.replace('-b 8', '-b 4')} --epochs 2 --output {root} --experiment two {flags}"
    launch(2, shared)
    for before, after in zip(metrics(one), metrics(root / "two"), strict=True):
        names = [name for name in before if "loss" in name]
        assert len(names) == 6 and [after[n] for n in names] == pytest.approx([before[n] for n in names], rel=1e-3)
