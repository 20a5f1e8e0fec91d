"""YAML recipes: values for known flags, strictly checked."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import yaml

from tlt.errors import UserError
from volo.config.flag_table import Flag, nearest

# A recipe in a recipe would need rules of precedence; the second name of the data directory is not needed.
_NOT_IN_RECIPES = ("config", "data_dir_option")
_MOST_ITEMS, _MOST_BYTES = 100_000, 1_000_000
_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(folder: str) -> Path:
    """Return the folder "configs" or "slurm": at the root of a checkout, in the package where it is installed."""
    installed = _PACKAGE / "files" / folder
    return installed if installed.is_dir() else _PACKAGE.parent / folder


def recipe_file(name: str) -> str:
    """Return the file that `-c` names: a path, or a recipe of this project by its name alone (`volo_d1_224`)."""
    known = shipped("configs") / f"{name}.yaml"
    return str(known) if not Path(name).exists() and Path(name).name == name and known.is_file() else name


class _Loader(yaml.SafeLoader):
    """Reads plain data only; refuses duplicate keys, and merge keys (`<<`), which can expand to billions of values."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[Any] = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            twice, merge = key.value in names, key.tag == "tag:yaml.org,2002:merge"
            if twice or merge:
                problem = "<< is not read: write the keys out" if merge else f"{key.value!r} stands there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)


# Flags that are gone, with the value that changes nothing: what older runs have written down holds them.
GONE = {"aug_order": "timm", "train_crop_mode": "rrc"}


def load_yaml(path: str, known: Mapping[str, Flag]) -> dict[str, Any]:
    """Read a recipe: a mapping from flag names (dashes or underscores) to values.

    Values are checked as if they stood on the command line: type, range, choices, number of values.

    Args:
        path: The YAML file, or the name of a recipe of this project.
        known: The program's flags by destination.

    Returns:
        Values by destination.

    Raises:
        UserError: The file can't be read, isn't a plain mapping, or has an unknown key (the nearest one is named) or a
            value that the flag doesn't take.
    """
    path = recipe_file(path)
    allowed = {dest: row for dest, row in known.items() if dest not in _NOT_IN_RECIPES}
    values: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        dest = str(key).replace("-", "_")
        if dest in GONE and value == GONE[dest]:
            continue
        if dest not in allowed:
            near = nearest(dest, allowed)
            raise UserError(f"{path}: unknown key {shortened(key)}" + (f", did you mean {near}?" if near else ""))
        if dest in values:
            raise UserError(f"{path}: {dest} stands there twice, with dashes and with underscores")
        try:
            values[dest] = _convert(allowed[dest], value)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise UserError(f"{path}: {key}: {error}") from error
    return values


def _mapping(path: str) -> dict[Any, Any]:
    try:
        info = os.stat(path)
        if not stat.S_ISDIR(info.st_mode) and (not stat.S_ISREG(info.st_mode) or info.st_size > _MOST_BYTES):
            raise UserError(f"--config {path}: not a file of less than {_MOST_BYTES} bytes, as recipes are")
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path}: not a text file") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"--config {path}{line}: {' '.join(str(error.problem).split())}") from error
    except Exception as error:  # any other effect of bad content: a month 13, brackets nested too deeply
        raise UserError(f"--config {path}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    if _is_huge(content):
        raise UserError(f"--config {path}: its aliases make it endless, or far too large; write the values out")
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise UserError(f"--config {path}: holds {found} where KEY: VALUE lines are expected")
    return content


def _is_huge(content: Any) -> bool:
    """Whether lists and mappings, with aliases expanded, hold more values than a recipe could need."""
    items = [content]
    for _ in range(_MOST_ITEMS):
        if not items:
            return False
        item = items.pop()
        if isinstance(item, dict):
            items += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set)):
            items += item
    return bool(items)


def _convert(row: Flag, value: Any) -> Any:
    """Convert `value` as the flag `row` does on the command line; raises ValueError or ArgumentTypeError."""
    if row.switch:
        if not isinstance(value, bool):
            raise ValueError(f"{shortened(value)} is neither true nor false")
        return value
    if value is None:
        if row.default is not None:
            raise ValueError("has no value")
        return None
    if row.key_values:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"{shortened(value)} is no mapping from names to values")
        return value
    if row.const is not None and isinstance(value, bool):
        return row.const if value else None
    if row.nargs == "+" or isinstance(row.nargs, int):
        return _convert_list(row, value)
    return _convert_one(row, value)


def _convert_list(row: Flag, value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    if isinstance(row.nargs, int) and len(items) != row.nargs:
        raise ValueError(f"{len(items)} values where {row.nargs} are expected")
    if not items:
        raise ValueError("an empty list")
    return [_convert_one(row, item) for item in items]


def _convert_one(row: Flag, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(
            f"{shortened(value)} is no value for {row.label}; text that looks like something else needs quotes"
        )
    if "\0" in str(value):
        raise ValueError(f"{shortened(value)} holds a zero byte")
    result = row.type(str(value))
    if row.choices is not None and result not in row.choices:
        raise ValueError(f"invalid choice: {shortened(value)} (choose from {', '.join(map(repr, row.choices))})")
    return result
