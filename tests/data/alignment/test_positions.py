"""A token's label is the label of what the token shows: every operation, order, image and map shape, from files on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.data.alignment.oracle import CASES, PIXELS, Scene, check, measure
from tests.data.alignment.position_data import GeometryOnly
from tlt.data.augment.plan import AUG_ORDERS
from tlt.data.backends.decode import PilBackend

SHIFTS = ("TranslateX", "TranslateY", "TranslateXRel", "TranslateYRel")
# A shift gives all pixels one phase t, and what a filter does there doesn't average out. Bilinear: a warp truncates,
# which moves a noisy ramp by about 0.4 / (noise between neighbours, in grey levels). Bicubic: PIL's kernel for
# transforms (a = -1) reads t (2 - 3 t + 2 t t) where it should read t, up to 0.0962 off along either axis.
PHASE = {"bilinear": 0.03, "bicubic": 2**0.5 * 0.0962}


def geometry_only(case: str, size: tuple[int, int] = PIXELS, **settings: Any) -> GeometryOnly:
    return GeometryOnly(size, **({"interpolation": "bilinear"} | CASES[case] | settings))


@pytest.mark.parametrize("order", AUG_ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_every_operation(scene: Scene, case: str, order: str) -> None:
    measured = measure(scene, geometry_only(case, aug_order=order))
    check(measured, slack=PHASE["bilinear"] if case in SHIFTS else 0.0)
    fills = case not in ("crop", "hflip", "vflip", "no_aug")
    assert (measured.found.cover < 1).any() == (measured.weight < 1).any() == fills


@pytest.mark.parametrize("order", AUG_ORDERS)
@pytest.mark.parametrize("case", ["crop", "Rotate", "ShearX", "TranslateXRel", "everything"])
def test_bicubic(scene: Scene, case: str, order: str) -> None:
    config = geometry_only(case, aug_order=order, interpolation="bicubic")
    check(measure(scene, config), slack=0 if case in ("crop", "Rotate", "ShearX") else PHASE["bicubic"])


@pytest.mark.parametrize(("archive", "order"), [(False, "timm"), (True, "timm"), (True, "published")])
@pytest.mark.parametrize("area", ["full", "center"])
@pytest.mark.parametrize("cells", [(18, 18), (10, 20), (32, 24)], ids=["18x18", "10x20", "32x24"])
def test_every_map(scene: Scene, cells: tuple[int, int], area: str, archive: bool, order: str) -> None:
    check(measure(scene, geometry_only("everything", aug_order=order), cells, area, archive))


@pytest.mark.parametrize("order", AUG_ORDERS)
@pytest.mark.parametrize("case", ["turns", "TranslateXRel", "TranslateY"])
@pytest.mark.parametrize("magnitude", [0.5, 5.0, 14.0])
def test_every_magnitude(scene: Scene, magnitude: float, case: str, order: str) -> None:
    config = geometry_only(case, aug_order=order, magnitude=magnitude)
    check(measure(scene, config), PHASE["bilinear"] if case in SHIFTS else 0.0, least_ramp=0.1, unjudged=0.4)


@pytest.mark.parametrize(("area", "order"), [("full", "timm"), ("center", "published")])
@pytest.mark.parametrize(
    ("size", "grid"), [((160, 96), (10, 6)), ((96, 192), (12, 24)), ((96, 96), (6, 12)), ((90, 130), (9, 13))]
)
def test_every_output(scene: Scene, size: tuple[int, int], grid: tuple[int, int], area: str, order: str) -> None:
    config = geometry_only("turns", size, aug_order=order)
    check(measure(scene, config, (10, 20), area, grid=grid), least_ramp=0.1)


def test_whole_images_of_every_output_shape(scene: Scene) -> None:
    check(measure(scene, geometry_only("no_aug", (160, 96)), grid=(10, 6), area="center"))


def test_pillow_decodes(scene: Scene) -> None:
    check(measure(scene, geometry_only("everything"), backend=PilBackend()))


def test_worker_processes_give_the_same_geometry(scene: Scene) -> None:
    here, there = (measure(scene, geometry_only("two"), workers=workers) for workers in (0, 1))
    assert torch.equal(here.found.ramp_error, there.found.ramp_error) and torch.equal(here.weight, there.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("order", AUG_ORDERS)
def test_gpu(scene: Scene, order: str) -> None:
    check(measure(scene, geometry_only("everything", aug_order=order), area="center", device="cuda"))
