"""`tlt show`: what is drawn is what the pipeline made, and mistakes are one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from tlt import geometry
from tlt.data.augment.plan import AugmentConfig, make_plan
from tlt.data.dataset import TrainDataset
from tlt.data.sources.folder import scan_folder
from tlt.labels.store import open_labels
from tlt.targets import make_targets
from tlt.tools.cli import main, parser
from tlt.tools.drawing import draw_page, read_examples
from tlt.tools.show import load_batch

CONFIG = AugmentConfig(size=(64, 96), scale=(0.3, 0.8), reprob=0.0)
GRID, STD = (4, 6), (0.229, 0.224, 0.225)
NAMES = ["bäume 美 $x$", "c", "d.lass"]  # a sign that the font lacks, and no formula


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, Path]:
    """Three images of 100 x 75, 75 x 100 and 32 x 32 with label maps of 2 x 5 x 7 that differ from cell to cell."""
    rng = np.random.default_rng(0)
    for name, (width, height) in zip(NAMES, [(100, 75), (75, 100), (32, 32)], strict=True):
        for folder in ("data", "labels"):
            (tmp_path / folder / name).mkdir(parents=True)
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / name / f"{name[0]}.v1.png")
        ids = np.argsort(rng.random((3, 5, 7)), axis=0)[:2]
        entry = np.stack([np.sort(rng.uniform(0, 6, ids.shape), axis=0)[::-1], ids])
        torch.save(torch.from_numpy(entry).half(), tmp_path / "labels" / name / f"{name[0]}.v1.pt")
    return tmp_path / "data", tmp_path / "labels"


def _drawn(figure: Figure, panel: str) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_gid() == panel]


def _one(axes: Axes, label: str) -> Artist:
    (found,) = [artist for artist in axes.get_children() if artist.get_label() == label]
    return found


def test_a_page_shows_what_the_pipeline_made(data: tuple[Path, Path]) -> None:
    folder = scan_folder(data[0])
    dataset = TrainDataset(folder, CONFIG, 5, open_labels(data[1], folder.paths))
    batch = load_batch(dataset, [0, 1, 2], epoch=2)
    targets = make_targets(batch.labels, batch.affine, batch.visible, batch.classes, GRID, 3)
    assert targets.tokens is not None
    examples = read_examples(dataset, batch, targets, CONFIG.mean, STD)
    figure = draw_page(examples, NAMES, "")
    plan = make_plan(CONFIG, 5, 2, [0, 1, 2], [100, 75, 32], [75, 100, 32])
    corners = geometry.apply(plan.affine, [[0, 0], [96, 0], [96, 64], [0, 64]])
    assert not np.allclose(plan.warp, geometry.identity(3))  # something to see
    for axes, image in zip(_drawn(figure, "augmented"), batch.images, strict=True):
        drawn = np.asarray(axes.get_images()[0].get_array())
        assert (drawn / 255 - CONFIG.mean) / STD == pytest.approx(image.permute(1, 2, 0).numpy(), abs=0.01)
    for axes, expected in zip(_drawn(figure, "source"), corners, strict=True):
        assert _one(axes, "window").get_xy()[:4] == pytest.approx(expected, abs=1e-3)
        assert _one(axes, "window").get_transform().contains_branch(axes.transData)
    # Each token has the colour of its target's first class, as strong as its probability.
    legend = zip(figure.legends[0].get_texts(), figure.legends[0].get_patches(), strict=True)
    shown, blank = {text.get_text(): patch.get_facecolor()[:3] for text, patch in legend}, 0
    for axes, target, example in zip(_drawn(figure, "tokens"), targets.tokens.dense(3), examples, strict=True):
        assert example.tokens is not None
        cells, weight = _one(axes, "cells"), example.tokens.weight.ravel()
        assert cells.get_extent() == [0, 96, 64, 0] and axes.get_ylim() == (64, 0)  # row 0 is above
        for colour, row, share in zip(cells.get_array().reshape(-1, 4), target, weight, strict=True):
            assert tuple(colour[:3]) == pytest.approx(shown[NAMES[int(row.argmax())].replace("美", "\\u7f8e")])
            assert colour[3] == pytest.approx(0.6 * float(row.max()) * share, abs=1e-6)
        hatched = [c for c in axes.collections if c.get_label() == "blank"]
        blank += sum(len(c.get_paths()) for c in hatched)
        assert sum(len(c.get_paths()) for c in hatched) == (weight == 0).sum()
    assert blank
    # The label map lies on its area, with the softmax over all classes.
    cells = _one(_drawn(figure, "label")[1], "cells")
    assert cells.get_extent() == [0, 75, 100, 0]
    values, ids = torch.load(data[1] / "c" / "c.v1.pt").double()
    dense = torch.zeros(3, 5, 7, dtype=torch.float64).scatter(0, ids.long(), values)
    found = np.asarray(cells.get_array())[..., 3]
    assert found == pytest.approx(0.6 * dense.softmax(0).max(0).values.numpy(), abs=1e-6)
    numbers = {text.get_text() for text in draw_page(examples, [], "").legends[0].get_texts()}
    assert numbers == {"class 0", "class 1", "class 2"}  # where no names are known


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--images nothing", "--images nothing names 0 images"),
        ("-n 3 --images a", "-n 3 has no effect with --images"),
        ("--hflip nan", "--hflip nan: give 1 number, at least 0 and at most 1"),
        ("-o page.doc", "end the name in .png"),
        ("-o nowhere/page.png", "can't be written: No such file"),
        ("-o IMAGE", "exists already: remove it, or choose another name"),
    ],
)
def test_mistakes_are_one_line(
    data: tuple[Path, Path], flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["-o", str(tmp_path / "p.png")] if "-o" not in flags else []
    image = next(path for path in data[0].rglob("*.png"))
    before, args = image.read_bytes(), [each.replace("nowhere", str(tmp_path / "nowhere")) for each in flags.split()]
    args = [str(image) if each == "IMAGE" else each for each in args]
    assert main(["show", *map(str, data), *output, "--size", "32", "32", *args]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "p.png").exists() and image.read_bytes() == before


def test_the_command_writes_a_page_and_nothing_else(
    data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (data[1] / "c" / "c.v1.pt").unlink()  # an image without label is shown as such
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    assert capsys.readouterr().out.startswith("usage: tlt show DATA LABELS -o FILE [flags]\n")  # --images takes several
    images = ["--images", "d.v1.png", "c/c.v1.png"]
    assert main(["show", *map(str, data), "-o", str(out / "p.png"), "--size", "32", "48", *images]) == 0
    assert "2 images of 3" in capsys.readouterr().out
    assert [p.name for p in out.iterdir()] == ["p.png"]
    with Image.open(out / "p.png") as page:
        assert min(page.size) > 300
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_flags_mean_what_train_py_means() -> None:
    from volo.config.args import TRAIN

    shown, train = parser().parse_args(["show", "d", "l", "-o", "p.png"]), TRAIN.parser().defaults()
    assert (list(shown.scale), shown.hflip, shown.reprob) == (train["scale"], train["hflip"], train["reprob"])
    assert shown.aa == train["aa"]
    assert shown.uncovered == train["uncovered"]
