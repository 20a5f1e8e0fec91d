"""Images/s of inference: ours with BatchNorm folded, against timm's VOLO and others on the same weights.

    python benchmark.py infer --model volo_d1 -b 8 --peer timm unfolded

The work is `model(images)` in evaluation: the published sum of both heads. What is timed, compiled or in bfloat16, is
checked before: its logits against those of our model in float32 without any of that.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial

import torch
from torch import Tensor

from benchmarks import arms
from benchmarks.arms import Arm
from benchmarks.rounds import OUTPUT, Rows
from tlt.models.folding import fold_batchnorm
from volo.cluster.distributed import choose_device
from volo.config.flag_table import Group, flag
from volo.config.value_types import POSITIVE
from volo.train.compilation import begin_step, compile_errors_told, compile_model
from volo.train.model import TimmModel, eval_settings
from volo.train.precision import Precision, compute_dtype

BATCH_SIZE = flag("-b --batch-size", POSITIVE, 8, "images")
FLAGS = (
    Group("Model", arms.MODELS, *arms.train_rows("img_size"), BATCH_SIZE),
    Group("Precision and speed", *arms.train_rows(*(name for name in arms.PRECISION if name != "model_dtype"))),
    Group(
        "Peers",
        arms.peers("timm", "timm-compile", "eager", "reference", "unfolded"),
        note="timm: its VOLO in eager mode; timm-compile: compiled. Ours: eager: not compiled; reference: that, "
        "without fused kernels; unfolded: with BatchNorm.",
    ),
    Group("Measuring", *arms.MEASURING, *OUTPUT),
)


def run(args: Namespace) -> None:
    """Measure one model after the other."""
    device = choose_device(args.device, 0)
    rows = Rows(args, arms.COLUMNS)
    for model in args.model:
        all_arms = arms.arms_of(args, model)
        first = arms.build_first(all_arms[0]).eval()
        size = eval_settings(all_arms[0].flags, first)["input_size"]
        images = torch.randn(args.batch_size, *size, generator=torch.Generator().manual_seed(0)).to(device)
        with torch.inference_mode(), arms.exact_float32():
            expected = arms.build(arms.exact(all_arms[0]), first, device).eval()(images)
        arms.time_arms(args, rows, all_arms, args.batch_size, partial(inference, first, images, expected))


def inference(first: TimmModel, images: Tensor, expected: Tensor, arm: Arm) -> arms.Work:
    """Return the inference of an arm. Raises DifferentResult: its logits are not those expected."""
    model = arms.build(arm, first, images.device).eval()
    if arm.flags.fold and not arm.is_timm:
        fold_batchnorm(model)
    called = compile_model(model, arm.flags)
    precision = Precision(images.device, compute_dtype(arm.flags, images.device))

    @torch.inference_mode()
    def work() -> Tensor:
        begin_step()
        with precision.autocast():
            logits: Tensor = called(images)
        return logits

    with arms.exact_float32(), compile_errors_told(arm.flags):
        arms.check_same(arm.name, {"logits": work()}, {"logits": expected}, arms.TOLERANCE[arm.dtype(images.device)])
    return work
