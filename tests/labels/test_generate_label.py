"""generate_label.py as its users call it: by one process or several, killed at any time."""

import json
import multiprocessing.connection
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform

import volo  # noqa: F401  (registers the models)
from tests.conftest import LIMIT
from tests.labels.packed import same_files
from tests.labels.ranks import end, start
from tlt.data.sources.folder import scan_folder
from tlt.labels import annotate
from tlt.labels.annotate import Annotator
from tlt.labels.store import open_labels
from tlt.tools.cli import main as tlt
from volo import cli

SIZE = 64


def save_weights(path: Path, name: str, classes: int = 4) -> str:
    torch.manual_seed(0)
    torch.save(timm.create_model(name, num_classes=classes).state_dict(), path)
    return str(path)


@pytest.fixture
def command(make_dataset: Callable[..., Path], tmp_path: Path) -> list[str]:
    """A command that labels 16 images with a small ConvNet."""
    weights = save_weights(tmp_path / "w.pth", "resnet10t")
    flags = f"--num-classes 4 --img-size {SIZE} -b 5 -j 0 --device cpu".split()
    return [str(make_dataset()), str(tmp_path / "out"), "--model", "resnet10t", "--checkpoint", weights, *flags]


def into(command: list[str], name: str, *more: str) -> list[str]:
    return [command[0], str(Path(command[1]).with_name(name)), *command[2:], *more]


def test_labels_are_those_of_the_squashed_whole_image(command, capsys):
    for path in Path(command[0]).rglob("*.jpg"):  # much wider than high, darkest at the left edge or at the right one
        turned = int("".join(filter(str.isdigit, path.stem))) // 4 % 2
        ramp = np.linspace(0, 255, 150)[None, :: 1 - 2 * turned, None] * np.ones((50, 1, 3))
        Image.fromarray(ramp.astype(np.uint8)).save(path)
    assert cli.run("label", command) == 0
    said = capsys.readouterr().out
    assert "16 label maps of 4 classes on 2 x 2 cells" in said and "of 16 images" in said and "64 cells" in said
    assert cli.run("label", into(command, "without", "--no-log-sum-exp")) == 0
    model = timm.create_model("resnet10t", num_classes=4, checkpoint_path=command[5]).eval()
    transform = create_transform((3, SIZE, SIZE), interpolation="bicubic", crop_pct=1.0, crop_mode="squash")
    folder = scan_folder(Path(command[0]) / "train")
    store = open_labels(command[1], folder.paths, num_classes=4, class_names=folder.class_names)
    assert open_labels(Path(command[1]).with_name("without"), folder.paths).reader.read(0).log_sum_exp is None
    # resnet10t: the first token's centre is at 14.5 pixels of 64, where that of the image's upper half is at 16.
    assert store.info.area == (-1.5 / 64, -1.5 / 64, 62.5 / 64, 62.5 / 64)
    assert store.info.class_names == ["blue", "green", "grey", "red"] and store.info.annotator["model"] == "resnet10t"
    for index in range(0, 16, 5):
        image = Image.open(folder.path(index))
        with torch.no_grad():
            features = model.forward_features(transform(image)[None])[0]
        expected = torch.einsum("chw,kc->khw", features, model.fc.weight) + model.fc.bias[:, None, None]
        label_map = store.read(index, *image.size)
        dense = np.zeros((4, 2, 2), np.float32)
        np.put_along_axis(dense, label_map.ids, label_map.values.astype(np.float32), axis=0)
        # The resize may be one grey level off; a centre crop is more than the whole deviation off.
        assert np.abs(dense - expected.detach().numpy()).max() < 0.05 * expected.std().item()
        assert (np.diff(label_map.values.astype(np.float32), axis=0) <= 0).all()
        total = store.reader.read(index).log_sum_exp
        assert total is not None and total.dtype == np.float32
        assert np.abs(total - expected.logsumexp(0).detach().numpy()).max() < 0.05 * expected.std().item()


def test_kill_within_a_write_leads_to_the_same_result(command, tmp_path):
    draw, whole, killed = random.Random(2), into(command, "whole"), into(command, "killed")
    assert end(whole, start(whole, shifted=True)) == [0]
    for ranks in (2, 1, 2):
        processes = start(killed, ranks, draw.randrange(20), shifted=True)
        assert multiprocessing.connection.wait([process.sentinel for process in processes], LIMIT)
        for process in processes:
            process.kill()
        assert -signal.SIGKILL in end(killed, processes)
    assert end(killed, start(killed, 2, shifted=True)) == [0, 0]
    assert same_files(tmp_path / "whole", tmp_path / "killed")


def test_what_is_in_out_decides(command, tmp_path, capsys):
    def said(code: int, *arguments: str) -> str:
        assert cli.run("label", list(arguments)) == code
        captured = capsys.readouterr()
        assert code == 0 or captured.err.count("\n") == 1
        return captured.err if code else captured.out

    def top() -> np.ndarray:
        return open_labels(command[1], ["red/red3.jpg"]).read(0).values

    refused, other = into(command, "out"), into(command, "out")
    for each, name in ((refused, "mobilenetv3_small_050"), (other, "resnet18")):
        each[3], each[5] = name, save_weights(tmp_path / name, name)
    assert "error: --model mobilenetv3_small_050 can't annotate" in said(2, *refused)
    assert not Path(command[1]).exists()
    assert "16 label maps of 4 classes on 2 x 2 cells" in said(0, *command)
    before = top()
    assert "was complete already" in said(0, *command)
    assert "was complete already" in said(0, *command, "-b", "3")
    assert "was made with --model-kwargs" in said(2, *command, "--model-kwargs", "drop_rate=0.5")
    elsewhere = shutil.copytree(command[0], tmp_path / "elsewhere")
    assert "was complete already" in said(0, str(elsewhere), *command[1:])
    for path in elsewhere.rglob("*.jpg"):
        Image.new("RGB", (40, 40)).save(path)
    assert "was made with sha256 of the first image" in said(2, str(elsewhere), *command[1:])
    assert "choose another" in said(2, *other) and (top() == before).all()
    assert "16 label maps" in said(0, *other, "--overwrite") and (top() != before).any()


def test_broken_images_are_counted(command, capsys):
    broken = Path(command[0]) / "train" / "red" / "red3.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    assert cli.run("label", [*command, "--max-bad-images", "0"]) == 2
    assert "1 of 16 images can't be read, more than --max-bad-images 0" in capsys.readouterr().err
    assert cli.run("label", [*command, "-b", "3"]) == 0  # with less memory
    assert "left out" in (said := capsys.readouterr().out) and "red3.jpg" in said
    folder = scan_folder(Path(command[0]) / "train")
    store = open_labels(command[1], folder.paths)
    assert store.info.skipped == ["red/red3.jpg"] and store.warnings == [] and store.reader.extra() == []
    assert store.read(folder.paths.index("red/red3.jpg"), 40, 36).area == (0, 0, 0, 0)
    assert cli.run("label", command) == 0  # nothing left but what can't be read


def test_transfer_labels_another_data_set(command, capsys):
    shutil.rmtree(Path(command[0]) / "train" / "red")
    assert cli.run("label", command) == 2
    assert "4 classes" in (error := capsys.readouterr().err) and "3 class folders" in error and "--transfer" in error
    assert cli.run("label", [*command, "--transfer"]) == 0
    assert "%" not in capsys.readouterr().out
    folder = scan_folder(Path(command[0]) / "train")
    store = open_labels(command[1], folder.paths, class_names=folder.class_names)
    assert store.info.transfer and store.info.class_names is None  # four classes, whose names nobody has said
    imagenet = into(command, "imagenet", "--transfer")
    save_weights(Path(command[5]), "resnet10t", 1000)
    imagenet[imagenet.index("--num-classes") + 1] = "1000"
    assert cli.run("label", imagenet) == 0
    info = open_labels(imagenet[1], folder.paths, class_names=folder.class_names).info
    assert info.class_names is not None and info.class_names[309] == "bee" and len(info.class_names) == 1000
    capsys.readouterr()
    assert tlt(["check", command[0], imagenet[1]]) == 0
    assert "the labels are of other classes" in capsys.readouterr().out


def test_mistakes_are_one_line(command, capsys):
    state = torch.load(command[5])
    state["fc.bias"] += 1e6  # finite, but beyond half precision
    torch.save(state, command[5])
    for extra, message in (
        ([], "beyond half precision: check its weights"),
        (["--crop-pct", "0.9"], "--crop-pct 0.9: the whole image is labelled"),
        (["--split", "test"], "no 'test' folder"),
    ):
        assert cli.run("label", [*command, *extra]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    headless = {"name": "resnet10t", "num_classes": 0, "img_size": [SIZE, SIZE], "kwargs": {}}
    weights = timm.create_model("resnet10t", num_classes=0).state_dict()
    torch.save({"state_dict": weights, "arch": "resnet10t", "model_config": headless}, command[5])
    assert cli.run("label", [*command[:2], "--checkpoint", command[5], "-j", "0"]) == 2
    assert "has no classes: give --num-classes" in capsys.readouterr().err


def test_an_error_on_one_rank_ends_all_and_is_reported_once(command, tmp_path):
    (Path(command[0]) / "train" / "blue" / "blue12.jpg").write_bytes(b"nothing")  # in rank 1's first batch of 3
    strict = into(command, "out", "-b", "3", "--max-bad-images", "0")
    assert end(strict, start(strict, 2)) == [5, 2]
    said = (tmp_path / "out.log").read_text()
    assert said.count("1 of 16 images") == said.count("[rank 1] error: 1 of 16 images") == 1
    assert said.count("error:") == 2 and "[rank 0] error: another rank has ended" in said and "Traceback" not in said
    assert not json.loads((tmp_path / "out" / "meta.json").read_text())["complete"]


def test_many_classes_are_exact_in_bounded_memory(monkeypatch):
    torch.manual_seed(0)
    model, images, sizes = timm.create_model("resnet10t", num_classes=70_000).eval(), torch.randn(3, 3, 64, 96), []
    real = annotate._annotation
    monkeypatch.setattr(annotate, "_annotation", lambda dense, k: (sizes.append(dense.numel()), real(dense, k))[1])
    annotation = Annotator(model, 5)(images)
    assert sizes == [2 * 3 * 70_000] * 3  # one image at a time, although a batch of 3
    with torch.no_grad():
        features, fc = model.forward_features(images).double(), model.fc.double()
        dense = (fc(features.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    np.testing.assert_array_equal(annotation.ids, dense.argsort(1, descending=True)[:, :5])
    np.testing.assert_allclose(annotation.log_sum_exp, dense.logsumexp(1), atol=2e-3)
