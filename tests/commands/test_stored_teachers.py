"""`volo features`, and runs with stored teachers: they compute what runs with the same teachers in the step do."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

from tests.commands.conftest import QUICK, Call, Ended, launch, metrics, same_weights
from tests.conftest import write_dataset
from tests.labels.packed import same_files
from tlt.labels.row_writer import RowWriter

VIT = {"patch_size": 14, "embed_dim": 24, "depth": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images (`data`), and weights of a teacher with 3 x 3 tokens at 42 px."""
    root = tmp_path_factory.mktemp("stored")
    write_dataset(root / "data")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, img_size=42, **VIT)
    config = {"name": "vit_tiny_patch16_224", "kwargs": VIT, "num_classes": 4, "img_size": [42, 42], "in_chans": 3}
    torch.save({"state_dict": model.state_dict(), "model_config": config}, root / "vit.pth.tar")
    return root


def store(call: Call, root: Path, out: str | Path, flags: str = "") -> Ended:
    return call("features", f"{root}/data {root / out} --checkpoint {root}/vit.pth.tar -j 0 -b 4 {flags}")


@pytest.fixture
def features(call: Call, root: Path) -> Path:
    if not (root / "features").exists():
        store(call, root, "features", "--dtype float16").ok()
    return root / "features"


def train(call: Call, root: Path, name: str, flags: str) -> tuple[Ended, Path]:
    return call("train", f"{root}/data {QUICK} --epochs 2 --output {root} --experiment {name} {flags}"), root / name


WARPS = "--aa rand-m9-n3-mstd0.5-inc1 --hflip 0.5 --drop-path 0.3"


@pytest.mark.parametrize(
    "more",
    [
        f"{WARPS} --train-img-sizes 32 48 64 --token-label --model-ema",
        "--kd-dense-loss gram --grad-accum-steps 2 -b 4 --drop-path 0.5 --drop-path-mode subset",
    ],
)
def test_a_step_is_that_of_the_teacher_itself(call: Call, root: Path, features: Path, more: str) -> None:
    live, one = train(call, root, "live", f"{more} --kd-model-name {root}/vit.pth.tar --kd-distill-type token "
                      "--kd-view whole --kd-size 42")  # fmt: skip
    stored, two = train(call, root, "stored", f"{more} --kd-model-name {features}")
    assert live.code == stored.code == 0, stored.err
    assert "stored features of vit_tiny_patch16_224 at 42 x 42 px, 3 x 3 tokens of 24 channels in float16" in stored.out
    losses = [[row[name] for row in metrics(run)] for run in (one, two) for name in ("loss", "cls_loss")]
    assert len(losses[0]) == len(losses[2]) and losses[2] == pytest.approx(losses[0], abs=1e-3)
    assert all(total > of_classes for total, of_classes in zip(*losses[:2], strict=True))
    for run in (one, two):
        shutil.rmtree(run)


def test_two_archives_and_a_live_teacher_resume_to_the_same_bits(
    call: Call, root: Path, features: Path, stop_at: Callable[[set[int]], None]
) -> None:
    store(call, root, "fewer", "--channels 7 --size 56").ok()
    flags = f"--kd-model-name {features} {root}/vit.pth.tar {root}/fewer --kd-loss-weight 1 0.5 2 --kd-drop 0.4"
    flags += f" {WARPS} --kd-distill-type token --kd-size 56 --resume auto"
    ended, _ = train(call, root, "whole", flags)
    assert ended.code == 0, ended.err
    assert "4 x 4 tokens of 7 of 24 channels in int8" in ended.out and "teachers: " in ended.out  # whose time is told
    stop_at({3})
    ends = [train(call, root, "cut", flags)[0].code for _ in range(2)]
    assert ends == [130, 0]
    saved = same_weights(*(root / run / "last.pth.tar" for run in ("whole", "cut")))
    assert saved["dense_head"]["kd_projector_3.1.weight"].shape[0] == 7
    store(call, root, "fewer", "--channels 7 --size 56 --overwrite --dtype float16").ok()
    changed, _ = train(call, root, "whole", f"{flags} --epochs 3")
    assert changed.code == 2 and "the weights of the teacher (--kd-model-name)" in changed.err, changed.err


@pytest.mark.parametrize("flags", ["", "--channels 5 --dtype float16"])
def test_a_killed_command_goes_on_to_the_same_archive(
    call: Call, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str
) -> None:
    store(call, root, tmp_path / "whole", flags).ok()
    writes, write = iter(range(100)), RowWriter.write_row

    def killed(writer: RowWriter, row: int, arrays: dict) -> None:
        if next(writes) == 6:
            raise KeyboardInterrupt
        write(writer, row, arrays)

    monkeypatch.setattr(RowWriter, "write_row", killed)
    assert store(call, root, tmp_path / "killed", flags).code == 130
    monkeypatch.undo()
    again = store(call, root, tmp_path / "killed", flags).ok()
    assert "6 of 16 images are stored already" in again.out and same_files(tmp_path / "whole", tmp_path / "killed")
    assert "was complete already" in store(call, root, tmp_path / "killed", flags).out
    assert store(call, root, tmp_path / "killed", f"{flags} --size 56").refused("was made with grid")


def test_a_dry_run_tells_size_and_time_and_writes_nothing(
    call: Call, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = store(call, root, tmp_path / "dry", "--dry-run").ok().out
    assert "16 images need 0.0 MB (3 x 3 tokens of 24 channels in int8, 0.3 KB an image); " in told
    assert " images/s, 0.0 minutes for 16 images; nothing was written" in told and not (tmp_path / "dry").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("", (), {"free": 4000}))
    full = store(call, root, tmp_path / "full")
    assert full.refused("make room, or store less (--channels, --size)") and not (tmp_path / "full").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--kd-distill-type logit", "--kd-distill-type logit: {} holds the features of tokens of whole images"),
        ("--kd-distill-type feature", "give token for it, or name the teacher itself"),
        ("--kd-view crop", "--kd-view crop: {} holds the features of tokens of whole images; leave the flag out"),
        ("--kd-size 42", "--kd-size: {} holds features of images of one size; leave it out, or store others"),
        ("--mixup 0.2", "--mixup, --cutmix and --compat: {} is of unmixed images; leave them out"),
        ("--cuda-graph --kd-temperature 2", "--kd-temperature"),
    ],
)
def test_flags_that_say_something_else_are_refused(
    call: Call, root: Path, features: Path, flags: str, told: str
) -> None:
    ended, run = train(call, root, "bad", f"--kd-model-name {features} {flags}")
    assert ended.refused(told.format(features)) and not run.exists(), ended.err


def test_archives_that_are_not_of_these_images_are_refused(
    call: Call, root: Path, features: Path, tmp_path: Path
) -> None:
    for name, change, told in (
        ("renamed", lambda d: (d / "train/blue/blue0.jpg").rename(d / "train/blue/new.jpg"), "1 of 16 images have no"),
        ("other", lambda d: [p.rename(p.with_name(f"n{p.name}")) for p in d.rglob("*.jpg")], "are of another data set"),
    ):
        data = shutil.copytree(root / "data", tmp_path / name / "data")
        change(data)
        ended, _ = train(call, tmp_path / name, "bad", f"--kd-model-name {features}")
        assert ended.refused(f"--kd-model-name {features}: ") and told in ended.err, ended.err
    ended, _ = train(call, tmp_path / "renamed", "skip", f"--kd-model-name {features} --bad-label skip")
    assert ended.code == 0 and "1 of 16 images have no features" in ended.out, ended.err


def test_images_without_classes_have_features_too(call: Call, root: Path, tmp_path: Path) -> None:
    images = shutil.copytree(root / "data/train", tmp_path / "flat/any/where").parents[1]
    for number, file in enumerate(sorted(images.rglob("*.jpg"))):
        file.rename(images / f"{number}.jpg")
    call("features", f"{images} {tmp_path}/f --checkpoint {root}/vit.pth.tar -j 0").ok()
    flags = f"{QUICK.replace('--num-classes 4', '')} --epochs 1 --kd-only --gp avg --kd-model-name {tmp_path}/f"
    ended = call("train", f"{images} {flags} --output {tmp_path} --experiment flat").ok()
    assert "loss 0." in ended.out or "loss 1." in ended.out


@pytest.mark.slow
def test_two_ranks_store_and_learn_what_one_does(call: Call, root: Path, features: Path) -> None:
    flags = f"--kd-model-name {features} --freeze-bn --lr 1e-3 --no-aug"
    train(call, root, "one", f"{flags} -b 8")[0].ok()
    shared = f"{root}/data {QUICK.replace('-b 8', '-b 4')} --epochs 2 --output {root} --experiment two {flags}"
    launch(2, shared)
    for before, after in zip(metrics(root / "one"), metrics(root / "two"), strict=True):
        names = [name for name in before if "loss" in name]
        assert len(names) == 4 and [after[n] for n in names] == pytest.approx([before[n] for n in names], rel=1e-3)
