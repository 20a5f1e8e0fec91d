"""The parser of a program, made of the fields of its settings, and what a mistyped name may mean.

This module imports nothing slow, so that `--help` answers at once.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from shutil import get_terminal_size
from typing import Any, Generic, NoReturn

from tlt import __version__
from tlt.errors import UserError
from tlt.io.text import WholeWords, fill
from volo.config.fields import Flag, S, check_flags, flags_of, sections_of
from volo.config.flags_elsewhere import ELSEWHERE
from volo.config.value_types import key_value


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError, and suggests the nearest flag for an unknown one.

    Abbreviated flags are refused, because a flag added later could silently change what an abbreviation means.
    """

    def __init__(self, program: "Program[Any]") -> None:
        name = _started_as(program.name)
        epilog = "Values in brackets are the defaults, words in parentheses what happens without the flag."
        epilog += " --no-X turns a switch off that a recipe turns on, and --X a switch --no-X." if program.undo else ""
        width = min(get_terminal_size().columns, 120) - 2
        columns = partial(WholeWords, max_help_position=34, width=width)
        usage = fill(f"{name} {program.usage}", width - 7, " " * 7)
        super().__init__(name, usage, program.description, epilog, formatter_class=columns, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"volo-tlt {__version__}")
        self.flags = flags_of(program.settings)
        self.instead = program.instead
        self._names = {name: row for row in self.flags.values() for name in row.names}
        for section in sections_of(program.settings):
            place = self.add_argument_group(section.title, section.note)
            for row in section.flags:
                _add(place, row, {*self._names} if program.undo else None)

    def error(self, message: str) -> NoReturn:
        """Raise a UserError with `message`, which is a single line."""
        message = message.replace("ignored explicit argument", "a switch takes no value:")
        raise UserError(f"{message} (see {self.prog} --help)")

    def explicit(self, argv: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the values of the flags in `argv` (None: sys.argv) by destination, without defaults. Raises UserError:
        a flag is unknown (the message suggests the nearest one), or its value is wrong or missing."""
        parsed, unknown = self.parse_known_args(argv)
        if flags := [self._unknown(item) for item in unknown if item.startswith("-")]:
            self.error("; ".join(flags))
        alone = [value for dest, value in vars(parsed).items() if self.flags[dest].names[0][0] != "-"]
        words = [str(word) for value in alone for word in (value if isinstance(value, list) else [value])] + unknown
        absent = [word for word in words if not os.path.exists(word)]
        if pairs := {word: text for word in absent if (text := self._as_typed(word))}:
            self.error(f"{' '.join(pairs)}: write {' '.join(pairs.values())}")
        if truth := [word for word in absent if word.lower() in ("true", "false")]:
            self.error(f"{truth[0]}: a switch takes no value, its name alone turns it on")
        if unknown:
            self.error(f"one argument too many: {' '.join(unknown)}")
        values = vars(parsed)
        return values | {dest: dict(values[dest]) for dest in values if self.flags[dest].type is key_value}

    def words_of(self, values: Mapping[str, Any]) -> list[str]:
        """Return a command line of flags with these values. Names have underscores; True and False switch on and off,
        and None is no value."""
        words: list[str] = []
        for name, value in values.items():
            option = f"--{name.replace('_', '-')}"
            items = value.tolist() if hasattr(value, "tolist") else value
            flag = self._option_string_actions.get(option)
            if value is False and flag is not None and flag.nargs == 0:
                opposite = f"--{option[5:]}" if option.startswith("--no-") else f"--no-{option[2:]}"
                words += [opposite] * (opposite in self._option_string_actions)  # without one it is off in any case
            elif isinstance(items, Mapping):
                words += [option, *(f"{key}={item!r}" for key, item in items.items())]
            elif isinstance(items, (list, tuple)):
                words += [option, *map(str, items)]
            elif items is not None:
                words.append(option if items is True else f"{option}={items}")
        return words

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices and (near := nearest(value, action.choices)):
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}, did you mean {near}?")
        super()._check_value(action, value)

    def _as_typed(self, word: str) -> str:
        """Return KEY=VALUE, as other programs have it, as this one takes it; "" for another word."""
        key, equals, value = word.partition("=")
        near = (nearest(key, self._names) if equals and key.isidentifier() else None) or ""
        row = self._names.get(near)
        if row is None or (not row.switch and value.lower() in ("true", "false")):
            return near
        if row.switch and value.lower() in ("false", "0"):
            return f"no {row.label}"
        return row.as_typed(value) if row.names[0].startswith("-") else value

    def _unknown(self, item: str) -> str:
        name = item.partition("=")[0]
        if reason := self.instead.get(name.replace("_", "-")):
            return f"{name} (timm): {reason}"
        near = nearest(name, ["--help", "--version", *self._names])
        if near in self._names and not near.startswith("-"):
            near = f"{self._names[near].metavar or near.upper()}, without a flag"
        return f"unknown flag {name}" + (f", did you mean {near}?" if near else "")


@dataclass(frozen=True)
class Program(Generic[S]):
    """A program of `volo`, or another one.

    Attributes:
        name: The command of `volo`, or how else the program is started.
        usage: The rest of its usage line.
        check: Returns the settings complete.
        does: What it does, if the docstring of its settings doesn't say it: that of a class without groups is a title.
        undo: Add `--no-X` for every switch `--X`, and `--X` for `--no-X`, which undo a recipe's switch, unless that is
            a flag of its own.
        instead: For flags that only another program has: what this one has in their place.
    """

    name: str
    usage: str
    settings: type[S]
    check: Callable[[S], S] = check_flags
    does: str = ""
    undo: bool = False
    instead: Mapping[str, str] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """What it does."""
        return self.does or self.settings.__doc__ or ""

    def parser(self) -> FlagParser:
        """Return a new parser for this program's flags."""
        return FlagParser(self)

    def parse(self, argv: Sequence[str] | None = None) -> S:
        """Parse a command line (None: sys.argv). Raises UserError: a flag is unknown, a value is wrong, flags
        contradict each other, or one has no effect."""
        return self.check(self.settings().decide("command line", **self.parser().explicit(argv)))


# The published scripts at the root of a checkout, by the `volo` command that they correspond to.
SCRIPTS = {"train": "train.py", "validate": "validate.py", "label": "generate_label.py"}


def _started_as(program: str) -> str:
    """Return the command that the user types: the script of a checkout if that was started, else `volo PROGRAM`."""
    if program.startswith("python "):
        return program
    script = SCRIPTS.get(program)
    return script if script and script == os.path.basename(sys.argv[0]) else f"volo {program}"


def _add(place: argparse._ArgumentGroup, row: Flag, taken: Set[str] | None) -> None:
    """Add a row to a parser, without its default, so that the parser returns only what the user has set. Add a switch's
    opposite unless its name is `taken`; None adds none."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": row.help + _default_text(row)}
    if row.names[0].startswith("-"):
        options["dest"] = row.dest
    if row.switch:
        place.add_argument(*row.names, action="store_true", **options)
        names = [f"--{name[5:]}" if name.startswith("--no-") else f"--no-{name[2:]}" for name in row.names]
        if taken is not None and not taken & {*names}:
            place.add_argument(*names, action="store_false", **options | {"help": argparse.SUPPRESS})
        return
    choices, kind = (row.type, str) if isinstance(row.type, tuple) else (None, row.type or str)
    metavar = row.metavar or getattr(kind, "metavar", None)
    if row.const is not None:
        options["const"] = row.const
    place.add_argument(*row.names, type=kind, choices=choices, metavar=metavar, nargs=row.nargs, **options)


def _default_text(row: Flag) -> str:
    if row.default in (None, False, "", {}) or not row.names[0].startswith("-"):
        return ""
    values = row.default if isinstance(row.default, list) else [row.default]
    text = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f" [{text.replace('%', '%%')}]"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return what `name` most likely means among the known names: one that looks the same, the one that another program
    calls so, the most similar, the longest of its words, the shortest with all its words, or the first that begins with
    it; else None."""
    plain = {other: other.lstrip("-").replace("_", "-") for other in known}
    words = name.lstrip("-").replace("_", "-")
    fitting = [other for other, text in plain.items() if look_of(text) == look_of(words)]
    for meant in (meant for meant, names in ELSEWHERE.items() if words.lower() in names.split()):
        first = re.split(r"[ ,]", meant)[0]
        said = first.lstrip("-").replace("_", "-")
        fitting += [meant.replace(first, other, 1) for other, text in plain.items() if text == said]
        fitting += [meant] * meant.startswith("volo ")
    close = difflib.get_close_matches(words, list(plain.values()), n=1, cutoff=0.8)
    fitting += [other for other, text in plain.items() if text in close]
    inside = (o for o, text in plain.items() if {*text.split("-")} <= {*words.lower().split("-")})
    fitting += sorted(inside, key=len, reverse=True)
    fitting += sorted((o for o, text in plain.items() if {*words.split("-")} <= {*text.split("-")}), key=len)
    fitting += [other for other, text in plain.items() if len(words) > 2 and text.startswith(words)]
    return next(iter(fitting), None)


def look_of(name: str) -> str:
    """Return a key that is the same for names that look the same, as O and 0, l and 1, - and _ do."""
    return name.lower().translate(_LOOKS)


_LOOKS = str.maketrans("oil", "011", "-_. ")
