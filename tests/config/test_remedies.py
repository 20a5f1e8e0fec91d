"""What a program tells its user to do, that user can do: a flag that a message names is one of the program's own."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.config.test_docs import flags_of
from volo.cli import COMMANDS
from volo.config.parser import SCRIPTS

ROOT = Path(__file__).parents[2]
TOOLS = {name: name.replace("-", "_") for name in ("show", "check", "pack", "pack-images", "pack-masks", "pack-table")}
TOOLS["unpack"] = "pack"
WITH_WEIGHTS = ("validate", "label", "predict", "export", "attention")
# The modules of one program or a few. Messages of all other modules may name the flags of any program.
MODULES = [
    *((command.module, name) for name, command in COMMANDS.items()),
    *((f"tlt.tools.{module}", f"tlt {name}") for name, module in TOOLS.items()),
    *(("volo.train.trained_model", name) for name in WITH_WEIGHTS),
    ("volo.commands.hub", "export"),
    ("tlt.tools.coco", "tlt pack-masks"),
    ("tlt.tools.masks", "tlt pack-masks"),
]
# In a clause, the flags behind the name of a program are that program's.
COMMAND = re.compile(r"volo ([a-z]+)|(tlt [a-z-]+)|(train|validate|generate_label)\.py|docker|\btar\b|torchrun|sbatch")


def texts_of(file: Path) -> Iterator[str]:
    """The texts in a file's code, without docstrings, and without CSS, whose properties look like flags."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    bodies = [node.body for node in nodes if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from [node.value] * (" " in node.value and not node.value.startswith("\n:root{"))


@cache
def flags(program: str) -> set[str]:
    return flags_of(program) | {"--help"}


def foreign_flags(programs: set[str], text: str) -> list[str]:
    """The flags in a text that neither one of the programs has nor the program that the text names before them."""
    foreign = []
    for clause in re.split(r"[();,]", text):
        named = programs
        for part in re.finditer(rf"(?P<command>{COMMAND.pattern})|(?<![\w-])(?P<flag>--[a-z][\w-]*[a-z])", clause):
            if part["command"]:
                script = next((name for name, file in SCRIPTS.items() if file == part["command"]), None)
                named = {script or part["command"].removeprefix("volo ")}
            elif not named & {"docker", "tar", "torchrun", "sbatch"}:
                foreign += [part["flag"]] * (part["flag"] not in set().union(*map(flags, named)))
    return foreign


@pytest.mark.parametrize("folder", ["volo", "tlt"])
def test_the_flags_that_a_program_speaks_of_are_its_own(folder):
    for file in (ROOT / folder).rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        programs = {name for other, name in MODULES if other == module} or {name for _, name in MODULES}
        for text in texts_of(file) if not module.startswith("volo.config") else ():
            assert not foreign_flags(programs, text), f"{module}: {text}"
