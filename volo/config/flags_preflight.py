"""The flags of `volo preflight`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from tlt.errors import UserError
from volo.config.flag_table import ABOVE_ZERO, AMOUNT, POSITIVE, SHARE, FlagParser, Group, Number, flag, switch

_WAIT = Number(float, low=1, high=3600)  # s

_GROUPS = (
    Group(
        "What the run needs",
        (
            flag(
                "--data", default=[], nargs="+", metavar="PATH", help="images, labels: readable, as many on all nodes"
            ),
            flag(
                "--image", default=None, metavar="FILE", help="the container's image: readable, as large on all nodes"
            ),
            flag("--output", default=None, metavar="DIR", help="where checkpoints go: writable, see --free-gb"),
            flag("--free-gb", default=20.0, type=AMOUNT, metavar="GB", help="free space that --output must have"),
            flag(
                "--shm-gb", default=1.0, type=AMOUNT, metavar="GB", help="free /dev/shm per process, for data workers"
            ),
            flag("--processes", default=None, type=POSITIVE, help="processes per node (the GPUs, else 1)"),
        ),
    ),
    Group(
        "Limits",
        (
            flag("--timeout", default=25.0, type=_WAIT, metavar="S", help="wait this long for all nodes"),
            flag("--max-clock-skew", default=1.0, type=ABOVE_ZERO, metavar="S", help="against node 0's clock"),
            flag("--slow-below", default=0.6, type=SHARE, metavar="SHARE", help="of the median node's bandwidth"),
            flag(
                "--min-bandwidth",
                default=None,
                type=ABOVE_ZERO,
                metavar="GB/S",
                help="all-reduce between two nodes, as bus bandwidth per process",
            ),
            flag("--round-timeout", default=15.0, type=_WAIT, metavar="S", help="for one bandwidth measurement"),
            switch("--no-bandwidth", help="measure no bandwidth"),
        ),
    ),
    Group(
        "Output",
        (
            flag("--json", default=None, metavar="FILE", help="write all of it there, too (node 0)"),
            switch("--debug", help="show the traceback of an error that is normally told in one line"),
        ),
    ),
)


def preflight_parser() -> FlagParser:
    """Return the parser of `volo preflight`."""
    usage = "[flags]   (one task per node)"
    return FlagParser("preflight", usage, "Check that the machines are fit for a run.", _GROUPS)


def parse_preflight(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of the preflight.

    Raises:
        UserError: A flag is unknown or has no effect.
    """
    parser = preflight_parser()
    args: Namespace = parser.parse_args(argv)
    given = parser.explicit(argv)
    if "free_gb" in given and args.output is None:
        raise UserError("--free-gb has no effect without --output: name the directory of the checkpoints")
    measuring = [parser.flags[name].label for name in ("slow_below", "min_bandwidth", "round_timeout") if name in given]
    if args.no_bandwidth and measuring:
        raise UserError(f"{measuring[0]} has no effect with --no-bandwidth: leave one of them out")
    return args
