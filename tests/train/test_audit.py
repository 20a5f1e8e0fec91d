"""A rank that computes or stores wrong is found and named: a bit is flipped in what one of two or four ranks holds."""

import json
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
from tlt.errors import UserError
from volo.checkpoint.replicas import Replicas, WrongRank, checksum, differing
from volo.cluster.distributed import World
from volo.cluster.shard import local
from volo.commands.train import wrong_rank_named
from volo.train.audit import Audit
from volo.train.loop import named, train_epoch
from volo.train.step import Step

CPU = torch.device("cpu")
FLAGS = f"{LABELLED} --audit 2 -b 2 --img-size 48 --model-ema --drop-path-mode subset --grad-accum-steps 2"
PLACES = ("weight", "moment", "average", "weight in the step", "gradient sum", "gradient")
# Ranks, more flags, and where bits are flipped. With FLIPS=10 each of these gets as many, on all ranks, in all updates.
WORLDS = {
    "2": (2, "", PLACES),
    "4": (4, "--cls-weight 0", ("moment", "gradient")),
    "4 in two copies": (4, "--shard 2", ("weight", "gradient")),
}
FLIPS = int(os.environ.get("FLIPS", 1))


class Fault(NamedTuple):
    """A flipped bit: where, on which rank, in which update."""

    where: str = "nowhere"
    rank: int = 0
    update: int = 0


class Faulty:
    """Trains an epoch of four updates, with a fault on one rank."""

    def __init__(self, flags: str, world: World) -> None:
        self.run, self.training = small_run(f"{FLAGS} {flags}", images=16 * world.data_size, world=world)
        self.run.guard.iterate_until_stopped = self._batches
        self.step = Step(self.run, self.training)
        self.start = self.training.replicas.copied()
        self.fault = Fault()
        self.draw = random.Random()
        state = self.training.state
        self.weights = [p for p in state.model.parameters() if p.ndim > 1]
        state.optimizer.register_step_pre_hook(lambda *_: self._flip("gradient sum", self.weights[3].grad))
        state.optimizer.register_step_post_hook(lambda *_: self._flip("weight in the step", self.weights[4]))

    def named(self, fault: Fault) -> tuple[list[int], bool]:
        """Return the ranks that are named, and whether in doubt."""
        self.fault, self.draw = fault, random.Random(str(fault))
        self.training.replicas.put(self.start)
        audit = Audit(self.run, self.training, self.step)
        leaf = next(weight for weight in audit._weights if weight.ndim > 1)
        hook = leaf.register_hook(self._local)  # before those of the audit
        try:
            train_epoch(self.run, self.training, self.step, Mock(done=9), Mock(), audit)
            self.training.replicas.compare()
        except WrongRank as error:
            wrong = named(self.run, self.training, error)
            return list(wrong.ranks), wrong.doubt
        finally:
            hook.remove()
        return [], False

    def _batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            state = self.training.state
            self._flip("weight", self.weights[5])
            if state.update:
                self._flip("moment", list(state.optimizer.state.values())[2]["exp_avg"])
            self._flip("average", next(p for p in state.ema.module.parameters() if p.ndim > 1))
            yield batch

    def _local(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if self.step.watched:
            self._flip("gradient", gradient)
        return gradient

    def _flip(self, where: str, value: Tensor) -> None:
        """Flip a random bit if the fault comes here, once."""
        if (where, self.run.world.rank, self.training.state.update) == self.fault:
            self.fault = Fault()
            bits = local(value).view(-1).view(torch.int32)
            bits[self.draw.randrange(len(bits))] ^= 1 << self.draw.randrange(31)


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for name, (size, flags, places) in WORLDS.items():
        store = dist.FileStore(f"{folder}/store-{name}-{rank // size}", size)
        dist.init_process_group("gloo", store=store, rank=rank % size, world_size=size)
        faulty = Faulty(flags, World(rank % size, rank % size, size, CPU))
        updates = [2 if where == "gradient" else 1 + number % 3 for where in places for number in range(FLIPS)]
        faults = [Fault(where, (number + len(where)) % size) for where in places for number in range(FLIPS)]
        faults = [Fault(), *(fault._replace(update=at) for fault, at in zip(faults, updates, strict=True))]
        found = [(fault, *faulty.named(fault)) for fault in faults]
        Path(f"{folder}/{name}-{rank}.json").write_text(json.dumps(found))
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    multiprocessing.set_forkserver_preload([__name__])  # imported once
    ranks = start_processes(one_rank, (str(folder),), 4, join=False, daemon=True, start_method="forkserver")
    wait_until(lambda: ranks.join(1))
    return folder


@pytest.mark.parametrize("name", WORLDS)
def test_fault_65_a_flipped_bit_names_its_rank(folder, name):
    for rank in range(4):
        for (where, wrong, update), ranks, doubt in json.loads((folder / f"{name}-{rank}.json").read_text()):
            assert (ranks, doubt) == ([] if where == "nowhere" else [wrong], False), (where, wrong, update)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_any_bit_changes_both_sums_and_so_do_places(device):
    """Also the bits of an odd number of values, in another memory format, and in a sum of several tensors."""
    tensors = [torch.arange(5.0), torch.tensor([True] * 9), torch.ones(()), torch.randn(4, 3, 2, 2)]
    tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    before = checksum([value.to(device) for value in tensors])
    for number, place, bit in ((0, 4, 30), (2, 0, 0), (3, 7, 17)):
        flipped = [value.clone() for value in tensors]
        flipped[number].as_strided((flipped[number].numel(),), (1,)).view(torch.int32)[place] ^= 1 << bit
        assert (checksum([value.to(device) for value in flipped]) != before).all()
    assert checksum([value.to(device) for value in tensors[::-1]])[1] != before[1]
    assert differing([(1, 2), (3, 4), (1, 2)]) == [1] and differing([1, 2]) == [0, 1]


def test_audits_need_two_ranks_with_the_same_weights():
    for world, shard in ((1, 1), (4, 4)):
        with pytest.raises(UserError, match="--audit 9: no two ranks hold the same weights"):
            Replicas(Mock(), Mock(shard=shard, tensor_parallel=1, audit=9), World(0, 0, world, CPU))


def test_a_wrong_rank_is_recorded_and_its_node_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("REQUEUE_MARKER", str(marker := tmp_path / "marker"))
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    run = Mock(directory=tmp_path)
    with pytest.raises(WrongRank, match="rank 0 on node7") as told, wrong_rank_named(run, Mock(state=Mock(update=4))):
        raise WrongRank("the weights of update 5", [0])
    assert told.value.exit_code == 7
    assert run.logger.event.call_args.kwargs["nodes"] == ["node7"]
    assert json.loads(marker.read_text())["exclude"] == "node7"
