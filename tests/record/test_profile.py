"""What `--profile` says of a run's steps."""

import gzip
import json
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.autograd import DeviceType

from tests.train.small_run import arguments
from volo.cluster.distributed import World
from volo.record.profile import WARM_UP, StepProfiler, table
from volo.train import meter


def test_updates_of_one_epoch_are_profiled_once_the_run_is_warm(tmp_path):
    lines: list[str] = []
    profiler = StepProfiler(2, torch.device("cpu"), tmp_path, lines.append)
    left = [WARM_UP - update for update in range(WARM_UP)] + [1, 0, 3, 2, 1, 0, 3, 2]  # too few are left at first
    for update, rest in enumerate(left):
        for _ in range(update + 1):
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert not lines or update >= WARM_UP + 4
        profiler.update_done(rest)
    assert lines[0].startswith("profile of 2 updates: ")
    # 24 and 25 products: the first two updates that begin where an epoch has two left.
    assert next(line for line in lines if line.startswith("matrix products")).split()[-1] in ("24", "25")
    assert (tmp_path / "profile.txt").read_text().splitlines() == lines[:-1]
    assert json.loads(gzip.decompress((tmp_path / "profile.json.gz").read_bytes()))["traceEvents"]


def event(key: str, count: int, device: float, host: float = 0.0, kind: Any = DeviceType.CUDA) -> Mock:
    return Mock(key=key, count=count, self_device_time_total=device, self_cpu_time_total=host, device_type=kind)


def test_a_gpus_kernels_are_added_up_by_kind():
    events = [
        event("nvjet_tst_128x256", 40, 30_000.0),
        event("sm90_xmma_gemm_bf16", 20, 10_000.0),
        event("void multi_tensor_apply_kernel<...>", 4, 2_000.0),
        event("triton_poi_fused_add_3", 100, 8_000.0),
        event("something new", 2, 0.0),
        event("aten::mm", 60, 0.0, 5_000.0, DeviceType.CPU),
        event("cudaStreamSynchronize", 1, 0.0, 60_000.0, DeviceType.CPU),
    ]
    lines = table(events, 2, 0.1, "cuda")
    assert lines[0] == "profile of 2 updates: 50.00 ms an update, cuda 25.00 ms, host at most 20.00 ms"
    rows = {line[:20].strip(): line[20:].split() for line in lines[2:]}
    assert rows["matrix products"] == ["20.00", "80.0", "%", "30"] and rows["optimizer"][0] == "1.00"
    assert rows["compiled"] == ["4.00", "16.0", "%", "50"] and rows["other"][-1] == "1" and len(rows) == 4


@pytest.mark.parametrize(("late", "waited", "told"), [(30, 0.0, 1), (25, 0.0, 0), (50, 2.0, 0)])
def test_a_gpu_that_waits_for_its_host_is_told_once(late, waited, told):
    logger = Mock()
    run = Mock(logger=logger, settings=arguments(), world=World(0, 0, 1, torch.device("cpu")))
    counting = meter.Meter(run, Mock(distillation=None))
    for _ in range(2):
        counting._late = late
        counting._tell_of_slow_host(Mock(updates=50, seconds=10.0, wait_seconds=waited))
    assert logger.line.call_count == told and counting._late == 0
    assert not told or "before 30 of 50 updates: the host is slower" in logger.line.call_args[0][0]
