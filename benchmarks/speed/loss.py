"""`benchmark.py loss`: from label maps to token targets, the loss and its gradients, in sparse form and with the
published dense target tensors and loss.

Each form runs in a process of its own, so that neither reuses memory of the other. Peak memory is reported twice:
`work` is the memory beyond the logits and their gradients, which any loss has; `all` includes both.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import statistics
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.memory import peak_of
from tlt.errors import UserError
from tlt.label_map import LabelBatch
from tlt.loss import TokenLabelCrossEntropy, token_label_loss
from tlt.targets import Targets, make_targets

FORMS = ("dense", "sparse")
_SEED = 0


@dataclass(frozen=True)
class LossCase:
    """Sizes of one measurement: `grid` tokens and `map_size` cells as (rows, columns)."""

    batch_size: int
    grid: tuple[int, int]
    num_classes: int
    top_k: int
    map_size: tuple[int, int]
    dtype: str


@dataclass(frozen=True)
class LossCost:
    """Median milliseconds of making targets and of the loss forward and backward; peak bytes; the loss."""

    targets_ms: float
    loss_ms: float
    work_bytes: int
    all_bytes: int
    value: float

    @property
    def total_ms(self) -> float:
        return self.targets_ms + self.loss_ms


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    if args.top_k > args.num_classes:
        raise UserError(f"--top-k {args.top_k} is more than --num-classes {args.num_classes}")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device}: torch sees no GPU; use --device cpu")
    case = LossCase(args.batch_size, tuple(args.grid), args.num_classes, args.top_k, tuple(args.map_size), args.dtype)
    found = {}
    for form in FORMS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found[form] = pool.submit(measure, form, case, device, args.repeats).result()
    print(_json(case, device, found) if args.json else _table(case, device, found), flush=True)
    return 0


def measure(form: str, case: LossCase, device_name: str, repeats: int) -> LossCost:
    """Measure one form in this process. Memory is that of the first full run, after a small run loads the kernels."""
    device = torch.device(device_name)
    step = _Step(form, case, device)
    _Step(form, LossCase(1, case.grid, case.num_classes, case.top_k, case.map_size, case.dtype), device).run()
    peaks = step.peaks()
    gradients = sum(x.numel() * x.element_size() for x in (step.cls_logits, step.token_logits))
    work = max(peaks[0], peaks[1], peaks[2] - gradients)
    times = [step.run() for _ in range(repeats)]
    targets_ms, loss_ms = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    return LossCost(targets_ms, loss_ms, work, work + 2 * gradients, step.value)


class _Step:
    """The inputs of one step, and the step in three parts: targets, forward, backward."""

    def __init__(self, form: str, case: LossCase, device: torch.device) -> None:
        self.form, self.case, self.device = form, case, device
        self.value = float("nan")
        g = self.generator = torch.Generator().manual_seed(_SEED)
        self.labels = random_labels(case, g).to(device)
        turn = torch.tensor([[[0.6, 0.1, 0.2], [-0.1, 0.6, 0.2]]])
        self.affine = turn.repeat(case.batch_size, 1, 1).to(device)
        self.visible = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(case.batch_size, 1).to(device)
        self.classes = torch.randint(0, case.num_classes, (case.batch_size,), generator=g).to(device)
        rows, cols = case.grid
        self.box = torch.tensor([0, 0, rows // 2, cols // 2], dtype=torch.int32).to(device)
        self.cls_logits = self._logits(case.batch_size, case.num_classes)
        self.token_logits = self._logits(case.batch_size, rows * cols, case.num_classes)

    def _logits(self, *shape: int) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.case.dtype)
        return torch.randn(shape, generator=self.generator).to(self.device, dtype).requires_grad_()

    def targets(self) -> Targets | Tensor:
        """Make the targets, as the published tensor (B, C, 2 + N) for the dense form."""
        grid, classes = self.case.grid, self.case.num_classes
        made = make_targets(self.labels, self.affine, self.visible, self.classes, grid, classes, 0.1)
        if self.form == "sparse" or made.tokens is None or made.weight is None:
            return made
        crop = torch.stack([made.truth_target(), made.cls], 2)
        return torch.cat([crop, (made.tokens.dense(classes) * made.weight[..., None]).transpose(1, 2)], 2)

    def loss(self, targets: Targets | Tensor) -> Tensor:
        if isinstance(targets, Targets):
            return token_label_loss(self.cls_logits, self.token_logits, targets, self.box).total
        loss: Tensor = TokenLabelCrossEntropy(dense_weight=0.5)((self.cls_logits, self.token_logits, self.box), targets)
        return loss

    def run(self) -> tuple[float, float]:
        """Return the seconds of making the targets, and of the loss forward and backward."""
        self._clear()
        start = self._now()
        targets = self.targets()
        middle = self._now()
        loss = self.loss(targets)
        loss.backward()
        end = self._now()
        self.value = loss.item()
        return middle - start, end - middle

    def peaks(self) -> tuple[int, int, int]:
        """Return the peak bytes of the three parts above the inputs, with the memory that earlier parts hold."""
        self._clear()
        targets, first = peak_of(self.targets, self.device)
        held = sum(x.untyped_storage().nbytes() for x in _tensors(targets))
        loss, second = peak_of(lambda: self.loss(targets), self.device)
        _, third = peak_of(loss.backward, self.device)
        return first, held + second, held + third

    def _clear(self) -> None:
        self.cls_logits.grad = self.token_logits.grad = None

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _tensors(targets: Targets | Tensor) -> list[Tensor]:
    if isinstance(targets, Tensor):
        return [targets]
    assert targets.tokens is not None and targets.weight is not None
    return [targets.cls, targets.weight, targets.tokens.base, targets.tokens.ids, targets.tokens.excess]


def random_labels(case: LossCase, generator: torch.Generator) -> LabelBatch:
    """Return maps whose cells draw their classes from at most 30 per image, as neighbours share classes."""
    (h, w), likely = case.map_size, min(case.num_classes, max(30, case.top_k))
    shape = (case.batch_size, h, w, likely)
    places = torch.rand(shape, generator=generator).argsort(-1)[..., : case.top_k]
    known = torch.stack([torch.randperm(case.num_classes, generator=generator)[:likely] for _ in range(shape[0])])
    ids = known.gather(1, places.flatten(1)).view(places.shape).permute(0, 3, 1, 2).int().contiguous()
    values = (torch.randn(ids.shape, generator=generator) * 3 + 5).half()
    return LabelBatch(values, ids, torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(case.batch_size, 1))


def _ratios(found: dict[str, LossCost]) -> dict[str, float]:
    dense, sparse = found["dense"], found["sparse"]
    return {
        "time": dense.total_ms / sparse.total_ms,
        "work": dense.work_bytes / max(1, sparse.work_bytes),
        "all": dense.all_bytes / sparse.all_bytes,
    }


def _json(case: LossCase, device: str, found: dict[str, LossCost]) -> str:
    rows = {form: asdict(row) for form, row in found.items()}
    return json.dumps({"case": asdict(case), "device": device, **rows, "dense/sparse": _ratios(found)})


def _table(case: LossCase, device: str, found: dict[str, LossCost]) -> str:
    (rows, cols), (h, w) = case.grid, case.map_size
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{torch.get_num_threads()} thread(s)"
    lines = [
        f"token-label loss: {case.batch_size} images, {rows} x {cols} tokens, {case.num_classes} classes, "
        f"{case.top_k} per cell of {h} x {w}, {case.dtype} logits",
        f"{device}, {name}; torch {torch.__version__}, Python {platform.python_version()}",
        f"{'':8}{'targets':>12}{'loss f+b':>12}{'together':>12}{'work':>12}{'all':>12}{'loss':>12}",
    ]
    for form, row in found.items():
        times = "".join(f"{value:9.1f} ms" for value in (row.targets_ms, row.loss_ms, row.total_ms))
        sizes = "".join(f"{value / 1e6:9.1f} MB" for value in (row.work_bytes, row.all_bytes))
        lines.append(f"{form:8}{times}{sizes}{row.value:12.6f}")
    ratio = _ratios(found)
    lines.append(f"{'ratio':8}{'':24}{ratio['time']:11.1f}x{ratio['work']:11.1f}x{ratio['all']:11.1f}x")
    return "\n".join([*lines, "work: peak memory beyond the logits and their gradients; all: with both"])
