"""The guarded step: what it clips, what it skips, when it gives up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from timm.utils.agc import adaptive_clip_grad
from torch import nn

from tlt.errors import NonFiniteError
from volo.config.args import TRAIN
from volo.train.model import heads_of
from volo.train.optim import create_optimizer
from volo.train.precision import Clipping, Precision, compute_dtype

CPU = torch.device("cpu")


def _linear(fused: bool = False) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=fused)


def test_fault_53_non_finite_gradients_change_no_weight() -> None:
    model, optimizer = _linear(fused=True)
    precision, parameters, ends = Precision(CPU), list(model.parameters()), []
    for scale in (1.0, float("inf"), 1.0):
        precision.backward((model(torch.ones(1, 3)) * scale).sum())
        precision.step(optimizer, parameters)
        ends.append([t.clone() for p in parameters for t in (p, optimizer.state[p]["exp_avg"])])
        assert precision.counts()[0] == (scale == float("inf"))
    assert all(map(torch.equal, ends[0], ends[1])) and not any(map(torch.equal, ends[1], ends[2]))


class _Blind(torch.optim.Optimizer):
    """Says that it skips steps on the device, but does not look at `found_inf` (apex's FusedAdam with capturable)."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            weight -= 0.1 * weight.grad


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Memory that is allocated but not written holds NaN, not what happened to be there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "loss-scale"])
@pytest.mark.parametrize(
    ("opt", "settings", "fused"),
    [
        *((opt, [], []) for opt in ("adam", "adamw", "sgd", "lookahead_adamw", "blind")),
        ("adamw", ["amsgrad=True"], []),
        *((opt, [], ["fused=True"]) for opt in ("momentum", "adagrad")),
    ],
)
def test_a_skipped_first_step_leaves_nothing_behind(
    opt: str, settings: list[str], fused: list[str], scaled: bool, device: str
) -> None:
    def train(kind: str, options: list[str], gradients: list[torch.Tensor]) -> tuple[torch.Tensor, Precision]:
        model = nn.Linear(3, 5, bias=False)
        model.weight.data = start.to(device, copy=True)
        if opt == "blind":
            optimizer: torch.optim.Optimizer = _Blind(model.parameters(), {})
        else:
            args = TRAIN.parse(["/data", "--opt", opt, "--lr", "0.1", "--opt-kwargs", *options])
            optimizer = create_optimizer(args, model, torch.device(kind))
        precision = Precision(torch.device(device))
        precision.scaler = torch.amp.GradScaler(device, init_scale=4.0) if scaled else None
        for gradient in gradients:
            precision.backward((model.weight * gradient.to(device)).sum())
            precision.step(optimizer, list(model.parameters()))
        return model.weight.detach(), precision

    start, *good = torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(0))
    broken = torch.full_like(start, float("inf"))
    expected, _ = train("mps", settings, good)  # torch has no fused kernels for it
    found, precision = train(device, settings + fused, [broken, *good])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert precision.counts() == [0, 1]
    assert precision.scaler is None or precision.scaler.get_scale() == 2.0


@pytest.mark.parametrize(
    ("mode", "clip"),
    [("norm", nn.utils.clip_grad_norm_), ("value", nn.utils.clip_grad_value_), ("agc", adaptive_clip_grad)],
)
def test_clipping_is_torchs_and_timms(mode: str, clip: Callable[..., Any]) -> None:
    (model, optimizer), (reference, _) = _linear(), _linear()
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    precision = Precision(CPU, clip=Clipping(0.01, mode))
    precision.backward((model(torch.full((4, 3), 5.0)) ** 2).sum())
    norm = precision.step(optimizer, list(model.parameters()))
    (reference(torch.full((4, 3), 5.0)) ** 2).sum().backward()
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in reference.parameters()]))
    clip(reference.parameters(), 0.01)
    torch.testing.assert_close(seen, [p.grad for p in reference.parameters()])


def test_adaptive_clipping_leaves_the_heads_alone() -> None:
    model = timm.create_model("lvvit_test", img_size=32, num_classes=4)
    parameters = list(model.parameters())
    precision = Precision(CPU, clip=Clipping(1e-6, "agc", heads_of(model)))
    cls, tokens = model(torch.ones(2, 3, 32, 32), dense=True)
    precision.backward(cls.square().sum() + tokens.square().sum())
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    changed: set[str] = set()
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    optimizer.register_step_pre_hook(
        lambda *_: changed.update(n for n, p in model.named_parameters() if not torch.equal(p.grad, before[n]))
    )
    precision.step(optimizer, parameters)
    assert "blocks.0.mlp.fc1.weight" in changed
    assert not [name for name in changed if "head" in name]


@pytest.mark.parametrize(
    ("flags", "device", "dtype"),
    [
        ("", "cuda", None),
        ("--amp", "cpu", torch.bfloat16),
        ("--amp", "cuda", torch.float16),
        ("--amp --amp-dtype bfloat16", "cuda", torch.bfloat16),
        ("--model-dtype bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_fault_59_amp_on_a_cpu_is_bfloat16(flags: str, device: str, dtype: torch.dtype | None) -> None:
    assert compute_dtype(TRAIN.parse(["/data", *flags.split()]), torch.device(device)) is dtype
    with Precision(CPU, dtype).autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is (dtype or torch.float32)


def test_gives_up_after_too_many_skipped_steps_in_a_row_also_of_before_a_resume() -> None:
    model, optimizer = _linear()
    precision = Precision(CPU, max_nonfinite=2)
    precision.restore_counts(1, 5)
    for scale, counts in ((float("nan"), [2, 6]), (1.0, [0, 6]), (float("nan"), [1, 7]), (float("nan"), [2, 8])):
        precision.backward(model(torch.ones(1, 3)).sum() * scale)
        precision.step(optimizer, list(model.parameters()))
        assert precision.counts() == counts and precision.check() == counts[1]
    precision.backward(model(torch.ones(1, 3)).sum() * float("inf"))
    precision.step(optimizer, list(model.parameters()))
    with pytest.raises(NonFiniteError, match="3 steps in a row") as caught:
        precision.check()
    assert caught.value.exit_code == 3
