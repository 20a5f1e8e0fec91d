"""Attention on every way that a CPU takes, against float64."""

import pytest
import torch
from torch import Tensor

from tlt.models.fast_ops import WRITTEN_OUT_TOKENS, attention


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.einsum("bhnd,bhmd->bhnm", q, k) / q.shape[-1] ** 0.5
    powers = torch.exp(logits - logits.amax(-1, keepdim=True))
    return torch.einsum("bhnm,bhmd->bhnd", powers / powers.sum(-1, keepdim=True), v)


def inputs(queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (queries, keys, keys)
    return [torch.randn(2, 3, n, 16, generator=generator).to(dtype).requires_grad_() for n in shapes]


@pytest.mark.parametrize(
    ("dtype", "tolerance", "queries", "keys"),
    [(torch.float32, 1e-5, 1, 13), (torch.bfloat16, 2e-2, 9, 9), (torch.bfloat16, 2e-2, 3, WRITTEN_OUT_TOKENS + 1)],
)
@pytest.mark.parametrize("avx512", [True, False])
def test_values_and_gradients(avx512, dtype, tolerance, queries, keys, monkeypatch):
    monkeypatch.setattr("tlt.models.fast_ops._AVX512", avx512)
    ours = inputs(queries, keys, dtype)
    wide = [x.detach().double().requires_grad_() for x in ours]
    weight = torch.randn(2, 3, queries, 16, generator=torch.Generator().manual_seed(1))
    out, expected = attention(*ours), reference(*wide)
    assert out.dtype is dtype
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, theirs in ((out, expected), *((x.grad, y.grad) for x, y in zip(ours, wide, strict=True))):
        largest = float(theirs.detach().abs().max())
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=0, atol=tolerance * largest)
