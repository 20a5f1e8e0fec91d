"""Ranks that have a whole model each, and four that divide one (`--shard`, `--tensor-parallel`), train as one rank that
does the work of all."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.utils import ModelEmaV3, distribute_bn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes

import volo  # noqa: F401  (registers the models)
from tests.conftest import wait_until
from tests.train.small_run import arguments, optimizer_of, tensors
from tlt.errors import UserError
from volo.checkpoint.state import STATISTICS_KEY, TrainState
from volo.cluster.distributed import World
from volo.cluster.shard import ShardedEma, distribute, forget_backward, shard, shard_meshes, synchronised, whole_weights
from volo.cluster.tensor_parallel import TensorParallelParams, divide_layers, in_groups
from volo.train.precision import Clipping, Precision

RANKS, STEPS, MICRO_BATCHES = 4, 2, 2
CPU = torch.device("cpu")


class Net(nn.Module):
    """Recomputes its activations, and has more than torch's first bucket of 1 MiB."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.third = nn.Linear(20, 15000), nn.Linear(15000, 4), nn.Linear(4, 4)
        self.whole = name != "third unused"

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(lambda y: self.first(y).relu(), x, use_reentrant=False)
        out: Tensor = self.second(hidden)
        return self.third(out) if self.whole else out


def step_gradients(model: nn.Module, rank: int) -> Tensor:
    """The first layers' gradients of three micro-batches of a rank, of which the last one sums them over the ranks."""
    model.zero_grad()
    for micro_batch in range(3):
        x = torch.randn(6, 20, generator=torch.Generator().manual_seed(10 * micro_batch + rank))
        with synchronised(model, micro_batch == 2):
            model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in list(model.parameters())[:4] if p.grad is not None])


COPIES = {"float32": 1e-6, "bf16": 1e-2, "third unused": 1e-6}  # with the error that is allowed


def copies(rank: int, directory: str) -> None:
    """The gradients of two steps of the same images: after the first one torch fills its buckets anew."""
    for name in COPIES:
        model = distribute(Net(name), CPU, "bf16" if name == "bf16" else "none", find_unused=name == "third unused")
        torch.save([step_gradients(model, rank) for _ in range(2)], f"{directory}/{name}-{rank}.pt")


def test_gradients_of_copies_are_summed_in_every_step(directory):
    """Else a resumed run, whose first step comes later, would end in other bits; four numbers have an order."""
    for name, error in COPIES.items():
        first, *others = [step for rank in range(RANKS) for step in load(directory / f"{name}-{rank}.pt")]
        assert all(torch.equal(first, other) for other in others), name
        expected = torch.stack([step_gradients(Net(name), rank) for rank in range(RANKS)]).mean(0)
        torch.testing.assert_close(first, expected, rtol=0, atol=error * expected.abs().max().item())
        assert torch.equal(first, first.bfloat16().float()) == (name == "bf16")


def test_a_backward_pass_that_has_failed_is_forgotten(process_group):
    """As when a CUDA graph can't hold it; after that the run goes on without one."""
    model = distribute(net := Net(""), CPU)
    expected = step_gradients(model, 0)
    refusing = net.second.register_full_backward_hook(lambda *_: pytest.fail("refused"))
    with pytest.raises(pytest.fail.Exception, match="refused"):
        model(torch.randn(6, 20)).sum().backward()
    refusing.remove()
    forget_backward(model)
    assert torch.equal(step_gradients(model, 0), expected)


def subset(model: Any) -> None:
    model.set_drop_path_mode("subset")


class Case(NamedTuple):
    """A model, how many ranks divide its layers and hold a copy of it, the optimizer, and changes to the model.

    DTensor thinks about each parameter in each rank: the models have few blocks.
    """

    model: str
    parts: int = 1
    shards: int = 2
    opt: str = "adamw --opt-eps 1e-3"  # its usual steps are of the rate's size, from gradients that are rounding alone
    clip: tuple[float, str] = (0.1, "norm")
    prepare: Callable[[Any], object] = bool


CASES = {
    "two copies": Case("volo_test", prepare=subset),
    "values clipped": Case("volo_test", shards=4, clip=(0.01, "value")),
    "heads of VOLO": Case("volo_test", parts=2, prepare=lambda m: (subset(m), m.set_grad_checkpointing(True))),
    "heads of LV-ViT": Case("lvvit_test", parts=2, shards=1, prepare=subset),
    "heads of timm's ViT": Case("test_vit", parts=2, shards=1, opt="sgd"),
}


def build(case: Case) -> Any:
    torch.manual_seed(5)
    more: dict[str, Any] = {"depth": 2}
    if case.model == "volo_test":
        more = {"layers": (1, 1, 0, 0), "drop_rate": 0.1}  # of the position embedding, as published
    model: Any = timm.create_model(case.model, num_classes=10, drop_path_rate=0.3, img_size=32, **more)
    case.prepare(model)
    return model.double().train()


def loss_of(model: Any, case: Case, data_rank: int, step: int, micro_batch: int) -> Tensor:
    torch.manual_seed(1000 * step + 10 * micro_batch + data_rank)
    images, classes = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.randint(10, (4,))
    outputs = model(images, **({} if case.model == "test_vit" else {"dense": True, "mix_box": (0, 1, 2, 3)}))
    return F.cross_entropy(outputs if isinstance(outputs, Tensor) else outputs[0] + outputs[1].mean(1), classes)


def train(case: Case, world: World | None) -> tuple[TrainState, list[Tensor]]:
    """Return the state after some steps, and of each the losses of its data ranks and the gradients' norm.

    Args:
        world: This rank among all; None: one rank does the work of all.
    """
    model = build(case)
    average = (ModelEmaV3 if world is None else ShardedEma)(model, 0.9)
    data_ranks = list(range(RANKS // case.parts))
    if world is not None:
        data_ranks, meshes = [world.data_rank], shard_meshes(case.shards, world)
        for module in (model, average.module):
            if meshes.tensor is not None:
                divide_layers(module, meshes.tensor)
            shard(module, meshes.data)
    clipping = Clipping(*case.clip)
    precision = Precision(CPU, None, clipping, norm_of=TensorParallelParams(model).total_norm)
    optimizer = optimizer_of(arguments(f"--lr 1e-3 --opt {case.opt}"), model)
    state, seen = TrainState(model, optimizer, None, average, updates_per_epoch=STEPS), []
    for step in range(STEPS):
        losses = []
        for micro_batch in range(MICRO_BATCHES):
            with synchronised(model, micro_batch == MICRO_BATCHES - 1):
                micro_losses = [loss_of(model, case, rank, step, micro_batch) for rank in data_ranks]
                precision.backward(sum(micro_losses, torch.zeros(())) / len(micro_losses) / MICRO_BATCHES)
            losses += [loss.detach() for loss in micro_losses]
        norm, _ = precision.step(optimizer, list(model.parameters()))
        average.update(model)
        seen.append(torch.stack([*losses, norm.detach()]))
    return state, seen


def kept(state: TrainState) -> int:
    """How many values a rank keeps between two steps."""
    optimizer = [value for each in state.optimizer.state.values() for value in each.values()]
    values = [*state.model.parameters(), *(state.ema or state).module.parameters()]  # type: ignore[union-attr]
    values += [value for value in optimizer if isinstance(value, Tensor)]
    return sum(t.to_local().numel() if isinstance(t, DTensor) else t.numel() for t in values)


def one_rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", RANKS), rank=rank, world_size=RANKS)
    copies(rank, directory)
    for name, case in CASES.items():
        state, seen = train(case, in_groups(World(rank, rank, RANKS, CPU), case.parts))
        torch.save({"seen": seen, "kept": kept(state), "payload": state.state_dict()}, f"{directory}/{name}-{rank}.pt")
        if name == "two copies":
            _more(rank, directory, state)
        if name == "values clipped":  # another division than the one that was saved
            state.load(load(Path(directory, "saved.pt")), "saved.pt")
            torch.save(state.state_dict(), f"{directory}/again-{rank}.pt")
    dist.destroy_process_group()


def _more(rank: int, directory: str, state: TrainState) -> None:
    """Whole weights in a block where ranks call the model as often as they like; a state that is saved."""
    distribute_bn(state.model, RANKS)
    state.model.eval()
    with whole_weights(state.model), torch.inference_mode():
        outputs = [state.model(torch.ones(1, 3, 32, 32, dtype=torch.float64)) for _ in range(1 + rank)]
    state.update = 1  # within an epoch
    payload = state.state_dict()
    if rank == 0:
        torch.save(payload, f"{directory}/saved.pt")
    torch.save(outputs, f"{directory}/outputs-{rank}.pt")
    dist.barrier()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divided")
    multiprocessing.set_forkserver_preload([__name__])  # imported once
    ranks = start_processes(one_rank, (str(folder),), RANKS, join=False, daemon=True, start_method="forkserver")
    wait_until(lambda: ranks.join(1))
    return folder


def load(file: Path) -> Any:
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_are_those_of_one_rank(directory, name):
    case = CASES[name]
    state, expected = train(case, None)
    whole, data_ranks = kept(state), RANKS // case.parts
    ranks = [load(directory / f"{name}-{rank}.pt") for rank in range(RANKS)]
    for rank, saved_by_rank in enumerate(ranks):
        for got, (*losses, norm) in zip(saved_by_rank["seen"], expected, strict=True):
            wanted = torch.stack([*losses[rank // case.parts :: data_ranks], norm])
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        if case.parts == 1:
            assert saved_by_rank["kept"] == pytest.approx(whole / case.shards, rel=0.1)
    payloads = [ranks[0]["payload"], state.state_dict()]
    assert payloads[0].keys() == payloads[1].keys()
    for saved in payloads:
        for entry in ("state_dict", "state_dict_ema"):  # ranks have other images for their running statistics
            saved[entry] = {name: value for name, value in saved[entry].items() if "running" not in name}
    assert payloads[0]["state_dict"].keys() == payloads[1]["state_dict"].keys()
    for entry in ("state_dict", "state_dict_ema", "optimizer"):
        pairs = [pair for pair in zip(*(tensors(saved[entry]) for saved in payloads), strict=True) if pair[0].ndim]
        assert len(pairs) > 20
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_what_was_saved_comes_back_in_parts_of_another_size(directory):
    saved, again = load(directory / "saved.pt"), load(directory / "again-0.pt")
    for entry in ("state_dict", "state_dict_ema", "optimizer"):
        pairs = list(zip(tensors(saved[entry]), tensors(again[entry]), strict=True))
        assert len(pairs) > 20 and all(torch.equal(a, b) for a, b in pairs), entry
    before, after = (each[STATISTICS_KEY]["state_dict_ema"] for each in (saved, again))  # a row of each rank
    assert len(before.unique(dim=0)) == RANKS and torch.equal(before, after)


def test_ranks_call_the_whole_model_as_often_as_they_like(directory):
    model = build(CASES["two copies"]).eval()
    model.load_state_dict(load(directory / "saved.pt")["state_dict"])
    with torch.inference_mode():
        expected = model(torch.ones(1, 3, 32, 32, dtype=torch.float64))
    for rank in range(RANKS):
        outputs = load(directory / f"outputs-{rank}.pt")
        torch.testing.assert_close(outputs, [expected] * (1 + rank))


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("volo_test", {}, "can't divide network.0.0.attn: it has 2 heads"),
        ("volo_d1", {"attn_drop_rate": 0.1}, "attn_drop drops values of all heads or channels at once"),
        ("vit_tiny_patch16_224", {"qk_norm": True}, "blocks.0.attn: q_norm is no plain linear layer, or needs all"),
        ("resnet18", {}, "the model has no attention or MLP of VOLO, LV-ViT or timm's ViT; use --shard"),
    ],
)
def test_what_cannot_be_divided_is_told(model, options, says):
    with torch.device("meta"), pytest.raises(UserError, match=f"--tensor-parallel 3.*{says}"):
        divide_layers(timm.create_model(model, **options), Mock(size=lambda: 3, get_local_rank=lambda: 1))


def test_ranks_and_optimizers_that_cannot_be_divided():
    with pytest.raises(UserError, match="--tensor-parallel 3 does not divide the number of processes, 4"):
        in_groups(World(0, 0, 4, CPU), 3)
    for size, parts, shared in ((4, 1, "4"), (8, 2, "8 / --tensor-parallel 2")):
        with pytest.raises(UserError, match=f"--shard 3 does not divide the number of processes, {shared}$"):
            shard_meshes(3, World(0, 0, size, CPU, tensor_parallel=parts))
    for opt, says in {"lamb": "needs the norm of each whole weight", "muon": "can't be divided among ranks"}.items():
        with pytest.raises(UserError, match=f"--opt {opt} {says}"):
            optimizer_of(arguments(f"--lr 1e-3 --tensor-parallel 2 --opt {opt}"), timm.create_model("volo_test"))
