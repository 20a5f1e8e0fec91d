"""Settings that several programs share: single ones, which stand in groups of theirs, and groups."""

from functools import partial
from typing import Any, Literal

from tlt.data.sources import KINDS
from volo.config import value_types as t
from volo.config.fields import Group, Need, flag, switch

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
DATASET = partial(flag, "", _KINDS, also="-d", metavar="KIND")
CLASS_MAP = partial(flag, "", "class folders in the order of the outputs, one a line")
DEVICE = partial(flag, None, "cpu, cuda, or cuda:N or N (a GPU where there is one)", metavar="NAME")
DEBUG = partial(flag, False, "show the traceback of an error that is normally told in one line")
POOL = partial(flag, None, f"global pooling: {', '.join(POOLS)}", POOLS, metavar="POOL")
MODEL_KWARGS = partial(flag, {}, "more arguments for the model")
CHANNELS_LAST = partial(flag, False, "channels-last memory layout")
OUTLOOK_KERNEL = partial(flag, "auto", "how VOLO's outlook attention is computed", OUTLOOK_KERNELS)
TORCHSCRIPT = partial(flag, False, "refused: use --torchcompile", refused=NO_TORCHSCRIPT)
BIND = partial(
    flag, "auto", "keep ranks on CPUs, memory and network card near their GPU", ("auto", "none", "cpu", "cpu+mem")
)


class Pixels(Group):
    """Size and colours of the images that the model sees. None and "" stand for the model's own."""

    img_size: t.Positive | None = flag(None, "image side in px (the model's own)", excludes=("input_size",))
    input_size: list[t.Positive] | None = flag(None, "channels, height and width in px", nargs=3)
    crop_pct: t.AboveZero | None = flag(None, "crop / resized side in validation (the model's own)")
    mean: list[float] | None = flag(None, "pixel means in 0..1 (the model's own)")
    std: list[t.AboveZero] | None = flag(None, "their deviations (the model's own)")
    interpolation: str = flag("", "resize filter in validation (the model's own)", INTERPOLATIONS)


class MixedPrecision(Group):
    """In which type the operations compute."""

    amp: bool = switch("mixed precision, by torch under each of these names", also="--apex-amp --native-amp")
    amp_dtype: Literal["float16", "bfloat16"] | None = flag(None, "(float16 on GPUs, bfloat16 on CPUs)", needs="--amp")
    model_dtype: Literal["float32", "bfloat16"] = flag("float32", "bfloat16: throughout, float32 master weights")


class Compilation(Group):
    """What torch.compile does with a model."""

    torchcompile: str | None = flag(None, "compile (inductor)", nargs="?", metavar="BACKEND", const="inductor")
    torchcompile_mode: str | None = flag(None, ", ".join(COMPILE_MODES), COMPILE_MODES, metavar="MODE", needs=INDUCTOR)
    torchcompile_scope: Literal["blocks", "model"] | None = flag(
        None, "one graph per kind of block, or of the model", needs="--torchcompile"
    )
    cuda_graph: bool = switch("repeat a step as one CUDA graph on several GPUs, too", excludes=("no_cuda_graph",))
    no_cuda_graph: bool = switch("launch each operation of a step, which one GPU else repeats as one CUDA graph")
    activation_memory_budget: t.Share | None = flag(
        None, "keep this share of a graph's activations (1)", needs=INDUCTOR
    )


class TrainedNetwork(Group):
    """Model"""

    model: t.Source | None = flag(None, "model (what the checkpoint says)", also="-m")
    checkpoint: t.Weights = flag("", "weights, or the directory of a run: its best", excludes=("pretrained",))
    pretrained: bool = switch("the published weights")
    use_ema: bool = switch("the moving average in the checkpoint (what training selected by)", needs="--checkpoint")
    no_use_ema: bool = switch("the plain weights, also where training selected by the average", needs="--checkpoint")
    num_classes: t.Positive | None = flag(None, "number of classes (the model's own)")
    gp: str | None = POOL()
    model_kwargs: dict[str, Any] = MODEL_KWARGS()
