"""A user's own images: class folders without splits, a table, `--dataset` and shards; the defaults fit them."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

from tests.commands.conftest import QUICK, metrics
from tests.data.sources.test_tfrecords import Features, write
from tlt.data.sources import open_images
from tlt.data.sources.source import ImageSource
from volo.checkpoint.resume import fingerprint
from volo.record.history import epochs_of
from volo.train.data import as_list, listed_images

OWN = "--model volo_test --img-size 32 -j 0 --epochs 2 --seed 3"


def folders(made: Path, root: Path) -> Path:
    """Class folders in `root` itself, of the training images of a made data set."""
    shutil.copytree(made / "train", root)
    return root


def test_folders_without_splits_train_all_their_classes(call, make_dataset, tmp_path):
    data = folders(make_dataset(train=30, classes=3), tmp_path / "own")
    ended = call("train", f"{data} {OWN} --val-fraction 0.2 --output {tmp_path} --experiment run").ok()
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


def test_a_resumed_run_validates_on_the_images_that_it_held_out(call, make_dataset, tmp_path):
    data = folders(make_dataset(train=20, classes=2), tmp_path / "own")
    flags = f"{data} {OWN} -b 4 --val-fraction 0.2 --num-classes 5 --output {tmp_path} --experiment run"
    assert call("train", flags).code == 0
    listed = (tmp_path / "run" / "validation_images.txt").read_bytes()
    for image in sorted(data.glob("*/*.jpg"))[:3]:
        shutil.copy(image, image.with_name(f"a{image.name}"))
    again = flags.replace("--epochs 2", "--epochs 3").replace("--num-classes 5 ", "") + " --resume auto"
    refused = call("train", again)
    assert refused.code == 2 and "--allow-changed-data" in refused.err
    ended = call("train", f"{again} --allow-changed-data").ok()
    assert (tmp_path / "run" / "validation_images.txt").read_bytes() == listed
    assert "data: 19 training images, 4 validation images" in ended.out and "5 classes" in ended.out


def test_a_list_of_images_holds_any_names(tmp_path):
    names = ["a.jpg", "b\r.jpg", "b\r\nc.jpg", "\n.jpg", "\\n.jpg", "\x85\u2028.jpg", "\udcff\r"]
    names += ['"quoted"', '"a\nb"', " x "]
    images = ImageSource("here", names, np.zeros(len(names), np.int64), ["x"])
    for row in range(len(names)):
        (tmp_path / "list").write_bytes(as_list(images.select([row])))
        assert np.flatnonzero(listed_images(images, str(tmp_path / "list"))).tolist() == [row]
    (tmp_path / "list").write_bytes(as_list(images).replace(b"\n", b"\r\n"))  # as it is saved on Windows
    assert listed_images(images, str(tmp_path / "list")).all()


def test_defaults_are_told_for_the_images_that_are_trained_on(call, tmp_path):
    root = tmp_path / "own"
    for number in range(28):  # five or six of a class, of which one is trained on
        (root / f"class{number % 5}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(root / f"class{number % 5}" / f"{number}.png")
    ended = call("train", f"{root} {OWN} --val-fraction 0.95 --output {tmp_path} --dry-run").ok()
    assert "data: 5 training images (1 left out per epoch, other ones each time), 23 validation" in ended.out
    assert "defaults for 5 images of 5 classes" in ended.out


def test_checkpoint_classes_go_by_name_everywhere(call, trained_run, tmp_path):
    """With its classes in another order a checkpoint is the same model: as start, as teacher, and as measured."""
    data, run = trained_run
    names, file = sorted(os.listdir(data / "train")), run / "last.pth.tar"
    (tmp_path / "map.txt").write_text("\n".join([*names[1:], names[0]]))
    flags = f"{data} {QUICK} --epochs 1 --lr 0 --min-lr 0 --no-aug --output {tmp_path} --kd-model-name {file}"
    flags += f" --kd-distill-type logit --finetune {file}"
    result = []
    for name, more in (("own", ""), ("map", f"--class-map {tmp_path}/map.txt")):
        ended = call("train", f"{flags} {more} --experiment {name}").ok()
        result.append([{n: v for n, v in row.items() if "loss" in n} for row in metrics(tmp_path / name)])
        assert ("by the names of the classes, of which the file has 4 of 4" in ended.out) == (name == "map")
        assert ("its 4 classes are numbered by their names: 4 of 4 are kept" in ended.out) == (name == "map")
        result[-1].append(call("validate", f"{data} -j 0 --checkpoint {tmp_path}/{name}/last.pth.tar").ok().row["loss"])
    assert result[1][-1] == pytest.approx(result[0][-1]), result
    for own, mapped in zip(result[0][:-1], result[1][:-1], strict=True):
        assert mapped == pytest.approx(own, rel=1e-4)
    assert call("validate", f"{data} -j 0 --checkpoint {file} --class-map {tmp_path}/map.txt").refused(
        f"--class-map: class 0 is {names[1]}, which is class 1 of the checkpoint"
    )
    (tmp_path / "map.txt").write_text("\n".join([*names[:3], "new"]))
    for split in ("train", "validation"):
        for each in names[:3]:
            shutil.copytree(data / split / each, tmp_path / "other" / split / each)
        shutil.copytree(data / split / names[3], tmp_path / "other" / split / "new")
    other = flags.replace(str(data), f"{tmp_path}/other")
    assert call("train", f"{other} --experiment x").refused("without 1 of 4 classes (new): use one that was trained on")
    ended = call("train", f"{other.partition('--kd')[0]} --finetune {file} --experiment y").ok()
    assert "of which the file has 3 of 4" in ended.out
    resume = f"{other.partition('--kd')[0]} --experiment z --resume {file} --allow-changed-data --epochs 3"
    assert call("train", resume).refused(f"it has other classes (class 3 is {names[3]} there, new here)")


def as_records(data: Path, out: Path) -> Path:
    """An image folder as TFRecords that name class and file, not in the folder's order."""
    for split in ("train", "validation"):
        numbers = {name: number for number, name in enumerate(sorted(path.name for path in (data / split).iterdir()))}
        records: list[Features] = [
            {
                "image/encoded": file.read_bytes(),
                "image/class/label": numbers[file.parent.name] + 1,
                "image/class/synset": file.parent.name.encode(),
                "image/filename": file.name.encode(),
            }
            for file in sorted((data / split).glob("*/*"), key=lambda file: file.name[::-1])
        ]
        write(out / f"{split}-00000-of-00002", records[::2])
        write(out / f"{split}-00001-of-00002", records[1::2])
    return out


def test_tfrecords_of_a_folder_are_the_same_data(data, tmp_path):
    """A run that was begun on either goes on with the other, as with shards (test_exact_resume.py)."""
    records = as_records(data, tmp_path / "records")
    for split in ("train", "validation"):
        folder, ours = open_images(str(data), split), open_images(str(records), split, "tfrecord")
        assert list(ours.paths) == list(folder.paths) and fingerprint(ours, None) == fingerprint(folder, None)
        assert all(bytes(ours.read(row)) == bytes(folder.read(row)) for row in range(len(folder)))


def test_a_data_set_of_the_hub_is_labelled_and_trained(call, data, tmp_path):
    datasets = pytest.importorskip("datasets")
    parquet = tmp_path / "parquet"
    names = sorted(path.name for path in (data / "train").iterdir())
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    for split in ("train", "validation"):
        files = sorted((data / split).glob("*/*"))
        images = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
        rows = {"image": images, "label": [names.index(file.parent.name) for file in files]}
        (parquet / "data").mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict(rows, features).to_parquet(parquet / "data" / f"{split}-00000-of-00001.parquet")
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), tmp_path / "w.pth")
    images, labels = f"{tmp_path / 'cache'} --dataset hfds/{parquet}", tmp_path / "labels"
    model = f"--model resnet10t --num-classes 4 --img-size 64 -j 1 --checkpoint {tmp_path / 'w.pth'} --device cpu"
    ended = call("label", f"{tmp_path / 'cache'} {labels} --dataset hfds/{parquet} {model}").ok()
    ended = call(
        "train", f"{images} {QUICK} -j 2 --epochs 1 --token-label --token-label-data {labels} --output {tmp_path}"
    )
    assert ended.code == 0 and "over 8 images" in ended.out, ended.err
    ended = call("train", f"--dataset hfds/{parquet} {QUICK} --epochs 1 --val-split nowhere --output {tmp_path}")
    assert ended.code == 2 and 'Unknown split "nowhere"' in ended.err
