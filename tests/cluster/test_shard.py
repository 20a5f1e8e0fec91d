"""`--shard`: weights divided among four ranks train as DistributedDataParallel does, and come back whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.utils import distribute_bn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import volo  # noqa: F401  (registers the models)
from tests.cluster.test_ddp import join, start_ranks
from tests.train.small_run import tensors
from tlt.errors import UserError
from volo.checkpoint.state import TrainState
from volo.cluster.ddp import distribute
from volo.cluster.distributed import World
from volo.cluster.shard import ShardedEma, is_sharded, shard, shard_meshes, synchronised, units_of, whole_weights
from volo.config.args import parse_train
from volo.train.model import heads_of
from volo.train.optim import create_optimizer
from volo.train.precision import Clipping, Precision

RANKS, STEPS, MICRO_BATCHES = 4, 2, 2
CPU = torch.device("cpu")


class Case(NamedTuple):
    """What is compared: flags of the optimizer, clipping, how many ranks hold a copy, and changes to the model."""

    model: str = "volo_test"
    opt: str = "adamw"
    clip: tuple[float, str] = (1.0, "norm")
    shards: int = RANKS
    prepare: Callable[[Any], object] = bool


CASES = {
    "two copies, stochastic depth of subsets": Case(shards=2, prepare=lambda m: m.set_drop_path_mode("subset")),
    "units clipped, recomputation": Case(clip=(0.01, "agc"), prepare=lambda m: m.set_grad_checkpointing(True)),
    "another model": Case(model="test_vit", opt="sgd", shards=2),
}


def build(case: Case) -> Any:
    torch.manual_seed(5)
    model = timm.create_model(case.model, num_classes=10, drop_path_rate=0.3, img_size=32).train()
    case.prepare(model)
    return model


def train(case: Case, rank: int, sharded: bool) -> tuple[TrainState, list[Tensor], list[Tensor]]:
    """Return the state after some steps, and the loss and gradient norm of each."""
    model = build(case)
    precision = Precision(CPU, None, Clipping(*case.clip, heads=heads_of(model)))
    average = ShardedEma(model, 0.9)
    if sharded:
        mesh = shard_meshes(case.shards, World(rank, rank, RANKS, CPU)).data
        shard(model, mesh)
        shard(average.module, mesh)
    called: nn.Module = model if sharded else distribute(model, CPU)
    args = parse_train(["/data", *f"--opt {case.opt} --lr 1e-3 --shard {case.shards if sharded else 1}".split()])
    state = TrainState(model, create_optimizer(args, model), None, average, updates_per_epoch=STEPS)
    losses, norms, parameters = [], [], list(model.parameters())
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            torch.manual_seed(1000 * step + 10 * micro_batch + rank)
            images, classes = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
            more = {"dense": True, "mix_box": (0, 1, 2, 3)} if case.model == "volo_test" else {}
            with synchronised(called, micro_batch == MICRO_BATCHES - 1):
                outputs = called(images, **more)
                logits = outputs[0] + outputs[1].mean(1) if more else outputs
                loss = F.cross_entropy(logits, classes)
                precision.backward(loss / MICRO_BATCHES)
            losses.append(loss.detach())
        norms.append(precision.step(state.optimizer, parameters))
        average.update(model)
    return state, losses, norms


def one_rank(rank: int, directory: str) -> None:
    join(rank, RANKS, directory)
    for name, case in CASES.items():
        found = {}
        for sharded in (False, True):
            state, losses, norms = train(case, rank, sharded)
            kept = sum(t.to_local().numel() if isinstance(t, DTensor) else t.numel() for t in _state_tensors(state))
            found[sharded] = {"losses": losses, "norms": norms, "kept": kept, "payload": state.state_dict()}
        torch.save(found, f"{directory}/{name}-{rank}.pt")
    _more(rank, directory)
    dist.destroy_process_group()


def _state_tensors(state: TrainState) -> list[Tensor]:
    """Weights, gradients' room aside: all that a rank keeps between two steps."""
    optimizer = [value for each in state.optimizer.state.values() for value in each.values()]
    average = state.ema.module if state.ema else state.model
    return [*state.model.parameters(), *average.parameters(), *(v for v in optimizer if isinstance(v, Tensor))]


def _more(rank: int, directory: str) -> None:
    """Whole weights in a block where ranks call the model as often as they like; a state that comes back."""
    case = CASES["two copies, stochastic depth of subsets"]
    state, _, _ = train(case, rank, sharded=True)
    distribute_bn(state.model, RANKS)
    state.model.eval()
    with whole_weights(state.model), torch.inference_mode():
        outputs = [state.model(torch.ones(1, 3, 32, 32)) for _ in range(1 + rank)]
    payload = state.state_dict()
    if rank == 0:
        torch.save(payload, f"{directory}/saved.pt")
    dist.barrier()
    saved = torch.load(f"{directory}/saved.pt", weights_only=True)
    fresh = build(case)
    average = ShardedEma(fresh, 0.9)
    mesh = shard_meshes(RANKS, World(rank, rank, RANKS, CPU)).data  # another division than the one that was saved
    for model in (fresh, average.module):
        shard(model, mesh)
    optimizer = create_optimizer(parse_train(["/data", "--lr", "1e-3"]), fresh)
    again = TrainState(fresh, optimizer, None, average, updates_per_epoch=STEPS)
    again.load(saved, "saved.pt")
    found = {"outputs": outputs, "again": again.state_dict()}
    torch.save(found, f"{directory}/more-{rank}.pt")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shard")
    start_ranks(one_rank, folder, RANKS)
    return folder


def load(file: Path) -> Any:
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_are_those_of_ddp(directory: Path, name: str) -> None:
    for rank in range(RANKS):
        found = load(directory / f"{name}-{rank}.pt")
        for key in ("losses", "norms"):
            torch.testing.assert_close(found[True][key], found[False][key], rtol=1e-6, atol=1e-6)
    found = load(directory / f"{name}-0.pt")
    whole, parts = found[False]["payload"], found[True]["payload"]
    assert whole.keys() == parts.keys()
    for entry in ("state_dict", "state_dict_ema", "optimizer"):
        pairs = list(zip(tensors(parts[entry]), tensors(whole[entry]), strict=True))
        assert len(pairs) > 20
        for got, expected in pairs:
            # AdamW makes steps of the rate's size from gradients that are rounding alone.
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4 if name == "another model" else 2e-5)


def test_a_rank_keeps_its_part(directory: Path) -> None:
    kept = [load(directory / f"units clipped, recomputation-{rank}.pt") for rank in range(RANKS)]
    whole = kept[0][False]["kept"]
    assert sum(each[True]["kept"] for each in kept) == pytest.approx(whole, rel=0.01)  # counters are on all ranks
    assert max(each[True]["kept"] for each in kept) < 1.1 * whole / RANKS
    two = load(directory / "two copies, stochastic depth of subsets-1.pt")
    assert two[True]["kept"] == pytest.approx(two[False]["kept"] / 2, rel=0.1)


def test_what_was_saved_comes_back_in_parts_of_another_size(directory: Path) -> None:
    saved, again = load(directory / "saved.pt"), load(directory / "more-0.pt")["again"]
    for entry in ("state_dict", "state_dict_ema", "optimizer"):
        pairs = list(zip(tensors(saved[entry]), tensors(again[entry]), strict=True))
        assert len(pairs) > 20 and all(torch.equal(a, b) for a, b in pairs), entry


def test_ranks_call_the_whole_model_as_often_as_they_like(directory: Path) -> None:
    model = build(Case()).eval()
    model.load_state_dict(load(directory / "saved.pt")["state_dict"])
    with torch.inference_mode():
        expected = model(torch.ones(1, 3, 32, 32))
    for rank in range(RANKS):
        outputs = load(directory / f"more-{rank}.pt")["outputs"]
        assert len(outputs) == 1 + rank
        torch.testing.assert_close(outputs, [expected] * (1 + rank))


def test_units_are_the_blocks() -> None:
    names = {"volo_test": 6, "test_vit": 6, "resnet18": 8, "convnext_atto": 12, "vgg11": 0}
    assert {name: len(units_of(timm.create_model(name))) for name in names} == names


def test_ranks_that_cannot_be_divided() -> None:
    with pytest.raises(UserError, match="--shard 3 does not divide the number of processes, 4"):
        shard_meshes(3, World(0, 0, 4, CPU))
    assert not is_sharded(timm.create_model("volo_test"))
