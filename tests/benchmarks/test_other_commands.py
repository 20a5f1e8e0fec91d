"""benchmark.py outlook, data and startup: what is compared does the same work."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tlt
from benchmarks import data, startup
from benchmarks.data import BATCHES, CROPS
from tests.benchmarks.conftest import Measure
from volo.config.args import TRAIN
from volo.kernels import KERNELS

OUTLOOK = "outlook -b 2 --model volo_d1 --cells 5 --rounds 2 --device cpu --no-compile"


def test_outlook_checks_and_times_every_kernel_and_timms(measure: Measure) -> None:
    rows = measure(OUTLOOK)
    assert {row["arm"] for row in rows} == {*KERNELS, "timm"}
    timed = [row for row in rows if "note" not in row]
    assert [row["arm"] for row in timed] == ["timm", "windows", "reference"] * 2
    assert all(row["off by"] < (1e-5 if row["type"] == "float32" else 2e-2) for row in timed)
    assert all(row["x timm"] == [1, 1, 1] for row in timed if row["arm"] == "timm")


def test_outlook_does_not_time_a_kernel_that_computes_something_else(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = KERNELS["windows"]
    wrong = right._replace(compute=lambda v, logits, *rest: right.compute(v, logits * 1.001, *rest))
    monkeypatch.setitem(KERNELS, "windows", wrong)
    rows = measure(f"{OUTLOOK} --dtypes float32", code=2)
    assert "windows is no peer: it is off by" in capsys.readouterr().err
    assert "windows" not in {row["arm"] for row in rows if "ms" in row}


@pytest.mark.parametrize("part", [CROPS, BATCHES])
def test_all_loaders_make_the_same_images(tmp_path: Path, part: str) -> None:
    # Nothing random is left but the order, so that what the loaders make can be compared.
    config = tlt.AugmentConfig((32, 24), (1.0, 1.0), (1.25, 1.25), 0.0, 0.0, None, None, "bilinear", reprob=0.0)
    data.make_images(tmp_path / "train", 6, (50, 40))
    images = tlt.open_images(str(tmp_path), "train")
    loading = data.Loading(images, data.make_labels(tmp_path, images.paths), config, 3, 0, torch.device("cpu"))
    made = {name: torch.cat(list(loading.ours(part, name)())) for name in ("torchvision", "pil")}
    made["timm"] = torch.cat(list(loading.timm(part)()))
    assert made["pil"].dtype == made["timm"].dtype == (torch.uint8 if part == CROPS else torch.float32)
    for name, found in made.items():
        apart = (found[:, None].double() - made["torchvision"][None].double()).abs().amax((2, 3, 4))
        nearest, which = apart.min(1)
        assert nearest.max() <= (2 if part == CROPS else 2 / 255 / 0.22), name
        assert sorted(which.tolist()) == list(range(6)), name


def test_data_times_both_parts_with_and_without_workers(measure: Measure) -> None:
    line = "data --images 6 --image-size 60 48 --img-size 24 -b 3 --rounds 1 --workers 1 --device cpu"
    rows = measure(f"{line} --backend torchvision dali-gpu")
    missing = [row for row in rows if "note" in row]
    assert len(missing) == 4 and all("dali-gpu" in row["note"] for row in missing)
    timed = {(row["augmentation"], row["workers"], row["part"], row["loader"]) for row in rows if "note" not in row}
    recipes, loaders = ("crop + flip", "rand-m9-mstd0.5-inc1, erasing"), ("timm", "torchvision")
    assert timed == {*product(recipes, (0, 1), (CROPS, BATCHES), loaders)}
    assert all(row["CPU ms an image"][0] > 0 for row in rows if "note" not in row)


def test_startup_lists_the_same_images_in_every_way(tmp_path: Path) -> None:
    startup.make_data(tmp_path, 60, 7)
    ours, torchvisions, timms = (listing(str(tmp_path)) for listing in startup.LISTINGS.values())
    found: Any = ours
    names = [f"{tmp_path}/train/{name}" for name in found.paths]
    for other in (torchvisions, timms):
        assert sorted(path for path, _ in other.samples) == sorted(names)  # type: ignore[attr-defined]
    assert len(names) == 60 and len(list((tmp_path / "val").glob("*/*"))) == 7


def test_startup_measures_listings_and_programs(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    train = startup.PROGRAMS["train.py to its first update"]
    args = TRAIN.parse(train[1:])
    assert (args.data_dir, args.log_interval) == (".", 1)
    monkeypatch.setitem(startup.PROGRAMS, "import torch, timm", ["-c", "print('loss 1.0')"])
    monkeypatch.delitem(startup.PROGRAMS, "train.py to its first update")
    monkeypatch.setattr(startup, "in_own_process", startup.listing)
    rows = measure("startup --images 30 --classes 3 --rounds 1")
    assert [row["what"] for row in rows] == [*startup.LISTINGS, "import torch, timm"]
    assert all(row["images"] == 30 and row["s"][0] > 0 for row in rows)


def test_startup_waits_for_the_first_loss() -> None:
    with pytest.raises(tlt.UserError, match="-c ended before its first update: no more"):
        startup.to_first_loss(["-c", "print('no more')"], ".")
    program = "import time; print('loss 1', flush=True); time.sleep(600)"
    assert 0 < startup.to_first_loss(["-c", program], ".")["s"] < 300
