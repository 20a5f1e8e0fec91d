"""The flags of `benchmark.py`: one table per subcommand."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.flags_speed import ACTIVATIONS, ALL, DEBUG, DEVICE, INFERENCE, TRAIN_STEP
from benchmarks.machines import LINK_EFFICIENCY, MACHINES
from volo.config.flag_table import (
    ABOVE_ZERO,
    AMOUNT,
    COUNT,
    POSITIVE,
    FlagParser,
    Group,
    Need,
    Number,
    check_flags,
    flag,
    needing,
    switch,
)


@dataclass(frozen=True)
class Command:
    """A subcommand: its module in `benchmarks`, what it measures, and its flags."""

    module: str
    description: str
    groups: tuple[Group, ...]


_OUTPUT = (switch("--json", help="one line of JSON instead of the table"), DEBUG)
_MAP_SIZE = flag("--map-size", default=[18, 18], type=POSITIVE, nargs=2, help="rows and columns of cells")
_LABEL_SIZES = (
    flag("--num-classes", default=1000, type=POSITIVE, help="classes"),
    flag("--top-k", default=5, type=POSITIVE, metavar="K", help="classes per cell of the label maps"),
    _MAP_SIZE,
)
_DTYPES = ("float32", "bfloat16", "float16")

_LOSS = (
    Group(
        "Sizes",
        (
            flag("-b", "--batch-size", default=128, type=POSITIVE, help="images"),
            flag("--grid", default=[14, 14], type=POSITIVE, nargs=2, help="rows and columns of tokens"),
            *_LABEL_SIZES,
            flag("--dtype", default="float32", choices=_DTYPES, help="of the logits"),
        ),
    ),
    Group(
        "Measuring",
        (DEVICE, flag("--repeats", default=5, type=POSITIVE, help="timed runs; the median counts"), *_OUTPUT),
    ),
)

_OUTLOOK = (
    Group(
        "Sizes",
        (
            flag("-b", "--batch-size", default=8, type=POSITIVE, help="images"),
            flag(
                "--shapes",
                default=["28x28x192x6", "28x28x384x12"],
                nargs="+",
                metavar="HxWxCxHEADS",
                help="cells, channels and heads; by default those of VOLO-D1 and D5 at 224 pixels",
            ),
            flag(
                "--dtypes",
                default=["float32", "bfloat16"],
                nargs="+",
                choices=_DTYPES,
                help="but for float32 under autocast",
            ),
            switch("--layer", help="the whole layer with its projections, not only what lies between them"),
        ),
    ),
    Group(
        "Measuring",
        (
            switch("--no-compile", help="without the compiled arms"),
            DEVICE,
            flag("--rounds", default=15, type=POSITIVE, help="rounds of all arms; the median counts"),
            flag("--calls", default=1, type=POSITIVE, help="of an arm in each round; more for a GPU"),
            *_OUTPUT,
        ),
    ),
)

_TESTS = (
    Group(
        "Measuring",
        (
            flag("--device", default=None, metavar="NAME", help="cpu, where they skip themselves, cuda or cuda:N"),
            *_OUTPUT,
        ),
    ),
)

_LABELS = (
    Group("Sizes", (flag("--records", default=8192, type=POSITIVE, help="labels made and read"), *_LABEL_SIZES)),
    Group(
        "Measuring",
        (
            flag("--rounds", default=7, type=POSITIVE, help="rounds of all readers; the median counts"),
            flag("--workers", default=4, type=POSITIVE, help="processes whose memory is measured"),
            *_OUTPUT,
        ),
    ),
)

_AUGMENTATION = (
    Group(
        "Images",
        (
            flag("--data-dir", default="", metavar="DIR", help="images of your own (else some are made)"),
            flag("--images", default=256, type=POSITIVE, help="how many"),
            flag("--image-size", default=[500, 375], type=POSITIVE, nargs=2, help="width and height if made"),
            flag("--img-size", default=224, type=POSITIVE, help="height and width of the crops"),
            flag("--aa", default="rand-m9-mstd0.5-inc1", metavar="POLICY", help="RandAugment in timm's grammar"),
            flag("-b", "--batch-size", default=32, type=POSITIVE, help="images per batch"),
        ),
    ),
    Group(
        "Measuring",
        (
            flag("--rounds", default=7, type=POSITIVE, help="rounds of all arms; the median counts"),
            flag("--workers", default=2, type=COUNT, help="worker processes of the second part; 0: none"),
            *_OUTPUT,
        ),
    ),
)

DATA_BACKENDS = ("torchvision", "pil", "dali-cpu", "dali-gpu", "synthetic")
_DATA_TIMED = (
    Group(
        "Images",
        (
            flag(
                "--backend",
                default=["all"],
                nargs="+",
                choices=("all", *DATA_BACKENDS),
                help="loaders of ours; those that can't be had here are told in a row",
            ),
            *_AUGMENTATION[0].flags,
        ),
    ),
    Group(
        "Measuring",
        (
            DEVICE,
            flag("--rounds", default=5, type=POSITIVE, help="rounds of all loaders; the median counts"),
            flag("--workers", default=2, type=COUNT, help="data workers, measured after none; 0: none alone"),
        ),
    ),
)
_TIMED = Need("timing: leave out --entries", lambda a: not a.entries)
_DATA = (
    *(replace(group, flags=needing(_TIMED, *group.flags)) for group in _DATA_TIMED),
    Group(
        "Sizes",
        (
            flag(
                "--sizes",
                default=None,
                type=POSITIVE,
                nargs="+",
                help="crops alone, of made square images with sides of so many pixels, in one process",
                needs=(_TIMED, Need("made images: leave out --data-dir", lambda a: not a.data_dir)),
            ),
        ),
    ),
    Group(
        "Memory",
        (
            flag(
                "--entries",
                default=0,
                type=COUNT,
                help="measure the memory of 0, 2 and 4 workers with so many made-up images instead",
            ),
        ),
    ),
    Group("Output", _OUTPUT),
)
_ABLATION = (
    Group(
        "Runs",
        (
            flag("--output", default="output/ablation", metavar="DIR", help="runs that are done, and the scenes"),
            flag("--arms", default=None, nargs="+", metavar="ARM", help="those of the table alone (default: all)"),
            flag("--seeds", default=5, type=POSITIVE, help="seeds of each arm, from 0"),
            flag("--epochs", default=10, type=POSITIVE, help="epochs of a run"),
            flag("--images", default=3000, type=POSITIVE, help="training scenes"),
            flag("--jobs", default=2, type=POSITIVE, help="runs at a time, one thread each"),
        ),
    ),
    Group("Output", (*_OUTPUT, flag("--plot", default="", metavar="FILE", help="draw the curves of top-1"))),
)
_ALIGNMENT = (
    Group(
        "Sizes",
        (
            flag("--images", default=8, type=POSITIVE, help="images of each shape"),
            flag("--crops", default=1000, type=POSITIVE, help="crops whose windows are compared"),
            flag("--size", default=[224, 224], type=POSITIVE, nargs=2, help="height, width of the output"),
            _MAP_SIZE,
            flag("--area", default="full", choices=("full", "center"), help="of the images, what the maps cover"),
            flag(
                "--shapes",
                default=["500x375", "375x500", "420x420"],
                nargs="+",
                metavar="WxH",
                help="width and height of the images",
            ),
        ),
    ),
    Group(
        "Models",
        (
            flag(
                "--families",
                default=None,
                nargs="*",
                metavar="MODEL",
                help="measure instead where the tokens of timm's models look, and how far from that their labels are "
                "taken; none named: 45 families (hours)",
            ),
        ),
    ),
    Group("Output", _OUTPUT),
)

_CHECKPOINT = (
    Group(
        "Run",
        (
            flag("--model", default="volo_d5", metavar="NAME", help="any model of timm or of this project"),
            flag("--output", default=".", metavar="DIR", help="where the file is written, and removed afterwards"),
            switch("--no-ema", help="without a moving average of the weights"),
        ),
    ),
    Group(
        "Measuring",
        (DEVICE, flag("--repeats", default=3, type=POSITIVE, help="saves of each kind; the median counts"), *_OUTPUT),
    ),
)

_STARTUP = (
    Group(
        "Data set",
        (
            flag("--images", default=[100_000, 1_281_167], type=POSITIVE, nargs="+", help="sizes to measure"),
            flag("--classes", default=1000, type=POSITIVE, help="folders that they are in"),
            flag("--directory", default="", metavar="DIR", help="where they are made and removed (the system's own)"),
        ),
    ),
    Group(
        "Measuring",
        (
            flag("--rounds", default=3, type=POSITIVE, help="of all arms; the median counts"),
            switch("--cold", help="start both programs with an empty page cache too (root; slows what else runs here)"),
            *_OUTPUT,
        ),
    ),
)

_SCALING_STEP = Group(
    "Step",
    (
        flag("--model", default="volo_d1", metavar="NAME", help="any model of timm or of this project"),
        flag("-b", "--batch-size", default=8, type=POSITIVE, help="images per rank"),
        flag("--bucket-mb", default=25.0, type=ABOVE_ZERO, metavar="MB", help="MiB of gradients sent in one piece"),
        flag("--grad-compression", default="none", choices=("none", "bf16"), help="as train.py's"),
    ),
)
_SCALING_PREDICTION = Group(
    "Prediction",
    (
        flag("--machine", default="dgx-a100", choices=tuple(MACHINES), help="whose links join the GPUs"),
        flag(
            "--gpus",
            default=[1, 2, 4, 8, 16, 40, 80, 160, 320, 640],
            type=POSITIVE,
            nargs="+",
            help="how many to predict",
        ),
        flag(
            "--images-per-second",
            default=None,
            type=ABOVE_ZERO,
            metavar="R",
            help="of one GPU alone",
        ),
        flag("--gpus-per-node", default=None, type=POSITIVE, help="(the machine's)"),
        flag("--node-gbits", default=None, type=ABOVE_ZERO, metavar="G", help="Gbit/s that a node really gets out"),
        flag("--latency-us", default=None, type=AMOUNT, metavar="U", help="microseconds of a message between nodes"),
        flag(
            "--link-efficiency",
            default=LINK_EFFICIENCY,
            type=Number(float, positive=True, high=1),
            metavar="R",
            help="of the machine's nominal bandwidths, what is got",
        ),
    ),
)
_PREDICTED = Need("a model to predict: leave out --published", lambda a: not a.published)
_SCALING = (
    replace(_SCALING_STEP, flags=needing(_PREDICTED, *_SCALING_STEP.flags)),
    replace(_SCALING_PREDICTION, flags=needing(_PREDICTED, *_SCALING_PREDICTION.flags)),
    Group(
        "Output",
        (
            switch("--published", help="compare the model with published throughputs instead"),
            *_OUTPUT,
        ),
    ),
)
COMMANDS: dict[str, Command] = {
    "all": Command("all", "Every number that has a target, measured on this machine, as Markdown and JSON.", ALL),
    "train": Command("speed.train", "Images/s of a training step: ours against timm's VOLO and others.", TRAIN_STEP),
    "infer": Command("speed.infer", "Images/s of inference: ours against timm's VOLO and others.", INFERENCE),
    "activations": Command(
        "speed.activations", "Memory of a training step's activations, predicted and measured.", ACTIVATIONS
    ),
    "alignment": Command(
        "feed.alignment",
        "Distance between what tokens show and what their labels say, ours and published, in one run.",
        _ALIGNMENT,
    ),
    "loss": Command(
        "speed.loss", "Time and peak memory of the token-label loss: sparse and dense targets, in one run.", _LOSS
    ),
    "checkpoint": Command(
        "feed.checkpoint", "How long a save keeps training waiting: synchronous and asynchronous.", _CHECKPOINT
    ),
    "startup": Command(
        "feed.startup",
        "Cost of finding images and labels: ours, torchvision's, timm's; time to the first update.",
        _STARTUP,
    ),
    "tests": Command("tests", "Every test that needs a GPU: what fails, and why.", _TESTS),
    "outlook": Command(
        "speed.outlook", "Time of outlook attention: each kernel of ours, compiled or not, and timm's.", _OUTLOOK
    ),
    "labels": Command(
        "feed.labels", "Cost of reading token labels: archive and published files; memory that workers share.", _LABELS
    ),
    "augmentation": Command(
        "feed.augmentation",
        "Images/s from JPEG to augmented crops: ours, timm's, and the published order.",
        _AUGMENTATION,
    ),
    "data": Command(
        "feed.data", "Images/s and CPU time of every data backend and of timm's loader, in one run.", _DATA
    ),
    "ablation": Command(
        "evidence.ablation", "Does a label at the right place make a better model? Hours on a CPU.", _ABLATION
    ),
    "scaling": Command("scaling", "Step time on 1 to 640 GPUs, predicted, and published throughputs.", _SCALING),
}


def benchmark_parser(command: str | None = None) -> FlagParser:
    """The parser of one subcommand, or of the program itself."""
    if command is not None:
        chosen = COMMANDS[command]
        return FlagParser(f"benchmark {command}", "[flags]", chosen.description, chosen.groups)
    row = flag("command", default=None, choices=tuple(COMMANDS), help="what to measure; COMMAND --help shows its flags")
    usage = "COMMAND [flags], or --all [flags]"
    return FlagParser("benchmark", usage, "Measure this machine.", (Group("Command", (row,)),))


def parse_benchmark(argv: Sequence[str] | None = None) -> Namespace:
    """Parse benchmark.py's command line. Returns one attribute per flag of the subcommand, `command`, and
    `command_line` as one would type it.

    Raises:
        UserError: An unknown subcommand or flag, a wrong value, or a flag that would have no effect.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    typed = shlex.join(["benchmark.py", *words])
    if words and words[0] == "--all":
        words[0] = "all"
    command = words[0] if words and words[0] in COMMANDS else benchmark_parser().parse_args(words).command
    parser = benchmark_parser(command)
    args = Namespace(command=command, command_line=typed, **vars(parser.parse_args(words[1:])))
    check_flags(args, parser.flags)
    return args
