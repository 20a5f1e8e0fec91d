"""A CUDA device that is not there: whole programs run with `--device cuda` on a machine without a driver.

A tensor on it says "cuda:0" to Python, and its numbers are computed on the CPU, so that programs end as on a GPU and
their losses can be compared. What a GPU punishes, the stand-in finds:

- An operation on tensors of both devices, or an attribute that a batch lost on its way, raises.
- `waits` lists every place at which the host waits for the device. A copy from memory that is not page-locked is one.
- `launches` counts the operations that start a kernel or a copy, by the stage of the product that starts them.
- A copy to page-locked memory arrives when the host has waited for it; until then its memory holds NaN, or -1.
- In the capture of a graph (`tests/stand_in/graph.py`) nothing is computed and nothing may wait. `replay` does it all
  with the numbers that Python had then, and is one launch.
- `races` lists where a stream reads or writes what another one may still be writing or reading, and memory that is
  given back while another stream than its own may still use it.

Not here: the rounding of a GPU (products of bfloat16 are float32's, rounded, on every processor), and autocast's list
of operations for CUDA (the CPU's takes its place); Triton's programs (the operator of `volo.kernels.windows` answers
for them, `tests/models/test_outlook_triton.py` interprets them); torch.compile and NCCL; worker processes (-j 0). C++
takes a tensor for one of the CPU.

What it can't see, because nothing here runs later than it is asked for, and no memory is used twice:
- Memory that a graph's pool gives to two tensors: on a GPU, `test_graphs_compute_what_launched_steps_do` of
  `tests/train/test_step_graph.py`, with sizes and accumulation.
- Page-locked memory that is used again before it was copied: there, `test_numbers_that_are_sent_to_a_busy_gpu_arrive`.
- What a failed capture leaves of the allocator: there, `test_a_capture_that_fails_gives_its_memory_back`.
- Kernels that wait and do not say so: no test, for torch reports none. A capture refuses them; elsewhere the GPU's
  pauses show them (`profiled` in `tests/gpu_day.py`).
- Failures that are reported later than they happen: no test, for a process can't use the GPU after one. Each check of
  `tests/gpu_day.py` is a process, and CUDA_LAUNCH_BLOCKING=1 names the kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.stand_in import streams
from tests.stand_in.device import CudaGenerator, StandIn
from tests.stand_in.graph import Graph, capture
from tests.stand_in.streams import ACTIVE, Event, Stream, current_stream, on_stream
from tests.stand_in.tensor import CUDA, CudaTensor, Mode, as_device_and_dtype, leaves_of, parse_to

_GPU = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132)


class DefaultGenerator:
    """Stands for the device's, whose numbers are the CPU's."""

    def clone_state(self) -> None:
        ACTIVE.device.refuse_in_capture("clone_state")

    def graphsafe_set_state(self, state: None) -> None:
        ACTIVE.device.left_by_failures.discard("generator")


class _GeneratorOf(torch.Generator):
    """Stands for `torch.Generator`; annotations of modules that are imported meanwhile need a class."""

    def __new__(cls, device: Any = "cpu", real: Any = torch.Generator) -> Any:
        return CudaGenerator() if torch.device(device).type == "cuda" else real(device)


def _run_thread(thread: threading.Thread, real: Any = threading.Thread.run) -> None:
    with Mode():
        real(thread)


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`; torch's puts the memory of the device behind a tensor of the CPU."""
    shared: dict[nn.Parameter, nn.Parameter] = {}
    with torch.no_grad():
        for each in module.modules():
            for name, parameter in each._parameters.items():
                if parameter is not None and parameter not in shared:
                    shared[parameter] = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
                each._parameters[name] = None if parameter is None else shared[parameter]
            for name, buffer in each._buffers.items():
                each._buffers[name] = None if buffer is None else function(buffer)
    return module


def _backward(*args: Any, real: Any = torch.autograd.backward, **kwargs: Any) -> None:
    ACTIVE.device.in_backward = any(isinstance(leaf, CudaTensor) for leaf in leaves_of((*args, *kwargs.values())))
    try:
        real(*args, **kwargs)
    finally:
        ACTIVE.device.in_backward = False


def _to(tensor: Tensor, *args: Any, real: Any = Tensor.to, **kwargs: Any) -> Tensor:
    return real(tensor, *as_device_and_dtype(args), **kwargs)


def _grouped(tensors: Any, with_indices: bool = False, real: Any = torch._C._group_tensors_by_device_and_dtype) -> Any:
    """Groups for `_foreach` operations, which C++ makes by its own idea of the device."""
    groups = real(tensors, with_indices)
    if not any(isinstance(leaf, CudaTensor) for leaf in leaves_of(leaves_of(tensors))):
        return groups
    return {(CUDA, dtype): group for (_, dtype), group in groups.items()}


@contextmanager
def stand_in_cuda() -> Iterator[StandIn]:
    """Within the block this machine has one H100, as far as Python can see."""
    stand_in = ACTIVE.device = StandIn()
    streams.begin()
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    nothing, zero, memory = (lambda *_, **__: None), (lambda *_, **__: 0), (lambda *_, **__: 1 << 30)
    seeds = ("manual_seed_all", "manual_seed", "set_rng_state")
    cuda = {
        **{name: nothing for name in ("_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats", "init")},
        **{name: partial(stand_in.refuse_in_capture, name) for name in seeds},
        **{name: memory for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")},
        **{name: lambda *_, **__: True for name in ("is_available", "is_initialized", "is_bf16_supported")},
        "max_memory_reserved": memory,
        "mem_get_info": lambda device=None: (_GPU.total_memory, _GPU.total_memory),
        "current_device": zero,
        "device_count": lambda: 1,
        "is_current_stream_capturing": lambda: stand_in.capturing is not None,
        "get_device_properties": lambda device=None: _GPU,
        "get_device_capability": lambda device=None: (_GPU.major, _GPU.minor),
        "get_device_name": lambda device=None: _GPU.name,
        "get_rng_state": lambda device=None: (
            stand_in.refuse_in_capture("get_rng_state") or torch.zeros(16, dtype=torch.uint8)
        ),
        "set_sync_debug_mode": lambda mode: setattr(stand_in, "sync_debug_mode", mode),
        "get_sync_debug_mode": lambda: ("default", "warn", "error").index(stand_in.sync_debug_mode),
        "synchronize": stand_in.synchronize,
        "current_stream": current_stream,
        "default_stream": lambda device=None: stand_in.default,
        "set_stream": streams.set_stream,
        "stream": on_stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 1),
        "default_generators": (DefaultGenerator(),),
    }
    with ExitStack() as patches:
        for name, value in cuda.items():
            patches.enter_context(patch.object(torch.cuda, name, value))
        for owner, name, value in (
            (torch.accelerator, "current_stream", current_stream),
            (torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")),
            (torch, "Generator", _GeneratorOf),
            (torch, "autocast", _Autocast),
            (torch, "is_autocast_enabled", lambda *_: enabled("cpu")),
            (torch, "get_autocast_dtype", lambda *_: dtype_of("cpu")),
            (torch._C, "_group_tensors_by_device_and_dtype", _grouped),
            (nn.Module, "_apply", _apply),
            (threading.Thread, "run", _run_thread),
            (torch.autograd, "backward", _backward),
            (torch._C, "_cuda_endAllocateToPool", lambda *_: stand_in.clear_up("pool")),
            (torch._C, "_cuda_releasePool", lambda *_: stand_in.clear_up("memory")),
            (Tensor, "to", _to),
            (torch._C._nn, "_parse_to", parse_to),
            (Tensor, "pin_memory", lambda self, *_: stand_in.pin(self.clone())),
            (Tensor, "is_pinned", lambda self, *_: stand_in.is_pinned(self)),
        ):
            patches.enter_context(patch.object(owner, name, value))
        kinds = torch.utils._foreach_utils._foreach_supported_types
        patches.enter_context(
            patch.object(torch.utils._foreach_utils, "_foreach_supported_types", [*kinds, CudaTensor])
        )
        # torch.tensor(values, device="cuda") then copies a tensor of the CPU, and asks no driver for its device.
        torch._C._ensureCUDADeviceGuardSet()
        patches.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        patches.enter_context(Mode())
        yield stand_in
