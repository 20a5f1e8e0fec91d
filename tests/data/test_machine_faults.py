"""Faults of the machine (too many open files, storage that fails for a while) are no faults of images and labels."""

import errno
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.labels.packed import make_archive, make_tree, save_image
from tlt.api import Loader
from tlt.data.augment.plan import AugmentConfig
from tlt.data.batch import Batch, BatchKey
from tlt.data.dataset import EvalDataset, TrainDataset
from tlt.data.loader import EvalLoader
from tlt.data.sources import open_images
from tlt.data.sources.folder import ImageFolder, scan_folder
from tlt.data.sources.image_file import BadImage, read_file
from tlt.data.sources.source import ImageSource
from tlt.errors import MachineFault, UserError
from tlt.io import files
from tlt.labels.store import open_labels
from tlt.tools.check import check
from tlt.tools.pack_images import pack_images

CONFIG = AugmentConfig((16, 16))
MACHINES = ["EMFILE", "ESTALE"]
ALL = BatchKey(0, (0, 1, 2, 3))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_WAITS", (0.0, 0.0, 0.0))


@pytest.fixture
def images(tmp_path: Path) -> ImageFolder:
    for number in range(4):
        save_image(tmp_path / "data" / "train" / "c" / f"{number}.png", number)
    return scan_folder(tmp_path / "data" / "train")


Storage = Callable[[str, str, int], list[str]]


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    """`fail(code, ending, times)`: files of this ending can't be opened, so many times. Returns their paths."""
    opens, plain, met = os.open, io.open, list[str]()

    def fail(code: str, ending: str, times: int) -> list[str]:
        number = getattr(errno, code)

        def failing(real: Callable[..., Any]) -> Callable[..., Any]:
            def opening(path: Any, *more: Any, **named: Any) -> Any:
                if str(path).endswith(ending) and len(met) < times:
                    met.append(str(path))
                    raise OSError(number, os.strerror(number), path)
                return real(path, *more, **named)

            return opening

        monkeypatch.setattr(os, "open", failing(opens))
        monkeypatch.setattr(io, "open", failing(plain))
        monkeypatch.setattr("builtins.open", failing(plain))
        monkeypatch.setattr(Path, "open", failing(Path.open))  # Python 3.10's keeps an io.open of its own
        return met

    return fail


@pytest.mark.parametrize("code", MACHINES)
def test_what_passes_costs_no_image(images, storage, code):
    training = TrainDataset(images, CONFIG, 3)
    expected = training[ALL]
    met = storage(code, "2.png", 3)
    batch = training[ALL]
    assert isinstance(batch, Batch) and isinstance(expected, Batch)
    assert len(met) == 3 and not batch.skipped and torch.equal(batch.images, expected.images)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_stays_ends_the_run_with_its_exit_code(images, storage, workers):
    storage("EIO", "2.png", 10**9)
    training = Loader(images, None, CONFIG, 2, 3, workers=workers)
    validation = EvalLoader(EvalDataset(images, (16, 16)), 2, lambda images: images, workers=workers)
    for batches in (training.epoch(0), iter(validation)):
        with pytest.raises(UserError, match=r"2\.png can't be read: Input/output error, 4 times in a row") as caught:
            list(batches)
        assert caught.value.exit_code == 5 and not training.skips.reasons


def test_real_faults_of_files(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")  # opening it waits for a writer
    names = {"pipe": "regular", "loop": "symbolic links", "folder": "regular", "file/x": "Not a dir", "no": "No"}
    for name, reason in (names | {"x" * 300: "too long"}).items():
        with pytest.raises(BadImage, match=reason):
            read_file(str(tmp_path / name))


@pytest.fixture
def shards(tmp_path: Path, images: ImageFolder) -> ImageSource:
    """The images with labels."""
    root = make_tree(tmp_path / "labels", images)
    pack_images(str(tmp_path / "data"), str(tmp_path / "shards"), labels=str(root))
    return open_images(str(tmp_path / "shards"), "train")


def test_a_defect_of_ours_is_not_blamed_on_a_file():
    """Foreign content may raise anything; where only our own code runs, an error that is no user's keeps its class."""
    with (
        pytest.raises(UserError, match=r"^a\.pt can't be used \(KeyError: 'x'\): copy it again$"),
        files.blamed_on("a.pt"),
    ):
        raise KeyError("x")
    with pytest.raises(KeyError), files.blamed_on("a.pt", of=UserError):
        raise KeyError("x")
    with pytest.raises(MachineFault, match=r"^a\.pt: worn$"), files.blamed_on("a.pt", of=UserError):
        raise MachineFault("worn")


@pytest.mark.parametrize("what", ["image", "label"])
def test_shard_failing_once_is_reopened(shards, tmp_path, monkeypatch, what):
    labels = open_labels(tmp_path / "shards", shards.paths, bad_label="skip")
    read: Callable[[int], object] = shards.read if what == "image" else lambda row: labels.read(row, 25, 24).values
    expected, stale, opens, real = read(1), True, os.open, os.pread  # its file is open from now on

    def opening(*arguments: Any) -> int:
        nonlocal stale
        stale = False
        return opens(*arguments)

    def pread(*arguments: Any) -> bytes:
        if stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*arguments)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "open", opening)
    assert np.array_equal(read(1), expected)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "open", opens)
    stale = True
    with pytest.raises(MachineFault, match=rf"00000\.tar can't be read: {os.strerror(errno.ESTALE)}"):
        read(1)
    assert not labels.take_faults()


@pytest.mark.parametrize(("make", "file"), [(make_tree, "2.pt"), (make_archive, "values.npy")])
@pytest.mark.parametrize("code", ["ENFILE", "ESTALE"])
def test_labels_on_failing_storage_are_not_bad(images, tmp_path, storage, make, code, file):
    store = open_labels(make(tmp_path / "labels", images), images.paths, bad_label="skip")
    expected, identity, sent = store.read(2).values, store.identity(), pickle.dumps(store)

    def read() -> np.ndarray:
        return pickle.loads(sent).read(2).values  # as a data worker, which opens the files anew

    met = storage(code, file, 3)
    assert np.array_equal(read(), expected) and len(met) == 3
    reads: list[Callable[[], object]] = [read]
    if make is make_tree:
        met.clear()
        assert store.identity() == identity and len(met) == 3
        reads += [store.identity, lambda: check(str(tmp_path / "data"), str(tmp_path / "labels"))]
    storage(code, file, 10**9)
    for each in reads:
        with pytest.raises(MachineFault, match=rf"{file} can't be read: {os.strerror(getattr(errno, code))}"):
            each()
    assert not store.take_faults()
