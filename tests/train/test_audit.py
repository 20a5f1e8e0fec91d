"""A rank that computes or stores wrong is found and named: a bit is flipped in what one of two or four ranks holds."""

import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import start_processes

from tests.conftest import wait_until
from tests.train.small_step import LABELLED, small_run
from tlt.data.batch import Batch
from volo.checkpoint.replicas import WrongRank
from volo.cluster.distributed import World
from volo.cluster.shard import local
from volo.train.audit import Audit
from volo.train.loop import named, train_epoch
from volo.train.step import Step

CPU = torch.device("cpu")
FLAGS = f"{LABELLED} --audit 2 -b 2 --img-size 48 --model-ema --drop-path-mode subset --grad-accum-steps 2"
PLACES = ("weight", "moment", "average", "weight in the step", "gradient sum", "gradient")
FLIPS = int(os.environ.get("FLIPS", 1))  # in each place


class Fault(NamedTuple):
    """A flipped bit: where, on which rank, in which update."""

    where: str = "nowhere"
    rank: int = 0
    update: int = 0


class Faulty:
    """Trains an epoch of four updates, with a fault on one rank."""

    def __init__(self, flags: str, world: World) -> None:
        self.run, self.training = small_run(flags, images=16 * world.data_size, world=world)
        self.run.guard.iterate_until_stopped = self._batches
        self.step = Step(self.run, self.training)
        self.audit = Audit(self.run, self.training, self.step)
        self.start = self.training.replicas.copied()
        self.fault = Fault()
        self.draw = random.Random(0)
        state = self.training.state
        self.weights = [p for p in state.model.parameters() if p.ndim > 1]
        state.optimizer.register_step_pre_hook(lambda *_: self._flip("gradient sum", self.weights[3].grad))
        state.optimizer.register_step_post_hook(lambda *_: self._flip("weight in the step", self.weights[4]))
        list(self.step.forward_model.parameters())[-2].register_hook(self._local)

    def name(self, fault: Fault) -> tuple[list[int], bool, int]:
        """Return the ranks that are named, whether in doubt, and in which update."""
        self.fault, self.draw = fault, random.Random(str(fault))
        replicas, state = self.training.replicas, self.training.state
        replicas.put(self.start)
        try:
            train_epoch(self.run, self.training, self.step, Mock(done=9), Mock(), self.audit)
            replicas.compare()
        except WrongRank as error:
            at = state.update
            wrong = named(self.run, self.training, error)
            self.audit = Audit(self.run, self.training, self.step)
            return list(wrong.ranks), wrong.doubt, at
        return [], False, 0

    def _batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            state = self.training.state
            moments = list(state.optimizer.state.values())
            self._flip("weight", self.weights[5])
            self._flip("moment", moments[2]["exp_avg"] if moments else self.weights[5])
            self._flip("average", next(p for p in state.ema.module.parameters() if p.ndim > 1))
            yield batch

    def _flip(self, where: str, value: Tensor) -> None:
        """Flip a random bit if the fault comes here, once."""
        if (where, self.run.world.rank, self.training.state.update) == self.fault:
            self.fault = Fault()
            bits = local(value).view(-1).view(torch.int32)
            bits[self.draw.randrange(len(bits))] ^= 1 << self.draw.randrange(31)

    def _local(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if self.step.watched:
            self._flip("gradient", gradient)
        return gradient


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for size, flags in ((4, ""), (2, ""), (4, "--shard 2")):
        group = rank // size
        store = dist.FileStore(f"{folder}/{size}{flags}{group}", size)
        dist.init_process_group("gloo", store=store, rank=rank % size, world_size=size)
        faulty = Faulty(f"{FLAGS} {flags}", World(rank % size, rank % size, size, CPU))
        places = PLACES if not flags else PLACES[3:]
        faults = [
            Fault(where, number % size, 2 if where == "gradient" else 1 + number % 3)
            for where in places
            for number in range(FLIPS)
        ]
        found = [(fault, *faulty.name(fault)) for fault in [Fault(), *faults]]
        torch.save(found, f"{folder}/{size}{flags}-{rank}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    multiprocessing.set_forkserver_preload([__name__])  # imported once
    ranks = start_processes(one_rank, (str(folder),), 4, join=False, daemon=True, start_method="forkserver")
    wait_until(lambda: ranks.join(1))
    return folder


@pytest.mark.parametrize("ranks", ["4", "2", "4--shard 2"])
def test_a_flipped_bit_names_its_rank(folder, ranks):
    for rank in range(4):
        for fault, named_ranks, doubt, at in torch.load(folder / f"{ranks}-{rank}.pt", weights_only=False):
            expected = [] if fault.where == "nowhere" else [fault.rank]
            assert named_ranks == expected and not doubt, (fault, named_ranks, doubt, at)
