"""The counter-based generator: known vectors, independence of the batch, uniformity."""

import numpy as np
import pytest
from scipy import stats

from tlt.data.augment.counter import key, keys, uniform

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """The finaliser in Python's integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def chained(seed: int, *words: int) -> int:
    state = splitmix64((seed + GAMMA) & MASK)
    for word in words:
        state = splitmix64((state + (word + 1) * GAMMA) & MASK)
    return state


@pytest.mark.parametrize("seed", [0, 42, -3, 2**64 - 1, 2**70 + 5])
def test_keys_chain_words_of_any_sign_and_size(seed):
    assert (key(0), key(1234567)) == (0xE220A8397B1DCDAF, 6457827717110365317)  # published vectors of splitmix64
    expected = [chained(seed & MASK, 7, index & MASK, 3) for index in (0, 1, -1, 2**62)]
    assert keys(seed, 7, np.array([0, 1, -1, 2**62]), 3).tolist() == expected


def test_uniform_takes_the_upper_53_bits_of_a_sample_whatever_its_batch():
    together = uniform(5, 6, [9, 10], 2, 3)
    assert together[0].tolist() == [(chained(5, 6, 9, 2, k) >> 11) / 2**53 for k in range(3)]
    assert np.array_equal(together[1:, :2], uniform(5, 6, [10], 2, 2))


def test_numbers_are_uniform_and_uncorrelated():
    base = uniform(0, 0, np.arange(20000), 0, 4)
    assert base.min() >= 0 and base.max() < 1
    assert stats.kstest(base.ravel(), "uniform").pvalue > 1e-3
    others = {
        "next index": base[1:, 0],
        "next position": base[:-1, 1],
        "next epoch": uniform(0, 1, np.arange(19999), 0, 1)[:, 0],
        "next stream": uniform(0, 0, np.arange(19999), 1, 1)[:, 0],
        "next seed": uniform(1, 0, np.arange(19999), 0, 1)[:, 0],
    }
    for name, other in others.items():
        assert stats.pearsonr(base[:-1, 0], other).pvalue > 1e-3, name
