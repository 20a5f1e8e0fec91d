"""The Triton programs of outlook attention: on a GPU where there is one, and in Triton's interpreter on any machine."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tlt.errors import UserError
from volo.kernels import outlook_attention, reference, triton_outlook

INTERPRETED = (
    os.environ.get("TRITON_INTERPRET") == "1"
)  # must be set before Triton is imported: in a process of its own
on_each = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="test_in_the_interpreter runs it")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
Arrays = tuple[Tensor, Tensor, Tensor]


def draw(batch: int, height: int, width: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> Arrays:
    """v, logits of some spread and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(batch, height, width, heads * head_dim, generator=generator)
    logits = 4 * torch.randn(batch, (height + 1) // 2, (width + 1) // 2, heads * 81, generator=generator)
    grad = torch.randn(v.shape, generator=generator)
    return v.to(device, dtype), logits.to(device, dtype), grad.to(device, dtype)


def with_gradients(kernel: str, v: Tensor, logits: Tensor, grad: Tensor) -> Arrays:
    v, logits = v.detach().requires_grad_(), logits.detach().requires_grad_()
    out = outlook_attention(v, logits, scale=0.2, kernel=kernel)
    out.backward(grad)
    assert v.grad is not None and logits.grad is not None
    return out.detach(), v.grad, logits.grad


def in_float64(v: Tensor, logits: Tensor, grad: Tensor) -> Arrays:
    return with_gradients("reference", v.double(), logits.double(), grad.double())


def assert_close(got: Arrays, expected: Arrays, dtype: torch.dtype) -> None:
    """Within the rounding of sums of up to 36 terms, relative to each tensor's largest element."""
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for ours, exact in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - exact).abs().max() <= 2 * rounding * exact.abs().max()


@on_each
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 5, 6, 2, 32), torch.float32),
        ((1, 7, 3, 1, 16), torch.bfloat16),
        ((1, 4, 5, 2, 64), torch.float16),
        ((3, 1, 1, 1, 32), torch.bfloat16),
        ((1, 2, 9, 1, 128), torch.float32),
    ],
)
def test_values_and_gradients_against_float64(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    tensors = draw(*shape, dtype, device)
    assert_close(with_gradients("triton", *tensors), in_float64(*tensors), dtype)


@on_each
def test_inputs_and_gradients_need_not_be_contiguous(device: str) -> None:
    v, logits, grad = draw(2, 3, 4, 2, 16, torch.float32, device)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    logits = logits[:1].expand(2, -1, -1, -1)
    grad = grad[..., :1].expand_as(v)
    assert_close(with_gradients("triton", v, logits, grad), in_float64(v, logits, grad), torch.float32)


@on_each
@pytest.mark.parametrize("height", [3, 4])
def test_logits_of_places_outside_the_image_may_be_huge(height: int, device: str) -> None:
    v, logits, grad = draw(1, height, 3, 1, 16, torch.float32, device)
    rows = logits.unflatten(-1, (9, 9))
    outside = torch.zeros(rows.shape[:-1], dtype=torch.bool)
    outside[:, 0, :, :3] = outside[:, :, 0, 0::3] = outside[:, :, -1, 2::3] = True
    if height == 3:
        outside[:, -1, :, 6:] = True
    rows[..., 0] = -1e4  # far below the row's largest
    rows[outside] = torch.where(torch.arange(9) % 2 == 0, 1e9, -1e9).to(device)  # about as large as they may be
    got = with_gradients("triton", v, logits, grad)
    assert_close(got, in_float64(v, logits, grad), torch.float32)
    assert got[2].unflatten(-1, (9, 9))[outside].eq(0).all()


@on_each
def test_torch_accepts_the_ops(device: str) -> None:
    v, logits, grad = draw(1, 3, 2, 1, 16, torch.float32, device)
    torch.library.opcheck(torch.ops.volo.outlook_attention, (v.requires_grad_(), logits.requires_grad_(), 0.2))
    torch.library.opcheck(torch.ops.volo.outlook_attention_backward, (grad, v.detach(), logits.detach(), 0.2))


@on_each
def test_one_graph_without_breaks_under_compile(device: str) -> None:
    tensors = draw(2, 3, 4, 1, 16, torch.float32, device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    attend = torch.compile(outlook_attention, backend=backend, fullgraph=True)
    v, logits = tensors[0].clone().requires_grad_(), tensors[1].clone().requires_grad_()
    out = attend(v, logits, scale=0.2, kernel="triton")
    got = (out.detach(), *torch.autograd.grad(out, (v, logits), tensors[2]))
    for compiled, eager in zip(got, with_gradients("triton", *tensors), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


@on_each
def test_autocast_gives_its_type(device: str) -> None:
    v, logits, grad = draw(1, 3, 4, 2, 16, torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, grad_v, grad_logits = with_gradients("triton", v, logits, grad.bfloat16())
        assert outlook_attention(v, logits, kernel="reference").dtype == out.dtype == torch.bfloat16
    assert grad_v.dtype == grad_logits.dtype == torch.float32
    exact = in_float64(v, logits, grad.bfloat16())
    for ours, expected in zip((out, grad_v, grad_logits), exact, strict=True):
        assert (ours.double() - expected).abs().max() <= 2**-6 * expected.abs().max()


@on_each
def test_second_derivatives_are_refused(device: str) -> None:
    v, logits, _ = draw(1, 2, 2, 1, 16, torch.float32, device)
    out = outlook_attention(v.requires_grad_(), logits.requires_grad_(), kernel="triton")
    (first,) = torch.autograd.grad(out.square().sum(), v, create_graph=True)
    with pytest.raises(UserError, match="set_outlook_kernel"):
        first.sum().backward()


@on_each
@pytest.mark.parametrize("program", triton_outlook.PROGRAMS)
def test_a_program_that_cannot_be_made_is_one_line(program: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    from volo.kernels import triton_programs

    def run(error: Exception) -> None:
        monkeypatch.setattr(triton_programs, program, MagicMock(**{"__getitem__.return_value.side_effect": error}))
        with_gradients("triton", *draw(1, 2, 2, 1, 16, torch.float32, device))

    for error in (
        OutOfResources(300_000, 232_448, "shared memory"),
        PTXASError("fatal\n" * 100),
        CompilationError(None, ast.Pass(lineno=1, col_offset=0), "two\nlines"),
        subprocess.CalledProcessError(1, ["gcc"]),
    ):
        expected = rf"{program} of .*\({type(error).__name__}: .*\): --outlook-kernel windows \(or reference\)"
        with pytest.raises(UserError, match=expected) as caught:
            run(error)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    with pytest.raises(RuntimeError, match="illegal memory access"):  # may be another program's fault
        run(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_whole_stage_on_a_gpu_repeats_bit_for_bit(dtype: torch.dtype) -> None:
    tensors = draw(16, 28, 28, 12, 32, dtype, "cuda")
    first = with_gradients("auto", *tensors)
    assert_close(first, in_float64(*tensors), dtype)
    for _ in range(3):
        for again, before in zip(with_gradients("triton", *tensors), first, strict=True):
            assert torch.equal(again, before)


@pytest.mark.gpu
def test_cuda_graph_replays_with_new_inputs() -> None:
    v, logits, grad = draw(4, 14, 14, 6, 32, torch.bfloat16, "cuda")
    v, logits = v.requires_grad_(), logits.requires_grad_()
    attend = torch.cuda.make_graphed_callables(lambda v, a: outlook_attention(v, a, scale=0.2), (v, logits))
    other = draw(4, 14, 14, 6, 32, torch.bfloat16, "cuda")[0].flip(0).requires_grad_()
    out = attend(other, logits)
    got = (out.detach(), *torch.autograd.grad(out, (other, logits), grad))
    for replayed, eager in zip(got, with_gradients("triton", other, logits, grad), strict=True):
        assert torch.equal(replayed, eager)


def test_in_the_interpreter() -> None:
    if INTERPRETED:
        pytest.skip("this is it")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_flops_are_those_of_the_matrix_products() -> None:
    def count(attend) -> int:  # type: ignore[no-untyped-def]
        v, logits, grad = draw(2, 5, 6, 2, 32, torch.float32, "meta")
        with FlopCounterMode(display=False) as counter:
            attend(v.requires_grad_(), logits.requires_grad_()).backward(grad)
        return counter.get_total_flops()

    fused = count(lambda v, a: torch.ops.volo.outlook_attention(v, a, 0.2))
    assert fused == count(lambda v, a: reference.outlook_attention(v, a, 3, 2, 1, 0.2, 0.0)) > 0


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_everything_else_works_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import os; os.environ["TRITON_INTERPRET"] = "1"
import torch, volo, volo.kernels
v, logits = torch.zeros(1, 2, 2, 16), torch.zeros(1, 1, 1, 81)
print(volo.kernels.triton_outlook.why_unsupported(v, logits, 3, 2, 1, 0.0))
volo.kernels.outlook_attention(v, logits)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "Triton is not installed" in done.stdout


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kernel_size": 5}, "windows of 3"),
        ({"dropout": 0.1}, "no dropout"),
        ({"heads": 4}, "heads of 16, 32, 64, 128 channels, not 8"),
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"device": "meta"}, "needs a CUDA device, not meta"),
    ],
)
def test_what_it_leaves_to_others(change: dict[str, object], reason: str) -> None:
    given = {"kernel_size": 3, "dropout": 0.0, "heads": 1, "dtype": torch.float32, "device": "cpu", **change}
    v = torch.empty(1, 2, 2, 32, dtype=given["dtype"], device=given["device"])  # type: ignore[call-overload]
    logits = torch.empty(1, 1, 1, 81 * given["heads"], dtype=given["dtype"], device=given["device"])  # type: ignore
    assert reason in str(triton_outlook.why_unsupported(v, logits, given["kernel_size"], 2, 1, given["dropout"]))  # type: ignore


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_offline_compilation_without_spills(
    architecture: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offline = pytest.importorskip("volo.kernels.triton_offline", exc_type=ImportError)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for program in triton_outlook.PROGRAMS:
        compiled = offline.compile_program(program, architecture, torch.bfloat16, 32)
        with capsys.disabled():
            print(compiled)
        assert compiled.stack == 0, compiled
        assert 0 < compiled.registers < 255
