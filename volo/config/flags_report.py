"""The flags of `volo report`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from tlt.errors import UserError
from volo.config.flag_table import FlagParser, Group, flag, switch

_GROUPS = (
    Group(
        "Report",
        (
            flag("run", default=None, metavar="RUN", help="directory of a run"),
            switch("--quick", help="don't read the checkpoints through to verify them"),
            flag("--picture", default=None, metavar="FILE", help="where to draw it (RUN/report.png)"),
            switch("--no-picture", help="draw nothing"),
            flag(
                "--same-as",
                default=None,
                metavar="RUN",
                help="only compare metrics.jsonl and summary.csv with another run's, line by line but for times",
            ),
            switch("--debug", help="show the traceback of an error that is normally told in one line"),
        ),
    ),
)


def report_parser() -> FlagParser:
    """The parser of volo report."""
    return FlagParser(
        "report", "RUN [flags]", "Tell what happened to a run: starts, losses, time, checkpoints.", _GROUPS
    )


def parse_report(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo report`.

    Raises:
        UserError: An unknown flag, no RUN, or flags that exclude each other.
    """
    args: Namespace = report_parser().parse_args(argv)
    if args.picture and args.no_picture:
        raise UserError("--picture has no effect with --no-picture: leave one of them out")
    if args.same_as and (args.picture or args.no_picture or args.quick):
        raise UserError("--same-as compares and does nothing else: leave --picture, --no-picture and --quick out")
    return args
