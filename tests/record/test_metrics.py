"""Sums and top-k counts against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from volo.cluster.distributed import World
from volo.record.metrics import Sums, correct_in_top


def test_top_k_counts_equal_a_sort() -> None:
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((50, 7))
    classes = generator.integers(0, 7, 50)
    order = np.argsort(-logits, axis=1)
    expected = [int((order[:, :k] == classes[:, None]).any(1).sum()) for k in (1, 5)]
    counted = correct_in_top(torch.from_numpy(logits), torch.from_numpy(classes))
    assert [int(c) for c in counted] == expected


def test_fewer_classes_than_k_and_images_without_class() -> None:
    logits = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0]])
    assert [int(count) for count in correct_in_top(logits, torch.tensor([0, 0, -1]))] == [1, 2]


def test_sums_add_up_in_float64() -> None:
    sums = Sums(("images", "loss"), World(0, 0, 1, torch.device("cpu")))
    for _ in range(1000):
        sums.add(1, torch.tensor(0.1, requires_grad=True))
    totals = sums.totals()
    assert totals["images"] == 1000
    assert totals["loss"] == pytest.approx(1000 * float(np.float32(0.1)), rel=1e-12)
    sums.reset()
    assert sums.totals() == {"images": 0.0, "loss": 0.0}
    with pytest.raises(ValueError, match="1 values for 2 names"):
        sums.add(1)


def test_sums_go_on_from_those_of_each_rank() -> None:
    def restored(by_rank: list[list[float]], size: int, same_images: int = 1) -> list[list[float]]:
        rows = []
        for rank in range(size):
            world = World(rank, rank, size, torch.device("cpu"), tensor_parallel=same_images)
            sums = Sums(("images", "loss"), world)
            sums.restore(by_rank)
            rows += sums.by_rank()
        return rows

    two = [[3.0, 0.1], [4.0, 0.7]]
    assert restored(two, 2) == two
    assert restored(two, 1) == [[7.0, 0.1 + 0.7]]
    assert restored(two, 4, same_images=2) == [two[0], two[0], two[1], two[1]]
    assert restored(two, 3) == [[7.0, 0.1 + 0.7], [0.0, 0.0], [0.0, 0.0]]
    for broken in ([[1.0]], [["x", "y"]], [[1.0, 2.0], [3.0]], None):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            restored(broken, 1)  # type: ignore[arg-type]
