"""Global batches are the same images whatever the number of ranks and micro-batches; nothing is lost or doubled."""

import numpy as np
import pytest

from tlt.data.augment.index_stream import IndexStream, eval_indices, permutation
from tlt.errors import UserError


def global_batches(length, global_batch, epoch, world=1, micro=1, **options):
    """One list of images per update, put together from all ranks, of which each holds as many."""
    streams = [IndexStream(length, global_batch, 42, world, rank, micro, **options) for rank in range(world)]
    updates = list(zip(*(stream.epoch(epoch) for stream in streams), strict=True))
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


def test_the_tail_has_micro_batches_as_large_as_the_others_the_last_one_ragged():
    streams = [IndexStream(30, 16, 0, world_size=2, rank=rank, micro_batches=2) for rank in (0, 1)]
    sizes = [[[len(chunk) for chunk in update] for update in stream.epoch(0)] for stream in streams]
    assert sizes == [[[4, 4], [4, 3]]] * 2
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


def test_repetitions_stand_beside_each_other_on_different_ranks():
    batches = np.array(global_batches(20, 6, 1, world=3, repeats=3)[:3])  # the fourth is the smaller tail
    images = batches.reshape(-1, 3)  # what the ranks have at the same place
    assert (images % 20 == images[:, :1]).all() and (np.sort(images // 20) == [0, 1, 2]).all()
    assert len(set(images[:, 0])) == len(images)
