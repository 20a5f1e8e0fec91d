"""`tlt show`: what is drawn is what the pipeline made, and mistakes are one line."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from tlt import geometry
from tlt.data.augment.plan import AugmentConfig, make_plan
from tlt.data.dataset import TrainDataset
from tlt.data.sources.folder import scan_folder
from tlt.labels.features import FeatureInfo, FeatureWriter
from tlt.labels.label_info import LabelInfo
from tlt.labels.store import open_labels
from tlt.targets import make_targets
from tlt.tools import show
from tlt.tools.cli import main, parser
from tlt.tools.drawing import Cells, Example, class_colours, draw_page, read_examples
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
    (result,) = [artist for artist in axes.get_children() if artist.get_label() == label]
    return result


def test_a_page_shows_what_the_pipeline_made(data):
    folder = scan_folder(data[0])
    dataset = TrainDataset(folder, CONFIG, 5, open_labels(data[1], folder.paths))
    batch = load_batch(dataset, [0, 1, 2], epoch=2)
    targets = make_targets(batch.labels, batch.affine, batch.visible, batch.classes, GRID, 3)
    examples = read_examples(dataset, batch, targets, CONFIG.mean, STD)
    figure = draw_page(examples, NAMES, "")
    plan = make_plan(CONFIG, 5, 2, [0, 1, 2], [100, 75, 32], [75, 100, 32])
    corners = geometry.apply(plan.pixel_affine, [[0, 0], [96, 0], [96, 64], [0, 64]])
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
        cells, weight = _one(axes, "cells"), example.tokens.weight.ravel()
        assert cells.get_extent() == [0, 96, 64, 0] and axes.get_ylim() == (64, 0)  # row 0 is above
        for colour, row, share in zip(cells.get_array().reshape(-1, 4), target, weight, strict=True):
            assert tuple(colour[:3]) == pytest.approx(shown[NAMES[int(row.argmax())].replace("美", "\\u7f8e")])
            assert colour[3] == pytest.approx(0.6 * float(row.max()) * share, abs=1e-6)
        hatched = [path for c in axes.collections if c.get_label() == "blank" for path in c.get_paths()]
        squares = {tuple(corners.min(0)) for path in hatched for corners in path.vertices.reshape(-1, 5, 2)[:, :4]}
        side = 96 / GRID[1]
        assert squares == {(c * side, r * side) for r, c in np.argwhere(example.tokens.weight == 0)}
        blank += len(squares)
    assert blank
    # The label map lies on its area, with the softmax over all classes.
    cells = _one(_drawn(figure, "label")[1], "cells")
    assert cells.get_extent() == [0, 75, 100, 0]
    values, ids = torch.load(data[1] / "c" / "c.v1.pt").double()
    dense = torch.zeros(3, 5, 7, dtype=torch.float64).scatter(0, ids.long(), values)
    actual = np.asarray(cells.get_array())[..., 3]
    assert actual == pytest.approx(0.6 * dense.softmax(0).max(0).values.numpy(), abs=1e-6)
    numbers = {text.get_text() for text in draw_page(examples, [], "").legends[0].get_texts()}
    assert numbers == {"class 0", "class 1", "class 2"}  # where no names are known


def linear(colour: str) -> np.ndarray:
    """(3,) linear light of an sRGB colour such as #ff8000."""
    share = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


# What the colour is to eyes without M cones (deutan) and without L cones (protan): Machado, Oliveira, Fernandes 2009.
EYES = {
    "normal": np.eye(3),
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}
TO_LMS = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
TO_LAB = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]  # OKLab


@pytest.mark.parametrize("eyes", EYES)
def test_twelve_classes_can_be_told_apart_by_every_kind_of_eye(eyes):
    colours = [*class_colours(range(12)).values(), class_colours([0, 12])[12]]  # and grey
    seen = [np.array(EYES[eyes]) @ linear(colour) for colour in colours]
    lab = [np.array(TO_LAB) @ np.cbrt(np.array(TO_LMS) @ light.clip(0, 1)) for light in seen]
    assert min(np.linalg.norm(one - other) for one, other in combinations(lab, 2)) > 0.07  # black to white: 1


def test_class_has_one_colour_or_is_grey_and_named():
    colours = class_colours(range(16))
    assert class_colours([11, 3, 7]) == {i: colours[i] for i in (11, 3, 7)}
    assert len({colours[i] for i in range(12)}) == 12 and len({colours[i] for i in range(12, 16)}) == 1
    assert class_colours([15, 3])[15] == colours[3]  # alone, or the more frequent one, it has its own
    pixels, ids = np.zeros((32, 32, 3), np.uint8), np.arange(16).reshape(4, 4)
    cells = Cells(ids, np.ones((4, 4)), np.ones((4, 4)))
    page = draw_page([Example("a", pixels, (32, 32), np.zeros((4, 2)), pixels, tokens=cells)], [], "")
    texts = [text.get_text() for text in page.legends[0].get_texts()]
    assert {text.get_text() for text in _drawn(page, "tokens")[0].texts} >= {f"class {i}" for i in range(12, 16)}
    assert texts == [f"class {i}" for i in range(12)]
    assert page.legends[0].get_title().get_text() == "grey: class 12, class 13, class 14, class 15"


def test_mix_is_shown_and_the_legend_in_order_of_classes():
    pixels, mixed = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 7, np.uint8)
    cells = Cells(np.array([[5, 5], [5, 2]]), np.ones((2, 2)), np.ones((2, 2)))
    example = Example("a", pixels, (32, 32), np.zeros((4, 2)), pixels, tokens=cells, mixed=mixed)
    for box in (None, (8.0, 0.0, 32.0, 16.0)):
        page = draw_page([replace(example, mix_box=box)], [], "")
        assert [text.get_text() for text in page.legends[0].get_texts()] == ["class 2", "class 5"]
        (axes,) = _drawn(page, "mixed")
        assert (np.asarray(axes.get_images()[0].get_array()) == 7).all()
        texts = [text.get_text() for text in _drawn(page, "key")[0].get_legend().get_texts()]
        assert any("MixToken" in text for text in texts) == (box is not None)
    assert _one(axes, "box").get_bbox().extents.tolist() == list(box)


@pytest.mark.parametrize(
    ("parts", "count", "features"),
    [((), 1, False), (("tokens",), 1, False), (("label", "tokens"), 3, False), (("label", "tokens"), 1, True)],
)
def test_text_is_within_the_page_and_about_what_is_drawn(parts, count, features):
    pixels, window = np.zeros((40, 30, 3), np.uint8), np.array([[0, 0], [60, 0], [60, 40], [0, 40]])
    cells = Cells(np.arange(30).reshape(5, 6) // 2, np.ones((5, 6)), np.ones((5, 6)))
    if features:
        cells = Cells.of_features(np.zeros((5, 6, 3)), np.ones((5, 6)))
    target = {} if features else {"target": (1, 0.87)}
    more = dict.fromkeys(parts, cells) | (target | {"area": (0, 0, 60, 40)} if parts else {})
    examples = [Example("a name that is long/" * 3, pixels, (60, 40), window, pixels, **more)] * count
    names = [f"{letter} class with a long name" for letter in "abcdefghijklmno"]
    page = draw_page(examples, names, "the first images of update 0", "smoothed probability of the class")
    page.draw_without_rendering()
    ticks = {text for axes in page.axes for axis in (axes.xaxis, axes.yaxis) for text in axis.findobj(Text)}
    texts, bounds = [text for text in page.findobj(Text) if text.get_text() and text not in ticks], page.bbox
    for text in texts:
        box = text.get_window_extent()
        inner = bounds if text.axes is None or text.get_text() not in names else text.axes.bbox
        assert inner.x0 - 1 <= box.x0 and box.x1 <= inner.x1 + 1 and bounds.y0 <= box.y0 and box.y1 <= bounds.y1, text
    words = " ".join(text.get_text() for text in texts)
    assert ("label" in words) == ("opacity" in words) == ("b class" in words) == (bool(parts) and not features)
    assert ("feature map" in words) == features
    headings = {"label": "label map", "tokens": "targets of the tokens"}
    headings = {"label": "stored features", "tokens": "what the tokens read"} if features else headings
    assert {"image", "augmented", *map(headings.get, parts)} <= {text.get_text() for text in texts}
    assert words.count("target: b class with a long name 0.87"[:16]) == count * bool(parts) * (not features)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--images nothing", "--images nothing names 0 images"),
        ("-n 3 --images a", "-n 3 has no effect with --images"),
        ("--seed -1", "--seed: '-1' is not a whole number of 0 or more"),
        ("--hflip nan", "--hflip nan: give 1 number, at least 0 and at most 1"),
        ("-o page.doc", "end the name in .png"),
        ("-o nowhere/page.png", "can't be written: No such file"),
        ("-o IMAGE", "exists already: remove it, or choose another name"),
        ("--no-such-flag a\x1bb", r"unrecognized arguments: --no-such-flag a\x1bb (see tlt --help)"),
        ("--grid 3", "--grid: expected 2 arguments (see tlt show --help)"),
    ],
)
def test_mistakes_are_one_line(data, flags, message, tmp_path, capsys):
    output = ["-o", str(tmp_path / "p.png")] if "-o" not in flags else []
    image = next(path for path in data[0].rglob("*.png"))
    before, args = image.read_bytes(), [each.replace("nowhere", str(tmp_path / "nowhere")) for each in flags.split()]
    args = [str(image) if each == "IMAGE" else each for each in args]
    assert main(["show", *map(str, data), *output, "--size", "32", "32", *args]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "p.png").exists() and image.read_bytes() == before


FOUR = np.array([[[250, 0, 0], [0, 250, 0]], [[0, 0, 250], [250, 250, 0]]], np.uint8)  # the quarters of an image


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Path]:
    """Images without a class, and features that tell the colours of their right three quarters; the last has none."""
    (tmp_path / "four").mkdir()
    for name in "abcd":
        Image.fromarray(FOUR.repeat(60, 0).repeat(80, 1)).save(tmp_path / "four" / f"{name}.png")
    paths = scan_folder(tmp_path / "four", classes=False).paths
    writer = FeatureWriter(tmp_path / "features", FeatureInfo((4, 6), 5, area=(0.25, 0, 1, 1)), paths[:3])
    colour = np.array([[0, 1], [2, 3]]).repeat(2, 0)[:, [0, 0, 1, 1, 1, 1]]  # of each cell: they are 1/8 wide
    for row in range(3):
        writer.write(row, torch.eye(5)[colour] + 3)
    writer.finish()
    return tmp_path / "four", tmp_path / "features"


def test_features_are_drawn_where_their_content_is(stored, tmp_path, monkeypatch, capsys):
    pages: list[Figure] = []
    monkeypatch.setattr(show, "save_figure", lambda page, path: pages.append(page))
    flags = "--size 64 64 --grid 8 8 --reprob 0 --scale 0.5 1 --aa none --hflip 0.5 --seed 3"
    assert main(["show", *map(str, stored), "-o", str(tmp_path / "p.png"), *flags.split()]) == 0
    assert "1 of 4 images have no features" in capsys.readouterr().out
    cells, tokens, images = (_drawn(pages[0], panel) for panel in ("label", "tokens", "augmented"))
    assert [_one(axes, "cells").get_extent() for axes in cells] == [[40, 160, 120, 0]] * 4
    drawn = np.asarray(_one(cells[0], "cells").get_array())[..., :3]
    of_quarter = drawn[[0, 0, 3, 3], [0, 5, 0, 5]]  # what stands for the features of each
    assert (drawn == of_quarter.reshape(2, 2, 3).repeat(2, 0)[:, [0, 0, 1, 1, 1, 1]]).all()
    assert min(np.abs(one - other).max() for one, other in combinations(of_quarter, 2)) > 0.5
    mirrored = []
    for number, (axes, image) in enumerate(zip(tokens, images, strict=True)):
        pixels = np.asarray(image.get_images()[0].get_array()).astype(int)
        mirrored.append(pixels[:, 0, 1].sum() > pixels[:, -1, 1].sum())  # the right quarters are the greener ones
        rgba = np.asarray(_one(axes, "cells").get_array())
        compared = set()
        for row, col in np.ndindex(8, 8):
            token = pixels[8 * row : 8 * row + 8, 8 * col : 8 * col + 8].reshape(-1, 3)
            quarter = np.abs(FOUR.reshape(4, 3).astype(int) - token[0]).sum(1).argmin()
            if np.ptp(token, axis=0).max() < 3 and rgba[row, col, 3] > 0.8:
                compared.add(quarter)
                assert np.abs(rgba[row, col, :3] - of_quarter).sum(1).argmin() == quarter
        assert len(compared) == (4 if number < 3 else 0)
    assert len(set(mirrored)) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--area full", "--area is for labels, and"),
        ("--uncovered uniform", "--uncovered is for labels, and"),
        ("--compat label-crop", "--compat is for labels, and"),
        ("--images d.png", "not one of these images has features in"),
    ],
)
def test_what_features_have_no_meaning_for_is_refused(stored, tmp_path, capsys, flags, message):
    assert main(["show", *map(str, stored), "-o", str(tmp_path / "p.png"), *flags.split()]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not (tmp_path / "p.png").exists()


def test_the_command_writes_a_page_and_nothing_else(data, tmp_path, capsys, recwarn):
    out = tmp_path / "out"
    out.mkdir()
    (data[1] / "c" / "c.v1.pt").unlink()  # an image without label is shown as such
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    assert capsys.readouterr().out.startswith("usage: tlt show DATA LABELS -o FILE [flags]\n")  # --images takes several
    images = ["--images", "d.v1.png", "c/c.v1.png"]
    assert main(["show", *map(str, data), "-o", str(out / "p.png"), "--size", "32", "48", *images]) == 0
    assert "2 images of 3" in capsys.readouterr().out
    LabelInfo(2, (5, 7), 3, class_names=["x", "y", "z"], transfer=True).write(data[1] / "labels.json")
    (extra := data[0] / "zz").mkdir()  # a folder whose number is none of the labels' classes
    Image.new("RGB", (32, 32)).save(extra / "z.png")
    assert main(["show", *map(str, data), "-o", str(tmp_path / "few.png"), "--size", "32", "32"]) == 0
    capsys.readouterr()
    assert [p.name for p in out.iterdir()] == ["p.png"]
    with Image.open(out / "p.png") as page:
        assert min(page.size) > 300
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_flags_mean_what_train_py_means():
    from volo.config.settings_train import TrainSettings

    shown, train = parser().parse_args(["show", "d", "l", "-o", "p.png"]), TrainSettings()
    for name in ("scale", "hflip", "reprob", "aa", "uncovered"):
        value = getattr(shown, name)
        assert (list(value) if name == "scale" else value) == train[name]
