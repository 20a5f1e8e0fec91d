"""Command-line flags as rows of tables, the programs that have them, and the parser built from them.

Imports nothing heavy, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from shutil import get_terminal_size
from typing import Any, NamedTuple, NoReturn

from tlt import __version__
from tlt.errors import UserError
from tlt.io.text import leads_out
from volo.config.checkpoint_files import single_checkpoint


@dataclass(frozen=True)
class Number:
    """A type of values: an int or a finite float inside [low, high], or above 0 and up to high where `positive`.

    Raises:
        argparse.ArgumentTypeError: The text is no such number; argparse puts the flag's name before the message.
    """

    kind: type[int] | type[float]
    low: float = -math.inf
    high: float = math.inf
    positive: bool = False

    @property
    def metavar(self) -> str:
        """What stands for a value in `--help`."""
        return "N" if self.kind is int else "X"

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
        return f"at least {self.low:g}" if math.isinf(self.high) else f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Text:
    """A type of values: text as it is."""

    metavar: str

    def __call__(self, text: str) -> str:
        return text


@dataclass(frozen=True)
class Place(Text):
    """A type of values: a file, folder or model; `~` at the beginning, or behind `local-dir:`, is the home folder.

    Raises:
        argparse.ArgumentTypeError: No file can have that name.
    """

    def __call__(self, text: str) -> str:
        prefix = "local-dir:" * text.startswith("local-dir:")
        return prefix + possible_name(os.path.expanduser(text.removeprefix(prefix)))


def possible_name(path: str) -> str:
    """Return a path that a file can have. Raises argparse.ArgumentTypeError: none can."""
    if "\0" in path or any(len(name.encode(errors="replace")) > 255 for name in path.split("/")):
        raise argparse.ArgumentTypeError(f"{path[:40]!r}... is no name of a file: it has more than 255 bytes, or NUL")
    return path


# The types of values. A tuple of words is a type, too: one of them.
INT = Number(int)
COUNT = Number(int, low=0)
POSITIVE = Number(int, low=1)
EPOCHS = Number(int, low=0, high=10**6)
FLOAT = Number(float)
AMOUNT = Number(float, low=0)
ABOVE_ZERO = Number(float, positive=True)
SEED = Number(int, low=0, high=2**63 - 1)
SHARE = Number(float, low=0, high=1)
NAME, TEXT = map(Text, ("NAME", "TEXT"))
PATH, FILE, DIR, SOURCE = map(Place, ("PATH", "FILE", "DIR", "NAME"))
WEIGHTS = Place("PATH")  # of a checkpoint; a folder stands for `single_checkpoint` in it


def name_below(text: str) -> str:
    """A type of values: the name of a folder below another one. Raises argparse.ArgumentTypeError: it is elsewhere."""
    if leads_out(text):
        raise argparse.ArgumentTypeError(f"{text!r} leads out of the folder that it is to be in: give a name alone")
    return possible_name(text)


def key_value(text: str) -> tuple[str, Any]:
    """A type of values: `depth=3` as a pair; the value is a Python literal, or text where it is none.

    Raises:
        argparse.ArgumentTypeError: There is no key, or no "=".
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deeply
        return key, value


def count_or_auto(text: str) -> int | str:
    """A type of values: a whole number from 1 on, or `auto`. Raises argparse.ArgumentTypeError: it is neither."""
    return text if text == "auto" else int(POSITIVE(text))


class Need(NamedTuple):
    """A condition without which a flag has no effect: its name, and whether the arguments meet it."""

    of: str
    met: Callable[[Namespace], bool]


@dataclass(frozen=True)
class Flag:
    """One row: everything about an option.

    Attributes:
        names: A name without a dash is positional.
        type: Of a value, or of each where `nargs` takes several; a tuple of words: one of them; None: a switch.
        const: The value where the flag stands alone.
        renamed: Its name in the namespace, if that is not the first long name.
        needs: Unless all of these are met, the flag has no effect and is refused.
        excludes: Flags (by destination) that set the same value: both together are refused, but one on the command
            line, unless it is switched off there, overrules others in a recipe.
        refused: The reason why it must keep its default; "" if it can be set.
    """

    names: tuple[str, ...]
    type: Callable[[str], Any] | tuple[str, ...] | None
    default: Any
    help: str
    nargs: int | str | None = None
    metavar: str | None = None
    const: Any = None
    renamed: str | None = None
    needs: tuple[Need, ...] = ()
    excludes: tuple[str, ...] = ()
    refused: str = ""

    @property
    def switch(self) -> bool:
        """Whether it takes no value."""
        return self.type is None

    @property
    def label(self) -> str:
        """The name in messages: the first long one."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    @property
    def dest(self) -> str:
        """Name in the namespace and in YAML files: the first long name with underscores."""
        return self.renamed or self.label.lstrip("-").replace("-", "_")

    def shown(self, value: Any) -> str:
        """Return the flag as on a command line."""
        if self.switch:
            return self.label
        return f"{self.label} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def flag(names: str, type: Callable[[str], Any] | tuple[str, ...], default: Any, help: str, **rest: Any) -> Flag:
    """Return a flag that takes a value; `names` are divided by spaces."""
    return Flag(tuple(names.split()), type, default, help, **rest)


def switch(names: str, help: str, **rest: Any) -> Flag:
    """Return a flag without a value, off by default."""
    return Flag(tuple(names.split()), None, False, help, **rest)


def needing(need: Need, *rows: Flag) -> tuple[Flag, ...]:
    """Return the rows with one more need, which is checked first."""
    return tuple(replace(row, needs=(need, *row.needs)) for row in rows)


def check_flags(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    """Check for flags that can't be set, contradict each other, or have no effect without others; put files in the
    place of folders of checkpoints, unless `--all` of them are wanted.

    Returns:
        Lines for the log: which files.

    Raises:
        UserError: For the first such flag.
    """
    changed = [row for dest, row in flags.items() if getattr(args, dest, row.default) != row.default]
    for row in changed:
        shown = row.shown(getattr(args, row.dest))
        if row.refused:
            raise UserError(f"{shown}: {row.refused}")
        for other in changed:
            if other.dest in row.excludes:
                others = other.shown(getattr(args, other.dest))
                raise UserError(f"{shown} and {others} set the same: keep one of them")
    for row in changed:
        for need in row.needs:
            if not need.met(args):
                raise UserError(f"{row.shown(getattr(args, row.dest))} has no effect without {need.of}")
    notes = []
    for row in changed:
        given = getattr(args, row.dest)
        places = given if isinstance(given, list) else [given]
        for number, folder in enumerate(places if row.type is WEIGHTS and not getattr(args, "all", False) else ()):
            if os.path.isdir(folder):
                file = single_checkpoint(folder, row.label)
                places[number] = str(file)
                setattr(args, row.dest, places if places is given else places[0])
                notes.append(f"{row.shown(folder)}: {file.name}")
    return notes


class Group:
    """Flags that stand together in `--help`, under a title and perhaps a note."""

    def __init__(self, title: str, *flags: Flag, note: str | None = None) -> None:
        self.title, self.flags, self.note = title, flags, note


class FlagParser(argparse.ArgumentParser):
    """ArgumentParser whose errors are UserErrors and which names the nearest flag for an unknown one.

    Abbreviated flags are refused: a flag added later could silently change what an abbreviation means.

    Args:
        program: A command of `volo`, or another way to start it.
        usage: The text after that name.
        undo: Give every switch `--X` a `--no-X`, and `--no-X` an `--X`, which set it back where a recipe turned it on.
    """

    instead: Mapping[str, str] = {}  # of flags that users of another program know: what there is in their place

    def __init__(self, program: str, usage: str, description: str, groups: Sequence[Group], undo: bool = False) -> None:
        name = _started_as(program)
        told = "Values in brackets are the defaults, words in parentheses what happens without the flag."
        told += " --no-X turns a switch off that a recipe turns on, and --X a switch --no-X." if undo else ""
        columns = partial(argparse.HelpFormatter, max_help_position=34, width=min(get_terminal_size().columns, 120) - 2)
        super().__init__(name, f"{name} {usage}", description, told, formatter_class=columns, allow_abbrev=False)
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

    def explicit(self, argv: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the values of the flags in `argv` (the command line where None), by destination, without defaults.

        Raises:
            UserError: An unknown flag (the message names the nearest one), a wrong type or choice, a missing value.
        """
        parsed, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [self._unknown(item) for item in unknown if item.startswith("-")]
            self.error("; ".join(flags) or f"one argument too many: {' '.join(unknown)}")
        given = vars(parsed)
        return given | {dest: dict(given[dest]) for dest in given if self.flags[dest].type is key_value}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as `explicit` does, over the defaults."""
        return Namespace(**(self.defaults() | self.explicit(args)))

    def defaults(self) -> dict[str, Any]:
        """Return a copy of the default of every flag, by destination."""
        return {dest: copy.copy(row.default) for dest, row in self.flags.items()}

    def _unknown(self, item: str) -> str:
        name = item.partition("=")[0]
        if told := self.instead.get(name.replace("_", "-")):
            return f"{name} (timm): {told}"
        known = [name for row in self.flags.values() for name in row.names if name.startswith("-")]
        near = nearest(name, ["--help", "--version", *known])
        return f"unknown flag {name}" + (f", did you mean {near}?" if near else "")


@dataclass(frozen=True)
class Program:
    """A program: its name, the text behind that in its usage, what it does, its flags, and the check of them, which
    returns lines for the log."""

    name: str
    usage: str
    does: str
    groups: tuple[Group, ...]
    check: Callable[[Namespace, Mapping[str, Flag]], list[str]] = check_flags
    undo: bool = False

    def parser(self) -> FlagParser:
        """Return its parser."""
        return FlagParser(self.name, self.usage, self.does, self.groups, self.undo)

    def parse(self, argv: Sequence[str] | None = None) -> Namespace:
        """Parse a command line (sys.argv where None). Returns one attribute per flag, and `notes`, lines to print.

        Raises:
            UserError: An unknown flag, a wrong value, a contradiction, or a flag that would have no effect.
        """
        parser = self.parser()
        args: Namespace = parser.parse_args(argv)
        args.notes = self.check(args, parser.flags)
        return args


# The published scripts at the root of a checkout, by the command of `volo` that each stands for.
SCRIPTS = {"train": "train.py", "validate": "validate.py", "label": "generate_label.py"}


def _started_as(program: str) -> str:
    """Return what a user types: the script of a checkout if that was started, else `volo PROGRAM`."""
    if program.startswith("python "):
        return program
    script = SCRIPTS.get(program)
    return script if script and script == os.path.basename(sys.argv[0]) else f"volo {program}"


def _add(section: argparse._ArgumentGroup, row: Flag, undo: bool) -> None:
    """Add a row to a parser. argparse knows no defaults: so it tells what was given."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": row.help + _default_text(row)}
    if row.names[0].startswith("-"):
        options["dest"] = row.dest
    if row.switch:
        section.add_argument(*row.names, action="store_true", **options)
        if undo:
            opposites = [f"--{name[5:]}" if name.startswith("--no-") else f"--no-{name[2:]}" for name in row.names]
            section.add_argument(*opposites, action="store_false", **options | {"help": argparse.SUPPRESS})
        return
    choices, kind = (row.type, str) if isinstance(row.type, tuple) else (None, row.type or str)
    metavar = row.metavar or getattr(kind, "metavar", None)
    if row.const is not None:
        options["const"] = row.const
    section.add_argument(*row.names, type=kind, choices=choices, metavar=metavar, nargs=row.nargs, **options)


def _default_text(row: Flag) -> str:
    if row.default in (None, False, "", {}) or not row.names[0].startswith("-"):
        return ""
    values = row.default if isinstance(row.default, list) else [row.default]
    shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f" [{shown.replace('%', '%%')}]"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is almost `name`, else the shortest one that has all of its words, else None."""
    plain = {other: other.lstrip("-").replace("_", "-") for other in known}
    asked = name.lstrip("-").replace("_", "-")
    close = difflib.get_close_matches(asked, list(plain.values()), n=1, cutoff=0.8)
    fitting = [other for other, text in plain.items() if text in close]
    fitting += sorted((o for o, text in plain.items() if {*asked.split("-")} <= {*text.split("-")}), key=len)
    return next(iter(fitting), None)
