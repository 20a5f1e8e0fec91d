"""benchmark.py labels and augmentation: the arms do the same work, and what is printed follows from what was timed."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import NAME_TO_OP

from benchmarks.feed import augmentation, images, labels
from benchmarks.feed.published_order import _MOVES, PublishedOrder, moved
from benchmarks.timing import Timing, interleaved
from tlt.data.augment.plan import AugmentConfig
from volo import cli

SIZES = labels.Sizes(6, 2, (4, 5), 30)
LINUX = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")


def test_rounds_are_interleaved_and_the_first_does_not_count() -> None:
    now, calls = [0.0], []

    def arm(name: str, seconds: list[float]) -> labels.Work:
        def work(number: int) -> int:
            calls.append(name)
            now[0] += seconds[number]
            return 2

        return work

    arms = {"one": arm("one", [50, 2, 4, 8]), "two": arm("two", [50, 10, 30, 20])}
    times = interleaved(arms, 3, clock=lambda: now[0])
    assert times == {"one": Timing(2, 1, 4, (1, 2, 4)), "two": Timing(10, 5, 15, (5, 15, 10))}
    assert calls == ["one", "two", "two", "one", "one", "two", "two", "one"]


def test_labels_are_the_same_out_of_every_reader(tmp_path: Path) -> None:
    sample = labels.make_sample(tmp_path, SIZES)
    labels.compare(sample)
    stored = torch.load(sample.files[3], weights_only=True).numpy()
    for store in (sample.archive, sample.tree):
        np.testing.assert_array_equal(store.read(3).values, stored[0])
        np.testing.assert_array_equal(store.read(3).ids, stored[1])
    assert sample.tree_bytes == sum(path.stat().st_size for path in tmp_path.glob("tree/*/*.pt"))
    assert sample.archive_bytes == sum(path.stat().st_size for path in tmp_path.glob("archive/*.safetensors"))
    torch.save(torch.zeros(2, 2, 4, 5).half(), sample.files[3])
    with pytest.raises(RuntimeError, match="label 3 out of .*archive is not that of"):
        labels.compare(sample)


def test_every_reader_reads_every_label_once(tmp_path: Path) -> None:
    sample = labels.make_sample(tmp_path, labels.Sizes(300, 1, (1, 1), 5))
    arms = labels.candidates(sample)
    for arm in arms.values():
        assert sorted(arm.order) == list(range(300)) and arm(0) == 300
    assert all(
        arms["archive, sorted batches"].order[i : i + 2] == sorted(arms["archive, sorted batches"].order[i : i + 2])
        for i in range(0, 128, 2)
    )
    assert arms["archive"].order != sorted(arms["archive"].order)


@LINUX
def test_labels_table_and_json_agree_and_pages_are_shared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "labels --records 1500 --map-size 18 18 --rounds 3 --workers 3"
    assert cli.run("benchmark", [*line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds, ratios = found["seconds"], found[f"{labels.PUBLISHED}/arm"]
    for name, ratio in ratios.items():
        assert ratio == pytest.approx(seconds[labels.PUBLISHED]["median"] / seconds[name]["median"])
    archive, copies = found["memory"]["archive"], found["memory"]["private copies"]
    size = found["bytes"]["archive"]
    # Each worker sees all of the archive; together they hold it once. Copies are held by each.
    assert archive["rss"] > 2.7 * size and archive["pss"] < 1.3 * size and archive["private"] < 0.3 * size
    assert copies["private"] > 0.9 * size and copies["pss"] > 2.7 * size

    monkeypatch.setattr(labels, "resident", lambda: None)  # a system without /proc
    assert cli.run("benchmark", ["labels", "--records", "3", "--map-size", "2", "2", "--rounds", "1"]) == 0
    assert "memory of workers: not measured" in capsys.readouterr().out


def _case(root: Path, config: AugmentConfig) -> augmentation.AugmentationCase:
    args = Namespace(data_dir="", images=5, image_size=[50, 40])
    folder = images.choose_images(args, root)
    return augmentation.AugmentationCase(folder, images.make_labels(root / "labels", folder), config, 3)


def test_every_augmentation_makes_the_same_crops_of_the_same_images(tmp_path: Path) -> None:
    # Nothing random is left, so that what the arms make can be compared.
    config = AugmentConfig((32, 24), (1.0, 1.0), (1.25, 1.25), 0.0, 0.0, None, None, "bilinear", reprob=0.0)
    case = _case(tmp_path, config)
    made = {}
    for name, arm in augmentation.candidates(case).items():
        assert arm(1) == 5
        batches = [arm.load(key) for key in case.batches(1)]
        made[name] = torch.cat([augmentation.images_of(batch) for batch in batches])
        assert made[name].shape == (5, 3, 32, 24)
    assert made[augmentation.OURS].dtype == torch.uint8
    for name in (augmentation.TIMM, augmentation.PUBLISHED):
        difference = made[name].int() - made[augmentation.OURS].int()
        assert difference.abs().max() <= 2, name
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (images.MEAN, images.STD))
    torch.testing.assert_close(made[augmentation.STAGED], (made[augmentation.OURS] / 255 - mean) / std)
    ours, published = (augmentation.candidates(case)[name].load for name in (augmentation.OURS, augmentation.PUBLISHED))
    key = next(case.batches(1))
    torch.testing.assert_close(ours(key).labels.values, published(key)[1][:, 0])
    torch.testing.assert_close(ours(key).labels.ids, published(key)[1][:, 1].int())


@pytest.mark.parametrize(
    ("name", "argument"),
    [("Rotate", 25.0), ("ShearX", -0.3), ("ShearY", 0.2), ("TranslateXRel", 0.25), ("TranslateYRel", -0.2)],
)
def test_the_published_label_follows_the_image_to_about_a_cell(name: str, argument: float) -> None:
    side = 60
    ramp = np.stack(np.meshgrid(np.arange(side), np.arange(side), [0], indexing="ij"), -1)[:, :, 0] + 1
    image = NAME_TO_OP[name](
        Image.fromarray(ramp.astype(np.uint8)), argument, fillcolor=(0, 0, 0), resample=Image.Resampling.NEAREST
    )
    pixels = np.asarray(image).astype(int)[..., :2]
    label = np.broadcast_to(ramp[..., :2].transpose(2, 0, 1), (2, 2, side, side)).astype(np.float16)
    cells = moved(label, _MOVES[name](argument, side, side))[0].transpose(1, 2, 0)
    both = (pixels[..., 0] > 0) & (cells[..., 0] > 0)
    assert both.mean() > 0.5 and np.abs(pixels - cells)[both].max() <= 1
    assert ((pixels[..., 0] > 0) != (cells[..., 0] > 0)).mean() < 0.06


def test_the_published_order_moves_labels_of_timms_operations(tmp_path: Path) -> None:
    config = AugmentConfig((16, 16), hflip=1.0, auto_augment="rand-m9-n4-mstd0.5-inc1")
    case = _case(tmp_path, config)
    order = PublishedOrder(config)
    crops, moves = zip(*(order(Image.open(case.folder.path(0)), case.labels.read(0)) for _ in range(8)), strict=True)
    assert all(crop.shape == (3, 16, 16) and crop.dtype == torch.uint8 for crop in crops)
    window = moves[0][2].flatten()[:4]
    assert ((window >= 0) & (window <= 1)).all() and window[2:].min() > 0
    flipped = torch.from_numpy(case.labels.read(0).values[..., ::-1].copy())
    assert any(not torch.equal(each[0], flipped) for each in moves)
    assert len({each[0].numpy().tobytes() for each in moves}) > 3


def test_augmentation_json_follows_from_what_was_timed(capsys: pytest.CaptureFixture[str]) -> None:
    line = "augmentation --images 6 --image-size 60 48 --img-size 24 -b 4 --rounds 1 --workers 1"
    torch.set_num_threads(2)
    try:
        assert cli.run("benchmark", [*line.split(), "--json"]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    found = json.loads(capsys.readouterr().out)
    assert ", 1 thread(s);" in found["machine"]
    for part, pairs in (("one process", 3), ("workers", 1)):
        seconds, ratios = found[part]["seconds"], found[part]["images/s ratios"]
        assert len(ratios) == pairs
        for pair, ratio in ratios.items():
            one, other = pair.split("/")
            assert ratio == pytest.approx(seconds[other]["median"] / seconds[one]["median"])


def test_images_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    images.make_images(tmp_path / "train", 7, (40, 30))
    line = f"augmentation --data-dir {tmp_path} --img-size 16 --rounds 1 --workers 0 --images"
    assert cli.run("benchmark", [*line.split(), "4"]) == 0
    assert "4 images (the first 40 x 30)" in capsys.readouterr().out
    assert cli.run("benchmark", [*line.split(), "8"]) == 2
    assert "--images 8: --data-dir" in capsys.readouterr().err


def test_sizes_of_images_have_a_row_for_each_loader(capsys: pytest.CaptureFixture[str]) -> None:
    line = "data --sizes 40 72 --images 3 -b 2 --rounds 1 --img-size 16 --backend torchvision"
    assert cli.run("benchmark", [*line.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["sizes"]
    assert [(row["side"], row["images"], list(row["seconds"])) for row in rows] == [
        (side, 3, ["timm", "torchvision"]) for side in (40, 72)
    ]
    assert rows[1]["megabytes"] > 2 * rows[0]["megabytes"]
    assert cli.run("benchmark", [*line.split(), "--data-dir", "x"]) == 2
    assert "--sizes" in capsys.readouterr().err


def test_large_images_repeat_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_LARGEST", 32)
    images.make_images(tmp_path, 1, (80, 64))
    pixels = np.asarray(Image.open(tmp_path / "class0" / "0.jpg"), int)
    assert pixels.shape == (64, 80, 3)
    assert abs(pixels[:32, :32] - pixels[32:, 32:64]).mean() < 3 and abs(pixels[:, :16] - pixels[:, 16:32]).mean() > 5
