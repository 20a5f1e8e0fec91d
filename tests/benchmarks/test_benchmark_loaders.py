"""benchmark.py data: loaders do the same work, what is printed follows from what was timed, memory is counted."""

from __future__ import annotations

import json
import multiprocessing
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.feed import data_memory, images, loaders
from benchmarks.feed.loaders import BATCHES, CROPS, TIMM, LoaderPart
from benchmarks.flags_benchmark import DATA_BACKENDS
from benchmarks.timing import cpu_seconds
from tests.conftest import LIMIT
from tlt.data.augment.plan import AugmentConfig
from tlt.data.backends.choice import create_backend
from tlt.data.backends.decode import Backend
from tlt.data.sources.folder import scan_folder
from tlt.errors import UserError
from volo import cli
from volo.config.flags_data import DATA

LINUX = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")
LINE = "data --images 6 --image-size 60 48 --img-size 24 -b 3 --rounds 1"


def _case(root: Path, config: AugmentConfig, workers: int = 0) -> loaders.LoaderCase:
    images.make_images(root / "images", 6, (50, 40))
    folder = scan_folder(str(root / "images"))
    labels = images.make_labels(root / "labels", folder)
    return loaders.LoaderCase(folder, labels, config, 3, workers, torch.device("cpu"))


@pytest.mark.parametrize("part", [CROPS, BATCHES])
def test_all_loaders_make_the_same_images(tmp_path: Path, part: str) -> None:
    # Nothing random is left but the order, so that what the loaders make can be compared.
    config = AugmentConfig((32, 24), (1.0, 1.0), (1.25, 1.25), 0.0, 0.0, None, None, "bilinear", reprob=0.0)
    case = _case(tmp_path, config)
    epochs = {TIMM: loaders.timm_loader(case, True, part)} | {
        name: loaders.our_loader(case, name, part) for name in ("torchvision", "pil")
    }
    if part == BATCHES:
        epochs[loaders.TIMM_WORKERS] = loaders.timm_loader(case, False, part)
    made = {name: torch.cat(list(epoch(1))) for name, epoch in epochs.items()}
    assert made["pil"].dtype == made[TIMM].dtype == (torch.uint8 if part == CROPS else torch.float32)
    for name, found in made.items():
        apart = (found[:, None].double() - made["torchvision"][None].double()).abs().amax((2, 3, 4))
        nearest, which = apart.min(1)
        assert nearest.max() <= (2 if part == CROPS else 2 / 255 / 0.22), name
        assert sorted(which.tolist()) == list(range(6)), name


def test_a_round_is_every_image_once_with_workers_too(tmp_path: Path) -> None:
    case = _case(tmp_path, AugmentConfig((16, 16)), workers=1)
    found = loaders.measure("", case, ["synthetic", "dali-none"], 1)
    assert set(found.wall) == {
        LoaderPart(TIMM, CROPS),
        LoaderPart(TIMM, BATCHES),
        LoaderPart(loaders.TIMM_WORKERS, BATCHES),
        LoaderPart("synthetic", CROPS),
        LoaderPart("synthetic", BATCHES),
    }
    assert "--data-backend dali-none" in found.missing["dali-none"]


def _burn(seconds: float) -> None:
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass


def _burn_and_stay(ready: Event, done: Event) -> None:
    _burn(0.2)
    ready.set()
    done.wait(LIMIT)


@LINUX
def test_cpu_time_is_that_of_living_children_too() -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    start = cpu_seconds()
    child = context.Process(target=_burn_and_stay, args=(ready, done), daemon=True)
    child.start()
    assert ready.wait(LIMIT)
    used = cpu_seconds() - start
    done.set()
    child.join()
    assert used > 0.19


def test_what_is_printed_follows_from_what_was_timed(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(2)
    try:
        assert (
            cli.run("benchmark", [*LINE.split(), *["--backend", "pil", "synthetic", "--workers", "1", "--json"]]) == 0
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    found = json.loads(capsys.readouterr().out)
    assert found["command"].startswith("benchmark.py data --images 6") and found["versions"]["torch"]
    assert found["hardware"]["CPUs to run on"] >= 1
    assert [(part["recipe"], part["workers"]) for part in found["parts"]] == [
        ("crop + flip", 0),
        ("crop + flip", 1),
        ("rand-m9-mstd0.5-inc1, erasing", 0),
        ("rand-m9-mstd0.5-inc1, erasing", 1),
    ]
    for part in found["parts"]:
        timed = {(row["loader"], row["part"]): row for row in part["loaders"]}
        ours = {"pil", "synthetic"}
        assert {loader for loader, _ in timed} == {TIMM, loaders.TIMM_WORKERS, *ours}
        assert len(timed) == 3 + 2 * len(ours) and not part["not_measured"]
        for (_, kind), row in timed.items():
            timm = timed[TIMM, kind]["cpu_seconds"]["median"]
            assert row["timm_cpu/cpu"] == pytest.approx(timm / row["cpu_seconds"]["median"])
            assert row["images/s"] == pytest.approx(1 / row["wall_seconds"]["median"])


def test_a_backend_that_is_not_there_is_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_dali(name: str, **options: Any) -> Backend:
        if name.startswith("dali"):
            raise UserError("nvidia-dali is not installed: pip install 'volo[dali]'")
        return create_backend(name, **options)

    monkeypatch.setattr(loaders, "create_backend", without_dali)
    assert cli.run("benchmark", [*LINE.split(), "--workers", "0", "--aa", "none"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.split(" | ") for line in lines if line.startswith("| ")]
    assert [row[0].strip("| ") for row in table if "not measured" not in row[1]][1:] == [
        TIMM, "torchvision", "pil", "synthetic", TIMM, loaders.TIMM_WORKERS, "torchvision", "pil", "synthetic"
    ]  # fmt: skip
    assert [row[1] for row in table if "not measured" in row[1]] == [
        "not measured: nvidia-dali is not installed: pip install 'volo[dali]'"
    ] * 2
    assert sum(line.startswith("###") for line in lines) == 1


def test_all_backends_of_training_are_measured() -> None:
    known = next(row for row in DATA.flags if row.dest == "data_backend").choices
    assert known is not None and set(known) <= set(DATA_BACKENDS)
    assert loaders.chosen(["all"]) == DATA_BACKENDS and loaders.chosen(["pil", "pil"]) == ("pil",)


@LINUX
def test_workers_share_packed_names_but_not_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_memory, "_LOADED", 4000)
    data_memory.make_labels(tmp_path, 40_000)
    packed, listed = (
        data_memory.measure(str(tmp_path), 40_000, names, 2) for names in (data_memory.PACKED, data_memory.LIST)
    )
    # 4000 images are all over the 3 MB of strings: two workers get most of these pages for themselves.
    assert listed.private - packed.private > 3e6 and listed.anonymous - packed.anonymous > 3e6


@LINUX
def test_memory_is_told_of_two_sizes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_memory, "WORKERS", (0, 1))
    monkeypatch.setattr(data_memory, "_in_own_process", data_memory.measure)
    assert cli.run("benchmark", ["data", "--entries", "2000", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["memory"]
    assert [(row["entries"], row["workers"], row["names"]) for row in rows] == [
        (128, 0, data_memory.PACKED),
        (128, 1, data_memory.PACKED),
        (2000, 0, data_memory.PACKED),
        (2000, 1, data_memory.PACKED),
        (2000, 1, data_memory.LIST),
    ]
    assert all(row["pss"] >= row["anonymous"] > 0 for row in rows)
    assert rows[3]["anonymous_per_worker"] == rows[3]["anonymous"] - rows[2]["anonymous"]
    assert rows[2]["anonymous_per_worker"] is None and rows[4]["anonymous_per_worker"] is None


@LINUX
def test_workers_of_a_process_of_its_own_start_as_those_of_training(tmp_path: Path) -> None:
    data_memory.make_labels(tmp_path, 200)
    found = data_memory._in_own_process(str(tmp_path), 200, data_memory.PACKED, 1)
    # Of two processes that both import torch, but didn't share what it makes, most would be private.
    assert found.private < 0.5 * found.anonymous


def test_mistakes_are_told_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for line, message in {
        "--entries 5 --rounds 2": "--rounds 2 has no effect without timing: leave out --entries",
        "--backend dali": "invalid choice: 'dali'",
        "--images 2 -b 3": "--images 2 are fewer than one --batch-size 3",
        "--device tpu": "--device tpu",
    }.items():
        assert cli.run("benchmark", ["data", *line.split()]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    monkeypatch.setattr(data_memory, "resident", lambda: None)  # a system without /proc
    assert cli.run("benchmark", ["data", "--entries", "200"]) == 2
    assert "which only Linux has" in capsys.readouterr().err
