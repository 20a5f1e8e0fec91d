"""docs/reliability.md tells every fault that is tested, and no other."""

from __future__ import annotations

import re

from tests.commands.conftest import ROOT


def test_faults_of_the_table_have_tests_and_tests_rows() -> None:
    table = (ROOT / "docs" / "reliability.md").read_text().partition("## The table")[2]
    documented = [int(number) for row in re.findall(r"^\| (\d[\d, ]*) \|", table, re.M) for number in row.split(", ")]
    tested = {
        int(number)
        for file in (ROOT / "tests").rglob("test_*.py")
        for numbers in re.findall(r"^def test_fault((?:_\d\d)+)_", file.read_text(), re.M)
        for number in numbers.strip("_").split("_")
    }
    assert sorted(documented) == list(range(1, 65)) == sorted(tested)


def test_the_tests_that_the_threat_table_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?/?)`|`(test_\w+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 15
    for path, beside in named:
        assert (ROOT / path).exists() if path else [*ROOT.glob(f"tests/*/{beside}")], (path, beside)
