"""The same for unusual images, maps, files and the recipe's own augmentation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.alignment.oracle import PIXELS, SHARE_LIMIT, SIZES, Measured, Scene, check, measure
from tests.data.alignment.position_code import position_classes, position_map, ramp_image
from tests.data.alignment.position_data import SEED, GeometryOnly, load_batch, write_maps
from tests.data.alignment.test_positions import geometry_only
from tlt.data.augment.plan import AUG_ORDERS, AugmentConfig, make_plan
from tlt.data.augment.rand_augment import OPS, RandAugmentPolicy
from tlt.data.backends.decode import PilBackend, TorchvisionBackend
from tlt.data.sources.folder import scan_folder
from tlt.label_map import LabelMap
from tlt.labels.store import open_labels

FILL = (1.0, 0.0, 1.0)


def source_pixels(measured: Measured) -> float:
    return float(measured.found.source_pixels()[measured.found.ramp].max())


@pytest.mark.parametrize("order", AUG_ORDERS)
@pytest.mark.parametrize("case", ["crop", "turns", "no_aug"])
@pytest.mark.parametrize("size", [(37, 53), (40, 30), (900, 31), (77, 1001)], ids="{0[0]}x{0[1]}".format)
def test_small_and_long_images(tmp_path: Path, size: tuple[int, int], case: str, order: str) -> None:
    """In source pixels: where a crop of a few pixels is enlarged, its outer half pixels show one colour each."""
    measured = measure(Scene.write(tmp_path, [size], 3), geometry_only(case, aug_order=order))
    assert measured.found.ramp.double().mean() > 0.2 and source_pixels(measured) < 0.1
    assert measured.coverage() < 0.03


@pytest.mark.parametrize("order", AUG_ORDERS)
@pytest.mark.parametrize("size", [(500, 1), (1, 375), (1, 1)], ids="{0[0]}x{0[1]}".format)
def test_images_of_one_row_or_column(tmp_path: Path, size: tuple[int, int], order: str) -> None:
    """The label lies in the pixel that is shown, which has one colour."""
    measured = measure(Scene.write(tmp_path, [size], 2), geometry_only("crop", aug_order=order))
    assert measured.found.judged.all() and source_pixels(measured) < 1
    assert (measured.weight == 1).all()


@pytest.mark.parametrize("area", ["full", "center"])
def test_a_map_of_one_cell(scene: Scene, area: str) -> None:
    measured = measure(scene, geometry_only("turns"), (1, 1), area)
    assert measured.coverage() < 0.03 and (measured.weight[measured.found.whole] == 1).all()


@pytest.mark.parametrize("cells", [(1, 40), (3, 2)])
def test_maps_of_few_rows(scene: Scene, cells: tuple[int, int]) -> None:
    measured = measure(scene, geometry_only("turns"), cells)
    along_x = measured.found.ramp_error[..., 0][measured.found.whole]
    assert measured.coverage() < 0.03
    assert float((along_x * 14).abs().median()) < SHARE_LIMIT if cells == (1, 40) else measured.pixels() < 0.05


def test_classes_listed_twice(scene: Scene, tmp_path: Path) -> None:
    """A cell's class counts once, with its larger value, wherever the smaller one stands."""
    single, cells = position_map(18, 18), (18, 18)
    values, ids = (np.concatenate([part, part[::-1]]) for part in (single.values, single.ids))
    values[3:] -= np.float16(0.5)
    write_maps(tmp_path / "labels", scene.shots[0].paths, LabelMap(values, ids), position_classes(*cells))
    labels = open_labels(tmp_path / "labels", scene.shots[0].paths, num_classes=position_classes(*cells))
    check(measure(scene, geometry_only("turns"), labels=labels))


@pytest.mark.parametrize("backend", [PilBackend(), TorchvisionBackend()], ids=lambda backend: backend.name)
def test_exif_orientation_is_ignored(tmp_path: Path, backend: PilBackend) -> None:
    """JPEG rounds colours in another space, which does not cancel: places can be read to 0.2 pixels."""
    scene = Scene.write(tmp_path, [(375, 500)], 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees
    shots = []
    for number, folder in enumerate(scene.shots):
        for name in folder.paths:
            file = (tmp_path / "jpeg" / str(number) / name).with_suffix(".jpg")
            file.parent.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(ramp_image(375, 500, number))
            image.save(file, quality=100, subsampling=0, exif=exif)
        shots.append(scan_folder(tmp_path / "jpeg" / str(number)))
    check(
        measure(Scene(tmp_path, shots, scene.sizes), geometry_only("turns"), area="center", backend=backend), slack=0.25
    )


@pytest.mark.parametrize("order", AUG_ORDERS)
def test_the_recipes_augmentation(tmp_path: Path, order: str) -> None:
    """rand-m9-mstd0.5-inc1, random interpolation and erasing, all at their defaults; only the fill is another.

    Places are read off the images whose colours no layer changed.
    """
    scene = Scene.write(tmp_path, SIZES, 6)
    config = AugmentConfig(PIXELS, mean=FILL, aug_order=order)
    source = torch.tensor(scene.sizes).repeat_interleave(len(scene.shots[0]) // len(scene.sizes), 0)
    plan = make_plan(config, SEED, 1, np.arange(len(source)), *source.T.numpy())
    plain = torch.from_numpy((plan.op == 0).all(1))
    measured = measure(scene, config, area="center", only=plain)
    assert plain.sum() >= 4
    check(measured, slack=0.1, unjudged=0.0, erased=True)


COLOURS = [name for name, op in OPS.items() if 0 < op.kernel < 20]


class OneColour(GeometryOnly):
    """The whole image, and one colour operation at about magnitude 6."""

    @property
    def policy(self) -> RandAugmentPolicy:
        return RandAugmentPolicy(self.operations, None, 1, 6.0, 0.5, 10.0, probability=1.0)


@pytest.mark.parametrize("name", COLOURS)
def test_colour_operations_move_nothing(tmp_path: Path, name: str) -> None:
    """A square on a flat ground stays where it is: the centre of what differs from the ground."""
    (tmp_path / "images" / "a").mkdir(parents=True)
    pixels = np.full((64, 64, 3), (200, 40, 90), np.uint8)
    pixels[20:33, 39:46] = (60, 120, 170)
    Image.fromarray(pixels).save(tmp_path / "images" / "a" / "0.png")
    folder = scan_folder(tmp_path / "images")
    write_maps(tmp_path / "labels", folder.paths, position_map(4, 4), position_classes(4, 4))
    labels = open_labels(tmp_path / "labels", folder.paths, num_classes=position_classes(4, 4))
    config = OneColour((64, 64), scale=(1.0, 1.0), ratio=(1.0, 1.0), operations=(name,))
    images, _ = load_batch([folder], labels, config)
    difference = (images[0, 0] - images[0, 0, :, :1, :1]).abs().sum(0).double()
    assert difference.max() > 0.02
    share = difference / difference.sum()
    places = torch.arange(64, dtype=torch.float64) + 0.5
    assert float(share.sum(0) @ places) == pytest.approx((39 + 46) / 2, abs=0.02)
    assert float(share.sum(1) @ places) == pytest.approx((20 + 33) / 2, abs=0.02)
