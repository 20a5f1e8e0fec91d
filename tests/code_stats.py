"""How large the house is, in numbers: `make house`."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.test_layout import LAYERS, MODULES, imported_by, packed, room_of  # noqa: E402

CODE = ("*.py", "volo/**/*.py", "tlt/**/*.py", "benchmarks/*.py", "demo/*.py", "examples/**/*.py")  # all but tests


def lines_of(*patterns: str) -> int:
    """The lines of all files that fit a pattern."""
    files = {file for pattern in patterns for file in ROOT.glob(pattern)}
    return sum(len(file.read_text().splitlines()) for file in files)


def nodes_of(*patterns: str) -> Iterator[ast.AST]:
    """Yield every node of the syntax trees of all Python files that fit a pattern."""
    for file in {file for pattern in patterns for file in ROOT.glob(pattern)}:
        yield from ast.walk(ast.parse(file.read_text()))


def main() -> None:
    """Print the lines of each room, and what else tells how easily the code is read."""
    rooms, importers = Counter[str](), Counter(other for module in MODULES for other in imported_by(module))
    for module, path in MODULES.items():
        rooms[LAYERS[room_of(module)]] += len(path.read_text().splitlines())
    rows = {f"lines of {room}": rooms[room] for room in LAYERS} | {
        "lines of slurm": lines_of("slurm/*"),
        "lines of all code": sum(rooms.values()) + lines_of("slurm/*", "*.py", "*.sh", "demo/*.py", "examples/**/*.py"),
        "lines of tests": lines_of("tests/**/*.py", "tests/**/*.sh"),
        "words of docs and README": sum(
            len(f.read_text().split()) for f in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
        ),
        "modules with one importer": sum(importers[module] == 1 for module in MODULES),
        "packed assignments": sum(map(packed, nodes_of(*CODE))),
        "names of tests above 60": sum(
            isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > 60
            for node in nodes_of("tests/**/*.py")
        ),
    }
    for what, number in rows.items():
        print(f"{what:<30}{number:>8}")


if __name__ == "__main__":
    main()
