"""Attention on every way that a CPU takes, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.models.attention import WRITTEN_OUT_TOKENS, attention


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.einsum("bhnd,bhmd->bhnm", q, k) / q.shape[-1] ** 0.5
    powers = torch.exp(logits - logits.amax(-1, keepdim=True))
    return torch.einsum("bhnm,bhmd->bhnd", powers / powers.sum(-1, keepdim=True), v)


def inputs(queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (queries, keys, keys)
    return [torch.randn(2, 3, n, 16, generator=generator).to(dtype).requires_grad_() for n in shapes]


def written_out(keys: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> bool:
    called = []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: called.append(1) or fused(*a, **k))
    attention(*inputs(2, keys, dtype))
    return not called


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 13)])
def test_values_and_gradients(dtype: torch.dtype, tolerance: float, queries: int, keys: int) -> None:
    ours = inputs(queries, keys, dtype)
    wide = [x.detach().double().requires_grad_() for x in ours]
    weight = torch.randn(2, 3, queries, 16, generator=torch.Generator().manual_seed(1))
    out, expected = attention(*ours), reference(*wide)
    assert out.dtype is dtype
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, theirs in ((out, expected), *((x.grad, y.grad) for x, y in zip(ours, wide, strict=True))):
        torch.testing.assert_close(
            mine.double(), theirs.double(), rtol=0, atol=tolerance * float(theirs.detach().abs().max())
        )


def test_written_out_in_bfloat16_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written_out(WRITTEN_OUT_TOKENS, torch.bfloat16, monkeypatch)
    assert not written_out(WRITTEN_OUT_TOKENS + 1, torch.bfloat16, monkeypatch)
    assert not written_out(4, torch.float32, monkeypatch)


def test_autocast_keeps_the_weights_in_bfloat16() -> None:
    # In float32 they would be twice as large, and every product would begin by copying them.
    q, k, v = inputs(6, 6, torch.bfloat16)
    saved: list[torch.dtype] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.dtype), lambda x: x)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        attention(q, k, v)
    assert set(saved) == {torch.bfloat16}
