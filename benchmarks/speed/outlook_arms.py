"""The arms of `benchmark.py outlook`: our kernels and timm's layer, on the same input and weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from timm.models.volo import OutlookAttention as TimmOutlookAttention
from torch import Tensor, nn

from tlt.errors import UserError
from volo.kernels import KERNELS, outlook_attention
from volo.models.blocks import OutlookAttention

KERNEL_SIZE, STRIDE, PADDING = 3, 2, 1  # of all VOLOs
PASSES = FORWARD, BOTH = "forward", "forward + backward"
OURS_COMPILED, TIMM, TIMM_COMPILED = "ours, compiled", "timm", "timm, compiled"


@dataclass(frozen=True)
class Case:
    """Images of `height` x `width` cells; the whole layer, or what lies between its projections."""

    images: int
    height: int
    width: int
    channels: int
    heads: int
    dtype: torch.dtype
    layer: bool

    @classmethod
    def parse(cls, text: str, images: int, dtype: str, layer: bool) -> Case:
        """Raises UserError: `text` isn't HxWxCHANNELSxHEADS."""
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
        if found is None or int(found[3]) % int(found[4]):
            raise UserError(f"--shapes {text}: give HEIGHTxWIDTHxCHANNELSxHEADS, channels a multiple of the heads")
        height, width, channels, heads = map(int, found.groups())
        return cls(images, height, width, channels, heads, getattr(torch, dtype), layer)

    @property
    def windows(self) -> tuple[int, int]:
        """Rows and columns of windows."""
        return (self.height + 1) // 2, (self.width + 1) // 2

    def floor_bytes(self, name: str) -> int:
        """Bytes that have to move between memory and processor: of the values and logits, whatever the layer adds."""
        values = self.height * self.width * self.channels
        logits = self.windows[0] * self.windows[1] * self.heads * 81
        count = 2 * values + logits if name == FORWARD else 5 * values + 3 * logits
        return self.images * count * self.dtype.itemsize


class _Given(nn.Module):
    """A projection's place, with what it would have given."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, _: Tensor) -> Tensor:
        return self.logits


class _Ours(nn.Module):
    """Our kernel alone, called as a layer is."""

    def __init__(self, attn: _Given, scale: float, kernel: str) -> None:
        super().__init__()
        self.attn, self.scale, self.kernel = attn, scale, kernel

    def forward(self, v: Tensor) -> Tensor:
        return outlook_attention(v, self.attn(v), KERNEL_SIZE, STRIDE, PADDING, scale=self.scale, kernel=self.kernel)


@dataclass
class Arm:
    """One way to compute it: what is called, its parameters and its input, and the gradient of what it gives."""

    module: nn.Module
    x: Tensor
    grad: Tensor
    amp: torch.dtype

    def forward(self) -> Tensor:
        with torch.autocast(self.x.device.type, self.amp, enabled=self.amp != torch.float32):
            out: Tensor = self.module(self.x)
        return out

    def both(self) -> Tensor:
        self.x.grad = None
        self.module.zero_grad()
        out = self.forward()
        out.backward(self.grad.to(out.dtype))
        return out

    def results(self) -> list[Tensor]:
        """The output and all gradients, in float64."""
        out = self.both()
        parameters = sorted(self.module.named_parameters())
        found = [out.detach(), self.x.grad, *(value.grad for _, value in parameters)]
        return [each.double() for each in found if each is not None]


def modules(case: Case, device: torch.device, compiled: bool) -> dict[str, Callable[[], nn.Module]]:
    """What makes each arm's module: ours by kernel, timm's, and unless they are unwanted both compiled."""
    arms: dict[str, Callable[[], nn.Module]] = {name: partial(_ours, case, device, name) for name in KERNELS}
    arms[TIMM] = partial(_timm, case, device)
    if compiled:
        arms[OURS_COMPILED] = lambda: _compiled(_ours(case, device, "auto"))
        arms[TIMM_COMPILED] = lambda: _compiled(_timm(case, device))
    return arms


def _compiled(module: nn.Module) -> nn.Module:
    module.compile(fullgraph=True, dynamic=False)
    return module


def _ours(case: Case, device: torch.device, kernel: str) -> nn.Module:
    full = _layer(case, device)
    if not case.layer:
        return _Ours(_Given(_logits(case, device)), full.scale, kernel)
    full.kernel = kernel
    return full


def _timm(case: Case, device: torch.device) -> nn.Module:
    peer = TimmOutlookAttention(case.channels, case.heads, KERNEL_SIZE, padding=PADDING, stride=STRIDE).to(device)
    peer.load_state_dict(_layer(case, device).state_dict())
    if not case.layer:
        peer.v = peer.proj = peer.pool = nn.Identity()
        peer.attn = _Given(_logits(case, device))
    return peer


def _layer(case: Case, device: torch.device) -> OutlookAttention:
    torch.manual_seed(0)
    return OutlookAttention(case.channels, case.heads, KERNEL_SIZE, STRIDE, PADDING).to(device)


def _logits(case: Case, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(case.images, *case.windows, case.heads * 81, generator=generator)
    return logits.to(device, case.dtype)


def inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """What goes in, which a layer's projections take in float32, and the gradient of what comes out."""
    generator = torch.Generator().manual_seed(2)
    x, grad = torch.randn(2, case.images, case.height, case.width, case.channels, generator=generator).to(device)
    return x.to(torch.float32 if case.layer else case.dtype).requires_grad_(), grad.to(case.dtype)


def truth(case: Case, device: torch.device) -> list[Tensor]:
    """What the results of every arm should be: those of unfold and fold in float64."""
    module = _ours(case, device, "reference").double()
    x, grad = inputs(case, device)
    return Arm(module, x.detach().double().requires_grad_(), grad.double(), torch.float32).results()


def error_of(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
