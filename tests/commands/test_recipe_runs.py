"""The recipes of other systems train on data in those systems' layouts: 20 updates with a small model."""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torchvision

from tests.commands.conftest import ROOT, Call, Make, metrics
from tests.commands.test_dataset_kinds import as_records
from tests.data.sources.test_dataset_kinds import cifar, pixels
from tlt.data.sources import open_images

SMALL = (
    "--model test_vit --img-size 32 --batch-size 4 --grad-accum-steps 1 --epochs 5 --warmup-epochs 1 "
    "--no-warmup-prefix --cooldown-epochs 0 --log-interval 1 --device cpu -j 1"
)
Data = tuple[str, set[tuple[bytes, int]], set[str]]  # flags, the training images with their classes, optimizer's state


def _of(folder: Path) -> Iterator[tuple[bytes, int]]:
    """The images of class folders with their classes."""
    for number, name in enumerate(sorted(path.name for path in (folder / "train").iterdir())):
        yield from ((file.read_bytes(), number) for file in (folder / "train" / name).iterdir())


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def colossal_ai(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """TFRecords read with DALI; LAMB."""
    flags = f"{as_records(folder, out)} --dataset tfrecord --data-backend dali-cpu"
    # Records with names have the image folder's numbers, whatever number they hold themselves.
    return f"{flags} -c {ROOT}/configs/vit_b32_224_lamb.yaml", set(_of(folder)), {"exp_avg", "exp_avg_sq"}


def nvidia(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """WebDataset's tar files with a class number beside each image, read with DALI; Adafactor."""
    out.mkdir()
    for split, name, shards in (("train", "imagenet-train", 2), ("validation", "imagenet-val", 1)):
        files = sorted((folder / split).glob("*/*"))
        classes = sorted({file.parent.name for file in files})
        for shard in range(shards):
            with tarfile.open(out / f"{name}-{shard:06d}.tar", "w") as tar:
                for number, file in enumerate(files[shard::shards]):
                    add(tar, f"{number:07d}-{shard}.cls", str(classes.index(file.parent.name)).encode())
                    add(tar, f"{number:07d}-{shard}.jpg", file.read_bytes())
    flags = f"{out} --dataset wds/imagenet --train-split imagenet-train-{{000000..000001}}.tar"
    flags += " --val-split imagenet-val-{000000..000000}.tar"
    flags += f" --data-backend dali-cpu -c {ROOT}/configs/vit_b16_224_adafactor.yaml"
    return flags, set(_of(folder)), {"exp_avg", "exp_avg_sq_r", "exp_avg_sq_c"}


def graphcore(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """CIFAR-10 as torchvision keeps it; SGD with momentum."""
    reader = torchvision.datasets.CIFAR10
    cifar(out, monkeypatch, reader)
    theirs = reader(str(out), train=True)
    images = {(image.tobytes(), number) for image, number in zip(theirs.data, theirs.targets, strict=True)}
    return f"{out} -c {ROOT}/configs/vit_b16_cifar10.yaml --data-backend pil", images, {"momentum_buffer"}


@pytest.mark.parametrize("system", [colossal_ai, nvidia, graphcore], ids=lambda system: system.__name__)
def test_twenty_updates(
    system: Callable[[Path, Path, pytest.MonkeyPatch], Data],
    call: Call,
    make_dataset: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags, images, state = system(make_dataset(train=16), tmp_path / "theirs", monkeypatch)
    ended = call("train", f"{flags} {SMALL} --output {tmp_path} --experiment run")
    assert ended.code == 0, ended.err
    records = metrics(tmp_path / "run")
    assert len(records) >= 20 and all(math.isfinite(record["loss"]) for record in records)
    saved = torch.load(tmp_path / "run" / "last.pth.tar", weights_only=True)
    assert state <= set().union(*saved["optimizer"]["state"].values())
    args = saved["args"]
    source = open_images(args["data_dir"], args["train_split"], args["dataset"])
    if system is graphcore:  # its files hold pixels
        found = {(pixels(source, i).tobytes(), int(source.classes[i])) for i in range(len(source))}
    else:
        found = {(bytes(source.read(i)), int(source.classes[i])) for i in range(len(source))}
    assert found == images


def test_nvidias_model_with_its_head_of_two_layers_trains_as_well(
    call: Call, make_dataset: Make, tmp_path: Path
) -> None:
    model = "vit_transformers --model-kwargs patch_size=16 embed_dim=64 depth=1 num_heads=2 representation_size=64"
    flags = f"{make_dataset(train=16)} -c {ROOT}/configs/vit_b16_224.yaml {SMALL.replace('test_vit', model)}"
    ended = call("train", f"{flags} --data-backend pil --output {tmp_path} --num-classes 4 --experiment run")
    assert ended.code == 0, ended.err
    losses = [record["loss"] for record in metrics(tmp_path / "run")]
    assert len(losses) == 20 and all(map(math.isfinite, losses))
