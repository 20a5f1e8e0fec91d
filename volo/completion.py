"""Print a script that completes `volo` in a shell: `source <(volo completion bash)`."""

from __future__ import annotations

import argparse
from argparse import Namespace
from importlib import import_module

from tlt.errors import UserError
from volo.cli import COMMANDS


def run(args: Namespace) -> int:
    """Print the script.

    Raises:
        UserError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise UserError("volo completion needs shtab: pip install 'volo-tlt[completion]'") from error
    print(shtab.complete(_all_commands(), args.shell))
    return 0


def _all_commands() -> argparse.ArgumentParser:
    """Return one parser with the flags of all commands."""
    top = argparse.ArgumentParser("volo")
    commands = top.add_subparsers()
    for name, command in COMMANDS.items():
        module, _, parse = command.parser.partition(":")
        parser = f"{parse.removeprefix('parse_')}_parser"
        if module.startswith("volo.") and hasattr(import_module(module), parser):
            flags = getattr(import_module(module), parser)()
            commands.add_parser(name, help=command.does, parents=[flags], add_help=False)
    return top
