"""Compiles the Triton programs for several GPUs on any machine: `python -m volo.kernels.triton_offline`.

A program that Triton's interpreter accepts may still fail to compile, or need too many registers. Imports Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from volo.kernels import triton_programs
from volo.kernels.triton_outlook import PROGRAMS, block_of

ARCHITECTURES = (80, 90, 100)
TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Compiled(NamedTuple):
    """A compiled program: registers per thread, and bytes of stack per thread, to which registers spill."""

    program: str
    architecture: int
    variant: str
    block: int
    warps: int
    registers: int
    stack: int
    shared_memory: int  # bytes per program


def compile_program(name: str, architecture: int, dtype: torch.dtype, head_dim: int) -> Compiled:
    """Compile one of `PROGRAMS` as it is launched for values and logits of this dtype."""
    program = getattr(triton_programs, name)
    block, warps = block_of(name, dtype, head_dim)
    constants: dict[str, Any] = {"D": head_dim, "BLOCK": block, "WIDEN": False}
    constants = {key: value for key, value in constants.items() if key in program.arg_names}
    signature = {key: _type_of(key, TRITON_TYPES[dtype], constants) for key in program.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))  # type: ignore[index]
    variant = f"{TRITON_TYPES[dtype]}, {head_dim} channels"
    return Compiled(name, architecture, variant, block, warps, registers, stack, compiled.metadata.shared)


def _type_of(argument: str, dtype: str, constants: dict[str, Any]) -> str:
    if argument in constants:
        return "constexpr"
    if argument in triton_programs.SIZES:
        return "i32"
    if argument.startswith("scale"):
        return "fp32"
    return "*fp32" if argument == "lse" else f"*{dtype}"


def main() -> None:
    """Print a table of all programs, architectures and dtypes."""
    print("| " + " | ".join(Compiled._fields) + " |\n|" + "---|" * len(Compiled._fields))
    for architecture in ARCHITECTURES:
        for dtype in (torch.bfloat16, torch.float32):
            for head_dim in (32, 64):
                for name in PROGRAMS:
                    row = compile_program(name, architecture, dtype, head_dim)
                    print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
