"""Global batches are the same images whatever the number of ranks and micro-batches; nothing is lost or doubled."""

import numpy as np
import pytest

from tlt.data.augment.index_stream import IndexStream, eval_indices, permutation
from tlt.errors import UserError


def global_batches(length, global_batch, epoch, world=1, micro=1, **options):
    """One list of images per update, put together from all ranks."""
    streams = [IndexStream(length, global_batch, 42, world, rank, micro, **options) for rank in range(world)]
    assert all(len(list(stream.epoch(epoch))) == stream.updates_per_epoch for stream in streams)
    updates = zip(*(stream.epoch(epoch) for stream in streams), strict=True)
    return [sorted(np.concatenate([chunk for rank in update for chunk in rank]).tolist()) for update in updates]


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (2, 1), (1, 4), (4, 2), (8, 1)])
def test_batches_do_not_depend_on_ranks_and_micro_batches(world, micro):
    expected = global_batches(40, 8, 3)
    assert global_batches(40, 8, 3, world, micro) == expected
    assert sorted(sum(expected, [])) == list(range(40))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("length", [19, 21, 22, 23])
def test_the_tail_loses_less_than_one_image_per_rank(length, world):
    batches = global_batches(length, 4, 0, world)
    seen = sum(batches, [])
    assert len(set(seen)) == len(seen) == length - (length % 4) % world
    assert [len(batch) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    assert IndexStream(length, 4, 42, world).images_per_epoch == len(seen)


def test_ranks_hold_equally_many_images_and_the_tail_is_ragged():
    streams = [IndexStream(30, 16, 0, world_size=2, rank=rank, micro_batches=2) for rank in (0, 1)]
    sizes = [[[len(chunk) for chunk in update] for update in stream.epoch(0)] for stream in streams]
    assert sizes == [[[4, 4], [4, 3]]] * 2


def test_a_tail_of_fewer_images_than_ranks_is_no_update():
    assert IndexStream(33, 32, 0, world_size=2).updates_per_epoch == 1


def test_drop_last_leaves_the_smaller_batch_out():
    assert [len(batch) for batch in global_batches(22, 8, 0, drop_last=True)] == [8, 8]


def test_epochs_leave_out_different_images():
    left_out = {frozenset(range(23)) - set(sum(global_batches(23, 4, epoch, world=4), [])) for epoch in range(6)}
    assert len(left_out) > 1


def test_start_update_skips_exactly_those_updates():
    stream = IndexStream(23, 4, 1)
    whole = [update[0].tolist() for update in stream.epoch(5)]
    assert [update[0].tolist() for update in stream.epoch(5, start_update=3)] == whole[3:]


def test_permutations_differ_between_epochs_and_seeds_and_are_fair():
    orders = np.array([permutation(10, 0, epoch) for epoch in range(4000)])
    assert (np.sort(orders, axis=1) == np.arange(10)).all()
    assert not np.array_equal(permutation(50, 0, 0), permutation(50, 1, 0))
    counts = np.array([(orders[:, place] == 3).sum() for place in range(10)])
    assert abs(counts - 400).max() < 5 * np.sqrt(400 * 0.9)


@pytest.mark.parametrize("world", [1, 3, 8])
def test_evaluation_sees_every_image_once(world):
    shares = [eval_indices(10, world, rank) for rank in range(world)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(10))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_faults_name_the_numbers():
    with pytest.raises(UserError, match="7 images.*8"):
        IndexStream(7, 8, 0)
    with pytest.raises(UserError, match="6 images.*4 ranks"):
        IndexStream(100, 6, 0, world_size=4)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        IndexStream(100, 8, 0, world_size=2, rank=2)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_shorten_the_last_batch_and_change_no_other(world):
    alone, shared = (global_batches(27, 8, 3, ranks) for ranks in (1, world))
    assert shared[:3] == alone[:3]
    assert len(shared) == (3 if world > 3 else 4)
    assert all(set(batch) < set(alone[3]) for batch in shared[3:])


def test_repetitions_stand_beside_each_other_on_different_ranks() -> None:
    length, world = 20, 3
    ranks = [
        [np.concatenate(update) for update in IndexStream(length, 6, 1, world, rank, repeats=3).epoch(0)]
        for rank in range(world)
    ]
    updates = [np.stack(update) for update in zip(*ranks, strict=True)]
    assert sum(update.size for update in updates) == IndexStream(length, 6, 1, world).images_per_epoch
    seen = []
    for update in updates:
        for image in update.T:  # what the ranks have at the same place
            assert len(set(image % length)) == 1 and sorted(image // length) == [0, 1, 2]
            seen.append(image[0] % length)
    assert len(set(seen)) == len(seen)
