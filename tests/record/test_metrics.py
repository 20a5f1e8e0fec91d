"""Sums and top-k counts against numpy; the share of its arithmetic that a GPU does."""

import numpy as np
import pytest
import torch

from volo.cluster.distributed import World
from volo.record.metrics import Arithmetic, Sums, correct_in_top, gpu_use, peak_flops


def test_top_k_counts_equal_a_sort():
    generator = np.random.default_rng(0)
    logits, classes = generator.standard_normal((50, 7)), generator.integers(0, 7, 50)
    order = np.argsort(-logits, axis=1)
    expected = [int((order[:, :k] == classes[:, None]).any(1).sum()) for k in (1, 5)]
    assert [int(c) for c in correct_in_top(torch.from_numpy(logits), torch.from_numpy(classes))] == expected
    few = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0]])  # fewer classes than k, and an image without class
    assert [int(count) for count in correct_in_top(few, torch.tensor([0, 0, -1]))] == [1, 2]


def test_sums_add_up_in_float64():
    sums = Sums(("images", "loss"), World(0, 0, 1, torch.device("cpu")))
    for _ in range(1000):
        sums.add(1, torch.tensor(0.1, requires_grad=True))
    assert sums.totals() == {"images": 1000, "loss": pytest.approx(1000 * float(np.float32(0.1)), rel=1e-12)}
    sums.reset()
    assert sums.totals() == {"images": 0.0, "loss": 0.0}


def test_sums_go_on_from_those_of_each_rank():
    def restored(by_rank: list[list[float]], size: int, same_images: int = 1) -> list[list[float]]:
        rows = []
        for rank in range(size):
            sums = Sums(("images", "loss"), World(rank, rank, size, torch.device("cpu"), tensor_parallel=same_images))
            sums.restore(by_rank)
            rows += sums.by_rank()
        return rows

    two = [[3.0, 0.1], [4.0, 0.7]]
    assert restored(two, 2) == two
    assert restored(two, 4, same_images=2) == [two[0], two[0], two[1], two[1]]
    assert restored(two, 3) == [[7.0, 0.1 + 0.7], [0.0, 0.0], [0.0, 0.0]]
    for broken in ([[1.0]], [["x", "y"]], [[1.0, 2.0], [3.0]], None):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            restored(broken, 1)  # type: ignore[arg-type]


PEAKS = {"H100 80GB HBM3": 989e12, "H100 PCIe": 756e12, "A10G": 70e12, "GeForce RTX 9090": None}


@pytest.mark.parametrize(("name", "peak"), PEAKS.items())
def test_the_peak_is_that_of_the_data_sheet(name, peak):
    assert peak_flops(f"NVIDIA {name}", torch.bfloat16) == peak and peak_flops(f"NVIDIA {name}", None) is None
    assert gpu_use(torch.device("cpu")) == {}
    use = Arithmetic(2e9, peak).use(5000.0)
    assert use == pytest.approx({"tflops_per_second": 10.0} | ({"mfu": 10e12 / peak} if peak else {}))


@pytest.mark.gpu(stand_in=False)
def test_memory_of_the_gpu():
    device = torch.device("cuda")
    before = torch.cuda.max_memory_allocated(device)
    held = torch.empty(2**28 + before, dtype=torch.uint8, device=device)
    assert gpu_use(device)["gpu_memory_bytes"] >= held.numel()
