"""Whatever stands on a command line or in a recipe: it is understood, or refused in one line with exit code 2."""

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.program import COMMANDS as BENCHMARKS
from benchmarks.program import parse_benchmark, program_of
from tests.properties.outcomes import result_or_refusal
from volo.cli import COMMANDS
from volo.commands.console import run_program
from volo.config.fields import Flag, Settings
from volo.config.parser import FlagParser
from volo.config.recipes import load_yaml
from volo.config.train import TRAIN

BENCHMARK = (parse_benchmark, program_of(BENCHMARKS[0]).parser(), [*BENCHMARKS])
PROGRAMS: dict[str, tuple[Callable[[Sequence[str] | None], Settings], FlagParser, list[str]]] = {
    name: (COMMANDS[name].program.parse, COMMANDS[name].program.parser(), [])
    for name in ("train", "validate", "label", "export", "report", "preflight")
} | {"benchmark": BENCHMARK}
ODD = (  # no NUL: no command line can hold one
    "", "-", "--", "---", "-1", "0", "1e400", "nan", "-inf", "1_0", "0x10", "١", "9" * 5000, "1e-400", "a=b", "=", "a=",
    "a=" + "[" * 300, "a=" + "-" * 100_000 + "1", "a=1" + "+1" * 50_000, "\udcff", "a=\udcff", "a\nb", "--x\ny",
    "%s", "{}", "@file", "/dev/null", "/", "..", "auto", "true", "None", "0.5", "7", "--no-", "-b", "-h-",
)  # fmt: skip


def _values(row: Flag) -> st.SearchStrategy[str]:
    return st.sampled_from([*ODD, *(row.type if isinstance(row.type, tuple) else ()), str(row.default)]) | st.text(
        max_size=8
    )


@st.composite
def command_lines(draw: st.DrawFn, parser: FlagParser, commands: list[str]) -> list[str]:
    """Known and unknown flags with values that suit them, and values that don't."""
    words: list[str] = draw(st.lists(st.sampled_from(commands), max_size=1)) if commands else []
    rows = draw(st.lists(st.sampled_from(list(parser.flags.values())), max_size=6))
    for row in rows:
        name = draw(st.sampled_from([*row.names, row.label, f"--no-{row.label[2:]}", row.label[:-1], row.label + "x"]))
        values = draw(st.lists(_values(row), max_size=3))
        glue = draw(st.booleans()) and values and name.startswith("--")
        words += [f"{name}={values[0]}", *values[1:]] if glue else [name, *values]
    return words + draw(st.lists(st.sampled_from(ODD), max_size=2))


def _code(parse: Callable[[Sequence[str] | None], Settings], argv: list[str]) -> tuple[int, str]:
    """Exit code and standard error of a program that does nothing."""
    nothing = ModuleType("does_nothing")
    nothing.run = lambda args: 0  # type: ignore[attr-defined]
    sys.modules["does_nothing"] = nothing
    error = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")  # as Python opens stderr
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = run_program(parse, "does_nothing", argv)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    error.seek(0)
    return code, error.read()


@pytest.mark.parametrize("program", PROGRAMS)
@given(data=st.data())
def test_a_command_line_is_understood_or_refused_in_one_line(program, data):
    parse, parser, commands = PROGRAMS[program]
    argv = [word for word in data.draw(command_lines(parser, commands)) if word != "--debug"]
    code, error = _code(parse, argv)
    assert code in (0, 2)
    assert bool(error) == (code == 2)
    assert error.count("\n") == bool(error) and "Traceback" not in error, error


PARSER = TRAIN.parser()
# Nine lists of nine aliases each of the one before: 9 ** 9 items.
BOMB = "[&a [x], " + ", ".join(f"&{c} [{','.join(['*' + p] * 9)}]" for p, c in pairwise("abcdefghij")) + "]"
_WORDS = st.sampled_from(
    ["a", "lr", ":", ": ", "- ", "\n", "  ", "{", "}", "[", "]", "&a", "*a", "<<", "!!python/object:os.system",
     "!!binary", "!!timestamp", "!!int", "|", ">", "%YAML 9", "---", "'", '"', "#", "\t", "\0", "1", "2e", "=", "? "]
)  # fmt: skip


@settings(max_examples=2 * settings().max_examples)
@given(text=st.lists(_WORDS | st.text(max_size=3), max_size=20).map("".join))
@example(text="lr: !!int x")
@example(text="a: !!timestamp 1")
@example(text="? [a]\n: 1")
@example(text="<<: 3")
@example(text="[" * 2000)
@example(text="a: " + "{a: " * 2000)
@example(text="lr: 2001-99-99")
@example(text="lr: 1:2:3:4.5")
@example(text="a: &a [*a]\nlr: *a")
@example(text=f"lr: {BOMB}")
@example(text=f"model_kwargs: {{a: {BOMB}}}")
@example(text=f"{BOMB}: 1")
@example(text='initial_checkpoint: "a\\0"')
def test_any_text_as_a_recipe(text, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    result_or_refusal(lambda: load_yaml(str(file), PARSER))
