"""The counter-based generator and the order of images made of it: known vectors, uniformity, the same global batches
whatever the number of ranks and micro-batches."""

import numpy as np
import pytest
import torch

from tlt.data.augment.counter import key, keys, normal_noise, uniform
from tlt.data.batch import IndexStream, permutation

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
    together = uniform(seed, 6, [9, 10], 2, 3)
    assert together[0].tolist() == [(chained(seed & MASK, 6, 9, 2, k) >> 11) / 2**53 for k in range(3)]
    assert np.array_equal(together[1:, :2], uniform(seed, 6, [10], 2, 2))  # whatever its batch


def test_numbers_are_uniform_or_normal_and_uncorrelated():
    from scipy import stats  # a second, which each process of the tests would take

    base = uniform(0, 0, np.arange(20000), 0, 4)
    assert base.min() >= 0 and base.max() < 1
    assert stats.kstest(base.ravel(), "uniform").pvalue > 1e-3
    noise = normal_noise(5, torch.arange(20000)).numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    others = {
        "next index": (base[:-1, 0], base[1:, 0]),
        "next position": (base[:, 0], base[:, 1]),
        "next epoch": (base[:, 0], uniform(0, 1, np.arange(20000), 0, 1)[:, 0]),
        "next stream": (base[:, 0], uniform(0, 0, np.arange(20000), 1, 1)[:, 0]),
        "next seed": (base[:, 0], uniform(1, 0, np.arange(20000), 0, 1)[:, 0]),
        "next word": (noise[:-1], noise[1:]),
        "next key": (noise, normal_noise(6, torch.arange(20000)).numpy()),
    }
    for name, pair in others.items():
        assert stats.pearsonr(*pair).pvalue > 1e-3, name


def global_batches(length, global_batch, epoch, world=1, micro=1, **options):
    """One list of images per update, put together from all ranks, of which each holds as many."""
    streams = [IndexStream(length, global_batch, 42, world, rank, micro, **options) for rank in range(world)]
    updates = list(zip(*(stream.epoch(epoch) for stream in streams), strict=True))
    assert all(each.smallest_batch == min(map(len, sum(each.epoch(epoch), []))) for each in streams)
    batches = [np.stack([np.concatenate(rank) for rank in update], axis=1).ravel().tolist() for update in updates]
    assert len(batches) == streams[0].updates_per_epoch and sum(map(len, batches)) == streams[0].images_per_epoch
    return batches


@pytest.mark.parametrize(("world", "micro"), [(2, 1), (1, 4), (4, 2), (8, 1)])
def test_batches_do_not_depend_on_ranks_and_micro_batches(world, micro):
    alone = global_batches(43, 8, 3)
    shared = global_batches(43, 8, 3, world, micro)
    assert sorted(sum(alone, [])) == list(range(43))
    assert shared[:5] == alone[:5]
    assert shared[5:] == [alone[5][: 3 - 3 % world]] * (world <= 3)  # less than an image per rank is left out


def test_tail_is_cut_like_the_rest_and_differs_between_epochs():
    streams = [IndexStream(30, 16, 0, world_size=2, rank=rank, micro_batches=2) for rank in (0, 1)]
    sizes = [[[len(chunk) for chunk in update] for update in stream.epoch(0)] for stream in streams]
    assert sizes == [[[4, 4], [4, 3]]] * 2
    assert [len(batch) for batch in global_batches(22, 8, 0, drop_last=True)] == [8, 8]
    left_out = {frozenset(range(23)) - set(sum(global_batches(23, 4, epoch, world=4), [])) for epoch in range(6)}
    assert len(left_out) > 1
    *repeated, once = sum(global_batches(25, 8, 1, repeats=3), [])
    assert [index % 25 for index in [*repeated[::3], once]] == permutation(25, 42, 1)[:9].tolist()
    assert all({b - a, c - b} == {25} for a, b, c in zip(repeated[::3], repeated[1::3], repeated[2::3], strict=True))


def test_permutations_differ_and_are_fair():
    orders = np.array([permutation(10, 0, epoch) for epoch in range(4000)])
    assert (np.sort(orders, axis=1) == np.arange(10)).all()
    assert not np.array_equal(permutation(50, 0, 0), permutation(50, 1, 0))
    counts = np.array([(orders[:, place] == 3).sum() for place in range(10)])
    assert abs(counts - 400).max() < 5 * np.sqrt(400 * 0.9)
