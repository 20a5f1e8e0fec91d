"""Loading in threads: the batches, order and faults that processes give; the process stays as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import LIMIT, wait_until
from tests.data.test_loader import CONFIG, Hostile, as_floats, loader, refusal, same
from tlt.data import threads
from tlt.data.augment.index_stream import IndexStream
from tlt.data.backends.decode import PilBackend, TorchvisionBackend
from tlt.data.dataset import BatchKey, EvalDataset, Fault, HostBatch, TrainDataset
from tlt.data.loader import Batch, EvalLoader, SkipCounter, TrainLoader
from tlt.data.sources import image_file
from tlt.data.sources.folder import ImageFolder, scan_folder
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.labels.records import MapForm, Reader, Record
from tlt.labels.store import LabelStore

THREAD = {"worker_type": "thread"}


def of_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("loader")}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_threads_change_nothing(workers: int) -> None:
    alone, several = loader(0), loader(workers, **THREAD)
    for epoch, start in ((0, 0), (1, 2)):
        pairs = list(zip(alone.epoch(epoch, start), several.epoch(epoch, start), strict=True))
        assert len(pairs) == 7 - 2 * start
        assert all(ours[:2] == theirs[:2] and same(ours[2], theirs[2]) for ours, theirs in pairs)
    assert several.take_deaths() == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_shows_each_image_once(world_size: int) -> None:
    images = loader().dataset.source
    seen: list[int] = []
    for rank in range(world_size):
        dataset = EvalDataset(images, (16, 16), backend=loader().dataset.backend)
        evaluation = EvalLoader(
            dataset, 4, as_floats, workers=2, world_size=world_size, rank=rank, worker_type="thread"
        )
        seen += [index for batch in evaluation for index in batch.indices.tolist()]
    assert sorted(seen) == list(range(26))


def test_an_epoch_left_early_does_not_disturb_the_next() -> None:
    training, whole = loader(2, **THREAD), list(loader(0).epoch(1))
    for number, _ in enumerate(training.epoch(0)):
        if number == 2:
            break
    assert all(same(a, b) for (_, _, a), (_, _, b) in zip(training.epoch(1), whole, strict=True))


def test_threads_end_with_their_loader() -> None:
    gc.collect()
    before = of_threads()
    training = loader(3, **THREAD)
    assert of_threads() == before  # none before the first pass
    next(training.epoch(0))
    assert len(of_threads() - before) == 3
    del training
    gc.collect()
    assert of_threads() == before


def test_only_what_is_needed_next_is_loaded_ahead() -> None:
    asked: list[int] = []

    class Asked(TrainDataset):
        def load(self, key):  # type: ignore[no-untyped-def]
            asked.append(key.indices[0])
            return super().load(key)

    base = loader().dataset
    training = TrainLoader(
        Asked(base.source, CONFIG, 5, base.labels, base.backend),
        IndexStream(26, 2, seed=5),
        as_floats,
        workers=1,
        **THREAD,
    )
    batches = training.epoch(0)
    next(batches)
    time.sleep(0.2)
    assert len(asked) <= 1 + 1 + threads.PREFETCH_FACTOR


def test_what_an_epoch_left_early_has_asked_for_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    training, asked, left = loader(1, **THREAD), [], threading.Event()
    load = training.dataset.load

    def first_or_late(key: BatchKey) -> HostBatch | Fault:
        assert not asked or left.wait(LIMIT)
        asked.append(key.epoch)
        return load(key)

    monkeypatch.setattr(training.dataset, "load", first_or_late)
    next(training.epoch(0))
    left.set()
    next(training.epoch(1))
    assert asked.count(0) <= 2  # the one that was seen, and one that was being made


def test_threads_keep_no_batch() -> None:
    training = loader(2, **THREAD)
    made = [weakref.ref(host) for host in training._workers.run(lambda: training._keys(0, 0))]
    wait_until(lambda: not any(batch() for batch in made))
    assert len(made) == 7


def test_fault_23_hung_storage_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_END_PATIENCE", 0.0)
    told = refusal(loader(2, Hostile("hang"), timeout=2.0, **THREAD).epoch(0))
    assert "no batch after 2 s (--loader-timeout): reading" in told and "/00000013 has taken" in told


@pytest.mark.parametrize("workers", [0, 2])
def test_user_errors_in_threads_stay_one_line(workers: int) -> None:
    told = refusal(loader(workers, Hostile("report"), **THREAD).epoch(0))
    assert told == "label 13.pt is damaged: make it again"


def test_other_errors_come_up_where_the_batch_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    training = loader(2, **THREAD)
    monkeypatch.setattr(training.dataset, "load", lambda key: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(training.epoch(0))


def test_torch_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading threads take one each; the process, and threads to come, what they had."""
    inside: list[int] = []
    training = loader(2, **THREAD)
    load = training.dataset.load
    monkeypatch.setattr(training.dataset, "load", lambda key: inside.append(torch.get_num_threads()) or load(key))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        list(training.epoch(0))
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert set(inside) == {1} and torch.get_num_threads() == 3 and later == [3]
    finally:
        torch.set_num_threads(before)


def test_a_program_ends_while_a_thread_loads(tmp_path: Path) -> None:
    """And quickly, though one hangs."""
    program = (
        "from tests.data.test_loader import loader, Hostile\nfrom tlt.data import threads\n"
        "threads._END_PATIENCE = 0.5\n"
        "batches = loader(2, Hostile('hang'), worker_type='thread').epoch(0)\nnext(batches)\nprint('one')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\n", "")


class _Broken:
    """Every map of an odd image is unusable; the others take their time."""

    root, form = "maps", MapForm((1, 2, 2), 0, "full", False, None)
    missing: set[int] = set()

    def record(self, index: int) -> Record:
        time.sleep(0.001)
        if index % 2:
            raise UserError(f"map {index} is broken")
        return Record(np.zeros((1, 2, 2), np.float16), np.zeros((1, 2, 2), np.int32))

    def source(self, index: int) -> str:
        return str(index)


def test_replaced_label_maps_are_told_with_their_batch() -> None:
    base = loader().dataset
    labels = LabelStore(cast(Reader, _Broken()), Names(base.source.paths), num_classes=4, bad_label="skip")
    dataset = TrainDataset(base.source, CONFIG, 5, labels, base.backend)
    training = TrainLoader(dataset, IndexStream(26, 8, seed=5), as_floats, workers=3, **THREAD)
    for _, _, batch in training.epoch(0):
        told = {name for name, _ in batch.bad_labels}
        assert told == {base.source.paths[index] for index in batch.indices.tolist() if index % 2}


@pytest.fixture
def pictures(tmp_path: Path) -> ImageFolder:
    rng = np.random.default_rng(0)
    for i in range(24):
        path = tmp_path / "train" / "c" / f"{i:02d}.{'png' if i % 2 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        # Pillow warns of palettes with transparency given as bytes.
        image.convert("P").save(path, transparency=bytes(9)) if i % 2 else image.save(path)
        if i in (4, 5):
            path.write_bytes(path.read_bytes()[:500])
    return scan_folder(tmp_path / "train")


@pytest.mark.parametrize("backend", [PilBackend, TorchvisionBackend])
def test_decoding_in_threads_leaves_the_process_as_it_was(pictures: ImageFolder, backend: type[PilBackend]) -> None:
    def batches(workers: int) -> Iterator[Batch]:
        dataset = EvalDataset(pictures, (16, 16), backend=backend(max_pixels=2000))
        return iter(EvalLoader(dataset, 2, as_floats, workers=workers, skips=SkipCounter(24), worker_type="thread"))

    before = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        inside = list(warnings.filters)
        for _ in range(3):
            pairs = list(zip(batches(4), batches(0), strict=True))
            assert sum(theirs.size for theirs, _ in pairs) == 22 and all(same(*pair) for pair in pairs)
        assert warnings.filters == inside
    assert not told and before == (Image.MAX_IMAGE_PIXELS, list(warnings.filters))


def test_other_code_may_warn_and_open_images_while_threads_decode() -> None:
    limit = Image.MAX_IMAGE_PIXELS
    assert limit is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with image_file._PROCESS.settings(10), image_file._PROCESS.settings(limit + 1):
            for module in ("PIL.Image", "torchvision.io.image", "program"):
                warnings.warn_explicit(f"of {module}", DeprecationWarning, "file.py", 1, module)
            assert limit + 1 == Image.MAX_IMAGE_PIXELS
        assert [str(one.message) for one in told] == ["of torchvision.io.image", "of program"]
        assert limit == Image.MAX_IMAGE_PIXELS
        with image_file._PROCESS.settings(None), image_file._PROCESS.settings(10):
            assert Image.MAX_IMAGE_PIXELS is None
        with image_file._PROCESS.settings(10):
            assert limit == Image.MAX_IMAGE_PIXELS
