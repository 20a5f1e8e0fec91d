"""Which size the images of an update have, and which images these are where batches of other sizes are larger."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from timm.data import ScheduledBatchSampler

from tlt.data.batch import IndexStream
from tlt.data.size_schedule import SizeSchedule
from tlt.errors import UserError

SIZES, EPOCHS = [(64, 64), (96, 96), (128, 128)], 20


def schedule(*batches: int, epochs: int | None = EPOCHS, **more: Any) -> SizeSchedule:
    return SizeSchedule(SIZES, batches, epochs=epochs, **more)


def streams(sizes: SizeSchedule, world: int = 1, micro: int = 1, **more: Any) -> list[IndexStream]:
    batch = round(sizes.mean_batch * world * micro)
    return [IndexStream(101, batch, 7, world, rank, micro, sizes=sizes, **more) for rank in range(world)]


@pytest.mark.parametrize(
    "more", [{}, {"weights": [1, 0, 3]}, {"spread": 0, "random_mix": 0.2}, {"random_mix": 0}, {"epochs": None}]
)
def test_sizes_are_as_frequent_as_timms_and_the_last_ends_it(more):
    sizes, updates = schedule(4, 4, 4, **more), 50
    mode = "constant" if sizes.epochs is None else "progressive"
    of_timm = ScheduledBatchSampler(range(99), [4] * 3, sizes.weights, choice_schedule=mode, schedule_epochs=EPOCHS)
    of_timm.schedule_spread, of_timm.schedule_random_mix = sizes.spread, sizes.random_mix
    for epoch in range(EPOCHS + 3):
        shares = of_timm.choice_weights_for_epoch(epoch).numpy()
        if sizes.epochs and epoch >= EPOCHS - 2:
            shares = np.array([0, 0, 1])
        choices = sizes.choices(7, epoch, updates)
        assert np.abs(np.bincount(choices, minlength=3) - updates * shares).max() < 1 + 1e-9
        assert set(choices) <= set(np.flatnonzero(shares))
    assert not np.array_equal(sizes.choices(7, 10, updates), sizes.choices(8, 10, updates))
    assert (np.diff(sizes.choices(7, 10, updates)) < 0).any()  # not one size after the other


def test_the_last_size_is_reached_however_narrow_the_window_is():
    nine = SizeSchedule([(side, side) for side in range(32, 41)], [4] * 9, epochs=30, spread=0, random_mix=0)
    assert [nine.weights_of(epoch).argmax() for epoch in (0, 15, 26, 27, 29, 35)] == [0, 4, 7, 8, 8, 8]


def test_sizes_of_equal_batches_change_no_batch():
    (sized,), plain = streams(schedule(8, 8, 8)), IndexStream(101, 8, 7)
    assert sized.updates_per_epoch == plain.updates_per_epoch == len(sized.sizes_of(3)) == 13
    for mine, theirs in zip(sized.epoch(3), plain.epoch(3), strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize(("world", "micro", "repeats"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 1, 2)])
def test_images_come_equally_often_in_batches_of_unlike_sizes(world, micro, repeats):
    sizes = schedule(8, 5, 2)
    ranks, per_epoch = streams(sizes, world, micro, repeats=repeats), []
    for epoch in range(EPOCHS):
        assert all(rank.sizes_of(epoch) == ranks[0].sizes_of(epoch) for rank in ranks)
        updates = list(zip(*(rank.epoch(epoch) for rank in ranks), strict=True))
        assert len(updates) == ranks[0].updates_per_epoch
        for size, update in zip(ranks[0].sizes_of(epoch), updates, strict=True):
            batch = sizes.batch_sizes[SIZES.index(size)]
            assert [[len(cut) for cut in rank] for rank in update] == [[batch] * micro] * world
        whole = [np.stack([np.concatenate(rank) for rank in update], 1).ravel() for update in updates]
        for rank, resumed in zip(ranks, zip(*updates, strict=True), strict=True):
            for mine, expected in zip(rank.epoch(epoch, 3), resumed[3:], strict=True):
                assert np.array_equal(mine, expected)
        per_epoch.append(np.concatenate(whole))
        assert len(set(per_epoch[-1])) == len(per_epoch[-1])  # each is augmented in its own way
    images = np.concatenate(per_epoch) % 101
    counts = Counter(images.tolist())
    if repeats == 1:
        assert len(counts) == 101 and max(counts.values()) - min(counts.values()) <= 1
        assert abs(len(images) / 101 - EPOCHS) < 1
    passes = [images[start : start + 101] for start in range(0, len(images) - 101, 101)]
    assert all(max(Counter(each.tolist()).values()) == repeats for each in passes)


def test_numbers_that_do_not_fit_are_refused():
    for batches, more in [((4, 4), {}), ((4, 4, 0), {}), ((4,) * 3, {"weights": [1, 1]}), ((4,) * 3, {"spread": -1})]:
        with pytest.raises(UserError, match="--train-"):
            schedule(*batches, **more)
    with pytest.raises(UserError, match="101 images, fewer than one global batch of 112"):
        streams(schedule(56, 4, 4), 2)
