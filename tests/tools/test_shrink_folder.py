"""`tlt shrink`: names, classes and labels stay together, whatever happens on the way."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.commands.conftest import Running, storage
from tests.commands.conftest import nothing_left_running as nothing_left_running  # a fixture
from tests.conftest import wait_until
from tlt.data.sources.folder import scan_folder
from tlt.errors import UserError
from tlt.labels.label_files import find_labels, label_names, tree_listing
from tlt.tools.cli import main
from tlt.tools.shrink import shrink
from tlt.tools.shrink_folder import ShrinkSettings, jpeg_names, shrink_folder

pytest.importorskip("pyvips")


def image(path: Path, width: int = 200, height: int = 150, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for number, name in enumerate(["ant/a1.JPEG", "ant/a2.png", "bee/Bär.v2.tiff", "bee/b.webp", "bee/b.jpg"]):
        image(tmp_path / "data/train" / name, seed=number)
    image(tmp_path / "data/val/bee/small.png", 60, 40)
    image(tmp_path / "data/val/ant/high.png", 60, 400)
    (tmp_path / "data/train/cat").mkdir()
    return tmp_path / "data"


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_same_folder_with_smaller_images(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["shrink", str(data), str(out), "--max-side", "100", "--quality", "80", "--workers", "1"]) == 0
    made = files(out)
    record = json.loads(made.pop("shrink.json"))
    assert record["complete"] and not record["broken"]
    assert sorted(made) == [
        *("train/ant/a1.JPEG", "train/ant/a2.jpg", "train/bee/Bär.v2.jpg", "train/bee/b.jpg", "train/bee/b.webp.jpg"),
        *("val/ant/high.jpg", "val/bee/small.png"),
    ]
    assert made["val/bee/small.png"] == (data / "val/bee/small.png").read_bytes()
    assert made["train/ant/a2.jpg"] == shrink(data / "train/ant/a2.png", 100, 80)
    sizes = {name: Image.open(out / name).size for name in made}
    assert sizes.pop("val/ant/high.jpg") == (15, 100) and sizes.pop("val/bee/small.png") == (60, 40)
    assert set(sizes.values()) == {(100, 75)}
    before, after = scan_folder(data / "train"), scan_folder(out / "train")
    assert after.class_names == before.class_names == ["ant", "bee", "cat"]
    assert after.classes.tolist() == before.classes.tolist()
    said = capsys.readouterr().out
    assert "train: 5 images: 5 made smaller; " in said and "val: 2 images: 1 made smaller, 1 small enough" in said


def test_tiles(data: Path, tmp_path: Path) -> None:
    shrink_folder(str(data), str(tmp_path / "out"), ShrinkSettings(tile=100, overlap=10), split="train", workers=1)
    made = files(tmp_path / "out")
    starts = [f"_{y}_{x}.jpg" for y in (0, 50) for x in (0, 90, 100)]
    stems = ["ant/a1", "ant/a2", "bee/Bär.v2", "bee/b", "bee/b.webp"]
    assert set(made) - {"shrink.json"} == {f"train/{stem}{start}" for stem in stems for start in starts}
    whole, tile = Image.open(data / "train/ant/a2.png"), Image.open(tmp_path / "out/train/ant/a2_50_90.jpg")
    off = np.asarray(tile).astype(int) - np.asarray(whole.crop((90, 50, 190, 150)))
    assert abs(off).max() < 8


def test_label_files_are_found_for_the_new_names(tmp_path: Path) -> None:
    names = ["a/x.png", "a/x.tiff", "a/y.png", "a/y.jpg", "a/z.b.png", "a/z.jpeg", "b/x.png"]
    labels = label_names(names)
    for label in labels:
        (tmp_path / label).parent.mkdir(exist_ok=True)
        (tmp_path / label).touch()
    new = jpeg_names(names)
    assert len(set(new)) == len(names)
    found = find_labels(tree_listing(str(tmp_path)), str(tmp_path), new)
    assert not found.missing
    usual = [os.path.splitext(name)[0] + ".pt" for name in new]
    assert [found.other_name.get(row, usual[row]) for row in range(len(new))] == labels


def test_without_splits(data: Path, tmp_path: Path) -> None:
    shrink_folder(str(data / "train"), str(tmp_path / "out"), ShrinkSettings(max_side=50), workers=1)
    assert "ant/a2.jpg" in files(tmp_path / "out")


def test_broken_images_are_left_out_and_listed(data: Path, tmp_path: Path) -> None:
    bad = data / "train/ant/bad.png"
    bad.write_bytes((data / "train/ant/a2.png").read_bytes()[:-900])
    (data / "train/bee/empty.jpg").touch()
    for name, settings in (("small", ShrinkSettings(max_side=100)), ("tiles", ShrinkSettings(tile=60))):
        lines = shrink_folder(str(data), str(tmp_path / name), settings, workers=1)
        assert any(line.startswith(f"left out {bad}: ") for line in lines)
        assert f"left out {data}/train/bee/empty.jpg: empty file" in lines
        broken = json.loads((tmp_path / name / "shrink.json").read_text())["broken"]
        assert sorted(broken) == [str(bad), f"{data}/train/bee/empty.jpg"]
        made = files(tmp_path / name)
        assert not any("bad" in path or "empty" in path for path in made)  # nor tiles of its upper part
    shutil.copy(data / "train/ant/a2.png", bad)
    shrink_folder(str(data), str(tmp_path / "small"), ShrinkSettings(max_side=100), workers=1)
    assert "train/ant/bad.jpg" in files(tmp_path / "small")


def test_nothing_can_be_read(data: Path, tmp_path: Path) -> None:
    for path in (data / "val").rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"no image in .*val can be read: .*high.png: no image format"):
        shrink_folder(str(data), str(tmp_path / "out"), ShrinkSettings(max_side=100), workers=1)


@pytest.mark.parametrize("settings", [ShrinkSettings(max_side=100), ShrinkSettings(tile=60, overlap=5)])
def test_a_stopped_command_goes_on(
    data: Path, tmp_path: Path, settings: ShrinkSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_folder(str(data), str(tmp_path / "whole"), settings, workers=1)
    replace, left = os.replace, [4]

    def full_disk(source: str, target: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        with pytest.raises(UserError, match=r"can't be written \(No space left on device\)"):
            shrink_folder(str(data), str(tmp_path / "out"), settings, workers=1)
    begun = files(tmp_path / "out")
    assert len(begun) == 3 and not json.loads(begun.pop("shrink.json"))["complete"]
    times = {name: os.stat(tmp_path / "out" / name).st_mtime_ns for name in begun}
    lines = shrink_folder(str(data), str(tmp_path / "out"), settings, workers=1)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    if settings.max_side:
        assert "2 there already" in lines[-2]
        assert times == {name: os.stat(tmp_path / "out" / name).st_mtime_ns for name in begun}


@pytest.mark.slow
def test_killed_workers_leave_nothing_half_done(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    first = image(data / "train/class0/0.png", 1500, 1100)
    for number in range(1, 24):
        path = data / f"train/class{number % 3}/{number}.png"
        path.parent.mkdir(exist_ok=True)
        os.link(first, path)
    words = f"shrink {data} {out} --max-side 1200 --workers 2"
    # Two that the workers wait for for ever.
    late = ("class1/1.png", "class2/2.png")
    hangs = f"while os.getpid() != os.getsid(0) and str(path).endswith({late}): time.sleep(0.05)"
    command = Running([sys.executable, "-m", "tlt", *words.split()], **storage(tmp_path, hangs))
    wait_until(lambda: [*out.glob("train/*/*.jpg")], lambda: command.output)
    assert command.end(signal.SIGKILL) == -signal.SIGKILL, command.output
    wait_until(lambda: unlocked(out))  # workers share the command's lock
    assert len(list(out.glob("train/*/*.jpg"))) < 24
    shrink_folder(str(data), str(out), ShrinkSettings(max_side=1200), workers=1)
    made = files(out)
    assert len(made) == 25 and not any(".tmp" in name for name in made)
    assert set(made.values()) == {shrink(first, 1200), made["shrink.json"]}


def unlocked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def refused(data: Path, out: Path, settings: ShrinkSettings | None = None) -> str:
    with pytest.raises(UserError) as caught:
        shrink_folder(str(data), str(out), settings or ShrinkSettings(max_side=100), workers=1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_other_settings_or_another_folder_are_refused(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shrink_folder(str(data), str(out), ShrinkSettings(max_side=100), workers=1)
    for settings in (ShrinkSettings(max_side=90), ShrinkSettings(tile=100), ShrinkSettings(max_side=100, quality=91)):
        assert "was begun with --max-side 100 --quality 90: give the same" in refused(data, out, settings)
    (out / "shrink.json").write_text("{")
    assert "shrink.json can't be read" in refused(data, out)
    (out / "shrink.json").unlink()
    assert "is not empty, and not made by" in refused(data, out)
    assert "is in the folder of the images" in refused(data, data)
    assert "is in the folder of the images" in refused(data, data / "train" / "small")
    assert "is in the folder of the images" in refused(data / "train", data / "train" / "small")
    (tmp_path / "file").touch()
    assert "can't be made" in refused(data, tmp_path / "file")
    assert files(out).keys() - {"shrink.json"} == files(out).keys()


def test_two_commands_at_a_time_are_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "is being written by another" in refused(data, tmp_path / "out")
    os.close(descriptor)
    shrink_folder(str(data), str(tmp_path / "out"), ShrinkSettings(max_side=100), workers=1)


def test_names_that_would_meet_are_refused(data: Path, tmp_path: Path) -> None:
    image(data / "train/ant/a1_0_5.png")
    assert "ant/a1_0_5.png has the name that another" in refused(data, tmp_path / "out", ShrinkSettings(tile=100))
    image(data / "train/bee/b.webp.jpg")
    assert "bee/b.webp" in refused(data, tmp_path / "small")


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--max-side", "0"], [], ["--max-side", "9", "--tile", "9"], ["--max-side", "90000"], ["--tile", "x"]),
        *(
            ["--tile", "50", "--overlap", "50"],
            ["--max-side", "50", "--overlap", "5"],
            ["--tile", "9", "--quality", "101"],
        ),
    ],
)
def test_bad_arguments(arguments: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["shrink", str(data), str(tmp_path / "out"), *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2 and "--" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_memory_is_limited(data: Path, tmp_path: Path) -> None:
    lines = shrink_folder(str(data), str(tmp_path / "out"), ShrinkSettings(max_side=100), workers=1, memory=100_000)
    assert [line for line in lines if "b.webp: WEBP of 200 x 150 pixels (RGB) can't be streamed" in line]
    assert "4 made smaller, 1 left out" in " ".join(lines)


def test_interrupted_write_is_removed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", no_sync)
    assert "(Input/output error)" in refused(data, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
