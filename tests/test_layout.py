"""Which folder may import which, and how large folders and functions get. Read from the syntax trees."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The lowest first; a module belongs to the longest name that it begins with, and imports its own room and lower ones.
LAYERS = (
    *("tlt.errors", "tlt.geometry", "tlt.label_map", "tlt.mixtoken"),
    *("tlt.io", "tlt.models", "tlt.data.augment", "tlt.data.sources", "tlt.data.backends", "tlt.data", "tlt.labels"),
    *("tlt.sparse_labels", "tlt.shares", "tlt.targets", "tlt.mix", "tlt.loss", "tlt.upstream", "tlt.utils"),
    *("tlt", "tlt.tools", "tlt.__main__"),
    *("volo.config", "volo.kernels", "volo.models", "volo.cluster", "volo.record", "volo.checkpoint", "volo.train"),
    *("volo.memory", "volo.commands", "volo", "benchmarks"),
)
FILES, LINES, PACKED = 20, 60, 80  # at most, in a folder and in a function; assignments that pack several values
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("tlt", "volo", "benchmarks")
    for path in (ROOT / package).rglob("*.py")
}


def packed(node: ast.AST) -> bool:
    """Return whether a statement assigns several values to as many targets: `a, b = f(x), g(y)`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    lengths = [len(target.elts) for target in node.targets if isinstance(target, ast.Tuple)]
    return len(node.value.elts) in lengths


def room_of(module: str) -> int:
    """Its place in LAYERS."""
    names = [room for room in LAYERS if f"{module}.".startswith(f"{room}.")]
    return LAYERS.index(max(names, key=len))


def imported_by(module: str) -> set[str]:
    """The modules of this project that a module imports, wherever in its file."""
    result = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            result |= {name if name in MODULES else node.module for name in full}
        elif isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
    return (result & MODULES.keys()) - {module}


def circles(imports: dict[str, set[str]]) -> Iterator[str]:
    """Modules from which imports lead back to themselves, with all others on the way."""
    reached = {module: set(others) for module, others in imports.items()}
    for via in reached:
        for others in reached.values():
            if via in others:
                others |= reached[via]
    yield from {" ".join(sorted(o for o in others if m in reached[o])) for m, others in reached.items() if m in others}


def broken() -> Iterator[str]:
    """What breaks a rule, a line each."""
    imports = {module: imported_by(module) for module in MODULES}
    for module, others in imports.items():
        yield from (f"upwards: {module} -> {other}" for other in others if room_of(other) > room_of(module))
    yield from (f"circle: {names}" for names in circles(imports))
    for folder in {path.parent for path in MODULES.values()}:
        if len(files := list(folder.glob("[!_]*.py"))) > FILES:
            yield f"folder: {folder.relative_to(ROOT)} has {len(files)} files"
    together = 0
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            together += packed(node)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > LINES:
                    yield f"function: {module}.{node.name} has {lines} lines"
    if together > PACKED:
        yield f"{together} assignments pack several values (tests/code_stats.py counts them)"
    for path in (ROOT / "tests").rglob("test_*.py"):
        yield from map("name above 60 letters: {}".format, re.findall(r"^def (test_\w{56,})", path.read_text(), re.M))


def test_the_rules_hold():
    assert sorted(broken()) == []
