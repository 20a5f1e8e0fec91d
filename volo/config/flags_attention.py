"""The flags of `volo attention`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from tlt.errors import UserError
from volo.config.flag_rules import check_weights
from volo.config.flag_table import SHARE, FlagParser, Group, flag, switch
from volo.config.flags_eval import MODEL, PREPROCESSING

GROUPS = (
    Group(
        "Pictures",
        (
            flag("images", default=None, nargs="+", metavar="IMAGE", help="image files"),
            flag("-o", "--output", default="", metavar="FILE", help="picture; of several images: FILE-1, FILE-2, ..."),
            flag(
                "--query", default=[0.5, 0.5], type=SHARE, nargs=2, metavar="R", help="place looked from: x, y shares"
            ),
            flag("--layers", default=[], nargs="+", metavar="NAME", help="blocks, or all (some of each kind)"),
            switch("--heads", help="self- and class attention of every head, not only their mean"),
        ),
    ),
    Group("Model", MODEL),
    Group(
        "Images and device",
        (
            *PREPROCESSING,
            flag("--device", default=None, metavar="NAME", help="cpu, cuda or cuda:N (a GPU where there is one)"),
            switch("--debug", help="show the traceback of an error that is normally told in one line"),
        ),
    ),
)


def attention_parser() -> FlagParser:
    """The parser of `volo attention`; use `parse_attention`, which also checks."""
    return FlagParser(
        "attention",
        "IMAGE [IMAGE ...] -o FILE --checkpoint PATH [flags]",
        "Draw what the attention layers of a VOLO or LV-ViT look at in an image.",
        GROUPS,
    )


def parse_attention(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo attention`. Returns one attribute per flag, and `notes`, lines to print.

    Raises:
        UserError: An unknown flag, a wrong value, no output, no model, or a flag that would have no effect.
    """
    parser = attention_parser()
    args = Namespace(**(parser.defaults() | parser.explicit(argv)))
    if not args.output:
        raise UserError("-o FILE is missing: where shall the picture go?")
    args.notes = check_weights(args, parser.flags)
    return args
