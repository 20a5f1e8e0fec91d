"""The `tlt` command: help without torch, check on images whose labels are known."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tlt.label_map import LabelMap
from tlt.labels.label_info import Agreement, LabelInfo
from tlt.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
GRID = 8


@pytest.fixture
def scenes(tmp_path: Path) -> tuple[Path, Path]:
    """Images of two classes, and label maps of three: class 0 or 1 within a box somewhere, class 2 around it."""
    generator = np.random.default_rng(3)
    for number in range(40):
        name = f"c{number % 2}"
        for folder in ("data", "tree"):
            (tmp_path / folder / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (36, 24)).save(tmp_path / "data" / name / f"{number}.png")
        ids = np.full((GRID, GRID), 2)
        row, col, side = generator.integers(0, 5, 3)
        ids[row : row + side + 1, col : col + side + 1] = generator.integers(0, 2)
        both = np.stack([np.stack([np.full(ids.shape, 6.0), np.zeros(ids.shape)]), np.stack([ids, (ids + 1) % 3])])
        torch.save(torch.from_numpy(both).half(), tmp_path / "tree" / name / f"{number}.pt")
    return tmp_path / "data", tmp_path / "tree"


def test_check_counts(scenes: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    data, tree = scenes
    (data / "c1" / "1.png").write_bytes(b"cut")  # no fault of a label: no byte of an image is read
    for area in ("full", "center"):
        LabelInfo(2, (GRID, GRID), 3, area).write(tree / "labels.json")
        assert main(["check", str(data), str(tree)]) == 0
        said = capsys.readouterr().out
        assert "40 images, 40 labels read, (k, h, w) = (2, 8, 8)" in said and "images without label: 0" in said
    assert main(["check", str(data), str(tree), "--num-classes", "0"]) == 2
    assert "--num-classes: '0' is not a whole number of 1 or more" in capsys.readouterr().err
    (tree / "labels.json").unlink()
    first = torch.load(tree / "c0" / "0.pt")
    torch.save(first[..., :4], tree / "c0" / "0.pt")
    (tree / "c0" / "2.pt").unlink()
    (tree / "c0" / "4.pt").write_bytes(b"cut")
    torch.save(first, tree / "c0" / "old.pt")
    assert main(["check", str(data), str(tree)]) == 2
    said = capsys.readouterr().out
    for line in (
        "40 images, 38 labels read",
        "images without label: 1\n  c0/2.png",
        "labels without image: 1\n  c0/old.pt",
        "labels of another shape: 1\n  c0/0.png: (2, 8, 4)",
        "labels that can't be used: 1\n  c0/4.png: label",
    ):
        assert line in said


def test_check_measures_agreement(scenes: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    data, tree = scenes
    tops = {path: torch.load(path)[1, 0] for path in tree.rglob("*.pt")}
    agreeing = sum(int((top == int(path.parent.name[1])).sum()) for path, top in tops.items())
    chance = sum(int((top == c).sum()) for top in tops.values() for c in (0, 1)) / 2
    cells = 40 * GRID * GRID
    expected = f"{100 * agreeing / cells:.2f} % of {cells} cells ({100 * chance / cells:.2f} % by chance)"
    assert main(["check", str(data), str(tree)]) == 0
    assert expected in capsys.readouterr().out
    out, whole = data.with_name("out.tlt"), data.with_name("whole")
    whole.mkdir()
    (whole / "other").symlink_to(data)
    assert main(["check", str(whole), str(tree), "--split", "other"]) == 0
    assert expected in capsys.readouterr().out
    assert main(["pack", str(tree), str(out), "--images", str(whole), "--split", "other"]) == 0
    assert expected in capsys.readouterr().out
    assert main(["check", str(data), str(out)]) == 0
    assert expected in capsys.readouterr().out
    with open(out / "values.npy", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x07")
    assert main(["check", str(data), str(out)]) == 2
    said = capsys.readouterr().out
    assert "labels that can't be used: 1\n  c1/39.png: label of c1/39.png in" in said and "crc32 is wrong" in said


def test_an_image_is_named_by_the_mean_of_its_cells_shares() -> None:
    """One cell is sure of class 0; each class of the two others has a third of a cell."""
    values = np.array([[[9, 0, 0]], [[0, 0, 0]], [[0, 0, 0]]], np.float16)  # (k, h, w)
    ids = np.array([[[0, 1, 1]], [[2, 2, 2]], [[3, 4, 5]]], np.int32)
    agreement = Agreement()
    for folder in (0, 0, 1):
        agreement.add(folder, LabelMap(values, ids))
    assert agreement.summary()["images_naming_their_class"] == 2 / 3


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; __file__ = '/usr/bin/tlt'\n"  # the program
        "from tlt.tools.cli import main\n"
        "for command in ([], ['pack'], ['unpack'], ['pack-images'], ['check'], ['show']):\n"
        "  try: main([*command, '--help'])\n"
        "  except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'PIL'} & set(sys.modules), 'imported'\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0 and "usage: tlt" in ended.stdout, ended.stderr
