"""Settings as fields: a group of settings is a frozen dataclass, and a setting a field of it.

    class Precision(Group):
        '''Precision and speed'''
        amp: bool = switch("mixed precision", also="--native-amp")
        amp_dtype: Literal["float16", "bfloat16"] | None = flag(None, "(float16 on GPUs)", needs="--amp")

A field says everything about its flag; the parser is made of the fields (`parser.py`). A class of `Settings` has the
groups of a program: each is a section of its `--help`, titled by the docstring. A group may hold another one, which
programs share, whole or without some of its settings. This module imports nothing slow, so that `--help` answers at
once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from tlt.errors import UserError
from volo.config.checkpoint_files import holds_features, single_checkpoint
from volo.config.value_types import PLAIN, TEACHER, WEIGHTS

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[type], type]:
        """Stands in for it, which Python 3.10 does not have."""
        return lambda kind: kind


# Where a value comes from. A later one overrules an earlier one, but data and checkpoint complete what the user left
# open. "other flags": the value follows from those that the user has set.
Source = Literal["default", "recipe", "command line", "other flags", "data", "checkpoint"]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Group:
    """A group of settings. A subclass is a frozen dataclass; its docstring is the title in `--help`, and a note."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Need(NamedTuple):
    """A condition without which a setting has no effect: its name in messages, and a test of all settings."""

    of: str
    met: Callable[[Any], bool]


Needs = str | Need | tuple[str | Need, ...]
ValueType = Callable[[str], Any] | tuple[str, ...] | None


@dataclass(frozen=True)
class Flag:
    """How a setting is written: everything about a flag.

    Attributes:
        dest: Name of the setting, also in YAML files.
        names: A name without a dash is positional.
        type: Type of the value, or of each value if `nargs` takes several. A tuple lists the choices; None is a switch.
        const: Value of the flag if it is given without a value.
        needs: A flag that differs from its default is refused as without effect unless all of these are met.
        excludes: Settings of flags that set the same value. Two of them together are refused, but a flag on the
            command line overrides others in a recipe, unless the command line switches it off.
        refused: Why the flag must keep its default; "" if it can be set.
        required: Says what is missing without the flag; "" if the flag can be left out.
        path: Names of the groups that hold the field, from the outermost to the innermost.
    """

    dest: str
    names: tuple[str, ...]
    type: ValueType
    default: Any
    help: str
    nargs: int | str | None = None
    metavar: str | None = None
    const: Any = None
    needs: tuple[Need, ...] = ()
    excludes: tuple[str, ...] = ()
    refused: str = ""
    required: str = ""
    path: tuple[str, ...] = ()

    @property
    def switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.type is None

    @property
    def label(self) -> str:
        """The flag's name in messages: its first long name."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    def words(self, value: Any) -> list[str]:
        """Return the flag with this value as words of a command line."""
        items = [f"{key}={item}" for key, item in value.items()] if isinstance(value, dict) else value
        words = [] if self.switch else items if isinstance(items, list) else [items]
        return [self.label, *map(str, words)]

    def as_typed(self, value: Any) -> str:
        """Return the flag with this value as it is written on a command line."""
        return " ".join(self.words(value))


def flag(default: Any, help: str, type: ValueType = None, *, needs: Needs = (), **more: Any) -> Any:
    """Return a field for a setting.

    Args:
        type: Lists the choices, where the annotation does not.
        needs: Conditions without which the flag has no effect. A text is what the user has to type: "--flag" must be
            set, "--flag word" must have this value, or have it among others.
        more: Further attributes of `Flag`; `positional=True`; `names`, separated by spaces, in place of "--the-name";
            or `also`, which are names beside it.
    """
    return _field(default, {"help": help, "type": type, "needs": _all_of(needs), **more})


switch = partial(flag, False)


def needing(first: str | Need) -> Callable[..., Any]:
    """Return a function like `flag`, for settings with a need that is checked before their own ones."""

    def needy(*args: Any, needs: Needs = (), **more: Any) -> Any:
        return flag(*args, needs=(*_all_of(first), *_all_of(needs)), **more)

    return needy


def taken(kind: type, name: str) -> Any:
    """Return the field `name` of another group, for one more group."""
    (other,) = (f for f in fields(kind) if f.name == name)
    return _field(other.default, other.metadata["flag"])


def group(
    kind: Callable[..., Any], without: str = "", *, text: str = "", needs: Needs = (), own: bool = True, **changes: Any
) -> Any:
    """Return a field for a group of settings.

    Args:
        without: Names of settings and groups inside it that this program has no flags for, separated by spaces.
        text: Title and note, if they aren't those of the group's docstring.
        needs: Of all its settings, checked before their own ones.
        own: False: without their own needs.
        changes: Other defaults.
    """
    here = {"without": {*without.split()}, "text": text, "needs": _all_of(needs), "own": own}
    return field(default_factory=partial(kind, **changes), metadata=here)


def _field(default: Any, flag: dict[str, Any]) -> Any:
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata={"flag": flag})
    return field(default=default, metadata={"flag": flag})


def _all_of(needs: Needs) -> tuple[Need, ...]:
    return tuple(map(_need, (needs,) if isinstance(needs, (str, Need)) else needs))


def _need(need: str | Need) -> Need:
    if isinstance(need, Need):
        return need
    name, _, word = need.partition(" ")
    dest = name.lstrip("-").replace("-", "_")

    def met(settings: Settings) -> bool:
        value = settings[dest]
        return word in (value if isinstance(value, list) else [value]) if word else bool(value)

    return Need(need, met)


class Section(NamedTuple):
    """Flags that `--help` shows together, with a title and perhaps a note."""

    title: str
    note: str | None
    flags: list[Flag]


def sections_of(kind: type) -> list[Section]:
    """Return the sections of a program's `--help`: the groups of its settings. Settings without groups are one section,
    and so is a group with what is inside it."""
    settings = kind()
    sections = [
        _section(f.metadata["text"] or owner.__doc__, _flags(owner, (f.name,), **f.metadata))
        for f in fields(kind)
        if isinstance(settings, Settings) and isinstance(owner := getattr(settings, f.name), Group)
    ]
    return sections or [_section(kind.__doc__, _flags(settings, ()))]


def _section(text: str | None, flags: Iterator[Flag]) -> Section:
    title, _, note = (text or "").partition("\n")
    return Section(title, " ".join(note.split()) or None, list(flags))


def _flags(
    owner: Any,
    path: tuple[str, ...],
    without: Set[str] = frozenset(),
    needs: Needs = (),
    own: bool = True,
    text: str = "",
) -> Iterator[Flag]:
    """Yield the flags of a group, and of those inside it, with what is said of it where it is used."""
    hints = get_type_hints(type(owner), include_extras=True)
    for f in fields(owner):
        if f.name in without:
            continue
        value = getattr(owner, f.name)
        if isinstance(value, Group):
            inner = f.metadata
            yield from _flags(
                value, (*path, f.name), without | inner["without"], needs + inner["needs"], own and inner["own"]
            )
        elif "flag" in f.metadata:
            row = f.metadata["flag"]
            yield _flag(f.name, hints[f.name], value, path, **row | {"needs": needs + row["needs"] * own})


def _flag(
    dest: str,
    hint: Any,
    default: Any,
    path: tuple[str, ...],
    type: ValueType,
    names: str = "",
    also: str = "",
    positional: bool = False,
    **more: Any,
) -> Flag:
    """Return a flag; what its field leaves open follows from the annotation."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is list:
        (hint,) = get_args(hint)
        more.setdefault("nargs", "+")
    if get_origin(hint) is dict:
        more = {"nargs": "*", "metavar": "K=V", **more}
    if get_origin(hint) is Literal:
        type = get_args(hint)
    elif get_origin(hint) is Annotated:
        (type,) = hint.__metadata__
    else:
        type = type or PLAIN.get(get_origin(hint) or hint)
    own = dest if positional else f"--{dest.replace('_', '-')}"
    spellings = names.split() or sorted([own, *also.split()], key=lambda name: name.startswith("--"))
    return Flag(dest, tuple(spellings), type, default, path=path, **more)


_FLAGS: dict[type, dict[str, Flag]] = {}


def flags_of(kind: type) -> dict[str, Flag]:
    """Return the flags of a program or a group, by the name of the setting, in the order of `--help`."""
    if kind not in _FLAGS:
        _FLAGS[kind] = {flag.dest: flag for section in sections_of(kind) for flag in section.flags}
    return _FLAGS[kind]


class Settings(Group):
    """All settings of a program. Subclasses have its groups.

    `settings["epochs"]` is a setting by its name alone, for what concerns any setting: records, messages, recipes.

    Attributes:
        sources: Where each value that is not the default comes from.
        notes: Lines that rank 0 prints once.
    """

    sources: Mapping[str, Source] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        owner: Any = self
        for step in flags_of(type(self))[name].path:
            owner = getattr(owner, step)
        return getattr(owner, name)

    def values(self) -> dict[str, Any]:
        """Return all settings by name."""
        return {name: self[name] for name in flags_of(type(self))}

    def decide(self: S, source: Source, **values: Any) -> S:
        """Return the settings with other values, which come from `source`."""
        flags = flags_of(type(self))
        changes = dict[str, Any]()
        for name, value in values.items():
            inner = changes
            for step in flags[name].path:
                inner = inner.setdefault(step, {})
            inner[name] = value
        decided: S = _replaced(self, changes)
        return replace(decided, sources={**self.sources, **dict.fromkeys(values, source)})

    def noting(self: S, *lines: str) -> S:
        """Return the settings with further lines to print."""
        return replace(self, notes=(*self.notes, *lines))

    def told(self) -> list[str]:
        """Return a line for each source with the flags whose values it has set to others than the defaults."""
        flags_by: dict[str, list[str]] = {}
        for name, row in flags_of(type(self)).items():
            if (value := self[name]) != row.default:
                text = row.as_typed(value) if row.label.startswith("-") else str(value)
                flags_by.setdefault(self.sources.get(name, "default"), []).append(text)
        return [f"set by {source}: {' '.join(flags)}" for source, flags in flags_by.items()]

    def set_by_user(self, name: str) -> bool:
        """Whether command line or recipe set this value."""
        return self.sources.get(name) in ("recipe", "command line")


S = TypeVar("S", bound=Settings)


def _replaced(owner: Any, changes: Mapping[str, Any]) -> Any:
    """Return a group with changes; those to a group inside it are a mapping."""
    inside = {k: _replaced(getattr(owner, k), v) for k, v in changes.items() if isinstance(getattr(owner, k), Group)}
    return replace(owner, **{**changes, **inside})


def check_flags(settings: S) -> S:
    """Refuse flags that are missing, can't be set, contradict each other, or have no effect. Replace folders of
    checkpoints by files, with a line for the log for each, unless the flag `--all` is set. Raises UserError: the
    message is about the first flag that is refused."""
    flags = flags_of(type(settings))
    given = {row.dest: value for row in flags.values() if (value := settings[row.dest]) != row.default}
    rows = [flags[dest] for dest in given]
    for row in flags.values():
        if row.required and row.dest not in given:
            raise UserError(f"{row.names[0]} {getattr(row.type, 'metavar', 'VALUE')} is missing: {row.required}")
    for row in rows:
        text = row.as_typed(given[row.dest])
        if row.refused:
            raise UserError(f"{text}: {row.refused}")
        for other in rows:
            if other.dest in row.excludes:
                raise UserError(f"{text} and {other.as_typed(given[other.dest])} set the same: keep one of them")
    for row in rows:
        for need in row.needs:
            if not need.met(settings):
                raise UserError(f"{row.as_typed(given[row.dest])} has no effect without {need.of}")
    for row in rows if not given.get("all") else ():
        if row.type in (WEIGHTS, TEACHER):
            settings = _with_files(settings, row, given[row.dest])
    return settings


def _with_files(settings: S, row: Flag, value: list[str] | str) -> S:
    """Return the settings with the file that each folder of a checkpoint stands for."""
    places = value if isinstance(value, list) else [value]
    stands = [os.path.isdir(place) and not (row.type is TEACHER and holds_features(place)) for place in places]
    files = [str(single_checkpoint(p, row.label)) if folder else p for p, folder in zip(places, stands, strict=True)]
    if files == places:
        return settings
    lines = (
        f"{row.as_typed(old)}: {os.path.basename(new)}" for old, new in zip(places, files, strict=True) if old != new
    )
    source = settings.sources.get(row.dest, "command line")
    return settings.decide(source, **{row.dest: files if isinstance(value, list) else files[0]}).noting(*lines)
