"""Stochastic depth: the law of what is drawn, its mean against timm's DropPath, and what each mode computes."""

import copy
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from math import comb, prod
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode

from tests.models.conftest import make_images
from tlt.data.augment.device_stage import DeviceStage, EvalStage
from tlt.data.augment.plan import AugmentConfig
from tlt.errors import UserError
from tlt.models.layers import WHOLE, TransformerBlock, add_branch, draw_masks, draw_subsets, kept_images, kept_share
from volo.commands.validate import ChosenClasses
from volo.config.train import TRAIN
from volo.models.volo import Outlooker
from volo.train.architecture import requested_by
from volo.train.model import build_model

CONFIGS = Path(__file__).parents[2] / "configs"
BATCH, KEPT = 3, 1
RATE = 1 - KEPT / BATCH
BLOCKS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "transformer": (lambda: TransformerBlock(6, 2, residual_scale=3.0), (BATCH, 3, 6)),
    "outlooker": (lambda: Outlooker(4, 1), (BATCH, 3, 3, 4)),
}
MODELS = {"volo_test": {"outlooker_drop_path": True}, "lvvit_test": {}}


def model_of(name: str, rate: float = 0.6, mode: str = "subset") -> Any:
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=64, num_classes=5, drop_path_rate=rate, **MODELS[name]).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    model.set_drop_path_mode(mode)
    return model


def output_and_gradients(model: Any, x: Tensor, *drawn: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x, *drawn)
    weights = [p for p in model.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.tanh().square().sum(), [x, *weights])]


def weighted_mean(results: Iterator[tuple[float, list[Tensor]]]) -> list[Tensor]:
    sums: list[Tensor] = []
    for weight, tensors in results:
        sums = [s + weight * t for s, t in zip(sums or [torch.zeros(())] * len(tensors), tensors, strict=True)]
    return sums


class WithTimms(nn.Module):
    """A block with timm's DropPath behind its branches."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block, self.drop = block, DropPath(RATE)

    def forward(self, x: Tensor) -> Tensor:
        block = self.block
        x = x + self.drop(block.attn(block.norm1(x))) / block.residual_scale
        return x + self.drop(block.mlp(block.norm2(x))) / block.residual_scale


@pytest.mark.parametrize("name", BLOCKS)
def test_masks_are_timms_and_subsets_have_the_same_mean(name, monkeypatch):
    make, shape = BLOCKS[name]
    torch.manual_seed(0)
    block = make().double()
    x, draws = torch.randn(shape, dtype=torch.float64), iter(())
    monkeypatch.setattr(torch.Tensor, "bernoulli_", lambda self, p: self.copy_(next(draws).view_as(self)))

    def all_masks() -> Iterator[tuple[float, list[Tensor]]]:
        nonlocal draws
        for flags in itertools.product((0.0, 1.0), repeat=2 * BATCH):
            masks = torch.tensor(flags).view(2, BATCH)
            draws = iter(masks)
            expected = output_and_gradients(WithTimms(block), x)
            torch.testing.assert_close(output_and_gradients(block, x, *masks / (1 - RATE)), expected)
            yield prod(1 - RATE if flag else RATE for flag in flags), expected

    subsets = [torch.tensor(kept) for kept in itertools.combinations(range(BATCH), KEPT)]
    pairs = list(itertools.product(subsets, repeat=2))
    mean = weighted_mean((1 / len(pairs), output_and_gradients(block, x, *pair)) for pair in pairs)
    torch.testing.assert_close(mean, weighted_mean(all_masks()), rtol=1e-12, atol=1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subset_is_taken_and_put_back_as_by_index_add(dtype):
    torch.manual_seed(0)
    x, drawn, weight = torch.randn(5, 3, 4, dtype=dtype), torch.tensor([4, 0, 3]), torch.randn(4, 4, dtype=dtype)
    x, drawn, weight = x.cuda(), drawn.cuda(), weight.cuda()

    def plain(x: Tensor) -> Tensor:
        return x.index_add(0, drawn, (x.index_select(0, drawn) @ weight).tanh() * (5 / (3 * 2.0)))

    results = []
    for run in (plain, lambda x: add_branch(x, lambda rows: (rows @ weight).tanh(), drawn, 2.0)):
        leaf = x.clone().requires_grad_()
        (out := run(leaf)).square().sum().backward()
        results.append((out, leaf.grad))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("mode", ["mask", "subset"])
def test_branches_draw_independently_and_evenly(mode):
    torch.manual_seed(0)
    x, shares, counts, passes = torch.zeros(4, 1), [WHOLE // 2] * 2, Counter(), 3600
    for _ in range(passes):
        drawn = draw_masks(torch.tensor(shares)[:, None], x) if mode == "mask" else draw_subsets(shares, x)
        counts[tuple(tuple(branch.tolist() if mode == "mask" else sorted(branch.tolist())) for branch in drawn)] += 1
    cells = (2**4 if mode == "mask" else comb(4, 2)) ** 2
    assert len(counts) == cells
    if mode == "mask":
        assert {value for pair in counts for branch in pair for value in branch} == {0.0, 2.0}
    expected = passes / cells
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < {"mask": 331, "subset": 67}[mode]  # 255 and 35 degrees of freedom: 1 in 1000


def test_masks_have_each_branch_s_own_rate():
    torch.manual_seed(0)
    rates = torch.tensor([0.001, 0.1, 0.31, 0.75, 1.0])
    shares = torch.tensor([kept_share(rate) for rate in rates.tolist()])[:, None]
    masks = draw_masks(shares, torch.zeros(100_000, 1))
    kept = (masks > 0).float().mean(1)
    assert (kept - (1 - rates)).abs().max() < 0.006  # four standard deviations
    torch.testing.assert_close(masks[:4].amax(1), 1 / (1 - rates[:4]))
    assert not masks[4].any() and masks.isfinite().all()


def test_the_number_kept_is_the_nearest_and_at_least_one():
    for rate, batch in itertools.product((0.0001, 0.31, 0.5, 0.75, 1.0), (1, 2, 3, 44, 1000)):
        nearest = int(batch * (1 - Fraction(rate)) + Fraction(1, 2))
        assert kept_images(batch, kept_share(rate)) == max(1, nearest)


@pytest.mark.parametrize(("mode", "checkpointing"), [("mask", False), ("subset", True)])
def test_d5_draws_for_its_72_branches_apart(mode, checkpointing, monkeypatch):
    model = timm.create_model("volo_test", img_size=32, layers=(12, 12, 20, 4), drop_path_rate=0.75).train()
    model.set_drop_path_mode(mode)
    model.set_grad_checkpointing(checkpointing)
    images, used = make_images(16, 32), []
    forward = TransformerBlock.forward
    watched = lambda block, x, *drawn: used.extend(drawn) or forward(block, x, *drawn)  # noqa: E731
    monkeypatch.setattr(TransformerBlock, "forward", watched)
    sum(out.square().mean() for out in model(images, dense=True)).backward()
    assert len(used) == 72 * (1 + checkpointing)
    assert len({drawn.data_ptr() for drawn in used}) == 72
    if mode == "subset":
        assert all(len(set(drawn.tolist())) == len(drawn) for drawn in used)
        shares = [kept_share(block.drop_path) for block in model.modules() if isinstance(block, TransformerBlock)]
        assert [len(drawn) for drawn in used[:72]] == [kept_images(16, share) for share in shares for _ in range(2)]


@pytest.mark.parametrize(("name", "mode"), [("volo_test", "mask"), ("lvvit_test", "subset")])
def test_checkpointing_redraws_and_evaluation_drops_nothing(name, mode):
    model, x = model_of(name, mode=mode), make_images(5, 64)

    def run(seed: int, checkpointing: bool) -> list[Tensor]:
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(seed)
        return output_and_gradients(model, x)

    plain = run(3, False)
    assert all(torch.equal(a, b) for a, b in zip(plain, run(3, True), strict=True))
    assert not torch.equal(plain[0], run(4, False)[0])
    assert torch.equal(model.eval()(x), model_of(name, rate=0.0).eval()(x))


RECIPES = sorted(CONFIGS.glob("volo_d[345]_*.yaml"))


@pytest.mark.parametrize(
    "recipe",
    [*RECIPES[:1], *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in RECIPES[1:])],
    ids=lambda path: path.stem,
)
def test_recipes_say_how_much_arithmetic_is_left(recipe):
    args = TRAIN.parse(["/data", "-c", str(recipe), "--token-label-data", "l", "--drop-path-mode", "subset"])
    with torch.device("meta"):
        model = build_model(requested_by(args)).train()
    side = args.images.pixels.img_size
    images, flops = torch.empty(args.images.batch_size, 3, side, side, device="meta"), []
    for mode in ("mask", "subset"):
        model.set_drop_path_mode(mode)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(images, dense=True)
        flops.append(counter.get_total_flops())
    header = re.search(r"--drop-path-mode subset .*: FLOPs / (\d\.\d\d) ", recipe.read_text())
    assert header is not None and float(header[1]) == round(flops[0] / flops[1], 2)


def test_timm_models_are_refused_in_one_line():
    flags = ["/data", "--model", "test_vit", "--drop-path", "0.2", "--drop-path-mode", "subset"]
    with pytest.raises(UserError, match="--drop-path-mode subset needs --model volo_"):
        build_model(requested_by(TRAIN.parse(flags)))
    assert build_model(requested_by(TRAIN.parse([*flags, "--model", "lvvit_test"]))).drop_path_mode == "subset"


class Around(nn.Module):
    """What others put around a block, and hands no attribute through."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Tensor:
        return self.inner(*inputs)


@pytest.mark.parametrize("mode", ["mask", "subset"])
@pytest.mark.parametrize(
    "put",
    [copy.deepcopy, Around, checkpoint_wrapper, partial(torch.compile, backend="eager"), lambda b: Around(Around(b))],
)
def test_wrapped_or_copied_block_keeps_stochastic_depth(put, mode):
    plain, changed = (model_of("lvvit_test", mode=mode) for _ in range(2))
    for index, block in enumerate(changed.blocks):
        changed.blocks[index] = put(block)
    x = torch.randn(6, 3, 64, 64)
    results = []
    for model in (plain, changed, copy.deepcopy(changed)):
        torch.manual_seed(1)
        results.append(model(x))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
    assert not torch.equal(results[0], plain(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: model_of("lvvit_test"),
        lambda: ChosenClasses(model_of("volo_test", mode="mask"), [3, 1]),
        lambda: EvalStage((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
        lambda: DeviceStage(AugmentConfig((8, 8)), (0.5,), (0.25,)),
    ],
)
def test_buffers_are_there_after_to_empty(make):
    plain = make()
    with torch.device("meta"):
        on_meta = make()
    for made in (on_meta.to_empty(device="cpu"), copy.deepcopy(plain).to_empty(device="cpu"), plain.to("meta")):
        made = made.to_empty(device="cpu")
        made.load_state_dict(make().state_dict())
        torch.testing.assert_close(dict(made.named_buffers()), dict(make().named_buffers()), rtol=0, atol=0)
