"""What a step keeps, predicted without computing, against what autograd saves; what is recomputed so that it fits."""

from __future__ import annotations

import itertools

import pytest
import timm
import torch
from torch import Tensor, nn

import volo  # noqa: F401  (registers the models)
from tests.conftest import imagined_gpu
from tlt.models.flops import flops_per_image
from tlt.models.recompute import EVERYTHING, LEVELS, NOTHING
from volo.config.args import parse_train
from volo.memory.activation_memory import Activations, BatchBytes, BlockMemory, activations_of
from volo.memory.fake_step import StepShape, forward_marks
from volo.memory.memory_budget import fixed_memory

NAMES = ["volo_test", "lvvit_test"]


def build(name: str, **kwargs: float) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=10, **kwargs).train()


def outputs_of(model: nn.Module, images: Tensor) -> Tensor:
    torch.manual_seed(3)
    return sum(out.float().logsumexp(-1).mean() for out in model(images, dense=True))


def saved_bytes(model: nn.Module, images: Tensor, amp: bool) -> int:
    """What autograd keeps of a real forward pass, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers(), images]}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp),
    ):
        loss = outputs_of(model, images)
    del loss
    gradients = len(images) * (1 + model.token_grid()[0] * model.token_grid()[1]) * model.num_classes * 4
    return sum(saved.values()) + gradients


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_predicted_is_what_autograd_saves(name: str, amp: bool) -> None:
    model, images = build(name), torch.randn(16, 3, 64, 64)
    shape = StepShape((3, 64, 64), "cpu", torch.bfloat16 if amp else None, dense=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    predicted = forward_marks(model, shape, 16)[-1].held
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert predicted == pytest.approx(saved_bytes(model, images, amp), rel=0.05)
    linear = activations_of(model, shape)
    for images in (16, 7):
        held = sum(size.at(images) for size in (*linear.between, *(block.kept[NOTHING] for block in linear.blocks)))
        assert held == pytest.approx(forward_marks(model, shape, images)[-1].held, rel=0.01)


@imagined_gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_that_is_not_there_keeps_what_fused_kernels_keep(name: str) -> None:
    model = build(name)
    kept = [forward_marks(model, StepShape((3, 64, 64), device), 16)[-1].held for device in ("cpu", "cuda")]
    assert kept[1] == pytest.approx(kept[0], rel=0.02)  # in float32 both devices keep the same
    half = forward_marks(model, StepShape((3, 64, 64), "cuda", torch.float16), 16)[-1].held
    assert 0.5 * kept[1] < half < 0.85 * kept[1]
    assert not torch.is_autocast_enabled("cuda")


def activations(sizes: list[tuple[float, float, float]]) -> Activations:
    """Blocks that keep so much at each level; recomputing takes 0, 1 and 10 operations."""
    flops = dict(zip(LEVELS, (0.0, 1.0, 10.0), strict=True))
    blocks = [
        BlockMemory(str(i), {k: BatchBytes(0, v) for k, v in zip(LEVELS, s, strict=True)}, flops)
        for i, s in enumerate(sizes)
    ]
    return Activations(tuple(blocks), (BatchBytes(5, 1),) * (len(blocks) + 1))


@pytest.mark.parametrize("budget", range(30, 90, 3))
def test_the_cheapest_choice_that_fits(budget: int) -> None:
    found = activations([(16, 9, 2)] * 4)
    chosen = found.fit(1, budget)
    fitting = [levels for levels in itertools.product(LEVELS, repeat=4) if found.peak(1, levels) <= budget]
    if not fitting:
        assert chosen == found.everywhere(EVERYTHING)
        return
    assert found.peak(1, chosen) <= budget
    assert found.repeated(chosen) == min(map(found.repeated, fitting))


def test_a_block_that_is_recomputed_is_there_once_more() -> None:
    found = activations([(16, 9, 2), (16, 9, 2)])
    # 6 before each block and at the end; the second one comes back when 6 + 2 + 6 are held. Gradients: 4 * 2.
    assert found.peak(1, [NOTHING, NOTHING]) == 6 + 16 + 6 + 16 + 8
    assert found.peak(1, [EVERYTHING, EVERYTHING]) == 6 + 2 + 6 + 16 + 8
    assert found.peak(1, [NOTHING, EVERYTHING]) == 6 + 16 + 6 + 16 + 8
    assert found.peak(2, [EVERYTHING, NOTHING]) == 7 + 4 + 7 + 32 + 16


def test_largest_batch() -> None:
    found = activations([(16, 9, 2), (16, 9, 2)])
    levels = found.everywhere(NOTHING)
    most = found.largest_batch(1000, levels)
    assert found.peak(most, levels) <= 1000 < found.peak(most + 1, levels)
    assert found.largest_batch(10, levels) == 0


GMACS = {
    "volo_d1": 6.92, "volo_d2": 14.31, "volo_d3": 20.73, "volo_d4": 44.26, "volo_d5": 72.30,
    "lvvit_t": 2.87, "lvvit_s": 6.55, "lvvit_m": 12.68, "lvvit_l": 34.64,
}  # fmt: skip


@pytest.mark.parametrize("name", GMACS)
def test_gmacs(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, img_size=224)
    assert round(flops_per_image(model, (3, 224, 224)) / 2e9, 2) == GMACS[name]


@pytest.mark.parametrize(
    ("flags", "optimizer", "ema"), [("", 2, 0), ("--opt sgd --model-ema", 1, 1), ("--opt lion", 1, 0)]
)
def test_what_stays_from_step_to_step(flags: str, optimizer: int, ema: int) -> None:
    model = build("volo_test")
    model.set_dense_head(False)
    args = parse_train(["--data-backend", "synthetic", *flags.split()])
    found = fixed_memory(args, model, torch.device("cpu"))
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.weights == sum(v.numel() * v.element_size() for v in model.state_dict().values())
    assert (found.gradients, found.optimizer, found.ema) == (trained, optimizer * trained, ema * found.weights)


def test_gmacs_of_d5_at_512_px() -> None:
    with torch.device("meta"):
        model = timm.create_model("volo_d5", img_size=512)
    assert round(flops_per_image(model, (3, 512, 512)) / 2e9, 1) == 424.6


def test_operations_of_a_step_that_recomputes_are_counted() -> None:
    model = build("volo_test")
    model.set_grad_checkpointing()
    plain = flops_per_image(build("volo_test"), (3, 64, 64), backward=True)
    assert plain < flops_per_image(model, (3, 64, 64), backward=True) < 4 / 3 * plain
