"""Programs on `--dataset`, shards and every backend: what is read otherwise is trained and labelled the same."""

import filecmp
from pathlib import Path

import pytest
import timm
import torch

from tests.commands.conftest import QUICK, Call, Make, metrics, same_weights
from tests.data.sources.test_tfrecords import Features, write
from tlt.tools.cli import main as tlt_command


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


def test_run_moves_from_folder_to_tfrecords_bit_for_bit(
    call: Call, data: Path, make_labels: Make, tmp_path: Path
) -> None:
    records = as_records(data, tmp_path / "records")
    flags = f"{QUICK} --lr 1e-3 --epochs 2 --token-label --token-label-data {make_labels(data)} --output {tmp_path}"
    runs = [tmp_path / name for name in ("whole", "both")]
    for run in runs:
        assert call("train", f"{data} {flags} --experiment {run.name}").code == 0
    (runs[1] / "last.pth.tar").unlink()
    first = runs[1] / "checkpoint-0.pth.tar"
    ended = call("train", f"{records} --dataset tfrecord {flags} --experiment both --resume {first}")
    assert ended.code == 0 and "1 epochs, 2 updates done" in ended.out, ended.err
    same_weights(*(run / "last.pth.tar" for run in runs))
    whole, both = ([each["loss"] for each in metrics(run)][-2:] for run in runs)
    assert whole == both and len(both) == 2
    accuracies = []
    for images in (f"{data}", f"{records} --dataset tfrecord"):
        ended = call("validate", f"{images} -b 4 -j 0 --checkpoint {runs[1] / 'last.pth.tar'}")
        row = ended.row
        accuracies.append((row["top1"], row["loss"], row["images"]))
    assert accuracies[0] == accuracies[1] and accuracies[0][2] == 8


def test_a_data_set_of_the_hub_is_labelled_and_trained(call: Call, data: Path, tmp_path: Path) -> None:
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


def test_shards_are_labelled_as_the_folder_that_was_packed(call: Call, data: Path, tmp_path: Path) -> None:
    assert tlt_command(["pack-images", str(data), str(tmp_path / "packed"), "--workers", "1"]) == 0
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), tmp_path / "w.pth")
    flags = f"--model resnet10t --checkpoint {tmp_path}/w.pth --num-classes 4 --img-size 64 -b 3 -j 0 --device cpu"
    for images, out in ((data, "one"), (tmp_path / "packed", "other")):
        assert call("label", f"{images} {tmp_path / out} {flags} --top-k 3").code == 0
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "other", names, shallow=False)[0] == names


def test_weights_and_label_maps_are_the_same_whatever_decodes(call: Call, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali", reason="the extra dali")
    told, archives = set(), []
    for number, how in enumerate(("-j 1", "-j 2 --data-backend dali-cpu", "-j 0 --data-backend dali-cpu")):
        flags = f"{data} {QUICK} --epochs 1 --lr 1e-3 --output {tmp_path} --experiment {number} {how}"
        assert (ended := call("train", flags)).code == 0, ended.err
        last = tmp_path / str(number) / "last.pth.tar"
        same_weights(tmp_path / "0" / "last.pth.tar", last)
        checked = call("validate", f"{data} --checkpoint {last} {how}")
        assert checked.code == 0 and "over 8 images" in checked.out, checked.err
        told.add(checked.out.split(" over 8 images")[0])
        made = call("label", f"{data} {tmp_path}/labels{number} --checkpoint {tmp_path}/0/last.pth.tar {how}")
        assert made.code == 0, made.err
        archives.append({path.name: path.read_bytes() for path in (tmp_path / f"labels{number}").glob("*.npy")})
    assert len(told) == 1 and len(archives[0]) == 7 and archives[0] == archives[1] == archives[2]
