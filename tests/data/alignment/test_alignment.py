"""A token's label is the label of what the token shows, from files on; and what measures it notices mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.alignment.oracle import (
    GEOMETRIC,
    PIXEL_LIMIT,
    PIXELS,
    SEED,
    SIZES,
    GeometryOnly,
    Measured,
    Scene,
    check,
    measure,
)
from tlt import geometry
from tlt.data.augment.plan import AugmentConfig, make_plan
from tlt.data.batch import Batch

CASES: dict[str, dict[str, Any]] = {
    "crop": {},
    "hflip": {"hflip": 1.0},
    "vflip": {"vflip": 1.0},
    **{name: {"operations": (name,)} for name in GEOMETRIC},
    "turns": {"hflip": 0.5, "operations": GEOMETRIC[:3], "layers": 2},
    "everything": {"hflip": 0.5, "vflip": 0.3, "operations": GEOMETRIC, "layers": 3, "magnitude": 5.0},
    "no_aug": {"no_aug": True},
}
# A shift gives all pixels one phase t, and what a filter does there doesn't average out. Bilinear: a warp truncates,
# which moves a noisy ramp by about 0.4 / (noise between neighbours, in grey levels). Bicubic: PIL's kernel for
# transforms (a = -1) reads t (2 - 3 t + 2 t t) where it should read t, up to 0.0962 off along either axis.
PHASE = {"bilinear": 0.03, "bicubic": 2**0.5 * 0.0962}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene.write(tmp_path_factory.mktemp("alignment"), SIZES, 3)


def geometry_only(case: str, size: tuple[int, int] = PIXELS, **settings: Any) -> GeometryOnly:
    return GeometryOnly(size, **({"interpolation": "bilinear"} | CASES[case] | settings))


def check_coverage(measured: Measured) -> None:
    """The weight of a token is the share of it that shows labelled image."""
    seen = measured.found
    assert measured.coverage() < 0.03
    assert not measured.weight[(seen.cover == 0) & seen.judged[:, None]].any()


@pytest.mark.parametrize("case", CASES)
def test_every_operation(scene: Scene, case: str) -> None:
    measured = measure(scene, geometry_only(case))
    check(measured, slack=PHASE["bilinear"] if case.startswith("Translate") else 0.0)
    check_coverage(measured)
    fills = case not in ("crop", "hflip", "vflip", "no_aug")
    assert (measured.found.cover < 1).any() == (measured.weight < 1).any() == fills


@pytest.mark.parametrize("seed", [0, 1])
def test_any_image_map_and_output(tmp_path: Path, seed: int) -> None:
    """Sizes of images, maps, outputs and token grids drawn at random, with all operations at once."""
    rng = np.random.default_rng(seed)
    sizes = [(int(w), int(h)) for w, h in rng.integers(200, 600, (3, 2))]
    grid = tuple(rng.integers(6, 15, 2).tolist())
    size = tuple((np.array(grid) * rng.integers(7, 13, 2)).tolist())
    cells = tuple(rng.integers(8, 25, 2).tolist())
    area, archive = rng.choice(["full", "center"]), bool(rng.integers(2))
    filters = str(rng.choice(["bilinear", "bicubic"]))
    config = geometry_only("everything", size, interpolation=filters)
    measured = measure(Scene.write(tmp_path, sizes, 3), config, cells, str(area), archive, grid)
    check(measured, slack=PHASE[filters], least_ramp=0.1, unjudged=0.4)
    check_coverage(measured)


def test_the_recipes_augmentation(tmp_path: Path) -> None:
    """rand-m9-mstd0.5-inc1, random interpolation and erasing, all at their defaults; only the fill is another.

    Places are read off the images whose colours no layer changed; erased boxes needn't be uncovered.
    """
    scene = Scene.write(tmp_path, SIZES, 6)
    config = AugmentConfig(PIXELS, mean=(1.0, 0.0, 1.0))
    source = torch.tensor(scene.sizes).repeat_interleave(len(scene.shots[0]) // len(scene.sizes), 0)
    plan = make_plan(config, SEED, 1, np.arange(len(source)), *source.T.numpy())
    plain = torch.from_numpy((plan.op == 0).all(1))
    assert plain.sum() >= 4
    check(measure(scene, config, area="center", only=plain), slack=0.1, unjudged=0.0)


@pytest.mark.gpu
def test_gpu(scene: Scene) -> None:
    check(measure(scene, geometry_only("everything"), area="center", device="cuda"))


def with_affine(batch: Batch, affine: np.ndarray) -> Batch:
    visible = torch.tensor([(-9.0, -9.0, 9.0, 9.0)] * batch.size)
    return replace(batch, affine=torch.from_numpy(affine).float(), visible=visible)


def after(make: Callable[[int], geometry.Affine]) -> Callable[[Batch], Batch]:
    """The label follows one more map of the output."""
    return lambda batch: with_affine(batch, geometry.compose(make(batch.size), batch.affine.double().numpy()))


def other_sign(batch: Batch) -> Batch:
    """The operation undone: PIL's sign turned around."""
    x0, y0, x1, y1 = batch.visible.double().T.numpy()
    plain = geometry.crop(x0, y0, x1 - x0, y1 - y0, 1, 1)
    operation = geometry.compose(batch.affine.double().numpy(), geometry.invert(plain))
    return with_affine(batch, geometry.compose(geometry.invert(operation), plain))


def other_labels(change: Callable[[Any], dict[str, torch.Tensor]]) -> Callable[[Batch], Batch]:
    def changed(batch: Batch) -> Batch:
        assert batch.labels is not None
        return replace(batch, labels=replace(batch.labels, **change(batch.labels)))

    return changed


def turned(*names: str) -> Callable[[Batch], Batch]:
    return other_labels(lambda old: {name: getattr(old, name).mT.contiguous() for name in names})


WHOLE = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
# case, part of the image that the maps show, mistake, pixels that it makes at least
MISTAKES: dict[str, tuple[str, str, Callable[[Batch], Batch], float]] = {
    "a tenth of a pixel": ("turns", "full", after(lambda n: geometry.translate(0.1 / PIXELS[1], 0.0)), 0.08),
    "missing flip": ("hflip", "full", after(lambda n: geometry.hflip(np.ones(n), 1)), 20),
    "sign of rotation": ("Rotate", "full", other_sign, 10),
    "sign of shear": ("ShearY", "center", other_sign, 10),
    "transposed map": ("crop", "full", turned("values", "ids"), 10),
    "transposed classes": ("crop", "full", turned("ids"), 0),
    "centre square for all": ("crop", "center", other_labels(lambda old: {"area": WHOLE.expand_as(old.area)}), 2),
    "half a cell": ("crop", "full", other_labels(lambda old: {"area": old.area + 0.5 / 18}), 2),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_are_seen(scene: Scene, name: str) -> None:
    case, area, mistake, least = MISTAKES[name]
    wrong = measure(scene, geometry_only(case), area=area, mistake=mistake)
    off = wrong.found.output_pixels()
    assert off.median() > least and (off.max() > PIXEL_LIMIT or not least)
    with pytest.raises(AssertionError):
        check(wrong)
