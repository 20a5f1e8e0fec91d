"""How easily the code is read, in numbers: `make house`.

A small run is made with made-up images and labels; files are those of volo, tlt and benchmarks.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.test_layout import MODULES, imported_by  # noqa: E402

FLAGS = (
    *("--data-backend", "synthetic", "--num-classes", "300", "--model", "volo_test", "--img-size", "64", "-b", "4"),
    *("-j", "0", "--device", "cpu", "--epochs", "1", "--warmup-epochs", "0", "--cooldown-epochs", "0"),
    *("--token-label", "--token-label-data", "made up", "--drop-path", "0.1", "--model-ema"),
)


class Trace:
    """Which of our files calls enter, how often they go from one to another, and how often back to one that was left.

    Args:
        counts: Which calls; all by default.
        most: Calls after which nothing is counted any more.
    """

    def __init__(self, counts: Callable[[FrameType], bool] = lambda frame: True, most: float = float("inf")) -> None:
        self.files: set[str] = set()
        self.switches = self.returns = 0
        self._last, self._counts, self._left = "", counts, most

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        ours = event == "call" and file.startswith((f"{ROOT}/volo", f"{ROOT}/tlt"))
        if ours and self._left > 0 and self._counts(frame):
            self._left -= 1
            self.switches += file != self._last
            self.returns += file != self._last and file in self.files
            self.files.add(file)
            self._last = file


def takes_args(frame: FrameType) -> bool:
    """Whether a call of `run` in train.py, or below it, was given the parsed arguments."""
    code = frame.f_code
    given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    return any(isinstance(each, Namespace) for each in given) and "/config/" not in code.co_filename


def run_and_trace(update: int) -> tuple[Trace, Trace, list[str]]:
    """The traces of the arguments and of one update in a small run, and the modules of ours that it has imported."""
    from volo import cli
    from volo.train.meter import Meter

    trace, look_at = Trace(), Meter.look_at
    args_trace = Trace(takes_args, most=400)

    def look(meter: Meter, batch: Any) -> None:
        sys.setprofile(None)
        look_at(meter, batch)
        if meter.state.update == update:
            sys.setprofile(trace)
        elif meter.state.update > update:
            raise KeyboardInterrupt

    Meter.look_at = look
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        sys.setprofile(args_trace)
        cli.run("train", [*FLAGS, "--output", folder])
    return args_trace, trace, [name for name in sys.modules if name in MODULES]


def main() -> None:
    """Print the table."""
    sizes = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    folders = Counter(path.parent for path in MODULES.values() if not path.name.startswith("_"))
    importers = Counter(other for module in MODULES for other in imported_by(module))
    packages = {path.parent for path in MODULES.values() if path.name == "__init__.py"}
    args, trace, imported = run_and_trace(2)
    words = sum(len(path.read_text().split()) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    own = [module for module, path in MODULES.items() if path.parent not in packages or path.name != "__init__.py"]
    rows = {
        "files in the largest folder": max(folders.values()),
        "files imported by a run of train.py": f"{len(imported)}, {sum(sizes[name] for name in imported)} lines",
        "files entered by its third update; switches between files": f"{len(trace.files)}; {trace.switches}",
        "files that args visits in 400 calls; returns to one it left": f"{len(args.files)}; {args.returns}",
        "lines of volo + tlt + benchmarks": sum(sizes.values()),
        "words of docs + README": words,
        "modules with one importer": sum(importers[module] == 1 for module in own),
        "files under 60 lines": sum(sizes[module] < 60 for module in own),
    }
    for what, number in rows.items():
        print(f"{what:<62}{number}")


if __name__ == "__main__":
    main()
