"""Linear layers by oneDNN: torch's own layer in float64 is the reference."""

from collections.abc import Callable
from functools import partial
from types import MethodType

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from tlt.models import fast_ops
from tlt.models.fast_ops import linear, onednn_linear

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()), reason="torch without them"
)


@pytest.fixture(autouse=True)
def slow_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_ops, "MKL_IS_SLOW", True)


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.layer, x)


def products(call: nn.Module, x: Tensor) -> int:
    """How many products of a call are oneDNN's."""
    with torch.profiler.profile() as profile:
        call(x)
    return sum(event.count for event in profile.key_averages() if event.key == "tlt::onednn_linear")


@pytest.mark.parametrize(("shape", "bias"), [((2, 3, 5, 24), True), ((1, 24), False), ((0, 24), True)])
def test_values_and_gradients_are_those_of_nn_linear(shape, bias):
    torch.manual_seed(0)
    ours, reference = nn.Linear(24, 10, bias=bias), nn.Linear(24, 10, bias=bias).double()
    reference.load_state_dict(ours.state_dict())
    x = torch.randn(shape[:-1] + (48,))[..., ::2].requires_grad_()  # not contiguous
    out = linear(ours, x)
    wide = x.detach().double().requires_grad_()
    expected = reference(wide)
    weight = torch.randn(10, *shape[:-1]).movedim(0, -1)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(out, expected.float())
    torch.testing.assert_close(x.grad, wide.grad.float())
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad.float())


def test_what_is_used_where():
    layer, x = nn.Linear(4, 3), torch.ones(2, 4)
    assert products(Wrapped(layer), x) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert products(Wrapped(layer), x) == 0 and linear(layer, x).dtype is torch.bfloat16
    assert products(Wrapped(nn.Linear(4, 3).double()), x.double()) == 0
    assert "onednn" not in str(torch.jit.trace(Wrapped(layer), x).graph)
    assert torch.fx.symbolic_trace(Wrapped(layer)).graph.find_nodes(op="call_module", target="layer")


def _patch(layer: nn.Linear, forward: Callable[..., Tensor]) -> None:
    layer.forward = forward  # type: ignore[method-assign]


_FORWARD, _CALL = nn.Linear.forward, nn.Module.__call__
Note = Callable[[nn.Module], None]
# What others do to a layer; each calls `note(layer)` where the layer computes.
CHANGES: dict[str, Callable[[nn.Linear, Note, pytest.MonkeyPatch], object]] = {
    "forward": lambda layer, note, _: _patch(layer, lambda x: note(layer) or _FORWARD(layer, x)),
    "partial": lambda layer, note, _: _patch(layer, partial(lambda own, x: note(own) or _FORWARD(own, x), layer)),
    "method": lambda layer, note, _: _patch(layer, MethodType(lambda own, x: note(own) or _FORWARD(own, x), layer)),
    "another's": lambda layer, note, _: _patch(layer, Noted(layer, note).forward),
    "class": lambda _, note, patch: patch.setattr(nn.Linear, "forward", lambda own, x: note(own) or _FORWARD(own, x)),
    "call": lambda _, note, patch: patch.setattr(nn.Module, "__call__", lambda own, *x: note(own) or _CALL(own, *x)),
    "hook": lambda layer, note, _: layer.register_forward_hook(lambda own, *_: note(own)),
    "pre-hook": lambda layer, note, _: layer.register_forward_pre_hook(lambda own, *_: note(own)),
    "backward hook": lambda layer, note, _: layer.register_full_backward_hook(lambda own, *_: note(own)),
    "all hooks": lambda layer, note, _: register_module_forward_hook(lambda own, *_: note(own)),
    "all pre-hooks": lambda layer, note, _: register_module_forward_pre_hook(lambda own, *_: note(own)),
    "all backward hooks": lambda layer, note, _: register_module_full_backward_hook(lambda own, *_: note(own)),
}


class Noted(nn.Module):
    def __init__(self, layer: nn.Linear, note: Note) -> None:
        super().__init__()
        self.layer, self.note = [layer], note

    def forward(self, x: Tensor) -> Tensor:
        self.note(self.layer[0])
        return _FORWARD(self.layer[0], x)


@pytest.mark.parametrize("change", CHANGES)
def test_what_others_did_to_a_layer_is_done(change, monkeypatch):
    """After it was compiled, too."""
    layer, x, seen = nn.Linear(4, 3), torch.ones(2, 4, requires_grad=True), list[nn.Module]()
    called = [Wrapped(layer), torch.compile(Wrapped(layer).forward, backend="eager")]
    for call in called:
        call(x).sum().backward()
    removable = CHANGES[change](layer, seen.append, monkeypatch)
    try:
        for call in called:
            seen.clear()
            out = call(x)
            out.sum().backward()
            assert seen.count(layer) == 1 and torch.equal(out, F.linear(x, layer.weight, layer.bias))
    finally:
        if isinstance(removable, RemovableHandle):
            removable.remove()


@pytest.mark.parametrize(
    ("vendor", "family", "capability", "asked", "slow"),
    [
        ("AuthenticAMD", 26, "AVX512", "", True),
        ("AuthenticAMD", 25, "AVX512", "", False),
        ("AuthenticAMD", 26, "AVX2", "", False),  # told by ATEN_CPU_CAPABILITY, or by a virtual machine
        ("GenuineIntel", 26, "AVX512", "", False),
        ("AuthenticAMD", 26, "AVX512", "mkl", False),
        ("GenuineIntel", 6, "AVX2", "onednn", True),
    ],
)
def test_the_processor_and_nothing_else_decides(vendor, family, capability, asked, slow, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\n")
    monkeypatch.setattr(fast_ops, "_PROCESSOR", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setenv(fast_ops.CHOICE, asked)
    assert fast_ops.mkl_is_slow() is slow


def test_the_operator_as_torch_checks_it_and_its_flops():
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    torch.library.opcheck(onednn_linear, (x, weight, torch.randn(5, requires_grad=True)))
    with FlopCounterMode(display=False) as counter:
        linear(nn.Linear(4, 3), torch.ones(2, 5, 4, requires_grad=True)).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 10 * 12


@pytest.mark.parametrize("name", ["volo_test", "lvvit_test"])
def test_no_linear_layer_of_a_model_is_left_out(name):
    model = timm.create_model(name)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert {type(layer) for layer in layers} == {nn.Linear}  # by which other programs know them
    assert products(model, torch.randn(2, 3, 64, 64)) == len(layers) - 1  # all but the class head
