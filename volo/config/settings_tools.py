"""The settings of the programs that look at few images or at none: export, attention, report, launch, ..."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from tlt.errors import UserError
from volo.config import value_types as t
from volo.config.fields import Group, Settings, flag, group, switch
from volo.config.parser import Program
from volo.config.rules import check_weights
from volo.config.settings_shared import BIND, DEBUG, DEVICE, Pixels, TrainedNetwork

# File endings by format.
ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2"}
OPSET = 18  # the lowest that torch's exporter writes, and so the most widely supported


class ExportedFile(Group):
    """File"""

    output: t.File = flag("", "file to write; it must not exist", also="-o")
    format: str | None = flag(None, "ONNX or torch.export's .pt2 (what the file's ending says)", tuple(ENDINGS))
    opset: int = flag(OPSET, "of ONNX", t.Number(int, low=OPSET))
    to_hf: t.Dir = flag("", "a folder for the Hugging Face Hub in place of a file")
    licence: t.Name = flag("", "for the model card", also="--license", needs="--to-hf")
    origin_url: str = flag("", "for the model card", metavar="URL", needs="--to-hf")
    dense: bool = switch("two outputs: class logits (B, K) and token logits (B, N, K)")
    model_dtype: Literal["float32", "float16", "bfloat16"] = flag("float32", "of weights and arithmetic")
    debug: bool = DEBUG()


class ExportSettings(Settings):
    """Write a trained model as a file that runs without this project. It is ONNX, or torch.export's .pt2."""

    file: ExportedFile = group(ExportedFile)
    network: TrainedNetwork = group(TrainedNetwork)
    pixels: Pixels = group(Pixels, text="Images\n\nThe size is the file's; the rest is only recorded in it.")


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


EXPORT = Program("export", "-o FILE --checkpoint PATH [flags]", ExportSettings, _check_export)


class AttentionPicture(Group):
    """Pictures"""

    image: t.Source = flag(None, "image file", positional=True, metavar="IMAGE")
    output: t.File = flag("", "picture", also="-o", required="where shall the picture go?")
    query: list[t.Share] = flag([0.5, 0.5], "place looked from: x, y shares", nargs=2)


class ImagesAndDevice(Group):
    """Images and device"""

    pixels: Pixels = group(Pixels)
    device: t.Device | None = DEVICE()
    debug: bool = DEBUG()


class AttentionSettings(Settings):
    """Draw what the attention layers of VOLO or LV-ViT look at."""

    picture: AttentionPicture = group(AttentionPicture)
    network: TrainedNetwork = group(TrainedNetwork)
    images: ImagesAndDevice = group(ImagesAndDevice)


ATTENTION = Program(
    "attention",
    "IMAGE -o FILE --checkpoint PATH [flags]",
    AttentionSettings,
    lambda s: check_weights(s, s.network, s.images.pixels),
)


class ReportSettings(Settings):
    """Report"""

    run: t.Source = flag(None, "directory of a run", positional=True, metavar="RUN")
    quick: bool = switch("don't read the checkpoints through to verify them")
    html: bool = switch("also write RUN/report.html: these texts, the curves, the first batch, the settings")
    debug: bool = DEBUG()


REPORT = Program(
    "report", "RUN [flags]", ReportSettings, does="Report what happened to a run: starts, speed, checkpoints, faults."
)


class SlurmSettings(Settings):
    """Slurm"""

    directory: t.Source = flag(None, "a new folder", positional=True, metavar="DIR")
    debug: bool = DEBUG()


SLURM = Program("slurm", "DIR", SlurmSettings, does="Write batch scripts for Slurm and recipes into a folder.")


class SampleSettings(Settings):
    """Sample"""

    directory: t.Source = flag(None, "a new folder", positional=True, metavar="DIR")
    images: t.Positive | None = flag(None, "how many, a fifth of them held out (all 1,797)")
    debug: bool = DEBUG()


SAMPLE = Program(
    "sample", "DIR", SampleSettings, does="Write a folder of images to try everything with: scans of digits."
)


class LaunchSettings(Settings):
    """Launch"""

    processes: t.Positive = flag(None, "how many, one per GPU", positional=True)
    command: str = "train"
    flags: tuple[str, ...] = ()


class _Launch(Program[LaunchSettings]):
    def parse(self, argv: Sequence[str] | None = None) -> LaunchSettings:
        """Parse the first word, and leave the other words to the program that is started. Raises UserError: the number
        of processes is missing."""
        words = list(sys.argv[1:] if argv is None else argv)
        settings = super().parse(words[:1])
        if words[1:2] in (["train"], ["label"], ["features"], ["validate"], ["preflight"]):
            return replace(settings, command=words[1], flags=tuple(words[2:]))
        return replace(settings, flags=tuple(words[1:]))


LAUNCH = _Launch(
    "launch",
    "N [train|label|features|validate|preflight] [DATA] [flags of that command]",
    LaunchSettings,
    does="Start a command in N processes of this machine. It is train unless another is named, as in "
    "distributed_train.sh. Several machines and other settings: variables of the environment, docs/multinode.md.",
)


class PushSettings(Settings):
    """Push"""

    repository: str = flag(None, "on the Hub; it is made where it is not there", positional=True, metavar="ORG/NAME")
    folder: t.Dir = flag(
        "", "what volo export --to-hf wrote", names="--from", required="the folder that volo export --to-hf wrote"
    )
    private: bool = switch("make the repository private")
    revision: t.Name = flag("", "branch (main)")
    message: str = flag("Upload model", "of the commit")
    dry_run: bool = switch("list the files, send nothing")
    debug: bool = DEBUG()


PUSH = Program("push", "ORG/NAME --from DIR", PushSettings, does="Upload a model to the Hugging Face Hub.")


class Fitness(Group):
    """What the run needs"""

    data: list[t.Path] = flag([], "images and labels: readable, equal on all nodes")
    output: t.Dir | None = flag(None, "where checkpoints go: writable, see --free-gb")
    free_gb: t.Amount = flag(20.0, "free space that --output must have", metavar="GB", needs="--output")
    shm_gb: t.Amount = flag(1.0, "free /dev/shm per rank, for data workers", metavar="GB")
    min_bandwidth: t.AboveZero | None = flag(None, "bus bandwidth per process, all-reduce", metavar="GB/S")


class Ranks(Group):
    """Ranks and output"""

    device: t.Device | None = DEVICE()
    bind: str = BIND()
    timeout: float = flag(120.0, "wait this long for all ranks", t.Number(float, 1, 3600), metavar="S")
    debug: bool = DEBUG()


class PreflightSettings(Settings):
    """Check that the machines are fit for a run."""

    fitness: Fitness = group(Fitness)
    ranks: Ranks = group(Ranks)


PREFLIGHT = Program("preflight", "[flags]   (as many processes as the run will have)", PreflightSettings)
