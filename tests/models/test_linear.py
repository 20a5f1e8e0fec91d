"""Linear layers by oneDNN: torch's own layer in float64 is the reference."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tlt.models import linear
from tlt.models.linear import Linear, onednn_linear

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or torch.backends.mkl.is_available() is False, reason="torch without them"
)
pytestmark = needs_onednn


@pytest.fixture(autouse=True)
def slow_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MKL_IS_SLOW", True)


def taken(model: nn.Module, x: Tensor) -> bool:
    """Whether the model's products are oneDNN's."""
    with torch.profiler.profile() as profile:
        model(x)
    return any("onednn_linear" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 24), (2, 3, 5, 24), (1, 24), (0, 24)])
def test_values_and_gradients_are_those_of_nn_linear(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours, reference = Linear(24, 10, bias=bias), nn.Linear(24, 10, bias=bias).double()
    reference.load_state_dict(ours.state_dict())
    x = torch.randn(shape[:-1] + (48,))[..., ::2].requires_grad_()  # not contiguous
    out = ours(x)
    wide = x.detach().double().requires_grad_()
    expected = reference(wide)
    weight = torch.randn(10, *shape[:-1]).movedim(0, -1)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(out, expected.float())
    torch.testing.assert_close(x.grad, wide.grad.float())
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad.float())
        assert mine.grad.stride() == mine.stride()  # else autograd would copy it


def test_what_is_used_where(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Linear(4, 3), torch.ones(2, 4)
    assert taken(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not taken(model, x) and model(x).dtype is torch.bfloat16
    assert not taken(Linear(4, 3).double(), x.double())
    exported = torch.export.export(model, (x,)).graph_module
    assert "onednn" not in exported.code
    monkeypatch.setattr(linear, "MKL_IS_SLOW", False)
    assert not taken(model, x)


def test_the_operator_as_torch_checks_it() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    torch.library.opcheck(onednn_linear, (x, weight, torch.randn(5, requires_grad=True)))
    torch.library.opcheck(onednn_linear, (x, weight.detach(), None))


def test_flops_are_counted_as_those_of_nn_linear() -> None:
    counts = []
    for layer in (Linear(4, 3), nn.Linear(4, 3)):
        with FlopCounterMode(display=False) as counter:
            layer(torch.ones(2, 5, 4, requires_grad=True)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 10 * 12


@pytest.mark.parametrize("name", ["volo_test", "lvvit_test"])
def test_no_linear_layer_of_a_model_is_left_out(name: str) -> None:
    model = timm.create_model(name)
    assert all(isinstance(module, Linear) for module in model.modules() if isinstance(module, nn.Linear))
