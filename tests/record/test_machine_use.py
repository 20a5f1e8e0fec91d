"""What share of its arithmetic a GPU does."""

from __future__ import annotations

import pytest
import torch

from volo.record.machine_use import Arithmetic, gpu_use, peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 9090", None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet(name: str, peak: float | None) -> None:
    assert peak_flops(name, torch.bfloat16) == peak
    assert peak_flops(name, None) is None and gpu_use(torch.device("cpu")) == {}


def test_a_share_is_given_where_the_peak_is_known() -> None:
    assert Arithmetic(2e9, 100e12).use(5000.0) == pytest.approx({"tflops_per_second": 10.0, "mfu": 0.1})
    assert Arithmetic(2e9, None).use(5000.0) == pytest.approx({"tflops_per_second": 10.0})


@pytest.mark.gpu
def test_memory_of_the_gpu() -> None:
    device = torch.device("cuda")
    before = torch.cuda.max_memory_allocated(device)
    held = torch.empty(2**28 + before, dtype=torch.uint8, device=device)
    assert gpu_use(device)["gpu_memory_bytes"] >= held.numel()
