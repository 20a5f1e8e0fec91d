"""The Triton programs of outlook attention: interpreted and compiled on any machine, and run where there is a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from tests.models.test_outlook_kernels import by_kernel, in_float64, results, tensors
from tlt.errors import UserError
from volo.kernels import triton_outlook

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # must be set before Triton is imported: in another process
on_each = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="test_in_the_interpreter runs it")),
        pytest.param("cuda", marks=pytest.mark.gpu(stand_in=False)),
    ],
)


def test_in_the_interpreter():
    if INTERPRETED:
        pytest.skip("this is it")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    files = [__file__, str(Path(__file__).with_name("test_outlook_kernels.py"))]
    chosen = "triton and not huge_logits_make"  # which takes long, and GPUs show
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", chosen, *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@on_each
@pytest.mark.parametrize("height", [3, 4])
def test_logits_of_places_outside_the_image_may_be_huge(height, device):
    v, logits, grad = (x.to(device) for x in tensors(height, 3, torch.float32, batch=1))
    rows = logits.unflatten(-1, (-1, 9, 9))
    outside = torch.zeros(rows.shape[:-1], dtype=torch.bool)
    outside[:, 0, :, :, :3] = outside[:, :, 0, :, 0::3] = outside[:, :, -1, :, 2::3] = True
    if height == 3:
        outside[:, -1, :, :, 6:] = True
    rows[..., 0] = -1e4  # far below the row's largest
    rows[outside] = torch.where(torch.arange(9) % 2 == 0, 1e9, -1e9).to(device)  # about as large as they may be
    fused = results(by_kernel("triton"), v, logits, grad)
    for ours, exact in zip(fused, in_float64(v, logits, grad), strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=2e-6 * float(exact.abs().max()))
    assert fused[2].unflatten(-1, (-1, 9, 9))[outside].eq(0).all()


@on_each
def test_a_program_that_cannot_be_made_is_one_line(device, monkeypatch):
    from triton.runtime.errors import PTXASError

    from volo.kernels import triton_programs

    def run(program: str, error: Exception) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(triton_programs, program, MagicMock(**{"__getitem__.return_value.side_effect": error}))
            results(by_kernel("triton"), *(x.to(device) for x in tensors(1, 1, torch.float32, batch=1)))

    for program in triton_outlook.PROGRAMS:
        with pytest.raises(UserError, match=rf"{program} of .*\(PTXASError: .*\): --outlook-kernel windows") as caught:
            run(program, PTXASError("fatal\n" * 100))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    with pytest.raises(RuntimeError, match="illegal memory access"):  # may be another program's fault
        run(program, RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))


def registers_and_stack(program: str, architecture: int, head_dim: int) -> tuple[int, int]:
    """Compile a program as it is launched for bfloat16. Return a thread's registers, and the bytes of its stack."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from volo.kernels import triton_programs

    function = getattr(triton_programs, program)
    block, warps = triton_outlook.block_of(program, torch.bfloat16, head_dim)
    constants = {"D": head_dim, "BLOCK": block, "WIDEN": False}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types = dict.fromkeys(function.arg_names, "*bf16") | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(triton_programs.SIZES, "i32") | {"lse": "*fp32", "scale": "fp32", "scale_log2e": "fp32"}
    types = {name: types[name] for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))  # type: ignore[index]
    return registers, stack


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("architecture", [90, *(pytest.param(each, marks=pytest.mark.slow) for each in (80, 100))])
def test_no_register_spills_to_the_stack(architecture, monkeypatch, tmp_path):
    """Compiled on any machine: a program that the interpreter accepts may still need too many registers."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for program in triton_outlook.PROGRAMS:
        registers, stack = registers_and_stack(program, architecture, 32)
        assert stack == 0 and 0 < registers < 255, (program, registers, stack)


@pytest.mark.parametrize(
    ("dropout", "heads", "dtype", "device", "reason"),
    [
        (0.1, 1, torch.float32, "cpu", "no dropout"),
        (0.0, 4, torch.float32, "cpu", "heads of 16, 32, 64, 128 channels, not 8"),
        (0.0, 1, torch.float64, "cpu", "not torch.float64"),
        (0.0, 1, torch.float32, "meta", "needs a CUDA device, not meta"),
    ],
)
def test_what_it_leaves_to_others(dropout, heads, dtype, device, reason):
    v, logits = (torch.empty(1, 2, 2, n, dtype=dtype, device=device) for n in (32, 81 * heads))
    assert reason in str(triton_outlook.why_unsupported(v, logits, dropout))


def stage(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """D1's outlooker stage on a GPU: values, logits and a gradient."""
    shapes = (16, 28, 28, 384), (16, 14, 14, 12 * 81), (16, 28, 28, 384)
    v, logits, grad = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    return v, logits, grad


@pytest.mark.gpu(stand_in=False)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_stage_on_a_gpu_repeats_bit_for_bit(dtype):
    inputs = stage(dtype)
    first = results(by_kernel("auto"), *inputs)
    for ours, exact in zip(first, results(by_kernel("reference"), *(x.double() for x in inputs)), strict=True):
        assert (ours - exact).abs().max() <= {torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype] * exact.abs().max()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(results(by_kernel("triton"), *inputs), first, strict=True))
