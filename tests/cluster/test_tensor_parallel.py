"""`--tensor-parallel`: two ranks that divide each attention and MLP, times two with other images, train as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import volo  # noqa: F401  (registers the models)
from tests.cluster.test_ddp import join, start_ranks
from tests.train.small_run import tensors
from tlt.errors import UserError
from volo.checkpoint.state import TrainState
from volo.cluster.distributed import World
from volo.cluster.shard import ShardedEma, shard, shard_meshes
from volo.cluster.tensor_parallel import TensorParallelParams, divide_layers, in_groups
from volo.config.args import parse_train
from volo.train.optim import create_optimizer
from volo.train.precision import Clipping, Precision

RANKS, PARTS, STEPS = 4, 2, 3
CPU = torch.device("cpu")
# Dropout falls on attention outputs and inside MLPs; VOLO has it on the position embedding alone, as published.
MODELS = {"volo_test": "drop_rate", "lvvit_test": "drop_rate", "test_vit": "proj_drop_rate"}
SHARDS = {"volo_test": 2, "lvvit_test": 1, "test_vit": 1}


def build(name: str) -> Any:
    torch.manual_seed(5)
    more = {MODELS[name]: 0.1}
    model: Any = timm.create_model(name, num_classes=10, drop_path_rate=0.3, img_size=32, **more).double().train()
    if name != "test_vit":
        model.set_drop_path_mode("subset")
    return model


def loss_of(model: Any, name: str, data_rank: int, step: int) -> Tensor:
    """The loss of the images of a data rank, with its random numbers."""
    torch.manual_seed(1000 + 10 * step + data_rank)
    images, classes = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.randint(10, (4,))
    more = {} if name == "test_vit" else {"dense": True, "mix_box": (0, 1, 2, 3)}
    outputs = model(images, **more)
    return F.cross_entropy(outputs[0] + outputs[1].mean(1) if more else outputs, classes)


def state_of(model: Any, average: ShardedEma) -> TrainState:
    optimizer = create_optimizer(parse_train(["/data", *["--lr", "1e-3", "--opt-eps", "1e-3"]]), model)
    return TrainState(model, optimizer, None, average, updates_per_epoch=STEPS)


def train(name: str, world: World | None) -> tuple[TrainState, list[Tensor]]:
    """Return the state after some steps, and of each the losses of both data ranks, or of one, and the gradients' norm.

    Args:
        world: This rank among all; None: one rank does the work of all.
    """
    model = build(name)
    average = ShardedEma(model, 0.9)
    data_ranks = [0, 1]
    if world is not None:
        data_ranks = [world.data_rank]
        meshes = shard_meshes(SHARDS[name], world)
        assert meshes.tensor is not None
        for each in (model, average.module):
            divide_layers(each, meshes.tensor)
            shard(each, meshes.data)
    precision = Precision(CPU, None, Clipping(0.1), norm_of=TensorParallelParams(model).total_norm)
    state = state_of(model, average)
    seen = []
    for step in range(STEPS):
        losses = [loss_of(model, name, rank, step) for rank in data_ranks]
        precision.backward(sum(losses, torch.zeros(())) / len(losses))
        norm = precision.step(state.optimizer, list(model.parameters()))
        average.update(model)
        seen.append(torch.stack([*losses, norm]).detach())
    return state, seen


def one_rank(rank: int, directory: str) -> None:
    join(rank, RANKS, directory)
    world = in_groups(World(rank, rank, RANKS, CPU), PARTS)
    for name in MODELS:
        state, seen = train(name, world)
        torch.save({"seen": seen, "payload": state.state_dict()}, f"{directory}/{name}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    start_ranks(one_rank, folder, RANKS)
    return folder


def load(file: Path) -> Any:
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_weights_are_those_of_one_rank(directory: Path, name: str) -> None:
    state, expected = train(name, None)
    for rank in range(RANKS):
        for got, (*losses, norm) in zip(load(directory / f"{name}-{rank}.pt")["seen"], expected, strict=True):
            wanted = torch.stack([losses[rank // PARTS], norm])
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    payload, whole = load(directory / f"{name}-0.pt")["payload"], state.state_dict()
    assert payload.keys() == whole.keys() and payload["state_dict"].keys() == whole["state_dict"].keys()
    for saved in (payload, whole):
        for entry in ("state_dict", "state_dict_ema"):  # ranks have other images for their running statistics
            saved[entry] = {name: value for name, value in saved[entry].items() if "running" not in name}
    for entry in ("state_dict", "state_dict_ema", "optimizer"):
        pairs = [pair for pair in zip(tensors(payload[entry]), tensors(whole[entry]), strict=True) if pair[0].ndim]
        assert len(pairs) > 20
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


class Mesh:
    """Three ranks, of which nothing is sent."""

    def size(self) -> int:
        return 3

    def get_local_rank(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("volo_test", {}, "can't divide network.0.0.attn: it has 2 heads"),
        ("volo_d1", {"attn_drop_rate": 0.1}, "attn: its kernel drops attention weights of all heads at once"),
        ("vit_tiny_patch16_224", {"qk_norm": True}, "blocks.0.attn: q_norm is no plain linear layer, or needs all"),
        ("resnet18", {}, "the model has no attention or MLP of VOLO, LV-ViT or timm's ViT; use --shard"),
    ],
)
def test_what_cannot_be_divided_is_told(model: str, options: dict[str, Any], says: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=f"--tensor-parallel 3.*{says}"):
        divide_layers(timm.create_model(model, **options), Mesh())  # type: ignore[arg-type]


def test_ranks_that_cannot_be_divided() -> None:
    with pytest.raises(UserError, match="--tensor-parallel 3 does not divide the number of processes, 4"):
        in_groups(World(0, 0, 4, CPU), 3)
    with pytest.raises(UserError, match="--shard 3 does not divide the number of processes, 8 / --tensor-parallel 2"):
        shard_meshes(3, World(0, 0, 8, CPU, tensor_parallel=2))


@pytest.mark.parametrize(
    ("opt", "says"),
    [("lamb", "lamb needs the norm of each whole weight"), ("muon", "muon can't be divided among ranks")],
)
def test_optimizers_that_need_whole_weights_are_refused(opt: str, says: str) -> None:
    with pytest.raises(UserError, match=f"--opt {says}"):
        args = parse_train(["/data", "--lr", "1e-3", "--tensor-parallel", "2", "--opt", opt])
        create_optimizer(args, timm.create_model("volo_test"))
