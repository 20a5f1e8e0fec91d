"""`--aug-order published` (flip, RandAugment on the full image, crop) as one window and one warp, against PIL's own."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data import auto_augment

from tlt import geometry
from tlt.data.augment.counter import uniform
from tlt.data.augment.device_stage import DeviceStage, Step, schedule
from tlt.data.augment.plan import BICUBIC, AugmentConfig, Plan, Stream, make_plan
from tlt.data.augment.rand_augment import Kernel, RandAugmentPolicy, sample_layers
from tlt.data.backends.decode import resized_crop
from tlt.label_map import LabelBatch, LabelMap
from tlt.targets import make_targets

SEED, EPOCH = 3, 5
SOURCES = [(500, 375), (375, 500), (300, 300)]
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel", "TranslateX", "TranslateY")


@dataclass(frozen=True)
class Geometric(AugmentConfig):
    """Nothing but geometry: `layers` operations of full magnitude in a row."""

    layers: int = 2

    @property
    def policy(self) -> RandAugmentPolicy | None:
        return RandAugmentPolicy(GEOMETRIC, None, self.layers, 9.0, 0.5, 10.0, probability=1.0)


def config(size: tuple[int, int] = (64, 64), **rest) -> Geometric:
    return Geometric(size, vflip=0.3, color_jitter=None, reprob=0, aug_order="published", **rest)


def planned(chosen: AugmentConfig, source: tuple[int, int], count: int = 40) -> Plan:
    return make_plan(chosen, SEED, EPOCH, np.arange(count), *source)


def crops_of(chosen: AugmentConfig, source: tuple[int, int], count: int = 40) -> np.ndarray:
    """The random resized crop, which timm's order cuts as it is."""
    return planned(replace(chosen, aug_order="timm"), source, count).crop


def corners(plan: Plan) -> np.ndarray:
    """(B, 4, 2) image px of the output's corners."""
    h, w = plan.size
    return geometry.apply(plan.affine, np.array([[0, 0], [w, 0], [0, h], [w, h]]))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_the_window_is_the_least_that_holds_what_is_shown(source, size):
    plan = planned(config(size), source, 300)
    x, y, w, h = plan.crop.T
    assert (x >= 0).all() and (y >= 0).all() and (w > 0).all() and (h > 0).all()
    assert (x + w <= source[0]).all() and (y + h <= source[1]).all()
    places = corners(plan)
    low, high = places.min(1).clip(0, source), places.max(1).clip(0, source)
    touches = (low < high).all(1)
    start, end = plan.crop[:, :2], plan.crop[:, :2] + plan.crop[:, 2:]
    for side in (low - start, end - high):
        assert (side[touches] > -1e-9).all() and (side[touches] < 1 + 1e-9).all()
    assert touches.mean() > 0.95
    x, y, w, h = plan.crop.T
    both = geometry.compose(plan.warp, geometry.crop(x, y, w, h, size[1], size[0]))
    assert np.allclose(both, plan.affine, rtol=0, atol=1e-9)


@pytest.mark.parametrize("source", [*SOURCES, (7, 5)])
@pytest.mark.parametrize("flips", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_without_operations_it_is_the_plain_crop_of_the_flipped_image(source, flips):
    chosen = AugmentConfig(
        (48, 80), hflip=flips[0], vflip=flips[1], auto_augment=None, color_jitter=None, aug_order="published"
    )
    plan, crop = planned(chosen, source), crops_of(chosen, source)
    numbers = np.arange(source[0] * source[1]).reshape(source[::-1])
    flipped = numbers[:: -1 if flips[1] else 1, :: -1 if flips[0] else 1]
    for row in range(len(plan)):
        x, y, w, h = plan.crop[row]
        left, top = crop[row, :2]
        ours = numbers[y : y + h, x : x + w][:: -1 if flips[1] else 1, :: -1 if flips[0] else 1]
        assert np.array_equal(ours, flipped[top : top + h, left : left + w])
    exact = {(0.0, 0.0): [], (1.0, 0.0): [Step.FLIP_X], (0.0, 1.0): [Step.FLIP_Y], (1.0, 1.0): [Step.FLIP_XY]}[flips]
    assert [step.code for step in schedule(plan)] == exact


def test_no_aug_knows_no_order():
    plain, other = (planned(AugmentConfig((32, 48), no_aug=True, aug_order=o), (60, 33)) for o in ("timm", "published"))
    assert np.array_equal(plain.affine, other.affine) and np.array_equal(plain.crop, other.crop)


def smooth_image(source: tuple[int, int], seed: int = 0) -> Image.Image:
    """Low frequencies only, so that different resampling filters agree on it."""
    coarse = np.random.default_rng(seed).integers(60, 200, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(source, Image.Resampling.BICUBIC)


def by_pil(image: Image.Image, crop, flips, layers, size, fill) -> tuple[np.ndarray, np.ndarray]:
    """(H, W, 3) uint8 that the published order gives, step by step, and (H, W) whether it shows image, not fill."""
    mask = Image.new("L", image.size, 255)
    mask.paste(0, (0, 0, 3, image.height))
    mask.paste(0, (image.width - 3, 0, image.width, image.height))
    mask.paste(0, (0, 0, image.width, 3))
    mask.paste(0, (0, image.height - 3, image.width, image.height))
    const = int(min(size) * 0.45)
    results = []
    for canvas, colour in ((image, fill), (mask, 0)):
        canvas = ImageOps.mirror(canvas) if flips[0] else canvas
        canvas = ImageOps.flip(canvas) if flips[1] else canvas
        for kernel, value in layers:
            options = {"resample": Image.Resampling.BILINEAR, "fillcolor": colour}
            canvas = {
                Kernel.ROTATE: lambda c, v, o: auto_augment.rotate(c, v, **o),
                Kernel.SHEAR_X: lambda c, v, o: auto_augment.shear_x(c, v, **o),
                Kernel.SHEAR_Y: lambda c, v, o: auto_augment.shear_y(c, v, **o),
                Kernel.TRANSLATE_X: lambda c, v, o: auto_augment.translate_x_rel(c, v, **o),
                Kernel.TRANSLATE_Y: lambda c, v, o: auto_augment.translate_y_rel(c, v, **o),
                Kernel.TRANSLATE_X_CONST: lambda c, v, o: auto_augment.translate_x_abs(c, v * const, **o),
                Kernel.TRANSLATE_Y_CONST: lambda c, v, o: auto_augment.translate_y_abs(c, v * const, **o),
            }[Kernel(kernel)](canvas, value, options)
        x, y, w, h = crop
        canvas = canvas.crop((x, y, x + w, y + h)).resize(size[::-1], Image.Resampling.BILINEAR)
        results.append(np.asarray(canvas))
    return results[0], results[1] == 255


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_pixels_are_those_of_the_steps_one_after_the_other(source, size):
    """Within 2 grey levels on average where the picture is, within 16 everywhere: the filters are other ones."""
    chosen, count = config(size, interpolation="bilinear"), 24
    plan, crop = planned(chosen, source, count), crops_of(chosen, source, count)
    indices = np.arange(count)
    draws = uniform(SEED, EPOCH, indices, int(Stream.RAND_AUGMENT), chosen.policy.uniforms)
    kernels, values = sample_layers(chosen.policy, draws)
    flips = uniform(SEED, EPOCH, indices, int(Stream.FLIP), 2) < np.array([0.5, 0.3])
    image = smooth_image(source)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    cut = torch.stack([resized_crop(pixels, tuple(box), size, "bilinear") for box in plan.crop.tolist()])
    ours = DeviceStage(chosen, (0, 0, 0), (1, 1, 1))(cut, plan).mul(255).permute(0, 2, 3, 1).numpy()
    shown = 0
    for row in range(count):
        layers = list(zip(kernels[row], values[row], strict=True))
        theirs, inside = by_pil(image, crop[row].tolist(), flips[row], layers, size, chosen.fill)
        if inside.sum() < 100:
            continue
        shown += 1
        difference = abs(ours[row] - theirs)[inside]
        assert difference.mean() < 2 and difference.max() < 16, row
    assert shown > count / 2
    assert (plan.interpolation != BICUBIC).all()


def test_colours_change_on_the_window():
    """Unlike published: AutoContrast stretches what the crop shows, not what the image shows."""

    class Contrast(Geometric):
        @property
        def policy(self) -> RandAugmentPolicy | None:
            return RandAugmentPolicy(("AutoContrast",), None, 1, probability=1.0)

    chosen = Contrast((64, 64), hflip=0.0, scale=(0.1, 0.2), color_jitter=None, reprob=0, aug_order="published")
    plan = planned(chosen, (300, 200), 4)
    ramp = Image.fromarray(np.linspace(0, 255, 300, dtype=np.uint8)[None].repeat(200, 0)).convert("RGB")
    for row, (x, y, w, h) in enumerate(plan.crop.tolist()):
        window = ramp.crop((x, y, x + w, y + h)).resize((64, 64), int(plan.interpolation[row]))
        pixels = torch.from_numpy(np.array(window)).permute(2, 0, 1)
        ours = DeviceStage(chosen, (0, 0, 0), (1, 1, 1))(pixels[None], plan.select([row]))[0].mul(255).round()
        theirs = torch.from_numpy(np.array(ImageOps.autocontrast(window))).permute(2, 0, 1)
        assert (ours - theirs).abs().max() <= 1 and w < 200


def test_a_crop_that_shows_nothing_of_the_image_is_all_fill_and_has_no_labels():
    chosen = config((32, 32), layers=3)
    plan = planned(chosen, (90, 40), 2000)
    places = corners(plan)
    outside = ((places.max(1) <= 0) | (places.min(1) >= (90, 40))).any(1)
    assert outside.sum() > 3
    plan = plan.select(outside)
    assert (plan.crop[:, 2:] > 0).all() and (plan.crop[:, :2] >= 0).all()
    images = DeviceStage(chosen, (0, 0, 0), (1, 1, 1))(torch.zeros(len(plan), 3, 32, 32, dtype=torch.uint8), plan)
    assert torch.allclose(images, (torch.tensor(chosen.fill).view(1, 3, 1, 1) / 255).expand_as(images), atol=1e-7)
    maps = LabelBatch.stack([LabelMap.unknown((2, 4, 4), (0.0, 0.0, 1.0, 1.0))] * len(plan))
    geometry_of = (torch.from_numpy(plan.normalised_affine()).float(), torch.from_numpy(plan.visible()).float())
    targets = make_targets(maps, *geometry_of, torch.zeros(len(plan)), (2, 2), 4)
    assert targets.weight is not None and not targets.weight.any()


@pytest.mark.parametrize("source", [(1, 1), (1, 50), (3, 2)])
def test_tiny_images_have_windows_too(source):
    plan = planned(config(), source, 200)
    assert (plan.crop[:, 2:] > 0).all() and (plan.crop[:, :2] + plan.crop[:, 2:] <= source).all()
    assert np.isfinite(plan.warp).all() and np.isfinite(plan.affine).all()
