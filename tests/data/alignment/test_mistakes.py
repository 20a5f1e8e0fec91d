"""What the alignment tests measure grows as soon as the label follows another geometry than the image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.alignment.oracle import GRID, PIXEL_LIMIT, PIXELS, Scene, check, measure
from tests.data.alignment.position_code import Size, grid_points
from tests.data.alignment.position_data import GeometryOnly
from tests.data.alignment.test_positions import geometry_only
from tlt import geometry
from tlt.data.batch import Batch
from tlt.upstream.rows import ROWS

EVERYWHERE = (-9.0, -9.0, 9.0, 9.0)


def with_affine(batch: Batch, affine: np.ndarray) -> Batch:
    visible = torch.tensor([EVERYWHERE] * batch.size)
    return replace(batch, affine=torch.from_numpy(affine).float(), visible=visible)


def window(batch: Batch) -> tuple[np.ndarray, ...]:
    """x, y, w, h of the crop in timm's order, as shares."""
    x0, y0, x1, y1 = batch.visible.double().T.numpy()
    return x0, y0, x1 - x0, y1 - y0


def shift(pixels: float) -> Callable[[Batch], Batch]:
    """The label is read beside where the image is."""

    def shifted(batch: Batch) -> Batch:
        move = geometry.translate(pixels / PIXELS[1], 0.0)
        return with_affine(batch, geometry.compose(move, batch.affine.double().numpy()))

    return shifted


def no_hflip(batch: Batch) -> Batch:
    mirror = geometry.hflip(np.ones(batch.size), 1)
    return with_affine(batch, geometry.compose(mirror, batch.affine.double().numpy()))


def no_vflip(batch: Batch) -> Batch:
    mirror = geometry.vflip(np.ones(batch.size), 1)
    return with_affine(batch, geometry.compose(mirror, batch.affine.double().numpy()))


def no_operation(batch: Batch) -> Batch:
    return with_affine(batch, geometry.crop(*window(batch), 1, 1))


def other_sign(batch: Batch) -> Batch:
    """The operation undone: PIL's sign turned around."""
    plain = geometry.crop(*window(batch), 1, 1)
    operation = geometry.compose(batch.affine.double().numpy(), geometry.invert(plain))
    return with_affine(batch, geometry.compose(geometry.invert(operation), plain))


def transposed_crop(batch: Batch) -> Batch:
    x, y, w, h = window(batch)
    return with_affine(batch, geometry.crop(y, x, h, w, 1, 1))


def one_scale(batch: Batch) -> Batch:
    """Both axes of the map are scaled by its width."""
    assert batch.labels is not None
    affine = batch.affine.double().numpy()
    affine[:, 1] *= batch.labels.values.shape[3] / batch.labels.values.shape[2]
    return with_affine(batch, affine)


def transposed_map(batch: Batch) -> Batch:
    assert batch.labels is not None
    labels = batch.labels
    turned = replace(labels, values=labels.values.mT.contiguous(), ids=labels.ids.mT.contiguous())
    return replace(batch, labels=turned)


def area_ignored(batch: Batch) -> Batch:
    assert batch.labels is not None
    full = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).expand(batch.size, 4)
    return replace(batch, labels=replace(batch.labels, area=full))


def half_a_cell(batch: Batch) -> Batch:
    assert batch.labels is not None
    return replace(batch, labels=replace(batch.labels, area=batch.labels.area + 0.5 / 18))


# case, size of the maps, area, order, mistake, pixels that it makes at least
MISTAKES: dict[str, tuple[str, Size, str, str, Callable[[Batch], Batch], float]] = {
    "half a pixel": ("crop", (18, 18), "full", "timm", shift(0.5), 0.45),
    "half a pixel, published order": ("turns", (18, 18), "full", "published", shift(0.5), 0.45),
    "a tenth of a pixel": ("turns", (18, 18), "full", "timm", shift(0.1), 0.08),
    "missing flip": ("hflip", (18, 18), "full", "timm", no_hflip, 20),
    "missing vertical flip": ("vflip", (10, 20), "full", "timm", no_vflip, 20),
    "ignored rotation": ("Rotate", (18, 18), "full", "timm", no_operation, 5),
    "ignored shear": ("ShearX", (18, 18), "full", "timm", no_operation, 5),
    "ignored shift": ("TranslateYRel", (18, 18), "full", "timm", no_operation, 20),
    "sign of rotation": ("Rotate", (18, 18), "full", "timm", other_sign, 10),
    "sign of shear": ("ShearY", (18, 18), "center", "timm", other_sign, 10),
    "transposed crop": ("crop", (18, 18), "full", "timm", transposed_crop, 10),
    "one scale for both axes": ("crop", (10, 20), "full", "timm", one_scale, 20),
    "transposed map": ("crop", (18, 18), "full", "timm", transposed_map, 10),
    "centre square taken for all": ("crop", (18, 18), "center", "timm", area_ignored, 2),
    "half a cell": ("crop", (18, 18), "full", "timm", half_a_cell, 2),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_are_seen(scene: Scene, name: str) -> None:
    case, cells, area, order, mistake, least = MISTAKES[name]
    config = geometry_only(case, aug_order=order)
    right = measure(scene, config, cells, area)
    wrong = measure(scene, config, cells, area, mistake=mistake)
    slack = 0.03 if case.startswith("Translate") else 0.0
    check(right, slack)
    assert wrong.typical() > least and wrong.pixels() > PIXEL_LIMIT
    with pytest.raises(AssertionError):
        check(wrong, slack)


# case, size of the maps, area, rows of --compat, pixels that it makes at least
PUBLISHED: dict[str, tuple[str, Size, str, tuple[str, ...], float]] = {
    "label-crop": ("crop", (18, 18), "full", ("label-crop",), 10),
    "label-scale": ("crop", (10, 20), "full", ("label-scale",), 20),
    "label-area": ("crop", (18, 18), "center", ("label-area",), 2),
    "label-affine": ("Rotate", (18, 18), "full", ("label-affine",), 1),
    "label-affine, absolute shift": ("TranslateX", (18, 18), "full", ("label-affine",), 10),
    "upstream": ("turns", (18, 18), "center", tuple(ROWS), 10),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_behaviour_is_seen(scene: Scene, name: str) -> None:
    case, cells, area, rows, least = PUBLISHED[name]
    measured = measure(scene, geometry_only(case, aug_order="published"), cells, area, rows=rows)
    assert measured.typical() > least


def window_overlap(root: Path, size: Size, count: int, rows: tuple[str, ...]) -> float:
    """The mean, over random resized crops, of the intersection over union of the part of the image that is shown and
    the part that the labels of the tokens describe."""
    config = GeometryOnly((56, 56), interpolation="bilinear")
    found = measure(Scene.write(root, [size], count, 1), config, (10, 10), rows=rows).found
    centres = grid_points(GRID)
    ones = torch.ones(len(centres), 1, dtype=centres.dtype)
    named = found.shown.places(centres) + found.ramp_error
    fit = torch.linalg.lstsq(torch.cat([centres, ones], 1).expand(len(named), -1, -1), named).solution.mT  # (B, 2, 3)
    boxes = [
        torch.cat([affine[:, :, 2], affine[:, :, 2] + affine[:, :, :2].diagonal(dim1=1, dim2=2)], 1)  # x0, y0, x1, y1
        for affine in (found.shown.affine, fit)
    ]
    low, high = torch.maximum(*boxes)[:, :2], torch.minimum(*boxes)[:, 2:]
    common = (high - low).clamp(min=0).prod(1)
    return float((common / (sum((box[:, 2:] - box[:, :2]).prod(1) for box in boxes) - common)).mean())


@pytest.mark.parametrize(("size", "overlap"), [((125, 94), 0.47), ((112, 112), 0.54)], ids=["4:3", "square"])
def test_published_windows_overlap_by_half(tmp_path: Path, size: Size, overlap: float) -> None:
    """The part of the image that is shown and the part of the map that its label is of: intersection over union."""
    assert window_overlap(tmp_path / "ours", size, 50, ()) > 0.99
    assert window_overlap(tmp_path / "published", size, 1200, ("label-crop",)) == pytest.approx(overlap, abs=0.02)
