"""RandAugment strings and tables against timm's own."""

import math

import numpy as np
import pytest
import timm
from packaging.version import Version
from timm.data import auto_augment

from tlt.data.augment.rand_augment import NAMES, OPS, Kernel, RandAugmentPolicy, arguments, parse, sample_layers
from tlt.errors import UserError

POLICIES = ["rand", "rand-m9-mstd0.5-inc1", "rand-m9-n3-mstd0.5", "rand-m15-mmax30-p0.8"]
POLICIES += ["rand-m7-mstd101-inc1", "rand-m9-mstd0.5-inc0", "rand-mstd1-tweights"]


@pytest.mark.skipif(Version(timm.__version__) < Version("1.0.31"), reason="older timm reads inc0 as inc1")
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


REJECTED = {
    "3a": "'3a' is not available",
    "rand-m9-magnitude3": "'magnitude3' is not a section",
    "rand-inc": "'inc' is not a section",
    "rand-m9-m5": "'m' is given twice",
    "rand-n20-tweights": "20 of 15 weighted operations",
    "rand-m9.5": "whole numbers",
    "rand-mstd0.5x": "numbers",
}


def test_what_timm_ignores_or_this_loader_lacks_is_an_error():
    for text, reason in REJECTED.items():
        with pytest.raises(UserError, match=f"^--aa {text}: .*{reason}"):
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


def test_each_operation_is_as_frequent_as_the_others_and_skipped_half_the_time():
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
