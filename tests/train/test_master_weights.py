"""Computing in bfloat16 beside float32 master weights."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from volo.train.precision import Precision, WorkingCopy, check_convolutions

CPU = torch.device("cpu")


def build(name: str = "volo_test") -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=4, **({"img_size": 32} if name == "volo_test" else {}))


def images(number: int, count: int = 4) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(number))


def backward(precision: Precision, called: nn.Module, x: Tensor, share: float = 1.0) -> None:
    with precision.autocast():
        loss = called(x).float().logsumexp(-1).mean()
    precision.backward(loss * share)


def norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, (nn.LayerNorm, _BatchNorm))]


@pytest.mark.parametrize("name", ["volo_test", "test_resnet"])
def test_norms_are_shared_and_the_rest_is_bfloat16(name: str) -> None:
    master = build(name)
    copy = WorkingCopy(master).module
    shared = {id(t) for norm in norms(master) for t in norm.state_dict(keep_vars=True).values()}
    assert {id(t) for norm in norms(copy) for t in norm.state_dict(keep_vars=True).values()} == shared
    for (name, own), (same, cast) in zip(master.named_parameters(), copy.named_parameters(), strict=True):
        assert own.dtype is torch.float32 and name == same
        assert id(cast) in shared or torch.equal(cast, own.bfloat16()), name
    assert any(id(cast) not in shared for cast in copy.parameters())


@pytest.mark.parametrize("name", ["volo_test", "test_resnet"])
def test_gradients_are_those_of_float32_up_to_rounding(name: str) -> None:
    master, reference = build(name), build(name).double()
    if check_convolutions(master, (3, 32, 32), torch.bfloat16, CPU):
        pytest.skip("this processor computes convolutions wrong in bfloat16")
    copy = WorkingCopy(master)
    backward(Precision(CPU, torch.bfloat16), copy.module.eval(), images(0))
    backward(Precision(CPU), reference.eval(), images(0).double())
    copy.accumulate_into_master()
    assert all(cast.grad is None for own, cast in copy._pairs)
    mine, theirs = (nn.utils.parameters_to_vector([p.grad for p in m.parameters()]) for m in (master, reference))
    assert mine.dtype is torch.float32
    assert torch.nn.functional.cosine_similarity(mine.double(), theirs, dim=0) > 0.99


def test_steps_too_small_for_bfloat16_add_up() -> None:
    master = nn.Linear(1, 1, bias=False)
    nn.init.ones_(master.weight)
    copy = WorkingCopy(master)
    precision = Precision(CPU, torch.bfloat16, working_copy=copy)
    optimizer = torch.optim.SGD(master.parameters(), lr=2**-12)
    for _ in range(64):
        with precision.autocast():
            precision.backward(copy.module(torch.ones(1, 1)).sum())
        precision.step(optimizer, list(master.parameters()))
    assert master.weight.item() == 1 - 2**-6 == copy.module.weight.item()


def test_sixteen_micro_batches_add_up_in_float32() -> None:
    master = build()
    copy = WorkingCopy(master)
    copy.module.eval()
    exact, precision = torch.zeros(()), Precision(CPU, torch.bfloat16, working_copy=copy)
    for part in images(0, 32).chunk(16):
        with precision.autocast():
            loss = copy.module(part).float().logsumexp(-1).mean()
        loss.backward()
        exact = exact + nn.utils.parameters_to_vector([p.grad.double() for p in copy.module.parameters()])
        copy.module.zero_grad()
    for part in images(0, 32).chunk(16):
        backward(precision, copy.module, part)
    found = nn.utils.parameters_to_vector([p.grad for p in master.parameters()])
    assert (found - exact).norm() < 1e-6 * exact.norm()  # added in bfloat16: 4e-3


def test_steps_that_are_not_finite_change_nothing_and_leave_no_gradient() -> None:
    master = build()
    copy = WorkingCopy(master)
    precision = Precision(CPU, torch.bfloat16, working_copy=copy)
    optimizer = torch.optim.AdamW(master.parameters(), lr=0.1, fused=True)
    nn.init.normal_(master.head.weight)  # as a checkpoint that is loaded later
    precision.begin()
    assert torch.equal(copy.module.head.weight, master.head.weight.bfloat16())
    before = [p.clone() for p in (*master.parameters(), *copy.module.parameters())]
    backward(precision, copy.module.train(), images(0) * float("inf"))
    precision.step(optimizer, list(master.parameters()))
    after = [*master.parameters(), *copy.module.parameters()]
    assert precision.counts() == [1, 1]
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, after, strict=True))
