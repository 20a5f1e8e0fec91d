"""--torchcompile by blocks: as many graphs as there are kinds of blocks, which compute what eager mode does."""

import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import volo  # noqa: F401  registers the models
from tests.train.small_run import arguments
from tlt.errors import UserError
from tlt.models.layers import WHOLE, ResidualBlock, draw_masks
from volo.cluster.distributed import World
from volo.cluster.shard import distribute
from volo.cluster.stopping import STOP, Stopped
from volo.config.settings_shared import Compilation
from volo.train.compilation import Compiler, compile_errors_told, stems
from volo.train.model import wrap_model

# Three transformer blocks, with stochastic depth of another rate each.
SMALL: dict[str, dict[str, Any]] = {"volo_test": {"layers": (1, 2, 1, 0)}, "lvvit_test": {"depth": 3}}
# LV-ViT's first block has no stochastic depth, so it is a kind of its own in training.
KINDS = {"volo_test": (3, 3), "lvvit_test": (2, 1)}  # in training, in evaluation


@pytest.fixture(autouse=True)
def from_the_beginning() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiler(name: str = "volo_test", backend: str = "eager", **more: Any) -> Compiler:
    return Compiler(Compilation(torchcompile=backend, **more), name)


def small(name: str, mode: str = "mask") -> Any:
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=32, num_classes=5, drop_path_rate=0.5, **SMALL[name]).train()
    model.set_drop_path_mode(mode)
    return model


def outputs(model: nn.Module, batch: int, step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return model(torch.randn(batch, 3, 32, 32), dense=True, mix_box=torch.tensor([0, 0, 1, 1]))


def gradients(model: nn.Module, batch: int, step: int) -> list[Tensor]:
    model.zero_grad()
    cls, tokens = outputs(model, batch, step)
    (cls.square().mean() + tokens.square().mean()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", SMALL)
def test_stem_is_one_graph_that_equals_eager_mode(name):
    eager, model = small(name), small(name)
    compiler(backend="aot_eager").modules([model.patch_embed])
    for step, batch in enumerate((4, 3)):
        torch.testing.assert_close(gradients(model, batch, step), gradients(eager, batch, step))
    assert graphs() == 1 and stems(model) == []
    torch.testing.assert_close(model.state_dict(), eager.state_dict())  # running statistics among it


@pytest.mark.gpu
def test_stems_are_compiled_unless_statistics_are_shared():
    model = small("volo_test").cuda()
    assert stems(nn.Sequential(model)) == [model.patch_embed]
    model.patch_embed = nn.SyncBatchNorm.convert_sync_batchnorm(model.patch_embed)
    assert stems(model) == []


@pytest.mark.parametrize(
    ("name", "drop_path_mode", "checkpointing"), [("volo_test", "mask", False), ("lvvit_test", "subset", True)]
)
def test_kind_of_block_is_one_graph_as_eager(name, drop_path_mode, checkpointing):
    eager, model = small(name, drop_path_mode), small(name, drop_path_mode)
    for each in (eager, model):
        each.set_grad_checkpointing(checkpointing)
    names = list(model.state_dict())
    assert compiler(name).model(model) is model and list(model.state_dict()) == names
    training, evaluation = KINDS[name]
    for step, batch in enumerate((8, 5, 7)):  # and, with the subset, as many numbers of samples as blocks
        torch.testing.assert_close(gradients(model, batch, step), gradients(eager, batch, step))
        assert graphs() == training
    for each in (eager, model):
        each.eval()
    with torch.inference_mode():
        for batch in (8, 5):
            x = torch.randn(batch, 3, 32, 32)
            torch.testing.assert_close(model(x), eager(x))
    gradients(model.train(), 8, 0)
    assert graphs() == training + evaluation


@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_distributed_data_parallel_takes_both_scopes(process_group, scope):
    cpu = torch.device("cpu")
    eager, model = (distribute(small("lvvit_test"), cpu) for _ in range(2))
    called = compiler(torchcompile_scope=scope).model(model)
    for step in range(2):
        with called.no_sync() if step else nullcontext():
            found = gradients(called, 4, step)
        assert len(found) == len(list(eager.parameters()))
        torch.testing.assert_close(found, gradients(eager, 4, step))


def test_whole_model_is_compiled_where_asked_or_needed():
    alone = World(0, 0, 1, torch.device("cpu"))
    for flags in (
        "volo_test --torchcompile eager --torchcompile-scope model",
        "test_vit --torchcompile eager",
        "volo_test --torchcompile --torchcompile-mode reduce-overhead",
    ):
        args = arguments(f"--model {flags}")
        model = timm.create_model(args.network.model)
        assert wrap_model(model, args, alone)._orig_mod is model
    assert compiler(backend="").model(model) is model


def test_what_cannot_be_done_is_told():
    vit = timm.create_model("test_vit")
    with pytest.raises(UserError, match="test_vit is compiled as a whole: --torchcompile-scope model"):
        compiler("test_vit", torchcompile_scope="blocks").model(vit)
    with pytest.raises(UserError, match="--torchcompile bogus: no such backend"):
        compiler(backend="bogus").model(small("volo_test"))


def test_an_annotator_s_features_are_compiled_in_either_scope():
    for scope in ("blocks", "model"):
        model = small("lvvit_test").eval()
        with torch.no_grad():
            x = torch.randn(2, 3, 32, 32)
            expected = model.forward_features(x)
            compiled = compiler(torchcompile_scope=scope).features(model)
            before = graphs()
            torch.testing.assert_close(compiled(lambda m, y: m.forward_features(y))(model, x), expected)
            assert graphs() > before


def test_errors_of_the_compiler_are_one_line(monkeypatch):
    def broken(*_: Any) -> Callable[..., Any]:
        raise ValueError("two\nlines")

    told = pytest.raises(UserError, match=r"can't compile this \(ValueError: two lines\): try another")
    with told as caught, compile_errors_told("inductor"):
        torch.compile(nn.ReLU(), backend=broken)(torch.ones(2))
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(STOP, "number", signal.SIGTERM)  # which has come to the compiler, too
    with pytest.raises(Stopped), compile_errors_told("inductor"):
        raise caught.value.__cause__ or caught.value
    with pytest.raises(ZeroDivisionError), compile_errors_told("inductor"):
        _ = 1 / 0


class Dropped(ResidualBlock):
    """Dropout and stochastic depth and nothing else: one kernel."""

    def __init__(self) -> None:
        super().__init__(8, nn.Dropout(0.5), mlp_ratio=1.0)
        self.norm1 = self.norm2 = self.mlp = nn.Identity()


def test_compiled_draws_are_a_function_of_the_seed():
    block, x = Dropped().train(), torch.ones(64, 8)
    block.compile()  # by Inductor, whose own generator draws dropout

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with torch.no_grad():
            return block(x, *draw_masks(torch.tensor([[WHOLE // 2], [WHOLE // 5 * 4]]), x))

    first, other = drawn(1), drawn(2)
    assert torch.equal(drawn(1), first) and not torch.equal(first, other)
    assert len(first.unique()) > 2 and len({tuple(row.tolist()) for row in first}) > 8  # dropout's, not only a sample's


def test_the_memory_budget_is_torchs():
    with torch._functorch.config.patch(activation_memory_budget=1.0):  # and put it back afterwards
        Compiler(Compilation(torchcompile="eager", activation_memory_budget=0.3), "lvvit_test").model(
            small("lvvit_test")
        )
        assert torch._functorch.config.activation_memory_budget == 0.3
