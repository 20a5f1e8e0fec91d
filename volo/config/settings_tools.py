"""The settings of the programs that look at few images or at none: export, attention, report, launch, ..."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tlt.errors import UserError
from volo.config import value_types as t
from volo.config.fields import Settings, group, setting
from volo.config.parser import Program
from volo.config.rules import check_weights
from volo.config.settings_shared import BIND, DEBUG, DEVICE, Pixels, TrainedNetwork

# File endings by format.
ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2"}
OPSET = 18  # the lowest that torch's exporter writes, and so the most widely supported


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """File"""

    output: str = setting("", "file to write; it must not exist", t.FILE, names="-o --output")
    format: str | None = setting(None, "ONNX or torch.export's .pt2 (what the file's ending says)", tuple(ENDINGS))
    opset: int = setting(OPSET, "of ONNX", t.Number(int, low=OPSET))
    to_hf: str = setting("", "a folder for the Hugging Face Hub in place of a file", t.DIR)
    licence: str = setting("", "for the model card", t.NAME, names="--licence --license", needs="--to-hf")
    origin_url: str = setting("", "for the model card", t.TEXT, metavar="URL", needs="--to-hf")
    dense: bool = setting(False, "two outputs: class logits (B, K) and token logits (B, N, K)")
    model_dtype: Literal["float32", "float16", "bfloat16"] = setting("float32", "of weights and arithmetic")
    debug: bool = DEBUG()


@dataclass(frozen=True, kw_only=True)
class ExportPixels(Pixels):
    """Images

    The size is the file's; the rest is only recorded in it.
    """


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """The settings of `volo export`."""

    file: ExportedFile = group(ExportedFile)
    network: TrainedNetwork = group(TrainedNetwork)
    pixels: ExportPixels = group(ExportPixels)


def _check_export(settings: ExportSettings) -> ExportSettings:
    file = settings.file
    if file.to_hf and (file.output or file.format or file.dense or file.model_dtype != "float32"):
        raise UserError("--to-hf writes the weights as they are: leave out -o, --format, --dense and --model-dtype")
    form = None if file.to_hf else _format(file.output, file.format)
    if file.opset != OPSET and form != "onnx":
        raise UserError(f"--opset {file.opset} has no effect without --format onnx")
    if file.model_dtype == "bfloat16" and form == "onnx":
        raise UserError("--model-dtype bfloat16: no ONNX runtime has a bfloat16 convolution; use float16, or a .pt2")
    if form != file.format:
        settings = settings.decide("other flags", format=form)
    return check_weights(settings, settings.network, settings.pixels)


def _format(output: str, asked: str | None) -> str:
    if not output:
        raise UserError("-o FILE is missing: where shall the model go?")
    meant = next((name for name, ending in ENDINGS.items() if output.endswith(ending)), None)
    if asked is None and meant is None:
        raise UserError(f"-o {output}: which format? Let it end in {' or '.join(ENDINGS.values())}, or give --format")
    if asked and meant and asked != meant:
        raise UserError(f"--format {asked} contradicts -o {output}: its files end in {ENDINGS[asked]}")
    return asked or meant or ""


EXPORT = Program(
    "export",
    "-o FILE --checkpoint PATH [flags]",
    "Write a trained model as a file that runs without this project. It is ONNX, or torch.export's .pt2.",
    ExportSettings,
    _check_export,
)


@dataclass(frozen=True, kw_only=True)
class AttentionPicture:
    """Pictures"""

    image: str = setting(None, "image file", t.SOURCE, positional=True, metavar="IMAGE")
    output: str = setting("", "picture", t.FILE, names="-o --output", required="where shall the picture go?")
    query: list[float] = setting([0.5, 0.5], "place looked from: x, y shares", t.SHARE, nargs=2)


@dataclass(frozen=True, kw_only=True)
class ImagesAndDevice:
    """Images and device"""

    pixels: Pixels = group(Pixels)
    device: str | None = DEVICE()
    debug: bool = DEBUG()


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(Settings):
    """The settings of `volo attention`."""

    picture: AttentionPicture = group(AttentionPicture)
    network: TrainedNetwork = group(TrainedNetwork)
    images: ImagesAndDevice = group(ImagesAndDevice)


ATTENTION = Program(
    "attention",
    "IMAGE -o FILE --checkpoint PATH [flags]",
    "Draw what the attention layers of VOLO or LV-ViT look at.",
    AttentionSettings,
    lambda s: check_weights(s, s.network, s.images.pixels),
)


@dataclass(frozen=True, kw_only=True)
class ReportSettings(Settings):
    """Report"""

    run: str = setting(None, "directory of a run", t.SOURCE, positional=True, metavar="RUN")
    quick: bool = setting(False, "don't read the checkpoints through to verify them")
    html: bool = setting(False, "also write RUN/report.html: these texts, the curves, the first batch, the settings")
    debug: bool = DEBUG()


REPORT = Program(
    "report", "RUN [flags]", "Report what happened to a run: starts, speed, checkpoints, faults.", ReportSettings
)


@dataclass(frozen=True, kw_only=True)
class SlurmSettings(Settings):
    """Slurm"""

    directory: str = setting(None, "a new folder", t.SOURCE, positional=True, metavar="DIR")
    debug: bool = DEBUG()


SLURM = Program("slurm", "DIR", "Write batch scripts for Slurm and recipes into a folder.", SlurmSettings)


@dataclass(frozen=True, kw_only=True)
class SampleSettings(Settings):
    """Sample"""

    directory: str = setting(None, "a new folder", t.SOURCE, positional=True, metavar="DIR")
    images: int | None = setting(None, "how many, a fifth of them held out (all 1,797)", t.POSITIVE)
    debug: bool = DEBUG()


SAMPLE = Program("sample", "DIR", "Write a folder of images to try everything with: scans of digits.", SampleSettings)


@dataclass(frozen=True, kw_only=True)
class LaunchSettings(Settings):
    """Launch"""

    processes: int = setting(None, "how many, one per GPU", t.POSITIVE, positional=True)
    command: str = "train"
    flags: tuple[str, ...] = ()


class _Launch(Program[LaunchSettings]):
    def parse(self, argv: Sequence[str] | None = None) -> LaunchSettings:
        """Parse the first word, and leave the other words to the program that is started.

        Raises:
            UserError: The number of processes is missing.
        """
        words = list(sys.argv[1:] if argv is None else argv)
        settings = super().parse(words[:1])
        if words[1:2] in (["train"], ["label"], ["validate"], ["preflight"]):
            return replace(settings, command=words[1], flags=tuple(words[2:]))
        return replace(settings, flags=tuple(words[1:]))


LAUNCH = _Launch(
    "launch",
    "N [train|label|validate|preflight] [DATA] [flags of that command]",
    "Start a command in N processes of this machine. It is train unless another is named, as in distributed_train.sh. "
    "Several machines and other settings: variables of the environment, docs/multinode.md.",
    LaunchSettings,
)


@dataclass(frozen=True, kw_only=True)
class PushSettings(Settings):
    """Push"""

    repository: str = setting(
        None, "on the Hub; it is made where it is not there", t.TEXT, positional=True, metavar="ORG/NAME"
    )
    folder: str = setting(
        "",
        "what volo export --to-hf wrote",
        t.DIR,
        names="--from",
        required="the folder that volo export --to-hf wrote",
    )
    private: bool = setting(False, "make the repository private")
    revision: str = setting("", "branch (main)", t.NAME)
    message: str = setting("Upload model", "of the commit", t.TEXT)
    dry_run: bool = setting(False, "list the files, send nothing")
    debug: bool = DEBUG()


PUSH = Program("push", "ORG/NAME --from DIR", "Upload a model to the Hugging Face Hub.", PushSettings)


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """What the run needs"""

    data: list[str] = setting([], "images and labels: readable, equal on all nodes", t.PATH)
    output: str | None = setting(None, "where checkpoints go: writable, see --free-gb", t.DIR)
    free_gb: float = setting(20.0, "free space that --output must have", t.AMOUNT, metavar="GB", needs="--output")
    shm_gb: float = setting(1.0, "free /dev/shm per rank, for data workers", t.AMOUNT, metavar="GB")
    min_bandwidth: float | None = setting(None, "bus bandwidth per process, all-reduce", t.ABOVE_ZERO, metavar="GB/S")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks and output"""

    device: str | None = DEVICE()
    bind: str = BIND()
    timeout: float = setting(120.0, "wait this long for all ranks", t.Number(float, 1, 3600), metavar="S")
    debug: bool = DEBUG()


@dataclass(frozen=True, kw_only=True)
class PreflightSettings(Settings):
    """The settings of `volo preflight`."""

    fitness: Fitness = group(Fitness)
    ranks: Ranks = group(Ranks)


PREFLIGHT = Program(
    "preflight",
    "[flags]   (as many processes as the run will have)",
    "Check that the machines are fit for a run.",
    PreflightSettings,
)
