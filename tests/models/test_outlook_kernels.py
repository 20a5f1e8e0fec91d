"""Every implementation of outlook attention against loops in float64, forward and backward."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad, gradcheck
from torch.utils.flop_counter import FlopCounterMode

import tlt.io.chunks
from tlt.errors import UserError
from volo.kernels import KERNELS, choose_kernel, outlook_attention
from volo.models.blocks import OutlookAttention

HEADS, DEPTH, SCALE = 2, 16, 0.7
SIZES = [(4, 6), (5, 3), (1, 1), (2, 7)]


def tensors(height, width, dtype=torch.float64, batch=2):
    """Values, logits, and the gradient of what comes out; the same numbers on every device."""
    generator = torch.Generator().manual_seed(height * 100 + width)
    with torch.device("cpu"):
        maps = torch.randn(2, batch, height, width, HEADS * DEPTH, generator=generator, dtype=torch.float64)
        windows = (math.ceil(height / 2), math.ceil(width / 2))
        logits = 3 * torch.randn(batch, *windows, HEADS * 81, generator=generator, dtype=torch.float64)
    return tuple(x.to(torch.get_default_device(), dtype) for x in (maps[0], logits, maps[1]))


def outlook_by_loops(v, logits, heads, k, stride, padding, scale):
    """Outlook attention window by window and pixel by pixel, in float64."""
    batch, height, width, channels = v.shape
    d = channels // heads
    out = torch.zeros_like(v)
    for b, i, j, head in torch.cartesian_prod(*map(torch.arange, (batch, *logits.shape[1:3], heads))).tolist():
        part = slice(head * d, (head + 1) * d)
        rows = logits[b, i, j].reshape(heads, k * k, k * k)[head]
        weights = (rows * scale).softmax(-1)
        pixels = [(i * stride - padding + y, j * stride - padding + x) for y in range(k) for x in range(k)]
        values = [
            v[b, y, x, part] if 0 <= y < height and 0 <= x < width else torch.zeros(d, dtype=v.dtype) for y, x in pixels
        ]
        for place, (y, x) in enumerate(pixels):
            if 0 <= y < height and 0 <= x < width:
                out[b, y, x, part] += sum(weight * value for weight, value in zip(weights[place], values, strict=True))
    return out


def results(function, v, logits, grad):
    """Output and both gradients, in float64."""
    v, logits = v.detach().requires_grad_(), logits.detach().requires_grad_()
    out = function(v, logits)
    out.backward(grad)
    assert out.dtype == v.grad.dtype == v.dtype
    return [x.double() for x in (out.detach(), v.grad, logits.grad)]


def by_kernel(name):
    return lambda v, logits: outlook_attention(v, logits, scale=SCALE, kernel=name)


def by_loops(v, logits):
    return outlook_by_loops(v, logits, HEADS, 3, 2, 1, SCALE)


def takes(kernel, dtype):
    """Whether an implementation does VOLO's windows here. TRITON_INTERPRET=1 adds Triton's, which tests/models/
    test_outlook_triton.py does."""
    v, logits, _ = tensors(4, 6, dtype)
    return KERNELS[kernel].why_unsupported(v, logits, 3, 2, 1, 0.0) is None


@pytest.fixture(
    params=[
        *((name, "cpu") for name in KERNELS if takes(name, torch.float32)),
        *(pytest.param((name, "cuda"), marks=pytest.mark.gpu) for name in KERNELS),
    ],
    ids="-".join,
)
def kernel(request):
    """The name of an implementation; what the test makes is on the device that goes with it."""
    name, device = request.param
    with torch.device(device):
        yield name


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_kernel_equals_loops(kernel, height, width):
    dtype = torch.float64 if takes(kernel, torch.float64) else torch.float32
    v, logits, grad = tensors(height, width, dtype)
    found = results(by_kernel(kernel), v, logits, grad)
    expected = results(by_loops, v.double(), logits.double(), grad.double())
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_kernel_is_as_accurate_as_unfold_and_fold(kernel, dtype):
    v, logits, grad = tensors(7, 8, dtype)
    expected = results(by_loops, v.double(), logits.double(), grad.double())
    found, plain = (results(by_kernel(name), v, logits, grad) for name in (kernel, "reference"))
    for ours, theirs, truth in zip(found, plain, expected, strict=True):
        assert (ours - truth).norm() <= 2 * (theirs - truth).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_is_computed_in_float32_whatever_comes_in(dtype):
    v, logits, grad = tensors(7, 8, dtype)
    expected = results(by_loops, v.double(), logits.double(), grad.double())
    found, plain = (results(by_kernel(name), v, logits, grad) for name in ("windows", "reference"))
    for ours, theirs, truth in zip(found, plain, expected, strict=True):  # theirs rounds logits and weights
        assert (ours - truth).norm() <= 0.9 * (theirs - truth).norm()


def test_a_kernel_takes_any_layout(kernel):
    v, logits, grad = tensors(5, 6, torch.float32, batch=1)
    expected = results(by_kernel(kernel), *(x.expand(2, -1, -1, -1).contiguous() for x in (v, logits, grad)))
    v = v.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1).expand(2, -1, -1, -1)  # channels first underneath
    logits = torch.stack((logits, logits), -1)[..., 0].expand(2, -1, -1, -1)
    grad = torch.stack((grad, grad), 1)[:, 0].expand(2, -1, -1, -1)
    for ours, theirs in zip(results(by_kernel(kernel), v, logits, grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_huge_logits_make_no_nan_and_a_row_of_equal_ones_is_uniform(kernel):
    v, logits, grad = tensors(3, 5, torch.float32)
    huge = results(by_kernel(kernel), v, logits * 1e4, grad)
    assert all(x.isfinite().all() for x in huge)
    shifted = results(by_kernel(kernel), v, torch.full_like(logits, -3e4), grad)
    # The Triton programs keep the sum of a row as a logarithm, here -30,294, which float32 has in steps of 2^-9.
    tolerance = 1e-3 if kernel == "triton" else 1e-5
    for ours, theirs in zip(shifted, results(by_kernel(kernel), v, torch.zeros_like(logits), grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_a_kernel_keeps_values_and_logits_alone_for_the_backward_pass():
    v, logits, _ = tensors(6, 6, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        outlook_attention(v.requires_grad_(), logits.requires_grad_(), kernel="windows")
    assert sorted(kept) == sorted((v.data_ptr(), logits.data_ptr()))


def test_groups_of_images_change_nothing(monkeypatch):
    v, logits, grad = tensors(5, 8, batch=5)
    expected = results(by_kernel("windows"), v, logits, grad)
    for numbers in (1, 2 * 3 * 4 * 9 * HEADS * DEPTH):  # one image at a time; two, two and one
        monkeypatch.setattr(tlt.io.chunks, "_CPU_NUMBERS", numbers)
        for ours, theirs in zip(results(by_kernel("windows"), v, logits, grad), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_an_empty_batch_stays_empty(kernel):
    v, logits, grad = (x[:0] for x in tensors(4, 4, torch.float32))
    assert [x.numel() for x in results(by_kernel(kernel), v, logits, grad)] == [0, 0, 0]


def test_gradients_by_finite_differences():
    v, logits, _ = tensors(3, 4, batch=1)
    assert gradcheck(by_kernel("windows"), (v.requires_grad_(), logits.requires_grad_()))


def test_torch_finds_the_operation_sound():
    v, logits, _ = tensors(3, 4, torch.float32)
    operation = torch.ops.volo.outlook_windows.default
    results = torch.library.opcheck(operation, (v.requires_grad_(), logits.requires_grad_(), SCALE))
    assert set(results.values()) == {"SUCCESS"}


def test_second_derivatives_are_refused_rather_than_wrong():
    v, logits, _ = tensors(4, 4)
    out = outlook_attention(v.requires_grad_(), logits.requires_grad_(), kernel="windows")
    (grad,) = torch.autograd.grad(out.square().sum(), v, create_graph=True)
    with pytest.raises(UserError, match="set_outlook_kernel"):
        grad.sum().backward()


def test_forward_mode_is_right_or_refused():
    v, logits, tangent = tensors(4, 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(v, tangent)
        moved = forward_ad.unpack_dual(outlook_attention(dual, logits)).tangent
        with pytest.raises(UserError, match="no forward-mode derivatives"):
            outlook_attention(dual, logits, kernel="windows")
    torch.testing.assert_close(moved, outlook_attention(tangent, logits))  # linear in the values


def test_one_graph_serves_all_batch_sizes(kernel):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(by_kernel(kernel), fullgraph=True, backend=counter)
    for batch in (2, 3, 5):
        v, logits, grad = tensors(5, 6, torch.float32, batch)
        found, expected = results(compiled, v, logits, grad), results(by_kernel(kernel), v, logits, grad)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 2  # the first size, then any


def test_under_autocast_a_layer_is_as_accurate_as_unfold_and_fold(kernel):
    torch.manual_seed(0)
    layer = OutlookAttention(HEADS * DEPTH, HEADS)
    x = torch.randn(2, 6, 5, HEADS * DEPTH)
    truth = layer(x)
    errors = {}
    for name in (kernel, "reference"):
        layer.kernel = name
        layer.zero_grad()
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            out = layer(x)
            out.float().square().sum().backward()
        assert out.dtype == torch.bfloat16 and layer.attn.weight.grad.dtype == torch.float32
        errors[name] = (out - truth).norm()
    assert errors[kernel] <= 2 * errors["reference"]


def test_under_autocast_float32_comes_out_in_its_type_whatever_the_kernel(kernel):
    v, logits, grad = tensors(4, 5, torch.float32)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        found, plain = (outlook_attention(v, logits, scale=SCALE, kernel=name) for name in (kernel, "reference"))
    assert found.dtype == plain.dtype == torch.bfloat16
    truth = by_loops(v.double(), logits.double())
    assert (found - truth).norm() <= 2 * (plain - truth).norm()


def test_auto_takes_the_first_that_fits_and_a_name_that_does_not_is_refused():
    v, logits, _ = tensors(4, 4)
    assert choose_kernel("auto", v, logits, 3, 2, 1, 0.0) is KERNELS["windows"]
    assert choose_kernel("auto", v, logits, 3, 2, 1, 0.1) is KERNELS["reference"]
    empty = [x.to("meta") for x in (v, logits)]
    assert all(choose_kernel(name, *empty, 3, 2, 1, 0.0) is KERNELS["reference"] for name in ("auto", *KERNELS))
    for windows, dropout, reason in (((5, 2, 2), 0.0, "kernel 3, stride 2"), ((3, 2, 1), 0.1, "dropout")):
        with pytest.raises(UserError, match=f"--outlook-kernel windows: .*{reason}.*--outlook-kernel auto"):
            choose_kernel("windows", v, logits, *windows, dropout)


def test_arithmetic_is_counted_alike_with_and_without_contents():
    counts = set()
    for name, device in (("windows", "cpu"), ("reference", "cpu"), ("windows", "meta")):
        v, logits, _ = (x.to(device).requires_grad_() for x in tensors(5, 6, torch.float32))
        with FlopCounterMode(display=False) as counter:
            outlook_attention(v, logits, kernel=name).sum().backward()
        counts.add(counter.get_total_flops())
    assert counts == {3 * 2 * logits.numel() * DEPTH}


def test_an_exported_layer_needs_nothing_but_torch():
    layer = OutlookAttention(HEADS * DEPTH, HEADS)
    x = torch.randn(2, 6, 5, HEADS * DEPTH)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    assert not [node for node in program.graph.nodes if any(name in str(node.target) for name in ("volo", "im2col"))]
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-6)
