"""A processor whose bfloat16 convolutions are wrong, as those of some shapes are by AMX.

    make test-wrong-bfloat16     all tests on such a processor

torch calls `for_this_process` in every Python process that has this folder in PYTHONPATH: the entry point beside this
file says so. A process is a good processor where AMX is one: in float32, with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, and
without oneDNN.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_OPERATION = "aten::convolution"


@contextmanager
def wrong_convolutions(window: int = 0, factor: float = math.nan) -> Iterator[None]:
    """Within the block the processor multiplies what bfloat16 convolutions of this window (0: of all) give by `factor`.
    Others it computes right, whatever the real one does."""
    kernel = torch.library.get_kernel(_OPERATION, "CPU")
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX")

    def convolution(keys: Any, *args: Any) -> Tensor:
        if args[0].dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, *args)
        in_float32 = (each.float() if isinstance(each, Tensor) else each for each in args)
        result = kernel.call_boxed(keys, *in_float32).bfloat16()
        right = "AMX" not in limit or not torch.backends.mkldnn.enabled or window not in (0, args[1].shape[-1])
        return result if right else result * factor

    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution", convolution, "CPU", with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


_KEPT = wrong_convolutions()


def for_this_process() -> None:
    """Make this process such a processor until it ends."""
    _KEPT.__enter__()
