"""The use of the machine, from files of Linux that a test writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from volo.record import machine_use
from volo.record.machine_use import Arithmetic, MachineUse, peak_flops

CPU = torch.device("cpu")


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def _machine(root: Path, stat: str, sent: int, rdma: int) -> None:
    cards = {"sys/class/net/eth0/device/vendor": "x"}
    for interface, count in (("eth0", sent), ("docker0", 10**9 * sent), ("lo", 10**9 * sent)):
        for way in ("rx", "tx"):
            cards[f"sys/class/net/{interface}/statistics/{way}_bytes"] = f"{count}\n"
    for way in ("rcv", "xmit"):
        cards[f"sys/class/infiniband/mlx5_0/ports/1/counters/port_{way}_data"] = f"{rdma}\n"
    _write(root, {"proc/stat": f"cpu  {stat}\ncpu0 {stat}\nintr 5\n", **cards})


def test_cpus_and_network_are_measured_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 110.0, 112.0))
    monkeypatch.setattr(machine_use.time, "monotonic", lambda: next(clock))
    _machine(tmp_path, "100 0 50 800 50 0 0 0 90 0", sent=1000, rdma=100)
    use = MachineUse(CPU, tmp_path)
    _machine(tmp_path, "160 0 70 810 60 0 0 0 150 0", sent=2000, rdma=350)  # 100 ticks, 20 of them idle or waiting
    # The card, not a bridge on it: 2 x 1000 bytes; 2 x 250 words of 4 bytes by RDMA; in 10 s.
    assert use.look() == pytest.approx({"cpu_share": 0.8, "network_bytes_per_second": (2000 + 2000) / 10})
    _machine(tmp_path, "160 0 70 830 60 0 0 0 150 0", sent=2000, rdma=350)
    assert use.look() == {"cpu_share": 0.0, "network_bytes_per_second": 0.0}


def test_a_container_has_interfaces_without_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 2.0))
    monkeypatch.setattr(machine_use.time, "monotonic", lambda: next(clock))
    received = "sys/class/net/eth0/statistics/rx_bytes"
    _write(tmp_path, {received: "5", "sys/class/net/lo/statistics/rx_bytes": "5"})
    use = MachineUse(CPU, tmp_path)
    _write(tmp_path, {received: "15", "sys/class/net/lo/statistics/rx_bytes": "900"})
    assert use.look() == {"network_bytes_per_second": 5.0}


def test_what_the_system_does_not_tell_is_left_out(tmp_path: Path) -> None:
    assert MachineUse(CPU, tmp_path).look() == {}


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


def test_a_share_is_told_where_the_peak_is_known() -> None:
    assert Arithmetic(2e9, 100e12).use(5000.0) == pytest.approx({"tflops_per_second": 10.0, "mfu": 0.1})
    assert Arithmetic(2e9, None).use(5000.0) == pytest.approx({"tflops_per_second": 10.0})


@pytest.mark.gpu
def test_memory_of_the_gpu() -> None:
    device = torch.device("cuda")
    use, before = MachineUse(device), torch.cuda.max_memory_allocated(device)
    held = torch.empty(2**28 + before, dtype=torch.uint8, device=device)
    assert use.look()["gpu_memory_bytes"] >= held.numel()
