"""docs/reliability.md names the tests of every fault, and they are there."""

from __future__ import annotations

import re

from tests.commands.conftest import ROOT


def test_every_fault_has_its_tests_where_the_table_says() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = {
        int(number): set(files.split(", ")) for number, files in re.findall(r"^\| (\d+) \|.*\| (.+) \|$", page, re.M)
    }
    assert sorted(rows) == list(range(1, 65))
    found: dict[int, set[str]] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        name = str(file.relative_to(ROOT / "tests").with_suffix("")).replace("/test_", "/")
        for numbers in re.findall(r"^def test_fault((?:_\d\d)+)_", file.read_text(), re.M):
            for number in numbers.strip("_").split("_"):
                found.setdefault(int(number), set()).add(name)
    assert found == rows


def test_the_tests_that_the_threat_table_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?/?)`|`(test_\w+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 15
    for path, beside in named:
        assert (ROOT / path).exists() if path else [*ROOT.glob(f"tests/*/{beside}")], (path, beside)
