"""The plan against timm's transforms given the same random numbers, and against PIL run step by step on ramp images."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data import auto_augment, random_erasing
from timm.data import transforms as timm_transforms
from timm.data.transforms_factory import transforms_noaug_train
from torchvision.transforms import ColorJitter

from tlt import geometry
from tlt.data.augment import plan as plan_module
from tlt.data.augment.counter import uniform
from tlt.data.augment.plan import BICUBIC, BILINEAR, AugmentConfig, Stream, make_plan
from tlt.data.augment.rand_augment import Kernel, parse, sample_layers
from tlt.errors import UserError

SQUARE = AugmentConfig((64, 64))
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")


class ScriptedRandom:
    """Stands in for the `random` module inside timm: hands out given uniform numbers in the order of the calls."""

    def __init__(self, draws) -> None:
        self.draws = iter(draws)

    def random(self) -> float:
        return float(next(self.draws))

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(next(self.draws))

    def randint(self, low: int, high: int) -> int:
        return low + min(math.floor(float(next(self.draws)) * (high - low + 1)), high - low)


def some_plan(config=SQUARE, count=64, seed=3, epoch=5, size=(500, 375), start=0):
    indices = np.arange(start, start + count)
    return make_plan(config, seed, epoch, indices, np.full(count, size[0]), np.full(count, size[1]))


def arrays(plan) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(plan).items() if isinstance(value, np.ndarray)}


def same(first, second) -> bool:
    ours, theirs = arrays(first), arrays(second)
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "config",
    [
        SQUARE,
        AugmentConfig((48, 80), auto_augment=None, recount=3, reprob=1.0),
        AugmentConfig((64, 64), vflip=0.3, auto_augment="rand-n3-m9-mstd0.5-tweights"),
    ],
)
def test_a_row_does_not_depend_on_its_batch(config):
    indices, widths, heights = np.array([7, 123456, 0, 99]), np.array([500, 90, 333, 40]), np.array([375, 700, 333, 9])
    together = make_plan(config, 1, 2, indices, widths, heights)
    for row in range(4):
        alone = make_plan(config, 1, 2, indices[row : row + 1], widths[row : row + 1], heights[row : row + 1])
        assert same(alone, together.select([row]))
        assert same(alone, together.select(slice(row, row + 1)))


def test_seed_epoch_and_index_all_matter():
    crops = [some_plan().crop, some_plan(seed=4).crop, some_plan(epoch=6).crop, some_plan(start=1).crop]
    assert all((crops[0] != other).any() for other in crops[1:])
    assert same(some_plan(), some_plan())


def test_select_concatenate_and_pickle_keep_all_fields():
    plan = some_plan(count=6)
    parts = [plan.select([0, 1]), plan.select([]), plan.select(np.array([2, 3, 4, 5]))]
    assert same(type(plan).concatenate(parts), plan)
    assert same(pickle.loads(pickle.dumps(plan)), plan)
    assert len(pickle.dumps(some_plan(count=256))) < 256 * 300


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (64, 64), (1000, 60), (40, 900), (7, 5), (1, 50)])
@pytest.mark.parametrize(("scale", "ratio"), [((0.08, 1.0), (0.75, 4 / 3)), ((0.9, 1.0), (0.75, 4 / 3))])
def test_crops_are_timms_for_the_same_numbers(size, scale, ratio, monkeypatch):
    config = AugmentConfig((64, 64), scale=scale, ratio=ratio)
    plan = some_plan(config, 200, size=size)
    draws = uniform(3, 5, np.arange(200), Stream.CROP, 22)
    image = Image.new("RGB", size)
    for row in range(200):
        u = draws[row]
        proposals = [value for attempt in range(10) for value in (u[attempt], u[10 + attempt])]
        accepted = _attempts(u, size, scale, ratio)
        script = proposals[: 2 * accepted] + ([u[21], u[20]] if accepted <= 10 else [])  # timm draws the row first
        monkeypatch.setattr(timm_transforms, "random", ScriptedRandom(script[:22]))
        i, j, h, w = timm_transforms.RandomResizedCropAndInterpolation.get_params(image, scale, ratio)
        if h and w:
            assert plan.crop[row].tolist() == [j, i, w, h]


def _attempts(u, size, scale, ratio) -> int:
    """How many proposals are drawn until one fits; 11 where none does."""
    for attempt in range(10):
        area = size[0] * size[1] * (scale[0] + (scale[1] - scale[0]) * u[attempt])
        aspect = math.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * u[10 + attempt])
        if round(math.sqrt(area * aspect)) <= size[0] and round(math.sqrt(area / aspect)) <= size[1]:
            return attempt + 1
    return 11


@pytest.mark.parametrize("size", [(500, 375), (1, 300), (300, 1), (3, 3)])
def test_windows_lie_inside_the_image_and_are_not_empty(size):
    x, y, w, h = some_plan(count=500, size=size).crop.T
    assert (x >= 0).all() and (y >= 0).all() and (w > 0).all() and (h > 0).all()
    assert (x + w <= size[0]).all() and (y + h <= size[1]).all()


@pytest.mark.parametrize("size", [(64, 64), (48, 80), (8, 8)])
@pytest.mark.parametrize("recount", [1, 3])
def test_erased_boxes_are_timms_for_the_same_numbers(size, recount, monkeypatch):
    config = AugmentConfig(size, reprob=0.6, recount=recount)
    plan = some_plan(config, 300)
    draws = uniform(3, 5, np.arange(300), Stream.ERASE, 2 + 22 * recount)
    eraser = random_erasing.RandomErasing(0.6, mode="const", max_count=recount, device="cpu")
    for row in range(300):
        u = draws[row]
        number = 1 + math.floor(u[1] * recount)
        script = [u[0]] + ([u[1]] if recount > 1 else [])
        for box in u[2:].reshape(recount, 22)[:number]:
            tries = _erase_attempts(box, size, number)
            script += [value for k in range(min(tries, 10)) for value in (box[k], box[10 + k])]
            script += box[20:].tolist() if tries <= 10 else []
        monkeypatch.setattr(random_erasing, "random", ScriptedRandom(script))
        image = torch.ones(3, *size)
        eraser(image)
        assert torch.equal(image[0] == 0, _covered(plan.erase[row], size)), row


def _erase_attempts(box, size, number) -> int:
    for attempt in range(10):
        area = size[0] * size[1] / number * (0.02 + (1 / 3 - 0.02) * box[attempt])
        aspect = math.exp(math.log(0.3) * (1 - 2 * box[10 + attempt]))
        if round(math.sqrt(area * aspect)) < size[0] and round(math.sqrt(area / aspect)) < size[1]:
            return attempt + 1
    return 11


def _covered(boxes, size) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    for top, left, h, w in boxes.tolist():
        mask[top : top + h, left : left + w] = True
    return mask


def test_flips_and_interpolations_are_as_frequent_as_asked():
    plan = some_plan(AugmentConfig((32, 48), hflip=0.3, vflip=0.8, auto_augment=None, color_jitter=None), 20000)
    assert (plan.warp[:, 0, 0] < 0).mean() == pytest.approx(0.3, abs=0.017)
    assert (plan.warp[:, 1, 1] < 0).mean() == pytest.approx(0.8, abs=0.015)
    for chosen in (plan.interpolation, plan.warp_interpolation):
        assert set(chosen) == {BILINEAR, BICUBIC}
        assert (chosen == BICUBIC).mean() == pytest.approx(0.5, abs=0.018)
    assert abs(np.corrcoef(plan.interpolation, plan.warp_interpolation)[0, 1]) < 0.03
    assert set(some_plan(replace(SQUARE, interpolation="bicubic")).interpolation) == {BICUBIC}


def timm_geometry(kernel: int, value: float, image: Image.Image) -> Image.Image:
    """One of timm's geometric operations on a float image."""
    options = {"resample": Image.Resampling.BILINEAR, "fillcolor": 0}
    functions = {
        Kernel.ROTATE: lambda: auto_augment.rotate(image, value, **options),
        Kernel.SHEAR_X: lambda: auto_augment.shear_x(image, value, **options),
        Kernel.SHEAR_Y: lambda: auto_augment.shear_y(image, value, **options),
        Kernel.TRANSLATE_X: lambda: auto_augment.translate_x_rel(image, value, **options),
        Kernel.TRANSLATE_Y: lambda: auto_augment.translate_y_rel(image, value, **options),
    }
    return functions[Kernel(kernel)]()


def without_border(image: Image.Image, pixels: int) -> Image.Image:
    """The image with its outermost pixels at 0, where an interpolation would repeat the edge."""
    values = np.zeros((image.height, image.width), np.float32)
    inner = (slice(pixels, -pixels), slice(pixels, -pixels))
    values[inner] = np.asarray(image)[inner]
    return Image.fromarray(values)


def resized_crop(image: Image.Image, window, size, border: int) -> Image.Image:
    left, top, w, h = window
    image = image.crop((left, top, left + w, top + h)).resize(size[::-1], Image.Resampling.BILINEAR)
    return without_border(image, 3 * border) if border else image


def step_by_step(image: Image.Image, window, size, flips, layers, border: int = 0) -> np.ndarray:
    """Crop, resize, flip and the layers with PIL, on floats; `border` blanks the edge before each layer."""
    image = resized_crop(image, window, size, border)
    image = ImageOps.mirror(image) if flips[0] else image
    image = ImageOps.flip(image) if flips[1] else image
    for kernel, value in layers:
        image = timm_geometry(kernel, value, image)
        image = without_border(image, border) if border else image
    return np.asarray(image).ravel()


@pytest.mark.parametrize("size", [(64, 64), (48, 96)])
def test_the_composed_affine_says_where_pil_takes_each_pixel_from(size, monkeypatch):
    """Every step, one after the other, on images of the source's coordinates."""
    policy = replace(parse("rand-n2-m5-mstd2-p0.8"), ops=GEOMETRIC)
    monkeypatch.setattr(AugmentConfig, "policy", policy)
    count, source = 60, (50, 40)
    plan = some_plan(AugmentConfig(size, vflip=0.5, scale=(0.3, 1.0)), count, size=source)
    kernels, values = sample_layers(policy, uniform(3, 5, np.arange(count), Stream.RAND_AUGMENT, policy.uniforms))
    flips = uniform(3, 5, np.arange(count), Stream.FLIP, 2) < 0.5
    y, x = (grid.astype(np.float32) + 0.5 for grid in np.mgrid[: source[1], : source[0]])
    rows, columns = np.mgrid[: size[0], : size[1]] + 0.5
    points = np.stack([columns.ravel(), rows.ravel()], axis=1)
    shown = 0.0
    for row in range(count):
        layers = [(k, v) for k, v in zip(kernels[row], values[row], strict=True) if k]
        steps = (plan.crop[row].tolist(), size, flips[row], layers)
        seen = np.stack([step_by_step(Image.fromarray(ramp), *steps) for ramp in (x, y)], axis=1)
        inner = step_by_step(Image.fromarray(np.ones_like(x)), *steps, border=1) > 0.9999
        shown += inner.mean() / count
        mine = geometry.apply(plan.affine[row : row + 1], points)[0]
        assert abs(mine - seen)[inner].max(initial=0) < 1e-3, row
    assert shown > 0.4


def test_visible_and_normalised_affine_agree_with_the_crop():
    plan = some_plan(AugmentConfig((48, 96), auto_augment=None, hflip=0.0), 20)
    corners = geometry.apply(plan.normalised_affine(), np.array([[0.0, 0.0], [1.0, 1.0]]))
    assert np.allclose(corners.reshape(-1, 4), plan.visible())
    x, y, w, h = plan.crop[0]
    assert np.allclose(plan.visible()[0], [x / 500, y / 375, (x + w) / 500, (y + h) / 375])


def test_colour_layers_keep_their_order_around_the_warp():
    config = AugmentConfig((64, 64), auto_augment="rand-n4-m9-inc1-p0.7")
    policy = config.policy
    plan = some_plan(config, 300)
    kernels, values = sample_layers(policy, uniform(3, 5, np.arange(300), Stream.RAND_AUGMENT, policy.uniforms))
    for row in range(300):
        steps = [(int(k), v) for k, v in zip(kernels[row], values[row], strict=True) if k]
        colours = [step for step in steps if step[0] < Kernel.ROTATE]
        first = next((at for at, step in enumerate(steps) if step[0] >= Kernel.ROTATE), None)
        before = 0 if first is None else len([step for step in steps[:first] if step[0] < Kernel.ROTATE])
        planned = [(int(k), v) for k, v in zip(plan.op[row], plan.argument[row], strict=True)]
        assert planned == colours + [(0, 0.0)] * (4 - len(colours))
        assert plan.warp_at[row] == before


def test_colour_jitter_has_torchvisions_ranges_and_orders():
    strengths = (0.4, 1.3, 0.2)
    plan = some_plan(AugmentConfig((64, 64), auto_augment=None, color_jitter=strengths), 6000)
    theirs = ColorJitter(*strengths)
    ranges = {Kernel.BRIGHTNESS: theirs.brightness, Kernel.CONTRAST: theirs.contrast, Kernel.COLOR: theirs.saturation}
    for kernel, (low, high) in ranges.items():
        factors = plan.argument[plan.op == kernel]
        assert len(factors) == 6000
        assert low <= factors.min() < low + 0.01 and high - 0.01 < factors.max() <= high
        assert factors.mean() == pytest.approx((low + high) / 2, abs=0.05 * (high - low))
    orders, counts = np.unique(plan.op, axis=0, return_counts=True)
    assert len(orders) == 6 and abs(counts - 1000).max() < 5 * math.sqrt(1000 * 5 / 6)


def test_colour_jitter_runs_where_timm_runs_it():
    assert some_plan(AugmentConfig((64, 64), auto_augment=None, color_jitter=0.4)).op.shape[1] == 3
    assert some_plan(replace(SQUARE, color_jitter=0.4)).op.shape[1] == 2
    for off in (None, 0.0):
        assert some_plan(AugmentConfig((64, 64), auto_augment=None, color_jitter=off)).op.shape[1] == 0


@pytest.mark.parametrize("interpolation", ["random", "bicubic"])
def test_no_aug_is_timms(interpolation):
    config = AugmentConfig((32, 48), no_aug=True, reprob=1.0, interpolation=interpolation)
    plan = some_plan(config, 5, size=(60, 33))
    assert np.array_equal(plan.warp, geometry.identity(5)) and not plan.op.any() and not plan.erase.any()
    source = np.random.default_rng(0).integers(0, 256, (33, 60, 3), dtype=np.uint8)
    theirs = transforms_noaug_train((32, 48), interpolation, normalize=False)(Image.fromarray(source))
    for (x, y, w, h), resample in zip(plan.crop.tolist(), plan.interpolation.tolist(), strict=True):
        mine = Image.fromarray(source).resize((48, 32), resample, box=(x, y, x + w, y + h))
        assert np.array_equal(np.asarray(mine).transpose(2, 0, 1), theirs.numpy())


FAULTS = {
    "--scale": {"scale": (0.5, 0.2)},
    "--ratio": {"ratio": (0.0, 1.0)},
    "--hflip": {"hflip": 1.5},
    "--vflip": {"vflip": -0.1},
    "--reprob": {"reprob": 2.0},
    "--recount": {"recount": 0},
    "--remode": {"remode": "noise"},
    "--train-interpolation": {"interpolation": "lanczos"},
    "--color-jitter": {"color_jitter": (0.4, 0.4, 0.4, 0.1)},
    "--mean": {"mean": (124.0, 116.0, 104.0)},
    "--img-size": {"size": (0, 64)},
    "--aa": {"auto_augment": "original"},
}


@pytest.mark.parametrize("flag", FAULTS)
def test_values_that_cannot_be_honoured_name_their_flag(flag):
    with pytest.raises(UserError, match=f"^{flag} "):
        AugmentConfig(**{"size": (64, 64), **FAULTS[flag]})


def test_fill_is_timms_rounded_mean():
    assert SQUARE.fill == (124, 116, 104)
    assert AugmentConfig((64, 64), mean=(0.5, 1.0, 0.0)).fill == (128, 255, 0)
    assert plan_module.INTERPOLATIONS["random"] == tuple(map(int, auto_augment._RANDOM_INTERPOLATION))
