"""`benchmark.py outlook`: outlook attention, each kernel that this project has against timm's unfold and fold.

Timed is the part between the projections, from values and logits to mixed values; with `--layer`, the whole layer.
timm's candidate is its own layer without the projections. Before the timing, output and gradients of every candidate
are compared with those of the reference kernel in float64. bfloat16 and float16 are those of autocast.

The floor is the time of a copy of as many bytes as have to move: values, logits and the output's gradient are read, the
output and both gradients written, values and logits read again in the backward pass.
"""

from __future__ import annotations

import json
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from timm.models.volo import OutlookAttention as TimmOutlookAttention
from torch import Tensor, nn

from benchmarks.comparison import described, reason_of
from benchmarks.conditions import conditions, heading
from benchmarks.timing import Timing, Work, by_clocks, cpu_seconds, seconds_of, synchronize
from tlt.errors import UserError
from volo.cluster.distributed import choose_device
from volo.kernels import KERNELS, outlook_attention
from volo.models.blocks import OutlookAttention

KERNEL_SIZE, STRIDE, PADDING = 3, 2, 1  # of all VOLOs
PASSES = FORWARD, BOTH = "forward", "forward + backward"
OURS_COMPILED, TIMM, TIMM_COMPILED = "ours, compiled", "timm", "timm, compiled"


@dataclass(frozen=True)
class AttentionCase:
    """Images of `height` x `width` cells; `layer` is the whole layer, else the part between its projections."""

    images: int
    height: int
    width: int
    channels: int
    heads: int
    dtype: torch.dtype
    layer: bool

    @classmethod
    def parse(cls, text: str, images: int, dtype: str, layer: bool) -> AttentionCase:
        """Parse HxWxCHANNELSxHEADS. Raises UserError for any other text."""
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
        if found is None or int(found[3]) % int(found[4]):
            raise UserError(f"--shapes {text}: give HEIGHTxWIDTHxCHANNELSxHEADS, channels a multiple of the heads")
        height, width, channels, heads = map(int, found.groups())
        return cls(images, height, width, channels, heads, getattr(torch, dtype), layer)

    @property
    def windows(self) -> tuple[int, int]:
        """Return rows and columns of windows."""
        return (self.height + 1) // 2, (self.width + 1) // 2

    def floor_bytes(self, name: str) -> int:
        """Return the bytes of values and logits that have to move between memory and processor in a pass."""
        values = self.height * self.width * self.channels
        logits = self.windows[0] * self.windows[1] * self.heads * 81
        count = 2 * values + logits if name == FORWARD else 5 * values + 3 * logits
        return self.images * count * self.dtype.itemsize


class _Given(nn.Module):
    """Stands in for a projection and returns given logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, _: Tensor) -> Tensor:
        return self.logits


class _Ours(nn.Module):
    """Our kernel alone, with the interface of a layer."""

    def __init__(self, attn: _Given, scale: float, kernel: str) -> None:
        super().__init__()
        self.attn, self.scale, self.kernel = attn, scale, kernel

    def forward(self, v: Tensor) -> Tensor:
        return outlook_attention(v, self.attn(v), KERNEL_SIZE, STRIDE, PADDING, scale=self.scale, kernel=self.kernel)


@dataclass
class AttentionCall:
    """A module with its input and the gradient of its output."""

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
        """Return the output and all gradients in float64."""
        out = self.both()
        parameters = sorted(self.module.named_parameters())
        found = [out.detach(), self.x.grad, *(value.grad for _, value in parameters)]
        return [each.double() for each in found if each is not None]


def modules(case: AttentionCase, device: torch.device, compiled: bool) -> dict[str, Callable[[], nn.Module]]:
    """Return a builder of each candidate's module: each of our kernels, timm's, and with `compiled` both compiled."""
    candidates: dict[str, Callable[[], nn.Module]] = {name: partial(_ours, case, device, name) for name in KERNELS}
    candidates[TIMM] = partial(_timm, case, device)
    if compiled:
        candidates[OURS_COMPILED] = lambda: _compiled(_ours(case, device, "auto"))
        candidates[TIMM_COMPILED] = lambda: _compiled(_timm(case, device))
    return candidates


def _compiled(module: nn.Module) -> nn.Module:
    module.compile(fullgraph=True, dynamic=False)
    return module


def _ours(case: AttentionCase, device: torch.device, kernel: str) -> nn.Module:
    full = _layer(case, device)
    if not case.layer:
        return _Ours(_Given(_logits(case, device)), full.scale, kernel)
    full.kernel = kernel
    return full


def _timm(case: AttentionCase, device: torch.device) -> nn.Module:
    peer = TimmOutlookAttention(case.channels, case.heads, KERNEL_SIZE, padding=PADDING, stride=STRIDE).to(device)
    peer.load_state_dict(_layer(case, device).state_dict())
    if not case.layer:
        peer.v = peer.proj = peer.pool = nn.Identity()
        peer.attn = _Given(_logits(case, device))
    return peer


def _layer(case: AttentionCase, device: torch.device) -> OutlookAttention:
    torch.manual_seed(0)
    return OutlookAttention(case.channels, case.heads, KERNEL_SIZE, STRIDE, PADDING).to(device)


def _logits(case: AttentionCase, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(case.images, *case.windows, case.heads * 81, generator=generator)
    return logits.to(device, case.dtype)


def inputs(case: AttentionCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the input, float32 for a whole layer, and the gradient of the output."""
    generator = torch.Generator().manual_seed(2)
    x, grad = torch.randn(2, case.images, case.height, case.width, case.channels, generator=generator).to(device)
    return x.to(torch.float32 if case.layer else case.dtype).requires_grad_(), grad.to(case.dtype)


def truth(case: AttentionCase, device: torch.device) -> list[Tensor]:
    """Return the expected results: those of unfold and fold in float64."""
    module = _ours(case, device, "reference").double()
    x, grad = inputs(case, device)
    return AttentionCall(module, x.detach().double().requires_grad_(), grad.double(), torch.float32).results()


def error_of(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error, by norms."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of norms
_WRONG = " is no peer: it is off by"
_COPIED_BYTES = 2**27
_MS = 1e3


@dataclass(frozen=True)
class AttentionRow:
    """A row of the table. Timings are seconds by pass; `error` is the largest relative one of output and gradients."""

    name: str
    wall: Mapping[str, Timing] | None = None
    cpu: Mapping[str, Timing] | None = None
    error: float | None = None
    missing: str | None = None


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    device = choose_device(args.device, 0)
    cases = [
        AttentionCase.parse(shape, args.batch_size, dtype, args.layer) for shape in args.shapes for dtype in args.dtypes
    ]
    bandwidth = copy_bandwidth(device)
    facts = {"device": described(device), "copy_bytes_per_s": bandwidth}
    found: list[dict[str, Any]] = []
    for case in cases:
        told: dict[str, Any] = {}
        for rounds, rows in measure(args, case, device):
            told = as_json(case, rows, bandwidth) | {"rounds": rounds}
            if args.json:
                print(json.dumps(conditions(args.command_line) | facts | {"cases": [*found, told]}), flush=True)
        found.append(told)
    if not args.json:
        print("\n".join([*heading(args.command_line), *table(facts | {"cases": found})]), flush=True)
    wrong = [row["not_measured"] for case in found for row in case["arms"] if _WRONG in (row["not_measured"] or "")]
    if wrong:
        raise UserError(wrong[0])
    return 0


def measure(args: Namespace, case: AttentionCase, device: torch.device) -> Iterator[tuple[int, list[AttentionRow]]]:
    """Compare all candidates, time each by itself, then all in turns; yield rounds in turns and rows each time."""
    torch.compiler.reset()  # else the shapes of earlier cases count among the compilations that are allowed
    rows: list[AttentionRow] = []
    candidates: dict[str, AttentionCall] = {}
    expected = truth(case, device)
    for name, build in modules(case, device, compiled=not args.no_compile).items():
        try:
            candidate = AttentionCall(build(), *inputs(case, device), case.dtype)
            error = error_of(candidate.results(), expected)
            if error > _TOLERANCE[case.dtype]:
                raise UserError(f"{name}{_WRONG} {error:.1e}")
            rows.append(_timed(args, 1, [AttentionRow(name, error=error)], {name: candidate}, device)[0])
            candidates[name] = candidate
        except Exception as problem:  # a kernel that doesn't fit; compilers raise their own kinds
            rows.append(AttentionRow(name, missing=reason_of(problem)))
        yield 0, rows
    yield args.rounds, _timed(args, args.rounds, rows, candidates, device)


def _timed(
    args: Namespace,
    rounds: int,
    rows: Sequence[AttentionRow],
    candidates: Mapping[str, AttentionCall],
    device: torch.device,
) -> list[AttentionRow]:
    works: dict[tuple[str, str], Work] = {}
    for name, candidate in candidates.items():
        works[name, FORWARD] = _repeated(torch.no_grad()(candidate.forward), args.calls, device)
        works[name, BOTH] = _repeated(candidate.both, args.calls, device)
    found = by_clocks(works, rounds, {"wall": time.perf_counter, "cpu": cpu_seconds})

    def timed(row: AttentionRow) -> AttentionRow:
        wall, cpu = ({part: found[clock][row.name, part] for part in PASSES} for clock in ("wall", "cpu"))
        return replace(row, wall=wall, cpu=cpu)

    return [timed(row) if row.name in candidates else row for row in rows]


def _repeated(work: Callable[[], Tensor], calls: int, device: torch.device) -> Work:
    def repeated(_: int) -> int:
        for _ in range(calls):
            work()
        synchronize(device)
        return calls

    return repeated


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that the fastest of a few large copies reads and writes."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / min(seconds_of(lambda: target.copy_(source), device) for _ in range(5))


def as_json(case: AttentionCase, rows: list[AttentionRow], bandwidth: float) -> dict[str, Any]:
    """Return the case and its rows. `timm/arm` is timm's time over the candidate's, by pass."""
    peer = next((row for row in rows if row.name == TIMM), AttentionRow(TIMM))
    return {
        "shape": [case.images, case.height, case.width, case.channels],
        "heads": case.heads,
        "dtype": str(case.dtype).removeprefix("torch."),
        "layer": case.layer,
        "floor_bytes": {name: case.floor_bytes(name) for name in PASSES},
        "floor_seconds": {name: case.floor_bytes(name) / bandwidth for name in PASSES},
        "arms": [_row_json(row, peer) for row in rows],
    }


def _row_json(row: AttentionRow, peer: AttentionRow) -> dict[str, Any]:
    if row.wall is None or row.cpu is None:
        return {"arm": row.name, "not_measured": row.missing}
    return {
        "arm": row.name,
        "wall_seconds": {name: asdict(row.wall[name]) for name in PASSES},
        "cpu_seconds": {name: asdict(row.cpu[name]) for name in PASSES},
        "timm/arm": {name: peer.wall[name].median / row.wall[name].median for name in PASSES} if peer.wall else None,
        "error": row.error,
        "not_measured": None,
    }


def table(facts: Mapping[str, Any]) -> list[str]:
    """Return the JSON of `--json` as lines of Markdown."""
    lines = [
        f"{facts['device']}, {facts['copy_bytes_per_s'] / 1e9:.1f} GB/s in a large copy; x: times as fast as timm; "
        "error: the largest of output and gradients against float64, relative",
    ]
    for case in facts["cases"]:
        lines += ["", *_case_table(case)]
    return lines


def _case_table(case: Mapping[str, Any]) -> Iterator[str]:
    what = "the layer with its projections" if case["layer"] else "between the projections"
    floors = ", ".join(
        f"{name} {case['floor_bytes'][name] / 1e6:.1f} MB, {case['floor_seconds'][name] * _MS:.3g} ms"
        for name in PASSES
    )
    turns = f"medians (lowest-highest) of {case['rounds']} rounds in turns"
    yield (
        f"{' x '.join(map(str, case['shape']))}, {case['heads']} heads, {case['dtype']}, {what}; "
        f"{turns if case['rounds'] else 'one round of each arm by itself'}; floor: {floors}"
    )
    yield ""
    yield f"| arm | {' | '.join(f'{name}, ms | x' for name in PASSES)} | CPU ms | share of the floor | error |"
    yield "|---" * 8 + "|"
    for candidate in case["arms"]:
        yield f"| {candidate['arm']} | {_cells(case, candidate)} |"


def _cells(case: Mapping[str, Any], candidate: Mapping[str, Any]) -> str:
    if candidate["not_measured"] is not None:
        return f"not measured: {candidate['not_measured']}" + " |" * 6
    cells = []
    for name in PASSES:
        wall = candidate["wall_seconds"][name]
        ratio = candidate["timm/arm"] and f"{candidate['timm/arm'][name]:.2f}x"
        cells += [f"{wall['median'] * _MS:.3g} ({wall['low'] * _MS:.3g}-{wall['high'] * _MS:.3g})", ratio or ""]
    share = case["floor_seconds"][BOTH] / candidate["wall_seconds"][BOTH]["median"]
    return " | ".join(
        [*cells, f"{candidate['cpu_seconds'][BOTH]['median'] * _MS:.3g}", f"{share:.1%}", f"{candidate['error']:.1e}"]
    )
