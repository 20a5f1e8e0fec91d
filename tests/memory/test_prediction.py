"""What a step keeps, predicted without computing, against what autograd saves."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import volo  # noqa: F401  (registers the models)
from tlt.models.flops import flops_per_image
from volo.config.args import parse_train
from volo.memory.prediction import StepShape, activations_of, fixed_memory

NAMES = ["volo_test", "lvvit_test"]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=10).train()


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
        loss = sum(out.float().logsumexp(-1).mean() for out in model(images, dense=True))
    del loss
    gradients = len(images) * (1 + model.token_grid()[0] * model.token_grid()[1]) * model.num_classes * 4
    return sum(saved.values()) + gradients


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_predicted_is_what_autograd_saves(name: str, amp: bool) -> None:
    model = build(name)
    shape = StepShape((3, 64, 64), "cpu", torch.bfloat16 if amp else None, dense=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plain, checkpointed = activations_of(model, shape)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model.grad_checkpointing
    for batch in (7, 16):
        assert plain.at(batch) == pytest.approx(saved_bytes(model, torch.randn(batch, 3, 64, 64), amp), rel=0.05)
    model.set_grad_checkpointing()
    # A block is held beside what is saved; of these models, whose blocks are few, that is a good part.
    saved = saved_bytes(model, torch.randn(16, 3, 64, 64), amp)
    assert saved < checkpointed.at(16) < 0.9 * plain.at(16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["volo_d1", "lvvit_s"])
def test_predicted_is_what_a_gpu_allocates(name: str) -> None:
    model, images = timm.create_model(name).cuda().train(), torch.randn(32, 3, 224, 224, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outputs = model(images, dense=True, mix_box=(0, 0, 1, 1))
            loss = sum(out.float().logsumexp(-1).mean() for out in outputs)
        del outputs
        loss.backward()

    found = activations_of(model, StepShape((3, 224, 224), "cuda", torch.bfloat16, dense=True))
    for checkpointing, predicted in zip((False, True), found, strict=True):
        model.set_grad_checkpointing(checkpointing)
        step()  # loads kernels and makes the gradients
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        assert torch.cuda.max_memory_allocated() - before == pytest.approx(predicted.at(32), rel=0.15)


def test_the_largest_batch_is_the_last_that_fits() -> None:
    plain, _ = activations_of(build("volo_test"), StepShape((3, 64, 64), "cpu"))
    most = plain.largest_batch(1e9)
    assert plain.at(most) <= 1e9 < plain.at(most + 1)
    assert plain.largest_batch(10) == 0


@pytest.mark.parametrize(
    ("flags", "optimizer", "ema"), [("", 2, 0), ("--opt sgd --model-ema", 1, 1), ("--opt lion", 1, 0)]
)
def test_what_stays_from_step_to_step(flags: str, optimizer: int, ema: int) -> None:
    model = build("volo_test")
    model.set_dense_head(False)
    args = parse_train(["--data-backend", "synthetic", *flags.split()])
    found = fixed_memory(args, model, torch.device("cpu"), 1)
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = sum(v.numel() * v.element_size() for v in model.state_dict().values())
    assert (found["weights"], found["gradients"]) == (weights, trained)
    assert (found["optimizer"], found["EMA"]) == (optimizer * trained, ema * weights)


GMACS = {
    "volo_d1": 6.92, "volo_d2": 14.31, "volo_d3": 20.73, "volo_d4": 44.26, "volo_d5": 72.30,
    "lvvit_t": 2.87, "lvvit_s": 6.55, "lvvit_m": 12.68, "lvvit_l": 34.64,
}  # fmt: skip


@pytest.mark.parametrize("name", GMACS)
def test_gmacs(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, img_size=224)
    assert round(flops_per_image(model, (3, 224, 224)) / 2e9, 2) == GMACS[name]


def test_operations_of_a_step_that_recomputes_are_counted() -> None:
    model = build("volo_test")
    model.set_grad_checkpointing()
    plain = flops_per_image(build("volo_test"), (3, 64, 64), backward=True)
    assert plain < flops_per_image(model, (3, 64, 64), backward=True) < 4 / 3 * plain
