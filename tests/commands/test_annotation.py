"""Token labels as a user meets them: the annotator's own word, its exact tail or itself; `--compat`; labels that are
damaged or foreign."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import timm
import torch
import yaml
from torch import Tensor

from tests.commands.conftest import QUICK, Call, Ended, metrics, same_weights
from tlt.api import StepKey
from tlt.data.batch import Batch
from tlt.label_map import FULL_AREA
from tlt.labels.annotate import Annotation, Annotator
from tlt.mix import Mixup
from tlt.tools.cli import main as tlt_command
from tlt.upstream import ROWS
from volo.train.criterion import TokenLabelCriterion, step_loss
from volo.train.online_annotator import OnlineAnnotator

Train = Callable[..., Ended]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A teacher for four classes that says something of its images."""
    torch.manual_seed(1)
    model = timm.create_model("resnet10t", num_classes=4)
    with torch.no_grad():
        model.fc.weight.mul_(40)
    torch.save(model.state_dict(), tmp_path / "teacher.pth")
    return tmp_path / "teacher.pth"


@pytest.fixture
def train(call: Call, data: Path, tmp_path: Path) -> Train:
    """Return `train("flags")`: train on 16 images, below tmp_path."""
    return lambda flags: call("train", f"{data} {QUICK} --epochs 1 --token-label --output {tmp_path} {flags}")


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in metrics(run)]


def test_teacher_of_whole_images_equals_labels(call, train, weights, tmp_path):
    # The same teacher with its classes in another order, which their names undo.
    names = sorted(path.name for path in (tmp_path / "data" / "train").iterdir())
    state = {name: v.flip(0) if name.startswith("fc.") else v for name, v in torch.load(weights).items()}
    turned, config = tmp_path / "turned.pth", {"name": "resnet10t", "num_classes": 4, "class_names": names[::-1]}
    torch.save({"state_dict": state, "model_config": config}, turned)
    flags = "--model resnet10t --num-classes 4 --img-size 32 -j 0 --device cpu --top-k 2 -b 8"
    made = call("label", f"{tmp_path / 'data'} {tmp_path / 'labels'} --checkpoint {turned} {flags}").ok()
    assert "4 classes are numbered by their names: 4 of 4 are kept" in made.out
    # The student's pixels are normalised in another way than the teacher's.
    same = "--no-aug --train-interpolation bicubic --mean 0.2 0.4 0.6 --std 0.3 0.5 0.7"
    files = f"--token-label-data {tmp_path / 'labels'}"
    teacher = f"--token-label-teacher resnet10t --token-label-teacher-checkpoint {weights}"
    teacher += " --token-label-teacher-top-k 2"
    result = {}
    for name, flags in {
        "zero": f"{files} --label-tail zero", "online": f"{teacher} --label-tail zero",
        "exact": f"{files} --label-tail exact", "none": "",
        "online exact": f"{teacher.replace(str(weights), str(turned))} --label-tail exact",
    }.items():  # fmt: skip
        train(f"{same} {flags} --experiment {name.replace(' ', '-')}").ok()
        result[name] = losses(tmp_path / name.replace(" ", "-"))
    assert result["online"] == pytest.approx(result["zero"], rel=2e-4)
    assert result["online exact"] == pytest.approx(result["exact"], rel=2e-4)
    # These losses differ from each other and from that against the classes alone, so the agreement says something.
    one, two, three = (result[name][0] for name in ("zero", "exact", "none"))
    assert min(abs(one - two), abs(two - three), abs(three - one)) > 5e-4 * one


def test_it_is_recorded_and_no_part_of_the_model(train, weights, tmp_path):
    teacher = f"--token-label-teacher resnet10t --token-label-teacher-checkpoint {weights}"
    ended = train(f"{teacher} --model-ema --epochs 2 --experiment whole").ok()
    assert "annotator resnet10t: 4.92 M parameters" in ended.out
    checkpoint = torch.load(tmp_path / "whole" / "last.pth.tar", weights_only=False)
    assert checkpoint["model_config"]["labels"]["teacher"] == "resnet10t"
    assert checkpoint["args"]["token_label_teacher"] == "resnet10t"
    names = set(timm.create_model("volo_test", num_classes=4, img_size=32).state_dict())
    assert set(checkpoint["state_dict"]) == set(checkpoint["state_dict_ema"]) == names
    trained = sum(len(group["params"]) for group in checkpoint["optimizer"]["param_groups"])
    assert trained == len(list(timm.create_model("volo_test", num_classes=4, img_size=32).parameters()))

    # From the first epoch on, the same bits.
    ended = train(f"{teacher} --model-ema --epochs 2 --resume {tmp_path}/whole/checkpoint-0.pth.tar --experiment again")
    assert ended.code == 0 and "token_label_teacher" not in ended.out, ended.err
    same_weights(*(tmp_path / run / "last.pth.tar" for run in ("whole", "again")))


def test_it_sees_the_images_before_they_are_mixed():
    seen: list[Tensor] = []

    class Look:
        model = timm.create_model("resnet10t", num_classes=4)

        def __call__(self, images: Tensor) -> Annotation:
            seen.append(images)
            values = images.mean((1, 2, 3))[:, None, None, None].expand(-1, 1, 2, 2).half()
            return Annotation(values, torch.zeros_like(values).int(), values[:, 0].float())

    pixels = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), ((0.1, 0.2, 0.3), (0.2, 0.2, 0.2))
    annotator = OnlineAnnotator("it", cast(Annotator, Look()), *pixels, {(32, 32): FULL_AREA})
    whole = torch.tensor([[0.0, 0.0, 0.5, 0.5]] * 3)
    images = torch.rand(3, 3, 32, 32)
    classes, affine, sizes = torch.tensor([0, 1, 2]), torch.zeros(3, 2, 3), torch.ones(3, 2)
    batch = Batch(images * 2 - 1, classes, torch.arange(3), affine, whole, None, [], [], sizes)
    criterion = TokenLabelCriterion((2, 2), 4, mix=Mixup(0.8, 1.0, num_classes=4), annotator=annotator)
    model = timm.create_model("volo_test", num_classes=4, img_size=32)
    terms = step_loss(criterion, None, model, batch, criterion.draw(batch, StepKey(0, 0, 0, 0)))
    assert torch.isfinite(terms.total)
    own = (images - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / 0.2
    torch.testing.assert_close(seen, [own], rtol=1e-4, atol=1e-5)
    labelled = annotator.label(batch)
    assert labelled.labels.area.tolist() == labelled.visible.tolist() == [[0, 0, 1, 1]] * 3
    assert labelled.affine.tolist() == [[[1, 0, 0], [0, 1, 0]]] * 3


@pytest.mark.parametrize("packed", [False, True], ids=["tree", "archive"])
def test_fault_47_ids_beyond_num_classes(train, labels, tmp_path, packed):
    # A tree's labels are only read as they are needed, but for the first one; an archive knows its largest id.
    changed = labels / "red" / "red15.pt" if packed else labels / "blue" / "blue0.pt"
    entry = torch.load(changed, weights_only=True).clone()
    entry[1, 2, 3, 3] = 7
    torch.save(entry, changed)
    given = tmp_path / "ids.tlt" if packed else labels
    if packed:
        assert tlt_command(["pack", str(labels), str(given)]) == 0
    ended = train(f"--token-label-data {given}")
    assert ended.refused("0..3 (--num-classes 4)") and "epoch 1 [" not in ended.out
    assert ("class ids up to 7" if packed else "blue0.pt: class id 7") in ended.err


def test_a_run_says_how_often_the_labels_name_the_class(train, labels):
    for label in labels.glob("*/*.pt"):
        entry = torch.load(label, weights_only=True)
        entry[1] = (entry[1] + 1) % 4
        torch.save(entry, label)
    ended = train(f"--token-label-data {labels}")
    assert "warning: the token labels name the class of 0.0 % of 16 sampled images" in ended.out


@pytest.mark.slow
def test_upstream_resumes_to_the_same_bits(call, make_dataset, make_labels, tmp_path):
    data = make_dataset(size=(60, 36))
    labels = make_labels(data, grid=(6, 8))
    flags = f"{data} {QUICK} --img-size 64 -b 4 --grad-accum-steps 2 --lr 1e-3 --epochs 2 --token-label"
    flags += f" --output {tmp_path} --token-label-data {labels}"
    whole = call("train", flags, "--compat", "upstream", "--experiment", "whole").ok()
    rows = list(ROWS)
    assert f"--compat: {', '.join(rows)}" in whole.out
    settings = yaml.safe_load((tmp_path / "whole" / "args.yaml").read_text())
    assert (settings["compat"], settings["uncovered"]) == (rows, "uniform")
    checkpoint = tmp_path / "whole" / "checkpoint-0.pth.tar"
    first = torch.load(checkpoint, weights_only=True)
    assert first["model_config"]["labels"] == {"compat": rows, "uncovered": "uniform", "label_tail": "zero"}

    resumed = call(
        "train", f"-c {tmp_path / 'whole' / 'args.yaml'} --experiment again --resume {checkpoint} --output {tmp_path}"
    )
    assert resumed.code == 0, resumed.err
    same_weights(*(tmp_path / name / "last.pth.tar" for name in ("whole", "again")))
    other = call("train", f"{flags} --compat label-crop --experiment other --resume {checkpoint} --dry-run")
    assert f"compat: {rows!r} before, ['label-crop'] now" in other.out, other.err
    assert call("train", f"{flags} --experiment plain --epochs 1 --val-interval 9").code == 0
    assert metrics(tmp_path / "plain")[0]["loss"] != metrics(tmp_path / "whole")[0]["loss"]


def test_older_runs_go_on_unless_they_need_what_is_gone(call, trained_run, tmp_path):
    saved, old = torch.load(trained_run.run / "last.pth.tar", weights_only=True), tmp_path / "old.pth.tar"
    line = f"{trained_run.data} {QUICK} --model-ema --epochs 3 --output {tmp_path} --resume {old} --dry-run"
    for compat, gone in (("label-crop uncovered", ""), ("label-crop half-ids", "half-ids"), ("aug-order", "aug-order")):
        torch.save(saved | {"args": saved["args"] | {"compat": compat.split()}}, old)
        ended, message = call("train", line), f"--compat {gone}, which this version has no more (docs/parity.md)"
        assert ended.refused(message) if gone else ended.code == 0, ended
