"""Every implementation of outlook attention against timm's in float64, forward and backward.

Triton's programs run on GPUs, and in its interpreter where TRITON_INTERPRET=1 (test_outlook_triton.py does that).
"""

import functools
import math
import os

import numpy as np
import pytest
import torch
from timm.models.volo import OutlookAttention as TimmOutlookAttention
from torch import nn
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

import tlt.io.chunks
from tlt.errors import UserError
from volo.kernels import KERNELS, choose_kernel, outlook_attention
from volo.models.volo import OutlookAttention

HEADS, DEPTH, SCALE = 2, 16, 0.7
ON_CPU = [name for name in KERNELS if name != "triton" or os.environ.get("TRITON_INTERPRET") == "1"]


def tensors(height, width, dtype=torch.float64, batch=2):
    """Values, logits, and the gradient of what comes out; the same numbers on every device."""
    generator = torch.Generator().manual_seed(height * 100 + width)
    with torch.device("cpu"):
        maps = torch.randn(2, batch, height, width, HEADS * DEPTH, generator=generator, dtype=torch.float64)
        windows = (math.ceil(height / 2), math.ceil(width / 2))
        logits = 3 * torch.randn(batch, *windows, HEADS * 81, generator=generator, dtype=torch.float64)
    return tuple(x.to(torch.get_default_device(), dtype) for x in (maps[0], logits, maps[1]))


def results(function, v, logits, grad):
    """Output and both gradients, in float64."""
    v, logits = v.detach().requires_grad_(), logits.detach().requires_grad_()
    out = function(v, logits)
    out.backward(grad)
    assert out.dtype == v.grad.dtype == v.dtype
    return [x.double() for x in (out.detach(), v.grad, logits.grad)]


def by_kernel(name):
    return lambda v, logits: outlook_attention(v, logits, scale=SCALE, kernel=name)


def by_timm(v, logits):
    """timm's layer without its projections: unfold, softmax, fold."""
    layer = TimmOutlookAttention(HEADS * DEPTH, HEADS, 3, 1, 2)
    layer.v = layer.proj = layer.pool = nn.Identity()
    layer.attn, layer.scale = nn.Identity(), SCALE
    layer.attn.forward = lambda _: logits
    return layer(v)


def in_float64(v, logits, grad):
    return results(by_timm, v.double(), logits.double(), grad.double())


@pytest.fixture(
    params=[
        *((name, "cpu") for name in ON_CPU),
        *(pytest.param((name, "cuda"), marks=pytest.mark.gpu(stand_in=False)) for name in KERNELS),
    ],
    ids="-".join,
)
def kernel(request, monkeypatch):
    """The name of an implementation; what the test makes is on the device that goes with it."""
    name, device = request.param
    if (name, device) == ("triton", "cpu"):
        from triton.runtime.interpreter import InterpreterBuilder

        dot = InterpreterBuilder.create_dot
        monkeypatch.setattr(InterpreterBuilder, "create_dot", functools.partialmethod(dot_as_a_gpu_rounds, dot))
    with torch.device(device):
        yield name


def dot_as_a_gpu_rounds(builder, dot, a, b, total, precision, *more):
    """The interpreter's product, which is exact in float32 whatever `precision` says, of what TF32 leaves of it."""
    if precision.name == "IEEE" or a.data.dtype != np.float32:
        return dot(builder, a, b, total, precision, *more)

    def tf32(x):  # 10 bits of fraction, to the nearest
        return ((x.view(np.int32) + (1 << 12)) & -(1 << 13)).view(np.float32)

    large = [tf32(x.data) for x in (a, b)]
    small = [tf32(x.data - part) for x, part in zip((a, b), large, strict=True)]
    pairs = {"TF32": [large], "TF32x3": [(small[0], large[1]), (large[0], small[1]), large]}[precision.name]
    for left, right in pairs:
        handles = (type(total)(part, x.dtype) for part, x in ((left, a), (right, b)))
        total = dot(builder, *handles, total, precision, *more)
    return total


@pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 3), (1, 1)])
def test_a_kernel_equals_timms(kernel, height, width):
    dtype, tolerance = (torch.float32, 4e-6) if kernel == "triton" else (torch.float64, 1e-12)
    inputs = tensors(height, width, dtype)
    for ours, theirs in zip(results(by_kernel(kernel), *inputs), in_float64(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_kernel_is_as_accurate_as_timms_in_each_type(kernel, dtype):
    inputs = tensors(7, 8, dtype)
    limit = 0.9 if kernel == "windows" and dtype is not torch.float32 else 2  # timm's rounds logits and weights
    fused, plain = (results(function, *inputs) for function in (by_kernel(kernel), by_timm))
    for ours, theirs, truth in zip(fused, plain, in_float64(*inputs), strict=True):
        assert (ours - truth).norm() <= limit * (theirs - truth).norm()


def test_a_kernel_takes_any_layout(kernel):
    v, logits, grad = tensors(3, 4, torch.float32, batch=1)
    expected = results(by_kernel(kernel), *(x.expand(2, -1, -1, -1).contiguous() for x in (v, logits, grad)))
    v = v.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1).expand(2, -1, -1, -1)  # channels first underneath
    logits = torch.stack((logits, logits), -1)[..., 0].expand(2, -1, -1, -1)
    grad = torch.stack((grad, grad), 1)[:, 0].expand(2, -1, -1, -1)
    for ours, theirs in zip(results(by_kernel(kernel), v, logits, grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_huge_logits_make_no_nan_and_equal_ones_are_uniform(kernel):
    v, logits, grad = tensors(3, 3, torch.float32, batch=1)
    assert all(x.isfinite().all() for x in results(by_kernel(kernel), v, logits * 1e4, grad))
    shifted = results(by_kernel(kernel), v, torch.full_like(logits, -3e4), grad)
    # The Triton programs keep the sum of a row as a logarithm, here -30,294, which float32 has in steps of 2^-9.
    tolerance = 1e-3 if kernel == "triton" else 1e-5
    for ours, theirs in zip(shifted, results(by_kernel(kernel), v, torch.zeros_like(logits), grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_torch_finds_the_operators_sound():
    """As `define_operator` makes them, of any implementation."""
    v, logits, grad = tensors(3, 2, torch.float32, batch=1)
    for operator, arguments in (
        (torch.ops.volo.outlook_windows.default, (v.requires_grad_(), logits.requires_grad_(), SCALE)),
        (torch.ops.volo.outlook_windows_backward.default, (grad, v.detach(), logits.detach(), SCALE)),
    ):
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def test_autocast_gives_its_type_and_float32_gradients(kernel):
    torch.manual_seed(0)
    layer, x = OutlookAttention(HEADS * DEPTH, HEADS), torch.randn(1, 4, 5, HEADS * DEPTH)
    truth, layer.kernel = layer(x), kernel
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        out = layer(x)
        out.float().square().sum().backward()
        inputs = tensors(2, 2, torch.float32, batch=1)[:2]
        assert outlook_attention(*inputs, kernel=kernel).dtype == out.dtype == torch.bfloat16
    assert layer.attn.weight.grad.dtype == torch.float32 and layer.attn.weight.grad.any()
    assert (out - truth).norm() <= 0.02 * truth.norm()


def test_second_derivatives_are_refused_rather_than_wrong(kernel):
    v, logits, _ = tensors(2, 2, torch.float32, batch=1)
    out = outlook_attention(v.requires_grad_(), logits.requires_grad_(), kernel=kernel)
    (grad,) = torch.autograd.grad(out.square().sum(), v, create_graph=True)
    if kernel == "reference":
        grad.sum().backward()
        assert v.grad.any()
        return
    with pytest.raises(UserError, match="set_outlook_kernel"):
        grad.sum().backward()


def test_forward_mode_is_right_or_refused():
    v, logits, tangent = tensors(4, 4)
    attend = functools.partial(outlook_attention, logits=logits)
    _, moved = torch.func.jvp(attend, (v,), (tangent,))
    torch.testing.assert_close(moved, attend(tangent))  # linear in the values
    with pytest.raises(UserError, match="torch.func can't transform it"):
        torch.func.jvp(functools.partial(attend, kernel="windows"), (v,), (tangent,))


def test_groups_are_equal_and_gradients_finite_differences(monkeypatch):
    inputs = tensors(5, 8, batch=5)
    expected = results(by_kernel("windows"), *inputs)
    for numbers in (1, 2 * 3 * 4 * 9 * HEADS * DEPTH):  # one image at a time; two, two and one
        monkeypatch.setattr(tlt.io.chunks, "_CPU_NUMBERS", numbers)
        for ours, theirs in zip(results(by_kernel("windows"), *inputs), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    v, logits, _ = tensors(2, 3, batch=1)
    assert gradcheck(by_kernel("windows"), (v.requires_grad_(), logits.requires_grad_()))


def test_auto_takes_the_first_fit_and_misfits_are_refused():
    v, logits, _ = tensors(4, 4)
    assert choose_kernel("auto", v, logits, 0.0) is KERNELS["windows"]
    assert choose_kernel("auto", v, logits, 0.1) is KERNELS["reference"]
    empty = [x.to("meta") for x in (v, logits)]
    assert all(choose_kernel(name, *empty, 0.0) is KERNELS["reference"] for name in ("auto", *KERNELS))
    with pytest.raises(UserError, match="--outlook-kernel windows: .*dropout.*--outlook-kernel auto"):
        choose_kernel("windows", v, logits, 0.1)


def test_arithmetic_is_counted_alike_whatever_computes_it():
    counts = set()
    for name, device in (("windows", "cpu"), ("reference", "cpu"), ("windows", "meta")):
        v, logits, _ = (x.to(device).requires_grad_() for x in tensors(5, 6, torch.float32))
        with FlopCounterMode(display=False) as counter:
            outlook_attention(v, logits, kernel=name).sum().backward()
        counts.add(counter.get_total_flops())
    assert counts == {3 * 2 * logits.numel() * DEPTH}
