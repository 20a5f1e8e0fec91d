"""Errors that the user can fix. Each has a message of one line."""

import importlib
import math
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from numbers import Integral, Real
from types import ModuleType


class UserError(Exception):
    """Bad input. The message is one line that names the file or flag and how to fix it.

    Programs print it without a traceback and exit with `exit_code` (see `volo.commands.console`).
    """

    exit_code = 2


class MissingSplit(UserError):
    """The data set has no such split. `tlt.data.sources` adds the name of the flag that chooses another."""


class MachineFault(UserError):
    """A file can't be read, but the machine is at fault, not the file: its storage fails or is lost, too many files are
    open, or memory is short. The file may be good, and another start may succeed."""

    exit_code = 5


class WorkerDied(UserError):
    """A data worker was killed, or ran out of memory, shared memory or open files. Another start may succeed."""

    exit_code = 5


class NonFiniteError(UserError):
    """Too many consecutive optimizer steps had non-finite gradients. The last saved checkpoint is not affected."""

    exit_code = 3


def reason_of(error: BaseException, length: int = 300) -> str:
    """Return the message of another library's error in one line, cut to `length`; the error's type if it has none."""
    return " ".join(str(error).split())[:length] or type(error).__name__


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise UserError if the argument `name` is none of the choices."""
    if value not in choices:
        raise UserError(f"{name} {value}: choose from {', '.join(map(str, choices))}")


def in_range(
    name: str, value: object, low: float, high: float = math.inf, counts: Sequence[int] = (1,), whole: bool = False
) -> None:
    """Raise UserError unless the argument `name` is `counts` numbers (one or more allowed counts) in [low, high]. With
    `whole` they must be integers."""
    values = value if isinstance(value, Sequence) else [value]
    kind = Integral if whole else Real
    if len(values) not in counts or not all(isinstance(v, kind) and low <= float(v) <= high for v in values):
        many = " or ".join(map(str, counts)) + f" number{'s' * (counts != (1,))}"
        limit = f" and at most {high:g}" * (high < math.inf) + ", without a fraction" * whole
        raise UserError(f"{name} {value}: give {many}, at least {low:g}{limit}")


def in_range_all(low: int, **numbers: object) -> None:
    """Raise UserError unless each of the named arguments is an integer that is not below `low`."""
    for name, value in numbers.items():
        in_range(name, value, low, whole=True)


def size_of(name: str, size: Sequence[int]) -> tuple[int, int]:
    """Return the argument `name`, a size (H, W) or a grid, as a tuple. Raise UserError if it is no such sequence."""
    in_range(name, size, 1, counts=(2,), whole=True)
    return int(size[0]), int(size[1])


def require(module: str, extra: str) -> ModuleType:
    """Import and return an optional package by its import name, such as `"matplotlib"`. Raise UserError, which names
    the pip extra of this project that installs it, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{module} is not installed: {install_command(extra)} ({error})") from error


def install_command(extra: str = "") -> str:
    """Return the command that installs this project with a pip extra. It installs from the repository that
    pyproject.toml names (`project.urls`), or from a checkout if it names none. PyPI has no package of this name."""
    brackets = extra and f"[{extra}]"
    with suppress(PackageNotFoundError):
        for url in metadata("volo-tlt").get_all("Project-URL") or ():
            label, _, address = url.partition(", ")
            if label == "Repository":
                return f"pip install 'volo-tlt{brackets} @ git+{address}'"
    return f"pip install '.{brackets}' in a checkout of volo-tlt"
