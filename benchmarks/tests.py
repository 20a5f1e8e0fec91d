"""`benchmark.py tests`: run every test that needs a GPU and list the failures."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, heading
from tlt.errors import UserError
from volo.cluster.distributed import choose_device

_ROOT = Path(__file__).resolve().parents[1]
_WORKERS = 6  # each has a CUDA context


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    choose_device(args.device, 0)
    if importlib.util.find_spec("pytest") is None:
        raise UserError("benchmark.py tests needs pytest: pip install pytest")
    # Nothing else is imported: the rest may need packages that a machine with a GPU doesn't have.
    files = [str(file) for file in sorted(_ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in file.read_text()]
    if not files:
        raise UserError(f"{_ROOT}/tests has no tests that need a GPU: run this in a checkout")
    found = TestCounts(args)
    with contextlib.redirect_stdout(sys.stderr):
        _pytest(files, found)
    print(found.show(), flush=True)
    return 0


def _pytest(files: list[str], found: TestCounts) -> None:
    import pytest

    workers = min(_WORKERS, (os.cpu_count() or 1) // 2)
    parallel = ["-n", str(workers)] if workers > 1 and importlib.util.find_spec("xdist") else []
    flags = ["-m", "gpu", "-q", "--continue-on-collection-errors", "-o", "faulthandler_timeout=120"]
    flags += ["-p", "no:cacheprovider", *parallel]
    code = pytest.main([f"--rootdir={_ROOT}", "-c", str(_ROOT / "pyproject.toml"), *flags, *files], plugins=[found])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        found.failed.setdefault("pytest", f"it ended with {code!r}")


class TestCounts:
    """A plugin of pytest that counts, and with `--json` prints a line after each test."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.out, self.began = args, sys.stdout, time.monotonic()
        self.passed = self.skipped = 0
        self.failed: dict[str, str] = {}

    def pytest_collectreport(self, report: Any) -> None:
        """Count a file that can't be imported as a failed test."""
        if report.failed:
            self._fails(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called after a test's setup, call and teardown."""
        self.passed += report.passed and report.when == "call"
        self.skipped += report.skipped
        if report.failed:
            self._fails(report)
        if self.args.json and report.when == "teardown":
            print(self.show(), file=self.out, flush=True)

    def _fails(self, report: Any) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message[:300] if crash else str(report.longrepr)[-300:]  # what can't be imported stands last
        self.failed[report.nodeid] = " ".join(text.split())

    def facts(self) -> dict[str, Any]:
        """Return the counts so far."""
        seconds = round(time.monotonic() - self.began, 1)
        return {"passed": self.passed, "skipped": self.skipped, "failed": self.failed, "seconds": seconds}

    def show(self) -> str:
        """Return one line of JSON, or the table."""
        if self.args.json:
            return json.dumps(conditions(self.args.command_line) | self.facts())
        return "\n".join([*heading(self.args.command_line), *table(self.facts())])


def table(facts: dict[str, Any]) -> list[str]:
    """Return the counts and failures as lines of Markdown."""
    count = (
        f"{facts['passed']} passed, {len(facts['failed'])} failed, {facts['skipped']} skipped in {facts['seconds']} s"
    )
    rows = [f"| `{name}` | {why.replace('|', '/')} |" for name, why in facts["failed"].items()]
    return [count, *(["", "| failed | why |", "|---|---|", *rows] if rows else [])]
