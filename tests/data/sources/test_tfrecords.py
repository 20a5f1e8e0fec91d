"""TFRecord files: the bytes and classes that DALI finds in them, and one line for whatever is wrong."""

import io
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from tests.data.conftest import flip, jpeg, refuses
from tlt.data.sources import open_images, tfrecords

pytest.importorskip("google_crc32c")

Features = dict[str, bytes | int | list[int]]


def example(features: Features) -> bytes:
    """The message of an Example, with the fields that ours knows: DALI, which knows all, reads it too."""
    entries = []
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        kind = "texts" if isinstance(value, bytes) else "numbers"
        entries.append({"name": name, "feature": {kind: {"value": values}}})
    return tfrecords._example()(features={"entries": entries}).SerializeToString()


def framed(data: bytes) -> bytes:
    RecordWriter(file := io.BytesIO()).write(data)
    return file.getvalue()


def write(path: Path, examples: Sequence[Features]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(framed(example(each)) for each in examples))
    return path


def image_record(mark: int) -> Features:
    """As TensorFlow's scripts write ImageNet: classes from 1, names of class and file."""
    synset = ["n10", "n2", "n300"][mark % 3]
    record = {"height": 20, "colorspace": b"RGB", "object/bbox/label": [2, 5], "class/label": mark % 3 + 1}
    record |= {"class/synset": synset.encode(), "filename": f"{synset}_{mark}.JPEG".encode(), "encoded": jpeg(mark)}
    return {f"image/{name}": value for name, value in record.items()}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two files of ImageNet's kind."""
    root = tmp_path / "data"
    write(root / "train" / "train-00000-of-00002", [image_record(mark) for mark in range(5)])
    write(root / "train" / "train-00001-of-00002", [image_record(mark) for mark in range(5, 9)])
    return root


def dali_reads(files: list[Path], label: str) -> list[tuple[bytes, int]]:
    """All records in order as DALI reads them, with the index of its own tool."""
    dali = pytest.importorskip("nvidia.dali")
    from nvidia.dali import fn, tfrecord

    indexes = [file.with_suffix(".idx") for file in files]
    tool = Path(sys.executable).with_name("tfrecord2idx")
    for file, index in zip(files, indexes, strict=True):
        subprocess.run([sys.executable, tool, file, index], check=True, capture_output=True)

    @dali.pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def pipeline() -> object:
        features = {
            "image/encoded": tfrecord.FixedLenFeature((), tfrecord.string, ""),
            label: tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
        }
        read = fn.readers.tfrecord(path=[*map(str, files)], index_path=[*map(str, indexes)], features=features)
        return read["image/encoded"], read[label]

    running = pipeline()
    running.build()
    count = sum(len(index.read_text().splitlines()) for index in indexes)
    batches = [running.run() for _ in range(count)]
    return [(images.at(0).tobytes(), int(labels.at(0)[0])) for images, labels in batches]


def test_images_are_those_that_dali_reads(data):
    files = sorted(path for path in (data / "train").iterdir() if "-of-" in path.name)
    expected = dali_reads(files, "image/class/label")
    ours = open_images(str(data), "train", "tfrecord")
    # Classes of ours are numbered in the natural order of their names: n2, n10, n300.
    number = {1: 1, 2: 0, 3: 2}
    class_of = {bytes(ours.read(i)): int(ours.classes[i]) for i in range(len(ours))}
    assert class_of == {image: number[label] for image, label in expected} and len(class_of) == len(expected) == 9


def test_split_may_be_in_file_names_and_classes_be_numbers(tmp_path):
    records: list[Features] = [{"image": jpeg(mark), "label": [mark % 2 * 2], "other": -5} for mark in range(4)]
    write(tmp_path / "training.tfrecord", records)
    write(tmp_path / "val.tfrecord-00000-of-00001", records[:3])
    ours = open_images(str(tmp_path), "train", "tfrecord")
    assert "numbered" in ours.warnings[0]
    assert ours.class_names == ["0", "1", "2"] and ours.classes.tolist() == [0, 2, 0, 2]
    assert ours.paths[1] == "2/00000001" and bytes(ours.read(1)) == jpeg(1)
    assert len(open_images(str(tmp_path), "validation", "tfrecord", ours.class_names)) == 3


def second(data: Path) -> Path:
    return data / "train" / "train-00001-of-00002"


def change(byte: int) -> Callable[[Path], object]:
    return lambda data: flip(second(data), byte)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut in the data": (lambda d: second(d).write_bytes(second(d).read_bytes()[:-9]), "is cut: its last record begins"),
    "empty": (lambda d: second(d).write_bytes(b""), "is empty"),
    "a length that is wrong": (change(1), "damaged at byte 0, or no TFRecord"),
    "data": (change(100), r"damaged in the record at byte 0 \(crc32c is wrong\)"),
    "compressed": (lambda d: second(d).write_bytes(b"\x1f\x8b" + bytes(20)), "is compressed"),
    "another file": (lambda d: second(d).write_bytes(b"hello, world, how are you?"), "or no TFRecord file"),
    "no Example": (lambda d: second(d).write_bytes(framed(b"hello")), "record 0 of .*train-00001.* is no Example"),
    "no image": (lambda d: write(second(d), [{"label": 1}]), "no single image named .* or image: it has label"),
    "two classes": (lambda d: write(second(d), [{"image": b"x", "label": [1, 2]}]), "no single class number"),
    "negative class": (lambda d: write(second(d), [{"image": b"x", "label": -1}]), "-1 is no class number"),
    "missing file": (lambda d: second(d).unlink(), "1 of 2 files train-.*-of-00002 are missing, the first is number 1"),
    "no file": (lambda d: shutil.rmtree(d / "train"), "no TFRecord files of the split train in .*searched.*training"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_one_line(case, data):
    damage, text = BAD_FILES[case]
    damage(data)
    with refuses(text):
        open_images(str(data), "train", "tfrecord")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A data_dir of tensorflow_datasets."""
    for version in ("1.9.0", "1.10.0"):
        folder = tmp_path / "flowers" / version
        for number, count in enumerate((3, 2)):
            marks = range(number * 3, number * 3 + count)
            records = [{"image": jpeg(m), "label": m % 2, "file_name": f"{m}.jpg".encode()} for m in marks]
            write(folder / f"flowers-train.tfrecord-{number:05d}-of-00002", records)
        (folder / "label.labels.txt").write_text("rose\ntulip\nlily\n")
    return tmp_path


def test_prepared_data_set_has_its_own_class_list(prepared):
    ours = open_images(str(prepared), "train", "tfds/flowers")
    assert "1.10.0" in ours.path(0) and ours.class_names == ["rose", "tulip", "lily"]
    rows = {ours.paths[i]: (int(ours.classes[i]), bytes(ours.read(i))) for i in range(len(ours))}
    expected = {f"{['rose', 'tulip'][mark % 2]}/{mark}.jpg": (mark % 2, jpeg(mark)) for mark in range(5)}
    assert rows == expected
    assert "1.9.0" in open_images(str(prepared), "train", "tfds/flowers:1.9.0").path(0)
    (prepared / "flowers" / "1.10.0" / "label.labels.txt").write_text("tulip\nrose\nlily\n")
    with refuses(r"label.labels.txt was changed after .*records.json was made \(class 0 is rose there, tulip here\)"):
        open_images(str(prepared), "train", "tfds/flowers")


BAD_PREPARED: dict[str, tuple[str, str, str]] = {
    "name": ("tfds/roses", "train", "there is no folder .*/roses; prepare it"),
    "outside": ("tfds/../x", "train", "there is no folder"),
    "version": ("tfds/flowers:2.0.0", "train", "no version 2.0.0 in .*which holds 1.10.0, 1.9.0"),
    "split": ("tfds/flowers", "validation", "no TFRecord files of the split validation"),
    "missing file": ("tfds/flowers", "test", "1 of 2 files flowers-test.tfrecord-.* are missing"),
    "class list": ("tfds/flowers:1.9.0", "train", "an image is of class 1, but there are 1 classes"),
}


@pytest.mark.parametrize("case", BAD_PREPARED)
def test_bad_prepared_data_set_is_one_line(case, prepared):
    dataset, split, text = BAD_PREPARED[case]
    (prepared / "flowers" / "1.10.0" / "flowers-test.tfrecord-00000-of-00002").touch()
    (prepared / "flowers" / "1.9.0" / "label.labels.txt").write_text("rose\n")
    with refuses(text):
        open_images(str(prepared), split, dataset)
