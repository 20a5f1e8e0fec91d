"""A user's own images: class folders without splits, or a table; the defaults fit them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import yaml
from PIL import Image

from tests.commands.conftest import Call, Make
from volo.record.records import epochs_of

OWN = "--model volo_test --img-size 32 -j 0 --epochs 2 --seed 3"


def folders(made: Path, root: Path) -> Path:
    """Class folders in `root` itself, of the training images of a made data set."""
    shutil.copytree(made / "train", root)
    return root


def test_class_folders_without_splits_train_as_many_classes_as_there_are(
    call: Call, make_dataset: Make, tmp_path: Path
) -> None:
    data = folders(make_dataset(train=30, classes=3), tmp_path / "own")
    ended = call("train", f"{data} {OWN} --val-fraction 0.2 --output {tmp_path} --experiment run")
    assert ended.code == 0, ended.err
    run = tmp_path / "run"
    listed = (run / "validation_images.txt").read_text().splitlines()
    images = {str(path.relative_to(data)) for path in data.rglob("*.jpg")}
    assert len(listed) == 6 and set(listed) < images
    assert [sum(name.startswith(folder.name) for name in listed) for folder in data.iterdir()] == [2, 2, 2]
    assert "data: 24 training images, 6 validation images, 3 class folders" in ended.out
    checkpoint = torch.load(run / "last.pth.tar", weights_only=True)
    assert checkpoint["model_config"]["num_classes"] == 3 and checkpoint["data"]["count"] == 24
    settings = yaml.safe_load((run / "args.yaml").read_text())
    assert (settings["batch_size"], settings["warmup_epochs"], settings["cooldown_epochs"]) == (4, 0, 0)

    # validate.py measures the same images when it is given the list, and all of them without it.
    line = f"{data} --checkpoint {run / 'last.pth.tar'} -j 0"
    measured = call("validate", f"{line} --image-list {run / 'validation_images.txt'}").out
    assert f"top-1 {epochs_of(run)[-1]['eval_top1']:.3f} %" in measured
    assert "over 6 images" in measured and "over 30 images" in call("validate", line).out
    (tmp_path / "list").write_text("red/none.jpg\n")
    refused = call("validate", f"{line} --image-list {tmp_path / 'list'}")
    assert refused.code == 2 and "red/none.jpg" in refused.err


def test_a_resumed_run_validates_on_the_images_that_it_held_out(call: Call, make_dataset: Make, tmp_path: Path) -> None:
    data = folders(make_dataset(train=20, classes=2), tmp_path / "own")
    flags = f"{data} {OWN} -b 4 --val-fraction 0.2 --num-classes 5 --output {tmp_path} --experiment run"
    assert call("train", flags).code == 0
    listed = (tmp_path / "run" / "validation_images.txt").read_bytes()
    for image in sorted(data.glob("*/*.jpg"))[:3]:
        shutil.copy(image, image.with_name(f"a{image.name}"))
    again = flags.replace("--epochs 2", "--epochs 3").replace("--num-classes 5 ", "") + " --resume auto"
    refused = call("train", again)
    assert refused.code == 2 and "--allow-changed-data" in refused.err
    ended = call("train", f"{again} --allow-changed-data")
    assert ended.code == 0, ended.err
    assert (tmp_path / "run" / "validation_images.txt").read_bytes() == listed
    assert "data: 19 training images, 4 validation images" in ended.out and "5 classes" in ended.out


def test_defaults_are_told_for_the_images_that_are_trained_on(call: Call, tmp_path: Path) -> None:
    root = tmp_path / "own"
    for number in range(28):  # five or six of a class, of which one is trained on
        (root / f"class{number % 5}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(root / f"class{number % 5}" / f"{number}.png")
    ended = call("train", f"{root} {OWN} --val-fraction 0.95 --output {tmp_path} --dry-run")
    assert ended.code == 0, ended.err
    assert "data: 5 training images, 23 validation" in ended.out
    assert "defaults for 5 images of 5 classes" in ended.out
