"""Real scans of digits to train on, and the table of faults that ends a run of the tests."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import defaultdict
from pathlib import Path
from shutil import copyfile

import pytest

from tests.commands.conftest import ROOT
from tests.commands.conftest import nothing_left_running as nothing_left_running  # a fixture

_FAULTS = re.compile(r"test_fault((?:_\d\d)+)_(\w+)")
_COLUMNS = ("injected", "survived", "lost", "message")


@pytest.fixture(scope="session")
def all_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits as the demo writes them."""
    spec = importlib.util.spec_from_file_location("digits_demo", ROOT / "demo" / "digits.py")
    assert spec is not None and spec.loader is not None
    demo = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclass looks itself up
    spec.loader.exec_module(demo)
    demo.ROOT = tmp_path_factory.mktemp("demo")
    demo.write_digits(demo.ROOT / "digits")
    return demo.ROOT / "digits"


@pytest.fixture
def digits(all_digits: Path, tmp_path: Path) -> Path:
    """Four scans of each digit to train on, two to validate on."""
    for split, count in (("train", 4), ("validation", 2)):
        for folder in sorted((all_digits / split).iterdir()):
            (tmp_path / "data" / split / folder.name).mkdir(parents=True)
            for file in sorted(folder.iterdir())[:count]:
                copyfile(file, tmp_path / "data" / split / folder.name / file.name)
    return tmp_path / "data"


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> dict[str, str]:
    """A test's line in the table, for the test to fill in: injected, survived, lost (updates), message."""
    line: dict[str, str] = {}
    request.node.user_properties.append(("fault", line))
    return line


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table: what was done to runs, and how many tests of each fault there were."""
    lines: dict[str, list[tuple[str, str, dict[str, str]]]] = defaultdict(list)
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            match = _FAULTS.search(report.nodeid)
            if match is None or (outcome == "passed" and report.when != "call"):
                continue
            told = dict(report.user_properties).get("fault", {})
            numbers = match[1].strip("_").replace("_", " ")
            lines[numbers].append((outcome, match[2].replace("_", " "), told))
    if not lines:
        return
    terminalreporter.section("faults")
    terminalreporter.line("no. | fault | injected | survived | updates lost | message")
    for numbers, tests in sorted(lines.items()):
        for text in _rows(numbers, tests):
            terminalreporter.line(text)


def _rows(numbers: str, tests: list[tuple[str, str, dict[str, str]]]) -> list[str]:
    """A row per test that measured something, and one for all others of the same numbers."""
    rows, plain = [], [(outcome, name) for outcome, name, told in tests if not told]
    for outcome, name, told in tests:
        if told:
            values = [told.get(column) or "-" for column in _COLUMNS]
            if outcome != "passed":
                values[1] = outcome.upper()
            rows.append(" | ".join([numbers, name, *values]))
    if plain:
        passed = sum(outcome == "passed" for outcome, _ in plain)
        others = sorted({outcome for outcome, _ in plain} - {"passed"})
        survived = " ".join([str(passed), *(f"({name})" for name in others)])
        names = "; ".join(dict.fromkeys(name for _, name in plain))
        rows.append(f"{numbers} | {names} | {len(plain)} | {survived} | - | -")
    return rows
