"""Print a script that completes `volo` in a shell: `source <(volo completion bash)`."""

from __future__ import annotations

import argparse

from tlt.errors import require
from volo.cli import COMMANDS


def run(args: argparse.Namespace) -> int:
    """Print the script. Raises UserError: shtab is not installed."""
    every = argparse.ArgumentParser("volo")
    commands = every.add_subparsers()
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.program.does, parents=[command.program.parser()], add_help=False)
    print(require("shtab", extra="completion").complete(every, args.shell))
    return 0
