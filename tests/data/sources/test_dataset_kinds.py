"""`--dataset`: every kind gives the images and classes that torchvision, timm and others find in the same files."""

import hashlib
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision import datasets as torch_datasets

from tests.data.conftest import jpeg, refuses
from tlt.data.backends.decode import PilBackend, TorchvisionBackend
from tlt.data.sources import open_images, parse_kind
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError


def pixels(source: ImageSource, index: int, backend: type[PilBackend] = PilBackend) -> np.ndarray:
    """(H, W, 3) of an image, as the loader decodes it."""
    opened = backend().open(source.path(index), source.read(index))
    return backend().decode(opened, None, (opened.height, opened.width), "bilinear").permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("hfids/timm/imagenet-1k", "hfds/timm/imagenet-1k reads the same data set"),
        ("torch/imagenet", "there are .*torch/cifar10, torch/cifar100.* .image folders and tar shards need none"),
        *((each, "there are .*tfrecord, .*wds/NAME") for each in ("tfrecords", "tfrecord/x", "wds")),
    ],
)
def test_unknown_kinds_are_one_line_that_names_what_there_is(dataset, message):
    with pytest.raises(UserError, match=message):
        parse_kind(dataset)
    assert parse_kind("HFDS/Owner/Name") == ("hfds", "Owner/Name") and parse_kind("ImageFolder") == ("", "")


def cifar(root: Path, monkeypatch: pytest.MonkeyPatch, reader: Any) -> Path:
    """Made-up files in the layout of a class of torchvision, which takes their md5 for the published one."""
    folder = root / reader.base_folder
    folder.mkdir(parents=True)
    fine = reader is torch_datasets.CIFAR100
    names = [f"class {number}/x" for number in range(100 if fine else 10)]

    def write(file: str, content: dict[str, Any]) -> str:
        data = pickle.dumps(content)
        (folder / file).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    def batch(mark: int) -> dict[str, Any]:
        generator = np.random.default_rng(mark)
        numbers = generator.integers(0, len(names), 6).tolist()
        return {"data": generator.integers(0, 256, (6, 3072), np.uint8), "fine_labels" if fine else "labels": numbers}

    for attribute in ("train_list", "test_list"):
        files = [[file, write(file, batch(len(file) + i))] for i, (file, _) in enumerate(getattr(reader, attribute))]
        monkeypatch.setattr(reader, attribute, files)
    meta = dict(reader.meta)
    meta["md5"] = write(meta["filename"], {meta["key"]: names})
    monkeypatch.setattr(reader, "meta", meta)
    return root


@pytest.mark.parametrize(
    ("name", "split", "backend"), [("cifar10", "train", PilBackend), ("cifar100", "validation", TorchvisionBackend)]
)
def test_cifar_is_torchvisions(name, split, backend, tmp_path, monkeypatch):
    reader = getattr(torch_datasets, name.upper())
    root = cifar(tmp_path, monkeypatch, reader)
    theirs = reader(root, train=split == "train")
    ours = open_images(str(root), split, f"torch/{name}")
    assert len(ours) == len(theirs) > 0 and ours.class_names == theirs.classes
    for index, (image, number) in enumerate(theirs):
        assert (pixels(ours, index, backend) == np.array(image)).all() and ours.classes[index] == number
    assert ours.paths[3] == f"class {ours.classes[3]}_x/00000003.ppm"
    taken = pickle.loads(pickle.dumps(ours.select([4, 1])))
    assert (pixels(taken, 0) == pixels(ours, 4)).all() and taken.paths == [ours.paths[4], ours.paths[1]]


def test_damaged_or_missing_cifar_is_never_unpickled(tmp_path, monkeypatch):
    root = cifar(tmp_path, monkeypatch, torch_datasets.CIFAR10)
    file = root / "cifar-10-batches-py" / "data_batch_3"
    file.write_bytes(b"cbuiltins\nexit\n(tR.")  # which would end this process
    with pytest.raises(UserError, match="cifar-10-batches-py is missing or damaged: unpack https.*cifar-10-python"):
        open_images(str(root), "train", "torch/cifar10")
    with pytest.raises(UserError, match="no split 'trian'; it has train and validation"):
        open_images(str(root), "trian", "torch/cifar10")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder of parquet files, as data sets of the hub are."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "parquet"
    folder.mkdir()
    columns = {"img": datasets.Image(), "text": datasets.Value("string")}
    features = datasets.Features({"label": datasets.ClassLabel(names=["cat", "b/dog", "eel"]), **columns})
    loose = tmp_path / "loose.jpg"
    loose.write_bytes(jpeg(99))
    for split, count in (("train", 7), ("test", 4), ("validation", 3)):
        images = [{"bytes": jpeg(number), "path": f"{number}.jpg"} for number in range(count)]
        images[1] = {"bytes": None, "path": str(loose)}
        images[2] = {"bytes": b"no image", "path": None}
        labels = [0, None, None] if split == "validation" else [number % 3 for number in range(count)]
        rows = {"img": images, "label": labels, "text": ["x"] * count}
        datasets.Dataset.from_dict(rows, features).to_parquet(folder / f"{split}-00000.parquet")
    return folder


def test_hub_data_sets_are_timms(hub, tmp_path):
    create_reader = pytest.importorskip("timm.data.readers.reader_factory").create_reader
    cache = str(tmp_path / "cache")
    theirs = create_reader(f"hfds/{hub}", cache, "train", input_key="img")
    ours = open_images(cache, "train", f"hfds/{hub}")
    assert len(ours) == len(theirs) == 7
    assert {name: number for number, name in enumerate(ours.class_names)} == theirs.class_to_idx
    for index in range(7):
        file, number = theirs[index]
        assert bytes(ours.read(index)) == file.read() and ours.classes[index] == number
    assert ours.paths[4] == "b_dog/00000004"
    taken = pickle.loads(pickle.dumps(ours.select([6, 4]).select([1])))
    assert bytes(taken.read(0)) == jpeg(4) and taken.classes.tolist() == [1]


@pytest.mark.parametrize("labels", [["owl", "b/ox", "owl"], [3, 0, 3]])
@pytest.mark.parametrize("beside", [True, False])
def test_hub_data_sets_of_plain_columns(tmp_path, labels, beside):
    datasets = pytest.importorskip("datasets")
    images = [{"bytes": jpeg(mark), "path": None} if beside else jpeg(mark) for mark in range(3)]
    table = datasets.Dataset.from_dict({"image": images, "label": labels, "size": [1, 2, 3]})
    (tmp_path / "set").mkdir()
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(table.data.table.replace_schema_metadata(None), tmp_path / "set" / "train.parquet")
    ours = open_images(str(tmp_path / "cache"), "train", f"hfds/{tmp_path}/set")
    assert [ours.class_names[number] for number in ours.classes] == [*map(str, labels)]
    assert len(ours.class_names) == (2 if labels[0] == "owl" else 4) and len(ours.folder_names) == 2
    assert [bytes(ours.read(row)) for row in range(3)] == [jpeg(mark) for mark in range(3)]


def test_hub_faults_are_one_line(hub, tmp_path):
    datasets = pytest.importorskip("datasets")
    cache = str(tmp_path / "cache")
    with pytest.raises(UserError, match=r'split nowhere, can.t be loaded: Unknown split "nowhere".*--split'):
        open_images(cache, "nowhere", f"hfds/{hub}")
    with pytest.raises(UserError, match="hfds//nowhere.* can't be loaded: .*--split"):
        open_images(cache, "train", "hfds//nowhere")
    with refuses("split validation: 2 of 3 images have no label: take a labelled split, or filter the data set"):
        open_images(cache, "validation", f"hfds/{hub}")
    plain = tmp_path / "plain"
    plain.mkdir()
    datasets.Dataset.from_dict({"a": [1], "label": [0]}).to_parquet(plain / "train.parquet")
    with pytest.raises(UserError, match="no Image column among a, label"):
        open_images(cache, "train", f"hfds/{plain}")
    datasets.Dataset.from_dict({"image": [b"x"], "label": [10**7]}).to_parquet(plain / "train.parquet")
    with refuses("an image is of class 10000000, but there are 1000000 classes"):
        open_images(cache, "train", f"hfds/{plain}")
    with pytest.raises(BadImage, match="no image format"):
        pixels(open_images(cache, "train", f"hfds/{hub}"), 2)


def test_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install '.*\[hf\]'"):
        open_images(None, "train", "hfds/x")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0.tfrecord").write_bytes(bytes(20))
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(UserError, match=r"pip install '.*\[tfrecord\]'"):
        open_images(str(tmp_path), "train", "tfrecord")
    with pytest.raises(UserError, match="DATA is missing"):
        open_images(None, "train", "tfrecord")
