"""Stochastic depth that skips the work of what it drops: its law, gradients, arithmetic, and what it is refused for."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import comb, prod
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tlt.errors import UserError
from tlt.models.drop_path import StochasticDepth, add_branch, draw_orders, draw_samples
from tlt.models.layers import TransformerBlock
from volo.config.args import parse_train
from volo.models.blocks import Outlooker
from volo.train.model import build_model

CONFIGS = Path(__file__).parents[2] / "configs"
BATCH, KEPT = 4, 2
RATE = 1 - KEPT / BATCH
BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (lambda: TransformerBlock(6, 2, drop_path=RATE), (BATCH, 3, 6)),
    "residual scale": (lambda: TransformerBlock(6, 2, drop_path=RATE, residual_scale=3.0), (BATCH, 3, 6)),
    "outlooker": (lambda: Outlooker(4, 1, drop_path=RATE), (BATCH, 3, 3, 4)),
}
MODELS = {"volo_test": {"outlooker_drop_path": True}, "lvvit_test": {}}


def subset(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, StochasticDepth):
            module.mode = "subset"
    return model


def model_of(name: str, rate: float = 0.6, mode: str = "subset") -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=64, num_classes=5, drop_path_rate=rate, **MODELS[name]).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    model.set_drop_path_mode(mode)
    return model


def output_and_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    gradients = torch.autograd.grad(out.tanh().square().sum(), [x, *(p for p in model.parameters() if p.requires_grad)])
    return [out.detach(), *gradients]


def weighted_mean(results: Iterator[tuple[float, list[Tensor]]]) -> list[Tensor]:
    sums: list[Tensor] = []
    for weight, tensors in results:
        sums = [s + weight * t for s, t in zip(sums or [torch.zeros(())] * len(tensors), tensors, strict=True)]
    return sums


@pytest.mark.parametrize("name", BLOCKS)
def test_mean_of_outputs_and_gradients_over_all_subsets_is_that_of_timms_drop_path(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = BLOCKS[name]
    torch.manual_seed(0)
    block = make().double()
    x = torch.randn(shape, dtype=torch.float64)
    subsets, draws = [], iter(())
    for kept in itertools.combinations(range(BATCH), KEPT):
        subsets.append(torch.tensor([*kept, *(i for i in range(BATCH) if i not in kept)]))
    assert len(subsets) == comb(BATCH, KEPT)

    def all_subsets() -> Iterator[tuple[float, list[Tensor]]]:
        nonlocal draws
        for pair in itertools.product(subsets, repeat=2):  # one of each branch
            draws = iter(pair)
            yield 1 / len(subsets) ** 2, output_and_gradients(block, x)

    def all_masks() -> Iterator[tuple[float, list[Tensor]]]:
        nonlocal draws
        for flags in itertools.product((0.0, 1.0), repeat=2 * BATCH):
            draws = iter(torch.tensor(flags, dtype=torch.float64).view(2, BATCH))
            yield prod(1 - RATE if flag else RATE for flag in flags), output_and_gradients(block, x)

    # What timm's DropPath and ours ask torch for.
    monkeypatch.setattr(torch.Tensor, "bernoulli_", lambda self, p: self.copy_(next(draws).view_as(self)))
    monkeypatch.setattr(torch, "rand", lambda rows, batch, **_: next(draws).argsort()[None])  # of which it is the order
    expected = weighted_mean(all_masks())
    found = weighted_mean(all_subsets()) if subset(block) else []
    assert next(draws, None) is None
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_every_pair_of_subsets_is_as_likely_in_two_branches_that_are_drawn_for_together() -> None:
    torch.manual_seed(0)
    first, second = subset(StochasticDepth(RATE)), subset(StochasticDepth(RATE))
    zeros, counts, passes = torch.zeros(BATCH, 1), Counter(), 3600
    for _ in range(passes):
        drawn = [
            add_branch(zeros, torch.ones_like, draw_samples(layer, zeros, order)).flatten().tolist()
            for layer, order in zip((first, second), draw_orders(2, zeros), strict=True)
        ]
        counts[tuple(map(tuple, drawn))] += 1
    cells = comb(BATCH, KEPT) ** 2
    assert len(counts) == cells and all(sorted(one) == [0, 0, 2, 2] for pair in counts for one in pair)
    expected = passes / cells
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 67  # 35 degrees of freedom: 1 in 1000


@pytest.mark.parametrize("rate", [0.0001, 0.1, 0.31, 0.47, 0.5, 0.75, 0.999, 1.0])
def test_the_number_kept_is_the_nearest_and_at_least_one(rate: float) -> None:
    for batch in (1, 2, 3, 8, 44, 128, 1000):
        nearest = int(batch * (1 - Fraction(rate)) + Fraction(1, 2))
        assert StochasticDepth(rate).kept(batch) == max(1, nearest)


@pytest.mark.parametrize("kept", [1, 2])
def test_gradients_of_first_and_second_order(kept: int) -> None:
    torch.manual_seed(0)
    layer = subset(StochasticDepth(1 - kept / 3))
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (2, 2)))

    def run(x: Tensor, weight: Tensor) -> Tensor:
        torch.manual_seed(1)
        return add_branch(x, lambda rows: (rows @ weight).sin(), draw_samples(layer, x), divisor=2.0)

    assert torch.autograd.gradcheck(run, (x, weight)) and torch.autograd.gradgradcheck(run, (x, weight))


class Branch(nn.Module):
    def __init__(self, dim: int, rate: float) -> None:
        super().__init__()
        self.linear, self.drop_path = nn.Linear(dim, dim), StochasticDepth(rate)

    def forward(self, x: Tensor) -> Tensor:
        return add_branch(x, lambda rows: self.linear(rows).sin(), draw_samples(self.drop_path, x))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_added_atomically_and_every_parameter_gets_a_gradient(
    name: str, make_images: Callable[..., Tensor]
) -> None:
    model = model_of(name, rate=1.0)  # one image is left in the last block
    with Operators() as operators:
        sum(out.square().sum() for out in model(make_images(4, 64), dense=True)).backward()
    assert "index_copy" in operators.names
    assert not operators.names & {
        "index_add",
        "index_add_",
        "scatter_add",
        "index_put",
        "index_put_",
        "_index_put_impl_",
    }
    assert all(p.grad is not None for p in model.parameters())


class Draws(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_of_d5_s_depth_draws_once_and_each_of_its_72_branches_apart(
    checkpointing: bool, make_images: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = timm.create_model("volo_test", img_size=32, layers=(12, 12, 20, 4), drop_path_rate=0.75).train()
    model.set_drop_path_mode("subset")
    model.set_grad_checkpointing(checkpointing)
    images, drawn = make_images(16, 32), []
    run = TransformerBlock.run
    monkeypatch.setattr(TransformerBlock, "run", lambda block, x, *given: drawn.extend(given) or run(block, x, *given))
    with Draws() as draws:
        sum(out.square().mean() for out in model(images, dense=True)).backward()
    assert draws.names == ["rand.default"] and len(drawn) == 72 * (1 + checkpointing)
    assert all(len(set(samples.tolist())) == len(samples) for samples in drawn)
    assert len({tuple(samples.tolist()) for samples in drawn}) == 72
    kept = [layer.kept(16) for layer in model.modules() if isinstance(layer, StochasticDepth)]
    assert [len(samples) for samples in drawn[:72]] == kept


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_recomputes_the_same_samples(name: str, make_images: Callable[..., Tensor]) -> None:
    model, x = model_of(name), make_images(5, 64)

    def run(seed: int, checkpointing: bool) -> list[Tensor]:
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(seed)
        return output_and_gradients(model, x)

    plain = run(3, False)
    assert all(torch.equal(a, b) for a, b in zip(plain, run(3, True), strict=True))
    assert not torch.equal(plain[0], run(4, False)[0])


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_and_single_images_drop_nothing(name: str, make_images: Callable[..., Tensor]) -> None:
    mask, skipping, whole = model_of(name, mode="mask"), model_of(name), model_of(name, rate=0.0)
    x = make_images(4, 64)
    assert torch.equal(skipping.eval()(x), mask.eval()(x))
    for model in (skipping.train(), whole):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    assert torch.equal(skipping(x[:1]), whole(x[:1]))
    assert not torch.equal(skipping(x), whole(x))


@pytest.mark.parametrize("name", BLOCKS)
def test_autocast_gives_the_types_of_the_mask(name: str) -> None:
    make, shape = BLOCKS[name]
    torch.manual_seed(0)
    block = make()
    for dtype in (torch.float32, torch.bfloat16):
        x, gradients = torch.randn(shape).to(dtype), []
        for mode in ("mask", "subset"):
            block = subset(block) if mode == "subset" else block
            with torch.autocast("cpu", torch.bfloat16):
                torch.manual_seed(1)
                gradients.append(output_and_gradients(block, x))
        assert [g.dtype for g in gradients[0]] == [g.dtype for g in gradients[1]]
    torch.manual_seed(1)
    torch.testing.assert_close(gradients[1][0].float(), output_and_gradients(block, x.float())[0], rtol=0.05, atol=0.05)


def test_the_sum_has_the_wider_type() -> None:
    for types in itertools.permutations((torch.float32, torch.bfloat16)):
        x = torch.randn(4, 2, dtype=types[0], requires_grad=True)
        samples = draw_samples(subset(StochasticDepth(0.5)), x)
        out = add_branch(x, lambda rows: rows.to(types[1]), samples)  # noqa: B023
        assert out.dtype == torch.float32 and torch.equal((out - x)[out[:, 0] != x[:, 0]] != 0, torch.ones(2, 2).bool())


@pytest.mark.parametrize(("checkpointing", "dynamic", "more"), [(False, True, 0), (True, None, 1)])
def test_one_graph_serves_all_draws_and_one_all_batches(checkpointing: bool, dynamic: bool | None, more: int) -> None:
    torch.compiler.reset()
    block = subset(TransformerBlock(10, 2, drop_path=0.6))

    def run(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)

    counter = CompileCounterWithBackend("aot_eager" if checkpointing else "eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=dynamic)
    samples, seen, first = torch.randn(9, 3, 10), set(), 0
    for step, batch in enumerate((8, 8, 8, 6, 7, 9)):
        results = []
        for each in (compiled, run):
            torch.manual_seed(step)
            x = samples[:batch].clone().requires_grad_()
            out = each(x)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])])
        torch.testing.assert_close(*results)
        seen.add(results[0][0].sum().item())
        first = counter.frame_count if step == 0 else first  # not 1 where a first try took floats for run-time values
        assert counter.frame_count == (first if step < 3 else first + more)
    assert len(seen) == 6
    torch.compiler.reset()


def test_a_block_takes_the_arithmetic_of_the_samples_it_keeps() -> None:
    make, shape = BLOCKS["transformer"]
    counts = []
    for block, batch in ((make(), KEPT), (subset(make()), BATCH)):
        with FlopCounterMode(display=False) as counter:
            block(torch.randn(batch, *shape[1:], requires_grad=True)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("volo_d[345]_*.yaml")), ids=lambda path: path.stem)
def test_recipes_say_how_much_arithmetic_is_left(recipe: Path) -> None:
    args = parse_train(["/data", "-c", str(recipe), "--token-label-data", "l", "--drop-path-mode", "subset"])
    args.finetune = ""
    with torch.device("meta"):
        model = build_model(args).train()
    images, flops = torch.empty(args.batch_size, 3, args.img_size, args.img_size, device="meta"), []
    for mode in ("mask", "subset"):
        model.set_drop_path_mode(mode)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(images, dense=True)
        flops.append(counter.get_total_flops())
    header = re.search(r"--drop-path-mode subset .*: FLOPs / (\d\.\d\d) ", recipe.read_text())
    assert header is not None and float(header[1]) == round(flops[0] / flops[1], 2)


def test_timm_models_are_refused_in_one_line() -> None:
    flags = ["/data", "--model", "test_vit", "--drop-path", "0.2", "--drop-path-mode", "subset"]
    with pytest.raises(UserError, match="--drop-path-mode subset needs --model volo_"):
        build_model(parse_train(flags))
    model = build_model(parse_train([*flags, "--model", "lvvit_test"]))
    modes = [module.mode for module in model.modules() if isinstance(module, DropPath)]
    assert modes == ["subset"] * 4


@pytest.mark.parametrize("checkpointing", [False, True])
def test_cudnn_makes_no_plans_where_each_block_has_a_batch_size_of_its_own(
    checkpointing: bool, make_images: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images, allowed = model_of("lvvit_test"), make_images(4, 64), []
    fused = F.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return fused(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model.set_grad_checkpointing(checkpointing)
    for mode, training, expected in (("mask", True, True), ("subset", True, False), ("subset", False, True)):
        model.set_drop_path_mode(mode)
        allowed.clear()
        model.train(training)(images).sum().backward()
        assert len(allowed) == len(model.named_blocks()) * (1 + checkpointing) and set(allowed) == {expected}
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
def test_a_gpu_takes_flash_attention_for_the_subset() -> None:
    model, images = model_of("lvvit_test").to("cuda", torch.bfloat16), torch.randn(8, 3, 64, 64, device="cuda")
    with Operators() as operators:
        model(images.bfloat16()).sum().backward()
    found = {name for name in operators.names if "attention" in name}
    assert found == {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"}


@pytest.mark.gpu
def test_a_gpu_repeats_itself_and_does_not_wait() -> None:
    torch.manual_seed(0)
    model, x = subset(Branch(64, rate=0.47)).cuda(), torch.randn(44, 196, 64, device="cuda")
    results = []
    for attempt in range(3):
        torch.manual_seed(3)
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")  # the first one starts libraries up
        try:
            results.append(output_and_gradients(model, x))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for again in results[1:] for a, b in zip(results[0], again, strict=True))
