"""The `tlt` command: help without torch, check on images whose labels are known."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from tlt.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
GRID = 8
PIXELS = 12  # per cell


@pytest.fixture
def scenes(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Return `make(centre, transposed, size)`: images with a textured disc somewhere, and label maps of them.

    Class 0 is the ground, classes 1 and 2 the discs; every scene has its own colours.
    """

    def make(
        centre: bool, transposed: bool, width: int = 144, height: int = 96, count: int = 40, mixed: bool = False
    ) -> tuple[Path, Path]:
        generator = np.random.default_rng(3)
        data, tree = tmp_path / "data", tmp_path / "tree"
        discs = []
        for number in range(count):
            name = f"c{1 + number % 2}"
            for folder in (data / name, tree / name):
                folder.mkdir(parents=True, exist_ok=True)
            image = Image.new("RGB", (width, height), tuple(generator.integers(60, 200, 3).tolist()))
            x, y, r = (
                generator.uniform(0.2, 0.8) * width,
                generator.uniform(0.2, 0.8) * height,
                generator.uniform(12, 24),
            )
            ImageDraw.Draw(image).ellipse((x - r, y - r, x + r, y + r), tuple(generator.integers(0, 256, 3).tolist()))
            noisy = np.array(image) + generator.normal(0, 12, (height, width, 3))
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(data / name / f"{number}.png")
            discs.append((name, number, (x, y, r)))
        for place, (name, number, _) in enumerate(discs):
            x, y, r = discs[(place + 1) % count if mixed else place][2]
            side = min(width, height)
            area = ((width - side) / 2, (height - side) / 2, side, side) if centre else (0, 0, width, height)
            xs, ys = (area[i] + (np.arange(GRID) + 0.5) / GRID * area[2 + i] for i in (0, 1))
            inside = (xs[None] - x) ** 2 + (ys[:, None] - y) ** 2 < r**2  # (rows, columns)
            inside = inside.T if transposed else inside
            ids = np.where(inside, int(name[1]) - 1, 2)
            both = np.stack([np.stack([np.full(ids.shape, 6.0), np.zeros(ids.shape)]), np.stack([ids, (ids + 1) % 3])])
            torch.save(torch.from_numpy(both).half(), tree / name / f"{number}.pt")
        return data, tree

    return make


def test_check_counts(scenes: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str]) -> None:
    data, tree = scenes(centre=False, transposed=False)
    assert main(["check", str(data), str(tree)]) == 0
    said = capsys.readouterr().out
    assert "40 images, 40 labels read, (k, h, w) = (2, 8, 8)" in said and "images without label: 0" in said
    first = torch.load(tree / "c1" / "0.pt")
    torch.save(first[..., :4], tree / "c1" / "0.pt")
    (tree / "c1" / "2.pt").unlink()
    (tree / "c1" / "4.pt").write_bytes(b"cut")
    torch.save(first, tree / "c1" / "old.pt")
    assert main(["check", str(data), str(tree)]) == 2
    said = capsys.readouterr().out
    for line in (
        "40 images, 38 labels read",
        "images without label: 1\n  c1/2.png",
        "labels without image: 1\n  c1/old.pt",
        "labels of another shape: 1\n  c1/0.png: (2, 8, 4)",
        "labels that can't be used: 1\n  c1/4.png: label",
    ):
        assert line in said


def test_check_measures_agreement(
    scenes: Callable[..., tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, tree = scenes(centre=False, transposed=False)
    tops = {path: torch.load(path)[1, 0] for path in tree.rglob("*.pt")}
    agreeing = sum(int((top == int(path.parent.name[1]) - 1).sum()) for path, top in tops.items())
    chance = sum(int((top == c).sum()) for top in tops.values() for c in (0, 1)) / 2
    cells = 40 * GRID * GRID
    expected = f"{100 * agreeing / cells:.2f} % of {cells} cells ({100 * chance / cells:.2f} % by chance)"
    assert main(["check", str(data), str(tree)]) == 0
    assert expected in capsys.readouterr().out
    out = tmp_path / "out.tlt"
    assert main(["pack", str(tree), str(out), "--images", str(data)]) == 0
    assert expected in capsys.readouterr().out
    assert main(["check", str(data), str(out)]) == 0
    assert expected in capsys.readouterr().out
    with open(out / "values.npy", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x07")
    assert main(["check", str(data), str(out)]) == 2
    said = capsys.readouterr().out
    assert "labels that can't be used: 1\n  c2/39.png: label of c2/39.png in" in said and "crc32 is wrong" in said


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["pack", "nowhere", "out"], ["unpack", "nowhere", "out"], ["check", "nowhere", "out"]):
        assert main(command) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("command", [[], ["pack"], ["unpack"], ["check"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    code = (
        f"import sys; sys.argv = [__file__ := '/usr/bin/tlt', *{command!r}, '--help']\n"
        "from tlt.tools.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'PIL'} & set(sys.modules), 'imported'\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0 and "usage: tlt" in ended.stdout, ended.stderr
