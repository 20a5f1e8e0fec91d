"""The flags of `benchmark.py train`, `infer` and `--all`; those that train.py has too are its own rows."""

from __future__ import annotations

from dataclasses import replace

from volo.config.flag_table import ABOVE_ZERO, COUNT, POSITIVE, Flag, Group, Need, flag, switch
from volo.config.flags_train import AMP, COMPILED, TRAIN_GROUPS

TRAIN_PEERS = ("timm", "timm-compile", "timm-bfloat16", "timm-compile-bfloat16", "reference", "eager", "mask", "amp")
INFER_PEERS = ("timm", "timm-compile", "reference", "eager", "unfolded")
PARTS = ("1", "2", "3", "4")
SYNTHETIC = "synthetic"
_OF_TRAIN = {row.dest: row for group in TRAIN_GROUPS for row in group.flags}


# What they need here; other flags of train.py's are not there to be needed.
_NEEDS = {"amp_dtype": (AMP,), "torchcompile_mode": (COMPILED,), "torchcompile_scope": (COMPILED,)}


def _rows(*names: str) -> tuple[Flag, ...]:
    return tuple(replace(_OF_TRAIN[name], needs=_NEEDS.get(name, ()), excludes=()) for name in names)


_PRECISION = (
    "amp",
    "amp_dtype",
    "model_dtype",
    "channels_last",
    "torchcompile",
    "torchcompile_scope",
    "torchcompile_mode",
    "outlook_kernel",
)
DEVICE = flag("--device", default=None, metavar="NAME", help="cpu, cuda or cuda:N (a GPU where there is one)")
DEBUG = switch("--debug", help="show the traceback of an error that is normally told in one line")
_OUTPUT = (switch("--json", help="JSON instead of the table: a line after each arm, the last one has all"), DEBUG)
_MEASURING = (
    DEVICE,
    flag("--rounds", default=5, type=POSITIVE, help="rounds of all arms in turns; the median counts"),
    flag("--steps", default=1, type=POSITIVE, help="batches of an arm in each round"),
    flag("--warm-up", default=2, type=POSITIVE, help="batches of each arm before the first round"),
    switch("--profile", help="after the rounds, where the time of a batch of ours goes (torch.profiler)"),
)
BATCH_SIZE = flag("-b", "--batch-size", default=8, type=POSITIVE, help="images per batch")


def _peers(choices: tuple[str, ...]) -> Flag:
    return flag(
        "--peer", default=["timm"], nargs="*", choices=choices, help="what to compare with: several, or nothing"
    )


TRAIN_STEP = (
    Group(
        "Model",
        (
            *_rows("model", "img_size"),
            BATCH_SIZE,
            *_rows("drop_path", "drop_path_mode", "grad_checkpointing", "clip_grad", "opt"),
        ),
    ),
    Group(
        "Precision and speed",
        (
            *_rows(*_PRECISION),
            switch("--cudnn-attention", help="attention may be cuDNN's with --drop-path-mode subset, too (GPUs)"),
        ),
    ),
    Group(
        "Peers",
        (_peers(TRAIN_PEERS),),
        "timm: its VOLO with both heads, in eager mode. timm-compile: the same compiled. With --model-dtype bfloat16 "
        "both have autocast, as timm's own program, and there are timm-bfloat16 and timm-compile-bfloat16, too, with a "
        "bfloat16 copy as ours has. reference: ours in eager mode with the reference kernel and nothing else that is "
        "fast. eager: ours without --torchcompile. mask: ours without --drop-path-mode subset. amp: ours with autocast "
        "instead of --model-dtype bfloat16, as reference has it then. All with the same weights, loss, optimizer and "
        "type of products.",
    ),
    Group(
        "Data",
        (
            flag("--data", default=SYNTHETIC, metavar="DIR", help="a folder of images, loaded in the step"),
            flag(
                "--workers",
                default=0,
                type=COUNT,
                help="data workers of each arm",
                needs=(Need("--data DIR", lambda a: a.data != SYNTHETIC),),
            ),
        ),
    ),
    Group("Measuring", (*_MEASURING, *_OUTPUT)),
)
ACTIVATIONS = (
    Group("Model", (*_rows("model", "img_size"), BATCH_SIZE, *_rows("amp", "amp_dtype", "outlook_kernel"))),
    Group("Measuring", (DEVICE, *_OUTPUT)),
)
INFERENCE = (
    Group("Model", (*_rows("model", "img_size"), BATCH_SIZE)),
    Group("Precision and speed", _rows(*(name for name in _PRECISION if name != "model_dtype"))),
    Group(
        "Peers",
        (_peers(INFER_PEERS),),
        "timm: its VOLO in eager mode. timm-compile: the same compiled. reference: ours in eager mode with the "
        "reference kernel, BatchNorm not folded. eager: ours without --torchcompile. unfolded: ours with BatchNorm.",
    ),
    Group("Measuring", (*_MEASURING, *_OUTPUT)),
)
ALL = (
    Group(
        "What",
        (
            flag(
                "--peer",
                default="timm-compile",
                choices=("timm", "timm-compile"),
                help="the strongest peer; timm: none is compiled, which is quicker",
            ),
            flag("--only", default=[], nargs="+", metavar="NAME", help="these experiments alone"),
            DEVICE,
            flag(
                "--part",
                default=None,
                choices=PARTS,
                help="of what a GPU has to measure, the most important first; on a CPU a rehearsal with small models",
            ),
            flag(
                "--minutes",
                default=None,
                type=ABOVE_ZERO,
                metavar="M",
                help="what is not measured then is told (20; a part: 9)",
            ),
        ),
    ),
    Group(
        "Output",
        (
            flag(
                "--output", default="", metavar="DIR", help="benchmark.md, .json and .log (partN.*) are written there"
            ),
            DEBUG,
        ),
    ),
)
