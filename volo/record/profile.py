"""Measures where the time of training steps goes (`--profile N`): a trace, and a table by kind of kernel."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

TRACE = "profile.json.gz"
TABLE = "profile.txt"
WARM_UP = 20  # updates before the profile, in which torch compiles, captures CUDA graphs and chooses kernels
_KINDS = {  # a kernel is of the first kind that has a word which occurs in the kernel's name in lower case
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "addmm", "::mm", "::bmm", "linear"),
    "convolutions": ("conv", "fprop", "dgrad", "wgrad"),
    "attention": ("flash", "fmha", "attention", "outlook"),
    "communication": ("nccl", "allreduce", "all_reduce", "c10d"),
    "normalisation": ("layer_norm", "batch_norm", "layernorm", "batchnorm", "bn_", "gammabeta", "native_norm"),
    "optimizer": ("multi_tensor", "adam", "foreach", "lamb"),
    "compiled": ("triton_", "inductor"),
    "copies": ("copy", "memcpy", "memset", "cat_", "::cat", "fill", "zero"),
    "indices": ("index", "gather", "scatter", "sort", "topk"),
    "softmax": ("softmax",),
    "random numbers": ("rand", "distribution", "bernoulli", "philox"),
    "sums": ("reduce", "::sum", "::mean"),
    "element by element": ("elementwise", "::mul", "::add", "::div", "::sub", "gelu", "relu"),
}
_WAITS = ("synchronize", "waitevent")  # calls in which the host waits


class StepProfiler:
    """Profiles some updates of a run once it is warm, and writes the results into the run directory.

    Args:
        updates: Number of updates, all in one epoch.
        directory: Run directory.
        say: Receives the lines of the table.
    """

    def __init__(self, updates: int, device: torch.device, directory: Path, say: Callable[[str], None]) -> None:
        self.updates = updates
        self.device = device
        self.directory = directory
        self._say = say
        on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._seen = 0
        self._end = -1  # updates

    def update_done(self, left: int) -> None:
        """Count an update; `left` remain in its epoch. Waits for the device where the profile begins and ends."""
        self._seen += 1
        if self._end < 0 and self._seen >= WARM_UP and left >= self.updates:
            self._wait()
            self._end = self._seen + self.updates
            self._profile.start()
            self._began = time.perf_counter()
        elif self._seen == self._end:
            self._wait()
            seconds = time.perf_counter() - self._began
            self._profile.stop()
            self._write(seconds)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _write(self, seconds: float) -> None:
        lines = table(self._profile.key_averages(), self.updates, seconds, self.device.type)
        try:
            (self.directory / TABLE).write_text("\n".join(lines) + "\n")
            self._profile.export_chrome_trace(str(self.directory / TRACE))
            lines.append(f"trace, for ui.perfetto.dev: {self.directory / TRACE}")
        except OSError as error:  # a failed profile must not end the run
            lines.append(f"warning: {self.directory / TRACE} can't be written: {error.strerror}")
        for line in lines:
            self._say(line)


def table(events: Any, updates: int, seconds: float, device_type: str) -> list[str]:
    """Return lines about profiled updates: time of device and host, and milliseconds and kernels by kind.

    Args:
        events: `torch.profiler.profile.key_averages()`.
        seconds: Duration of all updates together.
    """
    on_gpu = device_type == "cuda"
    kinds = dict[str, list[float]]()
    waited = 0.0
    for event in events:
        name = event.key.lower()
        if on_gpu and event.device_type != DeviceType.CUDA:
            waited += event.self_cpu_time_total * any(word in name for word in _WAITS)
            continue
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kind = next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "other")
        row = kinds.setdefault(kind, [0.0, 0.0])
        row[0] = row[0] + spent / 1e3 / updates
        row[1] = row[1] + event.count / updates
    busy = sum(row[0] for row in kinds.values())
    step = 1e3 * seconds / updates
    lines = [f"profile of {updates} updates: {step:.2f} ms an update, {device_type} {busy:.2f} ms"]
    if on_gpu:
        lines[0] += f", host at most {max(0.0, step - waited / 1e3 / updates):.2f} ms"
    lines.append(f"{'kind':<20}{'ms an update':>14}{'share':>8}{'kernels' if on_gpu else 'calls':>10}")
    for kind, (spent, count) in sorted(kinds.items(), key=lambda item: -item[1][0]):
        lines.append(f"{kind:<20}{spent:>14.2f}{100 * spent / max(busy, 1e-9):>6.1f} %{count:>10.0f}")
    return lines
