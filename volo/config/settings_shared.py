"""Settings that several programs share: single ones, which stand in groups of theirs, and groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tlt.data.sources import KINDS
from volo.config import value_types as t
from volo.config.fields import Need, needing, setting

POOLS = ("fast", "avg", "max", "avgmax", "avgmaxc", "token")
INTERPOLATIONS = ("", "bilinear", "bicubic")
FILE_BACKENDS = ("torchvision", "pil", "dali-cpu", "dali-gpu")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
OUTLOOK_KERNELS = ("auto", "triton", "windows", "reference")
NO_TORCHSCRIPT = "TorchScript is not supported: use --torchcompile"
INDUCTOR = "--torchcompile inductor"
FILES = Need("image files (--data-backend synthetic has none)", lambda s: s["data_backend"] != "synthetic")

_KINDS = f"{', '.join(KINDS)} (docs/data.md); folders and shards: none"
DATASET = partial(setting, "", _KINDS, t.TEXT, names="-d --dataset", metavar="KIND")
CLASS_MAP = partial(setting, "", "class folders in the order of the outputs, one a line", t.FILE)
DEVICE = partial(setting, None, "cpu, cuda, or cuda:N or N (a GPU where there is one)", t.device_name, metavar="NAME")
DEBUG = partial(setting, False, "show the traceback of an error that is normally told in one line")
POOL = partial(setting, None, f"global pooling: {', '.join(POOLS)}", POOLS, metavar="POOL")
MODEL_KWARGS = partial(setting, {}, "more arguments for the model")
CHANNELS_LAST = partial(setting, False, "channels-last memory layout")
OUTLOOK_KERNEL = partial(setting, "auto", "how VOLO's outlook attention is computed", OUTLOOK_KERNELS)
TORCHSCRIPT = partial(setting, False, "refused: use --torchcompile", refused=NO_TORCHSCRIPT)
BIND = partial(
    setting, "auto", "keep ranks on CPUs, memory and network card near their GPU", ("auto", "none", "cpu", "cpu+mem")
)
_on_files = needing(FILES)


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Size and colours of the images that the model sees. None and "" stand for the model's own."""

    img_size: int | None = setting(None, "image side in px (the model's own)", t.POSITIVE, excludes=("input_size",))
    input_size: list[int] | None = setting(None, "channels, height and width in px", t.POSITIVE, nargs=3)
    crop_pct: float | None = setting(None, "crop / resized side in validation (the model's own)", t.ABOVE_ZERO)
    mean: list[float] | None = setting(None, "pixel means in 0..1 (the model's own)", t.FLOAT)
    std: list[float] | None = setting(None, "their deviations (the model's own)", t.ABOVE_ZERO)
    interpolation: str = setting("", "resize filter in validation (the model's own)", INTERPOLATIONS)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How images are read, decoded and brought to the device."""

    workers: int | None = setting(
        None,
        "decoding processes per rank, dali-*: threads; 0: none (8, at most its CPUs)",
        t.COUNT,
        names="-j --workers",
    )
    pin_mem: bool = setting(False, "page-locked host memory for faster copies to the GPU")
    no_prefetcher: bool = setting(False, "do not copy the next batch to the device ahead of time")
    data_backend: str = setting("torchvision", "what decodes and resizes images", FILE_BACKENDS)
    max_pixels: int = _on_files(50_000_000, "refuse images of more pixels, which take 12 to 16 bytes each", t.POSITIVE)
    loader_timeout: int = setting(300, "seconds to wait for a batch; 0: for ever", t.COUNT, metavar="S")


@dataclass(frozen=True, kw_only=True)
class LimitedLoading(Loading):
    """Loading that ends after too many unreadable images."""

    max_bad_images: int | None = _on_files(
        None, "end after more unreadable images (0.1 %%, 10 to 100)", t.COUNT, after="data_backend"
    )


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """In which type the operations compute."""

    amp: bool = setting(
        False, "mixed precision, by torch under each of these names", names="--amp --apex-amp --native-amp"
    )
    amp_dtype: Literal["float16", "bfloat16"] | None = setting(
        None, "(float16 on GPUs, bfloat16 on CPUs)", needs="--amp"
    )
    model_dtype: str = "float32"  # a setting of train.py alone


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """What torch.compile does with a model."""

    torchcompile: str | None = setting(
        None, "compile (inductor)", t.TEXT, nargs="?", metavar="BACKEND", const="inductor"
    )
    torchcompile_mode: str | None = setting(
        None, ", ".join(COMPILE_MODES), COMPILE_MODES, metavar="MODE", needs=INDUCTOR
    )
    torchcompile_scope: Literal["blocks", "model"] | None = setting(
        None, "one graph per kind of block, or of the model", needs="--torchcompile"
    )
    activation_memory_budget: float | None = None  # a setting of train.py alone


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """Model"""

    model: str | None = setting(None, "model (what the checkpoint says)", t.SOURCE, names="-m --model")
    checkpoint: str = setting("", "weights, or the directory of a run: its best", t.WEIGHTS, excludes=("pretrained",))
    pretrained: bool = setting(False, "the published weights")
    use_ema: bool = setting(
        False, "the moving average in the checkpoint (what training selected by)", needs="--checkpoint"
    )
    no_use_ema: bool = setting(
        False, "the plain weights, also where training selected by the average", needs="--checkpoint"
    )
    num_classes: int | None = setting(None, "number of classes (the model's own)", t.POSITIVE)
    gp: str | None = POOL()
    model_kwargs: dict[str, Any] = MODEL_KWARGS()
