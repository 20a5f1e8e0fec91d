"""docs/flags.md against the rows of the flags: it names none that isn't there, and tells what the rows say."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.program import COMMANDS as BENCHMARKS
from benchmarks.program import benchmark_parser
from tests.commands.conftest import ROOT
from volo.cli import COMMANDS
from volo.config.flag_table import Flag

PAGE = (ROOT / "docs" / "flags.md").read_text()


def rows() -> Iterator[Flag]:
    for parser in (*(command.program.parser() for command in COMMANDS.values()), *map(benchmark_parser, BENCHMARKS)):
        yield from parser.flags.values()


def known_flags() -> set[str]:
    names = {name for row in rows() for name in row.names if name.startswith("-")}
    return names | {f"--no-{row.label[2:]}" for row in rows() if row.switch}


def test_the_page_names_no_flag_that_is_not_there() -> None:
    quoted = re.findall(r"`((?:\w+\.py )?--[a-z][^`]*)`", PAGE)
    named = {flag for text in quoted for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", text)} - {"--help", "--no-X"}
    assert len(named) > 40 and not named - known_flags()


def test_every_refused_flag_is_told() -> None:
    refused = {row.label for row in rows() if row.refused}
    told = PAGE[PAGE.index("Refused, because") :].partition("\n\n")[0]
    assert refused and not {label for label in refused if f"`{label}`" not in told and f"`{label} " not in told} - {
        "--num-gpu"  # told with its number
    }
