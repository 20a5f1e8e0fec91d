"""Gradients over two ranks: the same bits with every setting, and with bfloat16 what rounding says, bit for bit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes

from volo.cluster.shard import distribute

RANKS, STEPS = 2, 3
CPU = torch.device("cpu")
SETTINGS: dict[str, dict[str, Any]] = {"default": {}, "bf16": {"compression": "bf16"}}


class Net(nn.Module):
    """Recomputes its activations, and has more than torch's first bucket of 1 MiB.

    `unused` gets no gradient where the model is told to leave it out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(20, 15000), nn.Linear(15000, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(lambda y: self.first(y).relu(), x, use_reentrant=False)
        out: Tensor = self.second(hidden)
        return self.unused(out) if whole else out


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def loss_of(model: nn.Module, rank: int, step: int, micro_batch: int, whole: bool) -> Tensor:
    seed = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    x = torch.randn(6, 20, generator=seed).to(next(model.parameters()).dtype)
    loss: Tensor = model(x, whole).square().mean()
    return loss


def accumulate(model: nn.Module, rank: int, step: int, accumulated: int, whole: bool) -> None:
    """The gradients of some micro-batches, of which the last one sums them over the ranks."""
    for micro_batch in range(accumulated):
        last = micro_batch == accumulated - 1
        with nullcontext() if last else getattr(model, "no_sync", nullcontext)():
            loss_of(model, rank, step, micro_batch, whole).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def case(name: str, rank: int, accumulated: int, whole: bool) -> list[Tensor]:
    """The gradients of the last of some steps: after the first one torch fills its buckets anew."""
    model = distribute(net(), CPU, find_unused=not whole, **SETTINGS[name])
    for step in range(STEPS):
        model.zero_grad()
        accumulate(model, rank, step, accumulated, whole)
    found = gradients(model.module)
    return found if whole else found[:4]


CASES = [("default", 3, True), ("default", 1, False), ("bf16", 3, True)]


def join(rank: int, ranks: int, directory: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def start_ranks(function: Callable[[int, str], None], directory: Path, ranks: int) -> None:
    """Call `function(rank, directory)` in processes of one server, so that torch is imported once."""
    multiprocessing.set_forkserver_preload(["torch", "timm", "volo.train.model"])
    start_processes(function, (str(directory),), nprocs=ranks, start_method="forkserver")


def one_rank(rank: int, directory: str) -> None:
    join(rank, RANKS, directory)
    found = {(name, *rest): case(name, rank, *rest) for name, *rest in CASES}
    torch.save(found, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def one_of_three(rank: int, directory: str) -> None:
    """The gradients of the first step and of the second, of the same images; more than two numbers have an order."""
    join(rank, 3, directory)
    for name in ("default", "bf16"):
        model, steps = distribute(net(), CPU, **SETTINGS[name]), []
        for _ in range(2):
            model.zero_grad()
            accumulate(model, rank, 0, 1, True)
            steps.append(gradients(model.module))
        torch.save(steps, f"{directory}/{name}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, list[Tensor]]]:
    """Of each rank, the gradients of every case."""
    directory = tmp_path_factory.mktemp("ddp")
    start_ranks(one_rank, directory, RANKS)
    return [torch.load(Path(directory) / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def local(rank: int, accumulated: int, whole: bool) -> list[Tensor]:
    model = net()
    accumulate(model, rank, STEPS - 1, accumulated, whole)
    return gradients(model)


@pytest.mark.parametrize(("name", "accumulated", "whole"), CASES)
def test_gradients_over_two_ranks(found: list[Any], name: str, accumulated: int, whole: bool) -> None:
    first, second = (ranks[name, accumulated, whole] for ranks in found)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    pairs = list(zip(local(0, accumulated, whole), local(1, accumulated, whole), strict=True))
    if "compression" not in SETTINGS[name]:
        expected = [(a / 2 + b / 2) for a, b in pairs]
    else:
        # Rounded, halved (exact), summed, rounded again.
        expected = [((a.bfloat16() / 2).float() + (b.bfloat16() / 2).float()).bfloat16().float() for a, b in pairs]
    assert len(first) == (6 if whole else 4)
    assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=True))


def test_three_ranks_sum_in_the_first_step_as_in_every_other(tmp_path: Path) -> None:
    """Else a resumed run, whose first step comes later, would end in other bits."""
    start_ranks(one_of_three, tmp_path, 3)
    for name in ("default", "bf16"):
        first, second = torch.load(tmp_path / f"{name}-0.pt", weights_only=True)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), name
        others = torch.load(tmp_path / f"{name}-2.pt", weights_only=True)
        assert all(torch.equal(a, b) for a, b in zip(first, others[0], strict=True)), name
