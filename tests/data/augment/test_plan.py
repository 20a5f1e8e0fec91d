"""RandAugment's strings and tables against timm's own; the plan against timm's transforms given the same draws."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment, random_erasing
from timm.data import transforms as timm_transforms
from timm.data.transforms import RandomResizedCropAndInterpolation
from timm.data.transforms_factory import transforms_noaug_train
from torchvision.transforms import ColorJitter

from tlt import geometry
from tlt.data.augment.counter import uniform
from tlt.data.augment.plan import BICUBIC, BILINEAR, INTERPOLATIONS, AugmentConfig, Stream, make_plan
from tlt.data.augment.rand_augment import NAMES, OPS, Kernel, RandAugmentPolicy, arguments, parse, sample_layers
from tlt.errors import UserError

POLICIES = ["rand", "rand-m9-mstd0.5-inc1", "rand-m9-n3-mstd0.5", "rand-m15-mmax30-p0.8"]
POLICIES += ["rand-m7-mstd101-inc1", "rand-m9-mstd0.5-inc0", "rand-mstd1-tweights"]


@pytest.mark.parametrize("text", POLICIES)
def test_strings_mean_what_timm_reads(text):
    theirs = auto_augment.rand_augment_transform(text, {"translate_const": 100})
    mine, op = parse(text), theirs.ops[0]
    assert mine.ops == tuple(one.name for one in theirs.ops)
    assert (mine.layers, mine.magnitude, mine.probability) == (theirs.num_layers, op.magnitude, op.prob)
    assert (mine.magnitude_std, mine.magnitude_max) == (op.magnitude_std, op.magnitude_max or 10)
    assert (mine.weights is None) == (theirs.choice_weights is None)
    if mine.weights is not None:
        assert np.allclose(np.array(mine.weights) / sum(mine.weights), theirs.choice_weights)


REJECTED = {"3a": "'3a' is not available", "rand-m9-magnitude3": "'magnitude3' is not a section"}
REJECTED |= {"rand-m9-m5": "'m' is given twice", "rand-n20-tweights": "20 of 15 weighted operations"}
REJECTED |= {"rand-m9.5": "whole numbers", "rand-mstd0.5x": "numbers"}


@pytest.mark.parametrize("text", REJECTED)
def test_what_timm_ignores_or_this_loader_lacks_is_an_error(text):
    with pytest.raises(UserError, match=f"^--aa {text}: .*{REJECTED[text]}"):
        parse(text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("draw", [0.25, 0.75])
def test_operations_and_arguments_are_timms(name, draw, monkeypatch):
    assert auto_augment.NAME_TO_OP[name].__name__.removesuffix("_rel").upper() == OPS[name].kernel.name
    monkeypatch.setattr(auto_augment.random, "random", lambda: draw)
    level_to_arg = auto_augment.LEVEL_TO_ARG[name]
    for level in [*np.linspace(0, 10, 41), 13.7, 30.0]:
        theirs = level_to_arg(level, {"translate_const": 100}) if level_to_arg else ()
        mine = arguments(np.array([NAMES.index(name)]), np.array([level]), np.array([draw]))
        assert mine.tolist() == pytest.approx(list(theirs) or [0.0], abs=1e-12), level


def layers_of(policy: RandAugmentPolicy, count: int = 20000):
    return sample_layers(policy, np.random.default_rng(0).random((count, policy.uniforms)))


def near(share, expected, count) -> bool:
    return abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / count) + 1e-12


def test_operations_are_equally_frequent_and_half_skipped():
    kernels, values = layers_of(parse("rand-m9-mstd0.5-inc1"))
    assert kernels.shape == (20000, 2) and not values[kernels == Kernel.NONE].any()
    for kernel in {OPS[name].kernel for name in parse("rand-m9-mstd0.5-inc1").ops}:
        for layer in (0, 1):
            assert near((kernels[:, layer] == kernel).mean(), 0.5 / 15, 20000), kernel
    assert near((kernels > 0).all(axis=1).mean(), 0.25, 20000)


def test_magnitudes_have_timms_distribution():
    policy = RandAugmentPolicy(ops=("ShearX",), layers=1, magnitude=9, magnitude_std=0.5, probability=1.0)
    _, shear = layers_of(policy)
    theirs = np.random.default_rng(1).normal(9, 0.5, 20000).clip(0, 10) * 0.03
    assert near((shear < 0).mean(), 0.5, 20000)
    for quantile in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert np.quantile(abs(shear), quantile) == pytest.approx(np.quantile(theirs, quantile), abs=1e-3)
    policy = RandAugmentPolicy(ops=("ShearX",), layers=1, magnitude=8, magnitude_std=math.inf, probability=1.0)
    _, even = layers_of(policy)
    assert abs(even).max() <= 0.24 and abs(even).mean() == pytest.approx(0.12, abs=2e-3)


def test_weighted_choice_is_numpys_without_replacement():
    policy = parse("rand-n2-m5-tweights-p1.0")
    kernels, _ = layers_of(policy)
    rng, shares = np.random.default_rng(1), np.array(policy.weights) / sum(policy.weights)
    names = np.array([rng.choice(policy.ops, 2, replace=False, p=shares) for _ in range(5000)])
    theirs = np.array([[OPS[name].kernel for name in pair] for pair in names])
    for kernel in np.unique(theirs):
        for layer in (0, 1):
            expected = (theirs[:, layer] == kernel).mean()
            assert near((kernels[:, layer] == kernel).mean(), expected, 4000), (kernel, layer)
    assert not (kernels[:, 0] == kernels[:, 1]).any()


SQUARE = AugmentConfig((64, 64))
PLAIN = AugmentConfig((64, 64), auto_augment=None, color_jitter=None)


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
    return make_plan(config, seed, epoch, np.arange(start, start + count), *size)


def attempts(draws, fits) -> int:
    """How many of ten proposals are drawn until one fits; 11: none does."""
    return next((attempt + 1 for attempt in range(10) if fits(draws[attempt], draws[10 + attempt])), 11)


@pytest.mark.parametrize("size", [(500, 375), (64, 64), (1000, 60), (7, 5), (1, 50)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.9, 1.0)])
def test_crops_are_timms_for_the_same_numbers(size, scale, monkeypatch):
    plan, (low, high) = some_plan(replace(SQUARE, scale=scale), 200, size=size), SQUARE.ratio
    draws = uniform(3, 5, np.arange(200), Stream.CROP, 22)

    def fits(first, second) -> bool:
        area = size[0] * size[1] * (scale[0] + (scale[1] - scale[0]) * first)
        aspect = math.exp(math.log(low) + math.log(high / low) * second)
        return round(math.sqrt(area * aspect)) <= size[0] and round(math.sqrt(area / aspect)) <= size[1]

    for row, u in enumerate(draws):
        tries = attempts(u, fits)
        script = [value for k in range(min(tries, 10)) for value in (u[k], u[10 + k])]
        script += [u[21], u[20]] if tries <= 10 else []  # timm draws the row first
        monkeypatch.setattr(timm_transforms, "random", ScriptedRandom(script))
        top, left, h, w = RandomResizedCropAndInterpolation.get_params(Image.new("RGB", size), scale, SQUARE.ratio)
        assert plan.crop[row].tolist() == [left, top, w, h], row
        assert 0 <= left <= size[0] - w < size[0] and 0 <= top <= size[1] - h < size[1]


@pytest.mark.parametrize("size", [(48, 80), (8, 8)])
@pytest.mark.parametrize("recount", [1, 3])
def test_erased_boxes_are_timms_for_the_same_numbers(size, recount, monkeypatch):
    plan = some_plan(AugmentConfig(size, reprob=0.6, recount=recount), 300)
    draws = uniform(3, 5, np.arange(300), Stream.ERASE, 2 + 22 * recount)
    eraser = random_erasing.RandomErasing(0.6, mode="const", max_count=recount, device="cpu")
    for row, u in enumerate(draws):
        number = 1 + math.floor(u[1] * recount)

        def fits(first, second, number=number) -> bool:
            area = size[0] * size[1] / number * (0.02 + (1 / 3 - 0.02) * first)
            aspect = math.exp(math.log(0.3) * (1 - 2 * second))
            return round(math.sqrt(area * aspect)) < size[0] and round(math.sqrt(area / aspect)) < size[1]

        script = [u[0]] + ([u[1]] if recount > 1 else [])
        for box in u[2:].reshape(recount, 22)[:number]:
            tries = attempts(box, fits)
            script += [value for k in range(min(tries, 10)) for value in (box[k], box[10 + k])]
            script += box[20:].tolist() if tries <= 10 else []
        monkeypatch.setattr(random_erasing, "random", ScriptedRandom(script))
        image, covered = torch.ones(3, *size), torch.zeros(size, dtype=torch.bool)
        eraser(image)
        for top, left, h, w in plan.erase[row].tolist():
            covered[top : top + h, left : left + w] = True
        assert torch.equal(image[0] == 0, covered), row


def test_flips_and_interpolations_are_as_frequent_as_asked():
    plan = some_plan(replace(PLAIN, hflip=0.3, vflip=0.8), 20000)
    assert (plan.warp[:, 0, 0] < 0).mean() == pytest.approx(0.3, abs=0.017)
    assert (plan.warp[:, 1, 1] < 0).mean() == pytest.approx(0.8, abs=0.015)
    assert INTERPOLATIONS["random"] == tuple(map(int, auto_augment._RANDOM_INTERPOLATION)) == (BILINEAR, BICUBIC)
    for chosen in (plan.interpolation, plan.warp_interpolation):
        assert set(chosen) == {BILINEAR, BICUBIC} and (chosen == BICUBIC).mean() == pytest.approx(0.5, abs=0.018)
    assert abs(np.corrcoef(plan.interpolation, plan.warp_interpolation)[0, 1]) < 0.03
    assert set(some_plan(replace(SQUARE, interpolation="bicubic")).interpolation) == {BICUBIC}


def test_colour_jitter_has_torchvisions_ranges_and_orders():
    strengths = (0.4, 1.3, 0.2)
    plan = some_plan(replace(PLAIN, color_jitter=strengths), 6000)
    theirs = ColorJitter(*strengths)
    ranges = {Kernel.BRIGHTNESS: theirs.brightness, Kernel.CONTRAST: theirs.contrast, Kernel.COLOR: theirs.saturation}
    for kernel, (low, high) in ranges.items():
        factors = plan.argument[plan.op == kernel]
        assert len(factors) == 6000
        assert low <= factors.min() < low + 0.01 and high - 0.01 < factors.max() <= high
        assert factors.mean() == pytest.approx((low + high) / 2, abs=0.05 * (high - low))
    orders, counts = np.unique(plan.op, axis=0, return_counts=True)
    assert len(orders) == 6 and abs(counts - 1000).max() < 5 * math.sqrt(1000 * 5 / 6)
    # As in timm, RandAugment takes its place.
    layers = {0.4: 3, None: 0, 0.0: 0}
    assert {jitter: some_plan(replace(PLAIN, color_jitter=jitter)).op.shape[1] for jitter in layers} == layers
    assert some_plan(replace(SQUARE, color_jitter=0.4)).op.shape[1] == 2


@pytest.mark.parametrize("interpolation", ["random", "bicubic"])
def test_no_aug_is_timms(interpolation):
    plan = some_plan(AugmentConfig((32, 48), no_aug=True, reprob=1.0, interpolation=interpolation), 5, size=(60, 33))
    assert np.array_equal(plan.warp, geometry.identity(5)) and not plan.op.any() and not plan.erase.any()
    source = np.random.default_rng(0).integers(0, 256, (33, 60, 3), dtype=np.uint8)
    theirs = transforms_noaug_train((32, 48), interpolation, normalize=False)(Image.fromarray(source))
    for (x, y, w, h), resample in zip(plan.crop.tolist(), plan.interpolation.tolist(), strict=True):
        mine = Image.fromarray(source).resize((48, 32), resample, box=(x, y, x + w, y + h))
        assert np.array_equal(np.asarray(mine).transpose(2, 0, 1), theirs.numpy())


FAULTS = {"scale": (0.5, 0.2), "ratio": (0.0, 1.0), "hflip": 1.5, "vflip": -0.1, "reprob": 2.0, "recount": 0}
FAULTS |= {"remode": "noise", "interpolation": "lanczos", "color_jitter": (0.4, 0.4, 0.4, 0.1), "size": (0, 64)}
FAULTS |= {"mean": (124.0, 116.0, 104.0), "auto_augment": "original"}
FLAGS = {"interpolation": "train-interpolation", "size": "img-size", "auto_augment": "aa"}  # of other names


@pytest.mark.parametrize("name", FAULTS)
def test_values_that_cannot_be_honoured_name_their_flag(name):
    with pytest.raises(UserError, match=f"^--{FLAGS.get(name, name).replace('_', '-')} "):
        AugmentConfig(**{"size": (64, 64), name: FAULTS[name]})
