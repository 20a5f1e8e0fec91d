"""What a step keeps, predicted without computing, against what autograd saves."""

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import volo  # noqa: F401  (registers the models)
from tlt.models.flops import flops_per_image
from volo.config.train import TRAIN
from volo.memory.prediction import StepShape, activations_of, fixed_memory


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=10).train()


def tracked_bytes(model: nn.Module, images: Tensor, amp: bool) -> int:
    """The most that a real step holds beside weights and images, by torch's own tracker."""
    tracker = MemTracker()
    tracker.track_external(model, images)
    with tracker:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            loss = sum(out.float().logsumexp(-1).mean() for out in model(images, dense=True))
        loss.backward()
    model.zero_grad()
    before = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers(), images])
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return peak["Total"] - before - peak[_MemRefType.GRAD]


@pytest.mark.parametrize(("name", "amp", "recompute"), [("volo_test", False, True), ("lvvit_test", True, False)])
def test_predicted_is_what_torch_tracks(name, amp, recompute):
    """In a step with contents; the prediction leaves the model as it is."""
    model = build(name)
    model.set_grad_checkpointing(recompute)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fixed, each = activations_of(model, StepShape((3, 64, 64), "cpu", torch.bfloat16 if amp else None, dense=True))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for batch in (20, 40):  # where the peak is one of activations, not of gradients
        tracked = tracked_bytes(model, torch.randn(batch, 3, 64, 64), amp)
        assert fixed + each * batch == pytest.approx(tracked, rel=0.05)


@pytest.mark.gpu(stand_in=False)
@pytest.mark.parametrize(("name", "recompute"), [("volo_d1", True), ("lvvit_s", False)])
def test_predicted_is_what_a_gpu_allocates(name, recompute):
    model, images = timm.create_model(name).cuda().train(), torch.randn(32, 3, 224, 224, device="cuda")
    model.set_grad_checkpointing(recompute)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outputs = model(images, dense=True, mix_box=(0, 0, 1, 1))
            loss = sum(out.float().logsumexp(-1).mean() for out in outputs)
        del outputs
        loss.backward()

    fixed, each = activations_of(model, StepShape((3, 224, 224), "cuda", torch.bfloat16, dense=True))
    step()  # loads kernels and makes the gradients
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(fixed + 32 * each, rel=0.15)


@pytest.mark.parametrize(
    ("flags", "optimizer", "ema", "whole_gradients"),
    [
        ("", 2, 0, True),
        ("--opt sgd --model-ema", 1, 1, True),
        ("--shard 4 --model-ema", 2, 1, False),
        ("--shard 4 --grad-accum-steps 2", 2, 0, True),  # which are summed over the ranks by the last micro-batch
    ],
)
def test_what_stays_from_step_to_step(flags, optimizer, ema, whole_gradients):
    model = build("volo_test")
    model.set_dense_head(False)
    args = TRAIN.parse(["--data-backend", "synthetic", *flags.split()])
    kept = fixed_memory(args, model, torch.device("cpu"))
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = sum(v.numel() * v.element_size() for v in model.state_dict().values())
    ranks = args.distributed.shard
    gradients = trained if whole_gradients else trained // ranks
    assert (kept["weights"], kept["gradients"]) == (weights // ranks, gradients)
    assert (kept["optimizer"], kept.get("EMA", 0)) == (optimizer * trained // ranks, ema * weights // ranks)


@pytest.mark.parametrize("name", ["coat_tiny", "test_vit3"])
def test_a_count_is_that_of_a_run_and_changes_nothing(name):
    """Of a model with layers under two names, and of one with a weight that is a layer's input."""
    model = timm.create_model(name, num_classes=4)
    size = model.pretrained_cfg["input_size"]
    counted = flops_per_image(model, size)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(2, *size))
    assert counted == counter.get_total_flops() / 2


GMACS = {"volo_d1": 6.92, "volo_d5": 72.30, "lvvit_s": 6.55}  # as published


@pytest.mark.parametrize("name", GMACS)
def test_gmacs(name):
    with torch.device("meta"):
        model = timm.create_model(name, img_size=224)
    assert round(flops_per_image(model, (3, 224, 224)) / 2e9, 2) == GMACS[name]
