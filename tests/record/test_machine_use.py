"""The use of the machine, from files of Linux that a test writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from volo.record.machine_use import Arithmetic, MachineUse, peak_flops

CPU = torch.device("cpu")


def test_cpus_are_measured_between_two_looks(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 50 0 0 0 90 0\ncpu0 1 1 1 1 1\n")
    use = MachineUse(CPU, stat)
    stat.write_text("cpu  160 0 70 810 60 0 0 0 150 0\n")  # 100 ticks, 20 of them idle or waiting
    assert use.look() == pytest.approx({"cpu_share": 0.8})
    stat.write_text("cpu  160 0 70 830 60 0 0 0 150 0\n")
    assert use.look() == {"cpu_share": 0.0}


def test_without_counters_nothing_is_reported(tmp_path: Path) -> None:
    assert MachineUse(CPU, tmp_path / "none").look() == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 9090", None),
        ("", None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet(name: str, peak: float | None) -> None:
    assert peak_flops(name, torch.bfloat16) == peak
    assert peak_flops(name, None) is None


def test_a_share_is_given_where_the_peak_is_known() -> None:
    assert Arithmetic(2e9, 100e12).use(5000.0) == pytest.approx({"tflops_per_second": 10.0, "mfu": 0.1})
    assert Arithmetic(2e9, None).use(5000.0) == pytest.approx({"tflops_per_second": 10.0})


@pytest.mark.gpu
def test_memory_of_the_gpu() -> None:
    device = torch.device("cuda")
    use, before = MachineUse(device), torch.cuda.max_memory_allocated(device)
    held = torch.empty(2**28 + before, dtype=torch.uint8, device=device)
    assert use.look()["gpu_memory_bytes"] >= held.numel()
