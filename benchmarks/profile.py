"""Where the time of a batch goes: device work by class and by kernel, the host, synchronisations, memory.

Times of kernels are torch.profiler's, milliseconds a batch (on a CPU: of torch's operations). The profiler slows the
host, so the batch and the host are timed without it.
"""

from __future__ import annotations

import re
import statistics
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from benchmarks.timing import Runner, synchronize

_BATCHES = 3
_SHOWN = 60
_NAME = 110  # characters of a kernel's name
_ROOT = f"{Path(__file__).resolve().parents[1]}/"
# The first match counts. cuDNN's attention is called fprop as its convolutions are; Inductor names what it fused.
_CLASSES = (
    ("outlook attention", r"outlook"),
    ("compiled: fused passes and sums", r"^triton_"),
    ("attention", r"sdpa|flash|fmha|attention"),
    ("convolution", r"conv(?!ert)|fprop|dgrad|wgrad"),
    ("matrix products", r"gemm|gemv|nvjet|cutlass|cublas|::(add|b|badd)?mm\b|linear"),
    ("optimizer and gradient norms", r"multi_tensor|adam|foreach|lpnorm"),
    ("normalisation", r"layer_?norm|batch_?norm|bn_"),
    (
        "sorting, gathers, random numbers",
        r"sort|radix|scan|index|gather|scatter|embedding|rand|philox|distrib|bern",
    ),
    ("copies and fills", r"mem(cpy|set)|copy|fill|zero|cat"),
    ("element by element", r"elementwise|gelu|softmax|reduce|aten::"),
)
_WAITS = re.compile(r"cuda\w*Synchronize|cudaMemcpy$|Memcpy DtoH|_local_scalar_dense|aten::nonzero")


def profile_of(runner: Runner, device: torch.device) -> dict[str, Any]:
    """Profile batches of a runner that has been warmed up."""
    facts = _by_clock(runner, device) | {"synchronising_lines": _synchronising_lines(runner, device)}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities[: 1 + (device.type == "cuda")]) as profiler:
        runner.run(_BATCHES)
        synchronize(device)
    runner.phases.take()
    return facts | _summed(profiler.key_averages(), device) | {"memory_mib": _memory(device)}


def _by_clock(runner: Runner, device: torch.device) -> dict[str, float]:
    """Return the milliseconds until the host has launched a batch, and until the device has finished it."""
    host, both = [], []
    for _ in range(_BATCHES):
        synchronize(device)
        began = time.perf_counter()
        runner.run(1)
        host.append(1e3 * (time.perf_counter() - began))
        synchronize(device)
        both.append(1e3 * (time.perf_counter() - began))
    return {"host_ms": statistics.median(host), "batch_ms": statistics.median(both)}


def _synchronising_lines(runner: Runner, device: torch.device) -> dict[str, int]:
    """Return the lines of Python at which torch warns that the host waits for the device, with counts per batch."""
    if device.type != "cuda":
        return {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            runner.run(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(Counter(f"{w.filename.removeprefix(_ROOT)}:{w.lineno}" for w in told if "synchroniz" in str(w.message)))


def _summed(events: Any, device: torch.device) -> dict[str, Any]:
    """Sum the profiler's events for one batch as classes, kernels and waits."""
    on_device = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    time_of = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    kernels, waits = [], {}
    for event in events:
        row = {"calls": event.count / _BATCHES, "ms": getattr(event, time_of) / 1e3 / _BATCHES}
        if _WAITS.search(event.key):
            waits[event.key] = row | {"ms": max(row["ms"], event.cpu_time_total / 1e3 / _BATCHES)}
        if event.device_type == on_device and not event.is_user_annotation:
            kernels.append({"name": event.key[:_NAME], "class": class_of(event.key), **row})
    kernels.sort(key=lambda kernel: -kernel["ms"])
    classes: defaultdict[str, dict[str, float]] = defaultdict(lambda: {"ms": 0.0, "calls": 0.0})
    for kernel in kernels:
        for name in ("ms", "calls"):
            classes[kernel["class"]][name] += kernel[name]
    busy = sum(kernel["ms"] for kernel in kernels)
    return {"busy_ms": busy, "classes": dict(classes), "kernels": kernels[:_SHOWN], "waits": waits}


def class_of(kernel: str) -> str:
    """Return the class of a kernel by its name."""
    return next((name for name, pattern in _CLASSES if re.search(pattern, kernel, re.IGNORECASE)), "other")


def _memory(device: torch.device) -> dict[str, float]:
    """Return the MiB allocated and reserved by torch now and at the peaks, and the number of allocation retries."""
    if device.type != "cuda":
        return {}
    found = torch.cuda.memory_stats(device)
    names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak")
    sizes = {name.replace("_bytes.all.", ", "): found[name] / 2**20 for name in names}
    return sizes | {"allocation retries (times)": found["num_alloc_retries"]}


def lines(found: dict[str, Any]) -> list[str]:
    """Return the profile as lines of Markdown."""
    busy = found["busy_ms"]
    waits = [f"{name} {row['calls']:g} ({row['ms']:.2f} ms)" for name, row in found["waits"].items()]
    places = [f"{place} ({count})" for place, count in found["synchronising_lines"].items()]
    memory = [f"{name} {value:.0f}" for name, value in found["memory_mib"].items()]
    told = [
        "",
        f"A batch of ours takes {found['batch_ms']:.1f} ms; the host has asked for all of it after "
        f"{found['host_ms']:.1f} ms; kernels run for {busy:.1f} ms.",
        f"Waits of the host, calls a batch (the profiler waits in the end): {', '.join(waits) or 'none'}; torch warns "
        f"of waits at {', '.join(places) or 'no line'}.",
        *([f"Memory, MiB: {', '.join(memory)}."] if memory else []),
        "",
        "| class | ms | share | calls |",
        "|---|---|---|---|",
    ]
    for name, row in sorted(found["classes"].items(), key=lambda item: -item[1]["ms"]):
        told.append(f"| {name} | {row['ms']:.2f} | {row['ms'] / max(busy, 1e-9):.1%} | {row['calls']:.0f} |")
    told += ["", "| kernel | class | ms | calls |", "|---|---|---|---|"]
    for row in found["kernels"]:
        told.append(f"| `{row['name'].replace('|', '/')}` | {row['class']} | {row['ms']:.3f} | {row['calls']:g} |")
    return told
