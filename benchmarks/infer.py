"""Images/s of inference: ours with BatchNorm folded, against timm's VOLO and others on the same weights.

    python benchmark.py infer --model volo_d1 -b 8 --peer timm unfolded

The work is `model(images)` in evaluation: the published sum of both heads. What is timed, compiled or in bfloat16, is
checked before: its logits against those of our model in float32 without any of that.
"""

from functools import partial

import torch
from torch import Tensor

from benchmarks import arms
from benchmarks.arms import Arm
from benchmarks.rounds import BenchmarkSettings, Rows
from tlt.models.folding import fold_batchnorm
from volo.cluster.distributed import choose_device
from volo.config import value_types as t
from volo.config.fields import Group, flag, group
from volo.config.settings_train import Precision as PrecisionSettings
from volo.train.architecture import requested_by
from volo.train.compilation import begin_step, compile_errors_told
from volo.train.model import TimmModel, compiler_of, data_config_of
from volo.train.precision import Precision, compute_dtype


class Models(Group):
    """Model"""

    model: list[t.Name] = arms.MODEL()
    img_size: t.Positive | None = arms.IMG_SIZE()
    batch_size: t.Positive = flag(8, "images", also="-b")


class Peers(Group):
    """Peers

    timm: its VOLO in eager mode; timm-compile: compiled. Ours: eager: not compiled; reference: that, without fused
    kernels; unfolded: with BatchNorm.
    """

    peer: list[str] = arms.peers("timm", "timm-compile", "eager", "reference", "unfolded")


class Flags(BenchmarkSettings):
    """The settings of `benchmark.py infer`."""

    models: Models = group(Models)
    speed: PrecisionSettings = arms.speed("no_cuda_graph model_dtype")
    peers: Peers = group(Peers)
    measuring: arms.Measuring = group(arms.Measuring)


def run(settings: Flags) -> None:
    """Measure one model after the other."""
    measuring, batch_size = settings.measuring, settings.models.batch_size
    device = choose_device(measuring.device, 0)
    rows = Rows(settings, arms.COLUMNS)
    for model in settings.models.model:
        all_arms = arms.arms_of(arms.train_settings(settings, model), settings.peers.peer)
        first = arms.build_first(all_arms[0]).eval()
        size = data_config_of(requested_by(all_arms[0].settings), first)["input_size"]
        images = torch.randn(batch_size, *size, generator=torch.Generator().manual_seed(0)).to(device)
        with torch.inference_mode(), arms.exact_float32():
            expected = arms.build(arms.exact(all_arms[0]), first, device).eval()(images)
        arms.time_arms(measuring, rows, all_arms, batch_size, partial(inference, first, images, expected))


def inference(first: TimmModel, images: Tensor, expected: Tensor, arm: Arm) -> arms.Work:
    """Return the inference of an arm. Raises DifferentResult: its logits are not those expected."""
    model = arms.build(arm, first, images.device).eval()
    if arm.fold and not arm.is_timm:
        fold_batchnorm(model)
    called = compiler_of(arm.settings).model(model)
    flags = arm.settings.precision
    precision = Precision(images.device, compute_dtype(flags.mixed, images.device))

    @torch.inference_mode()
    def work() -> Tensor:
        begin_step()
        with precision.autocast():
            logits: Tensor = called(images)
        return logits

    with arms.exact_float32(), compile_errors_told(flags.compilation.torchcompile):
        arms.check_same(arm.name, {"logits": work()}, {"logits": expected}, arms.TOLERANCE[arm.dtype(images.device)])
    return work
