"""`benchmark.py activations`: memory of a training step for its backward pass, predicted and measured.

Without and with recomputing all blocks (`--grad-checkpointing`). Measured is the peak of a forward and a backward pass
above weights, gradients and images: of memory allocated by torch (CUDA), or of resident memory (CPU).
"""

from __future__ import annotations

import json
from argparse import Namespace

import torch
from torch import nn

from benchmarks.comparison import described
from benchmarks.conditions import conditions, heading
from benchmarks.memory import give_back_at_once, peak_of
from tlt.errors import UserError
from tlt.models.token_labeling import TokenLabelModel
from volo.cluster.distributed import choose_device
from volo.config.args import train_parser
from volo.memory.prediction import StepShape, activations_of
from volo.train.model import build_model
from volo.train.precision import Precision, resolve_amp_dtype

_MIB = 2.0**20


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    device = choose_device(args.device, 0)
    model = build_model(Namespace(**(train_parser().defaults() | vars(args))))
    if not isinstance(model, TokenLabelModel):
        raise UserError(f"--model {args.model} is not predicted: only VOLO and LV-ViT are")
    model.to(device).train()
    precision = Precision(device, resolve_amp_dtype(args.amp, args.amp_dtype, device))
    found = activations_of(
        model, StepShape((model.in_chans, *model.img_size), device.type, precision.amp_dtype, dense=True)
    )
    if device.type == "cpu":
        give_back_at_once()
    images = torch.randn(args.batch_size, model.in_chans, *model.img_size, device=device)
    _step(model, images, precision)  # loads kernels and makes the gradients
    rows = {}
    for recomputed, memory in zip(("nothing", "everything"), found, strict=True):
        model.set_grad_checkpointing(recomputed == "everything")
        _, measured = peak_of(lambda: _step(model, images, precision), device)
        predicted = memory.at(args.batch_size)
        rows[recomputed] = {"predicted": predicted / _MIB, "measured": measured / _MIB, "ratio": predicted / measured}
    print(_json(args, device, rows) if args.json else _table(args, model, device, rows), flush=True)
    return 0


def _step(model: nn.Module, images: torch.Tensor, precision: Precision) -> None:
    """Do a forward and a backward pass with both losses and MixToken."""
    with precision.autocast():
        outputs = model(images, dense=True, mix_box=(0, 0, 1, 1))
        loss = torch.stack([each.float().logsumexp(-1).mean() for each in outputs]).sum()
    del outputs
    loss.backward()


def _json(args: Namespace, device: torch.device, rows: dict[str, dict[str, float]]) -> str:
    case = {"model": args.model, "images": args.batch_size, "device": described(device)}
    return json.dumps({**conditions(args.command_line), **case, "unit": "MiB", "recomputed": rows})


def _table(args: Namespace, model: TokenLabelModel, device: torch.device, rows: dict[str, dict[str, float]]) -> str:
    height, width = model.img_size
    lines = [
        *heading(args.command_line),
        f"{args.model}, {args.batch_size} images of {height} x {width} on {described(device)}",
        "",
        "| recomputed | predicted | measured | predicted / measured | measured, an image |",
        "|---|---|---|---|---|",
    ]
    for recomputed, row in rows.items():
        lines.append(
            f"| {recomputed} | {row['predicted']:.0f} MiB | {row['measured']:.0f} MiB | {row['ratio']:.3f} | "
            f"{row['measured'] / args.batch_size:.1f} MiB |"
        )
    return "\n".join(lines)
