"""Step times of DistributedDataParallel, measured by ranks that this process starts on this machine.

Every rank times, in turns: forward and backward pass alone (all ranks at once, nothing is sent), all-reduces of several
sizes alone, and the step with the all-reduce under the backward pass. A time is that of the slowest rank in the
quickest round, because other work on the machine only adds to it.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn
from torch.utils.hooks import RemovableHandle

from benchmarks.scaling.prediction import Gradient, Work
from tlt.errors import UserError
from volo import models as models  # registers them with timm
from volo.cluster.ddp import DdpSettings, distribute
from volo.cluster.distributed import choose_device, max_over_ranks

_TIMEOUT = timedelta(minutes=5)  # of one collective
_WARM_UP = 2  # rounds: DistributedDataParallel fills its buckets anew after the first step
_NANO = 1_000_000_000


@dataclass(frozen=True)
class Job:
    """The work of the ranks. `threads` are per rank, on CPUs; `sizes` are bytes of the all-reduces timed alone."""

    model: str
    batch_size: int
    device: str | None
    rounds: int
    threads: int
    settings: DdpSettings
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class MeasuredRanks:
    """Seconds: `work` is the computing of a rank alone, `transfers` are all-reduces by bytes."""

    ranks: int
    device: str
    work: Work
    transfers: dict[int, float]
    step: float


def measure(job: Job, ranks: int) -> MeasuredRanks:
    """Start `ranks` processes and return their times. Raises UserError if a rank fails, as without enough memory."""
    with tempfile.TemporaryDirectory(prefix="scaling-benchmark-") as directory:
        try:
            spawn(_rank, (job, ranks, directory), nprocs=ranks)
        except (ProcessExitedException, ProcessRaisedException) as error:
            last = str(error).strip().splitlines()[-1]
            raise UserError(f"a rank of {ranks} failed: {last}") from error
        found = json.loads((Path(directory) / "found.json").read_text())
    gradients = tuple(Gradient(*pair) for pair in found["gradients"])
    return MeasuredRanks(
        ranks,
        found["device"],
        Work(job.batch_size, found["forward"], found["backward"], gradients),
        dict(zip(job.sizes, found["transfers"], strict=True)),
        found["step"],
    )


def _rank(rank: int, job: Job, ranks: int, directory: str) -> None:
    """Run one process. The ranks meet in `directory`, where rank 0 writes the times."""
    device = choose_device(job.device, rank)
    if device.type == "cpu":
        torch.set_num_threads(job.threads)
    store = dist.FileStore(str(Path(directory) / "store"), ranks)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    try:
        found = _Rank(job, device).run()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (Path(directory) / "found.json").write_text(json.dumps(found))


class _Rank:
    """A model with its inputs, and the functions that time it."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device = job, device
        torch.manual_seed(0)
        model = timm.create_model(job.model).to(device).train()
        size = model.pretrained_cfg["input_size"]
        self.images = torch.randn(job.batch_size, *size, device=device)
        self.classes = torch.zeros(job.batch_size, dtype=torch.long, device=device)
        self._loss(model).backward()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.grad is not None)  # the others would keep all ranks waiting
            parameter.grad = None
        self.model = model

    def run(self) -> dict[str, Any]:
        wrapped = distribute(copy.deepcopy(self.model), self.device, self.job.settings)
        tensors = [torch.ones(size // 4, device=self.device) for size in self.job.sizes]
        rounds = [self._round(wrapped, tensors) for _ in range(_WARM_UP + self.job.rounds)][_WARM_UP:]
        forward, backward, step, *transfers = (min(column) for column in zip(*rounds, strict=True))
        return {
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "forward": forward,
            "backward": backward,
            "transfers": transfers,
            "step": step,
            "gradients": self._ready(),
        }

    def _round(self, wrapped: nn.Module, tensors: list[Tensor]) -> list[float]:
        alone = self._alone()
        transfers = [self._slowest(lambda t=tensor: dist.all_reduce(t.fill_(1.0))) for tensor in tensors]  # type: ignore[misc]
        return [*alone, self._slowest(lambda: self._step(wrapped)), *transfers]

    def _alone(self) -> tuple[float, float]:
        """Seconds of forward and backward pass of the bare model; their sum is that of the slowest rank."""
        marks: list[float] = []

        def work() -> None:
            marks.append(self._now())
            loss = self._loss(self.model)
            marks.append(self._now())
            loss.backward()

        seconds = self._slowest(work)
        forward = seconds * (marks[1] - marks[0]) / (self._now() - marks[0])
        self.model.zero_grad(set_to_none=True)
        return forward, seconds - forward

    def _step(self, model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        self._loss(model).backward()

    def _loss(self, model: nn.Module) -> Tensor:
        return F.cross_entropy(model(self.images).float(), self.classes)

    def _slowest(self, work: Callable[[], object]) -> float:
        """Return the seconds of the slowest rank; all begin together."""
        max_over_ranks(0)
        began = self._now()
        work()
        return max_over_ranks(round((self._now() - began) * _NANO)) / _NANO

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _ready(self) -> list[tuple[int, float]]:
        """Return the bytes of every gradient, and the share of the backward pass after which it is ready."""
        marks: list[tuple[int, float]] = []
        handles: list[RemovableHandle] = []
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                # On a GPU this waits for each gradient: the shares count, not the seconds.
                note = lambda p: marks.append((p.numel() * p.element_size(), self._now()))  # noqa: E731
                handles.append(parameter.register_post_accumulate_grad_hook(note))
        loss = self._loss(self.model)
        began = self._now()
        loss.backward()
        whole = self._now() - began
        for handle in handles:
            handle.remove()
        return [(size, (at - began) / whole) for size, at in marks]
