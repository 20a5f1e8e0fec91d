"""Programs on `--dataset`, shards and every backend: what is read otherwise is trained and labelled the same."""

from pathlib import Path

import pytest
import timm
import torch

from tests.commands.conftest import QUICK, Call, Make, metrics, same_weights
from tests.data.sources.test_tfrecords import Features, write


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
