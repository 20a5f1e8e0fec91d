"""Command-line flags as rows of tables, and the parser built from them.

Imports nothing heavy, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

from tlt._version import __version__
from tlt.errors import UserError


@dataclass(frozen=True)
class Number:
    """Argument type: an int or a finite float inside [low, high], or above 0 and up to high where `positive`.

    Raises:
        argparse.ArgumentTypeError: the text is no such number; argparse puts the flag's name before the message.
    """

    kind: type[int] | type[float]
    low: float = -math.inf
    high: float = math.inf
    positive: bool = False

    def __call__(self, text: str) -> int | float:
        try:
            value = self.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid {self.kind.__name__} value: {text!r}") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not a finite number")
        if not self.low <= value <= self.high or (self.positive and value <= 0):
            raise argparse.ArgumentTypeError(f"{text} is out of range: {self.range_text}")
        return value

    @property
    def range_text(self) -> str:
        """The allowed range in words."""
        if self.positive:
            return "it must be above 0"
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        if math.isinf(self.low):
            return f"at most {self.high:g}"
        return f"{self.low:g} to {self.high:g}"


# The published scripts at the root of a checkout, by the command of `volo` that each stands for.
SCRIPTS = {"train": "train.py", "validate": "validate.py", "label": "generate_label.py"}
INT = Number(int)
COUNT = Number(int, low=0)
POSITIVE = Number(int, low=1)
FLOAT = Number(float)
AMOUNT = Number(float, low=0)
ABOVE_ZERO = Number(float, positive=True)
SEED = Number(int, low=0, high=2**63 - 1)
SHARE = Number(float, low=0, high=1)


class Need(NamedTuple):
    """A condition without which a flag has no effect: its name, and whether the arguments meet it."""

    of: str
    met: Callable[[argparse.Namespace], bool]


@dataclass(frozen=True)
class Flag:
    """One row: everything about an option.

    Attributes:
        names: A name without a dash is positional.
        renamed: Its name in the namespace, if that is not the first long name.
        needs: Unless all of these are met, the flag has no effect and is refused.
        excludes: Flags (by destination) that set the same value: one on the command line, unless it is switched off
            there, overrules others in a recipe.
        refused: The reason why it must keep its default; "" if it can be set.
    """

    names: tuple[str, ...]
    default: Any
    help: str
    type: Callable[[str], Any] = str
    nargs: int | str | None = None
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    const: Any = None
    switch: bool = False
    key_values: bool = False
    renamed: str | None = None
    needs: tuple[Need, ...] = ()
    excludes: tuple[str, ...] = ()
    refused: str = ""

    @property
    def dest(self) -> str:
        """Name in the namespace and in YAML files: the first long name with underscores."""
        long = next((name for name in self.names if name.startswith("--")), self.names[0])
        return self.renamed or long.lstrip("-").replace("-", "_")

    @property
    def label(self) -> str:
        """The name in messages."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    def shown(self, value: Any) -> str:
        """Return the flag as on a command line."""
        if self.switch:
            return self.label
        return f"{self.label} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def flag(*names: str, default: Any, help: str, **rest: Any) -> Flag:
    """Return a flag that takes a value; `--help` shows a whole number as N."""
    if isinstance(rest.get("type"), Number) and rest["type"].kind is int:
        rest.setdefault("metavar", "N")
    return Flag(names, default, help, **rest)


def switch(*names: str, help: str, **rest: Any) -> Flag:
    """Return a flag without a value, off by default."""
    return Flag(names, False, help, switch=True, **rest)


def needing(need: Need, *rows: Flag) -> tuple[Flag, ...]:
    """Return the rows with one more need, which is checked first."""
    return tuple(replace(row, needs=(need, *row.needs)) for row in rows)


def check_flags(args: argparse.Namespace, flags: Mapping[str, Flag]) -> None:
    """Check for flags that can't be set, and flags that have no effect without others.

    Raises:
        UserError: For the first such flag.
    """
    changed = [row for dest, row in flags.items() if getattr(args, dest, row.default) != row.default]
    for row in changed:
        if row.refused:
            raise UserError(f"{row.shown(getattr(args, row.dest))}: {row.refused}")
    for row in changed:
        for need in row.needs:
            if not need.met(args):
                raise UserError(f"{row.shown(getattr(args, row.dest))} has no effect without {need.of}")


@dataclass(frozen=True)
class Group:
    """Flags that stand together in `--help`."""

    title: str
    flags: tuple[Flag, ...]
    note: str | None = None


class KeyValues(argparse.Action):
    """`--model-kwargs a=1 b=relu` as a dict; values are Python literals, or text where they are none."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        pairs = {}
        for item in values:
            key, equals, text = item.partition("=")
            if not equals or not key:
                raise argparse.ArgumentError(self, f"{item!r} is not KEY=VALUE")
            pairs[key] = _literal(text)
        setattr(namespace, self.dest, pairs)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deeply
        return text


class _HelpFormat(argparse.HelpFormatter):
    """Two columns; defaults are shown where they are informative."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(shutil.get_terminal_size().columns, 120) - 2)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, "", argparse.SUPPRESS) or not action.option_strings or action.default == {}:
            return action.help
        values = action.default if isinstance(action.default, list) else [action.default]
        shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        return f"{action.help} [{shown.replace('%', '%%')}]"


class FlagParser(argparse.ArgumentParser):
    """ArgumentParser whose errors are UserErrors and which names the nearest flag for an unknown one.

    Abbreviated flags are refused: a flag added later could silently change what an abbreviation means.

    Args:
        program: A name in `volo.cli.COMMANDS`, or another way to start it.
        usage: The text after that name.
        undo: Give every switch `--X` a `--no-X`, which sets it back where a recipe turned it on.
    """

    def __init__(self, program: str, usage: str, description: str, groups: Sequence[Group], undo: bool = False) -> None:
        name = _started_as(program)
        super().__init__(name, f"{name} {usage}", description, formatter_class=_HelpFormat, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"volo-tlt {__version__}")
        self.flags: dict[str, Flag] = {}
        for group in groups:
            section = self.add_argument_group(group.title, group.note)
            for row in group.flags:
                self.flags[row.dest] = row
                _add(section, row, undo)

    def error(self, message: str) -> NoReturn:
        """Raise `message`, a single line.

        Raises:
            UserError: always.
        """
        raise UserError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse `args` (the command line where None).

        Raises:
            UserError: an unknown flag (the message names the nearest one), a wrong type or choice, a missing value.
        """
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error("; ".join(self._unknown(i) for i in unknown if i.startswith("-")) or _left_over(unknown))
        for dest, default in self.defaults().items():
            if not hasattr(parsed, dest):
                setattr(parsed, dest, default)
        return parsed

    def explicit(self, argv: Sequence[str] | None) -> dict[str, Any]:
        """Return the values of the flags on the command line, by destination, without defaults."""
        absent = object()
        start = argparse.Namespace(**dict.fromkeys(self.flags, absent))
        parsed = self.parse_args(sys.argv[1:] if argv is None else list(argv), start)
        return {dest: value for dest, value in vars(parsed).items() if value is not absent}

    def defaults(self) -> dict[str, Any]:
        """Return a copy of the default of every flag, by destination."""
        return {dest: copy.copy(row.default) for dest, row in self.flags.items()}

    def _unknown(self, item: str) -> str:
        name = item.partition("=")[0]
        near = nearest(
            name, ["--help", "--version", *(n for row in self.flags.values() for n in row.names if n.startswith("-"))]
        )
        return f"unknown flag {name}" + (f", did you mean {near}?" if near else "")


def _started_as(program: str) -> str:
    """Return what a user types: the script of a checkout if that was started, else `volo PROGRAM`."""
    if program.startswith("python "):
        return program
    command, *subcommand = program.split()
    script = SCRIPTS.get(command)
    return " ".join([script if script == os.path.basename(sys.argv[0]) else f"volo {command}", *subcommand])


def _add(section: argparse._ArgumentGroup, row: Flag, undo: bool) -> None:
    if row.switch:
        section.add_argument(*row.names, action="store_true", default=False, help=row.help, dest=row.dest)
        opposite = f"--no-{row.label[2:]}"
        if undo and not row.label.startswith("--no-"):
            section.add_argument(
                opposite, action="store_false", dest=row.dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
        return
    options: dict[str, Any] = {"default": row.default, "help": row.help, "metavar": row.metavar, "nargs": row.nargs}
    if row.names[0].startswith("-"):
        options["dest"] = row.dest
    elif row.nargs == "?":
        # argparse would write the default of an absent positional over a value that is already there.
        options["default"] = argparse.SUPPRESS
    if row.key_values:
        section.add_argument(*row.names, action=KeyValues, **options)
        return
    if row.const is not None:
        options["const"] = row.const
    section.add_argument(*row.names, type=row.type, choices=row.choices, **options)


def _left_over(items: Iterable[str]) -> str:
    return f"one argument too many: {' '.join(items)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is almost `name`, else the shortest one that has all of its words, else None."""
    plain = {other: other.lstrip("-").replace("_", "-") for other in known}
    asked = name.lstrip("-").replace("_", "-")
    close = difflib.get_close_matches(asked, list(plain.values()), n=1, cutoff=0.8)
    fitting = [other for other, text in plain.items() if text in close]
    fitting += sorted((o for o, text in plain.items() if {*asked.split("-")} <= {*text.split("-")}), key=len)
    return next(iter(fitting), None)
