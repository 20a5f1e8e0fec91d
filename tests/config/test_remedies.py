"""What a program tells its user to do, that user can do: a flag that a message names is one of the program's own."""

import ast
import re
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.config.test_docs import flags_of
from volo.cli import COMMANDS
from volo.config.flag_table import SCRIPTS

ROOT = Path(__file__).parents[2]
MODULES = {"show": "show", "check": "check", "pack": "pack", "unpack": "pack", "pack-images": "pack_images"}
STARTS = {name: (command.module, "run") for name, command in COMMANDS.items()}
STARTS |= {f"tlt {name}": (f"tlt.tools.{module}", name.replace("-", "_")) for name, module in MODULES.items()}
# In a clause, the flags behind the name of a program are that program's.
COMMAND = re.compile(r"volo ([a-z]+)|(tlt [a-z-]+)|(train|validate|generate_label)\.py|docker|\btar\b|torchrun|sbatch")
# What a program reaches and never tells: it is said of a flag that was given, or names a limit and another remedy.
UNTOLD = {
    "train": {"choose_weights"},  # of a teacher
    "validate label predict export attention": {
        "check_convolutions",
        "_set_modes",
        "_try_size",
        "choose_kernel",
        "WithDenseHead",
        "SkippedSteps",
    },
    "validate label preflight": {"init_world", "open_images"},
    "report": {"_STYLE"},  # CSS has custom properties that look like flags
    "predict": {"SkipCounter"},  # where any number of images may be unreadable
    "attention tlt": {"LESS_MEMORY", "check_length", "check_pixel_limit", "pillow_errors"},  # no workers; --max-pixels
    "tlt": {"open_images", "parse_kind", "other_kinds", "open_labels", "_check_classes", "_check_missing"}
    | {"check_class_id"},
}


@cache
def definitions(module: str) -> dict[str, ast.AST | tuple[str, str]]:
    """The nodes of a module's names, or from where it imports them."""
    parts = ROOT / module.replace(".", "/")
    file = next((each for each in (parts.with_suffix(".py"), parts / "__init__.py") if each.is_file()), None)
    tree, found = ast.parse(file.read_text() if file else ""), dict[str, ast.AST | tuple[str, str]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("volo", "tlt"):
            found |= {each.asname or each.name: (node.module, each.name) for each in node.names}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


@cache
def uses(module: str, name: str) -> tuple[list[tuple[str, str]], list[str]]:
    """The names that a definition leads to, and its texts without docstrings."""
    node = definitions(module).get(name)
    if not isinstance(node, ast.AST):
        return [node] if node else [], []
    every = list(ast.walk(node))
    documented = [each.body[0] for each in every if isinstance(each, (ast.FunctionDef, ast.ClassDef))]
    docstrings = {id(each.value) for each in documented if isinstance(each, ast.Expr)}
    texts = [each for each in every if isinstance(each, ast.Constant) and id(each) not in docstrings]
    names = dict.fromkeys((module, each.id) for each in every if isinstance(each, ast.Name))
    return list(names), [each.value for each in texts if isinstance(each.value, str) and " " in each.value]


def told_by(program: str) -> Iterator[tuple[str, str]]:
    """(name of the definition, text) of all that a program's entry point leads to, but for the tables of flags."""
    left, seen = deque([STARTS[program]]), set[tuple[str, str]]()
    while left:
        if (place := left.popleft()) in seen or place[0].startswith("volo.config"):
            continue
        seen.add(place)
        names, texts = uses(*place)
        left.extend(names)
        yield from ((place[1], text) for text in texts)


def foreign_flags(program: str, text: str) -> list[str]:
    """The flags in a text of the program that neither it nor the program named before them has."""
    foreign = []
    for clause in re.split(r"[();,]", text):
        of = program
        for part in re.finditer(rf"(?P<command>{COMMAND.pattern})|(?<![\w-])(?P<flag>--[a-z][\w-]*[a-z])", clause):
            if part["command"]:
                script = next((name for name, file in SCRIPTS.items() if file == part["command"]), None)
                of = script or part["command"].removeprefix("volo ")
            elif of not in ("docker", "tar", "torchrun", "sbatch") and part["flag"] not in flags(of):
                foreign.append(part["flag"])
    return foreign


@cache
def flags(program: str) -> set[str]:
    return flags_of(program) | {"--help"}


def test_the_flags_that_a_program_speaks_of_are_its_own() -> None:
    foreign = {(program, name) for program in STARTS for name, text in told_by(program) if foreign_flags(program, text)}
    excused = {
        (program, name)
        for program in STARTS
        for programs, names in UNTOLD.items()
        for name in names
        if program.split()[0] in programs.split()
    }
    assert not foreign - excused
    assert {name for _, name in excused} == {name for _, name in foreign}
