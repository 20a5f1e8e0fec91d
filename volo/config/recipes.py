"""Recipes: YAML files with values of train.py's flags, which are checked as on the command line."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import yaml

from tlt.errors import UserError
from tlt.io.files import blamed_on, regular_only
from volo.config.fields import Flag
from volo.config.parser import FlagParser, nearest
from volo.config.value_types import key_value

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(folder: str) -> Path:
    """Return the folder "configs" or "slurm": inside an installed package, or else at the root of the checkout."""
    installed = _PACKAGE / "files" / folder
    return installed if installed.is_dir() else _PACKAGE.parent / folder


def recipe_file(name: str) -> str:
    """Return the path of the file that `-c` names: a path, or the name of one of this project's recipes. Raises
    UserError: there is neither; the message names the nearest recipe, or lists all."""
    recipes = {file.stem: str(file) for file in sorted(shipped("configs").glob("*.yaml"))}
    if os.path.lexists(name) or not name:
        return name
    if name not in recipes:
        near = nearest(Path(name).name.removesuffix(".yaml"), recipes)
        hint = f"did you mean {near}?" if near else f"recipes are {', '.join(recipes)}"
        raise UserError(f"--config {name}: No such file or directory, nor a recipe of this name; {hint}")
    return recipes[name]


class _Loader(yaml.SafeLoader):
    """Reads only plain data. It refuses duplicate keys, and aliases, which could expand to billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            where = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not read: write the values out", where)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load_yaml(path: str, parser: FlagParser) -> dict[str, Any]:
    """Read a recipe, a path or a name of one of this project's: a mapping from flag names (dashes or underscores) to
    values. Return them by destination, checked as on the command line: type, range, choices, number of values.

    Raises:
        UserError: The file can't be read or isn't a plain mapping, a key is unknown (the message suggests the nearest
            one), or a flag doesn't accept its value.
    """
    path = recipe_file(path)
    # A recipe inside a recipe would need rules of precedence. A recipe may use only one name of the data directory.
    rows = [row for row in parser.flags.values() if row.dest not in ("config", "data_dir_option")]
    known = {name.lstrip("-").replace("-", "_"): row for row in rows for name in row.names if len(name) > 3}
    values: dict[str, Any] = {}
    content, texts = _mapping(path)
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if reason := parser.instead.get(f"--{name.replace('_', '-')}"):
            raise UserError(f"{path}: {key} (timm): {reason}")
        if name not in known:
            near = nearest(name, known)
            raise UserError(f"{path}: unknown key {shortened(key)}" + (f", did you mean {near}?" if near else ""))
        row = known[name]
        if name != row.dest and value in (None, False):
            continue  # an alias that used to be a flag of its own, and is off
        with blamed_on(f"{path}: {key}", of=UserError):
            converted = convert(row, value, parser, texts.get(key, ()))
        if values.setdefault(row.dest, converted) != converted:
            raise UserError(f"{path}: {row.dest} stands there twice, under two names")
    return values


def _mapping(path: str) -> tuple[dict[Any, Any], dict[Any, list[str]]]:
    """Return a recipe's values by key, and the text of each value's items: a name may be written 001."""
    # Also for errors of bad content: a month 13, brackets nested too deeply.
    told = blamed_on(f"--config {path}", "can't be read", "mend it, or name another")
    with told, open(path, encoding="utf-8", opener=regular_only) as file:
        loader = _Loader(file)
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
    if not isinstance(content, dict):
        content_type = "nothing" if content is None else f"a {type(content).__name__}"
        raise UserError(f"--config {path}: holds {content_type} where KEY: VALUE lines are expected")
    texts = {}
    for key, value in pairs:
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        texts[key.value] = [item.value for item in items if item.id == "scalar"]
    return content, texts


def convert(row: Flag, value: Any, parser: FlagParser, written: Sequence[str] = ()) -> Any:
    """Convert `value` as the flag `row` does on the command line; `written` is the text of its items. Raises UserError:
    the flag doesn't accept the value."""
    if row.switch:
        if not isinstance(value, bool):
            raise UserError(f"{shortened(value)} is neither true nor false")
        return value
    if row.const is not None and isinstance(value, bool):
        return row.const if value else None
    if value is None:
        if row.default is not None:
            raise UserError("has no value")
        return None
    if row.type is key_value:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise UserError(f"{shortened(value)} is no mapping from names to values")
        return value
    several = row.nargs == "+" or isinstance(row.nargs, int)
    items = value if several and isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (str, int, float)):
            raise UserError(f"{shortened(item)} is no value; text that looks like something else needs quotes")
    words = list(written if len(written) == len(items) else map(str, items))
    if not row.names[0].startswith("-"):
        words = ["--", *words]
    else:
        words = [row.label, *words] if several else [f"{row.label}={words[0]}"]
    return parser.explicit(words)[row.dest]
