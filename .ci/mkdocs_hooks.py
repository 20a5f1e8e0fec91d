"""Hooks of mkdocs.yml: the page of all flags, the repository's address, and links to files outside of docs/."""

from __future__ import annotations

import logging
import re
from argparse import SUPPRESS
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.program import COMMANDS as BENCHMARKS
from benchmarks.program import benchmark_parser
from tlt.tools.cli import parser as tlt_parser
from volo.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
_LOG = logging.getLogger("mkdocs.hooks")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def all_flags() -> Iterator[str]:
    """The page of all flags, by paragraph. Each flag is a heading with its program: that is what a search shows."""
    yield "# All flags\n\nWhat `--help` says in every program; in brackets are defaults."
    ours, tlt = [command.program.parser() for command in COMMANDS.values()], tlt_parser()._subparsers
    for parser in [*ours, *tlt._group_actions[0].choices.values(), *map(benchmark_parser, BENCHMARKS)]:
        yield f"## {parser.prog}\n\n{escape(parser.description)}\n\n```\n{parser.usage}\n```"
        for group in parser._action_groups:
            rows = [row for row in group._group_actions if row.help != SUPPRESS and row.dest not in ("help", "version")]
            yield f"### {group.title}\n\n{group.description or ''}" if rows else ""
            for row in rows:
                values = row.metavar or (f"{{{','.join(map(str, row.choices))}}}" if row.choices else "")
                anchor = parser.prog.split()[-1] + max(row.option_strings or [row.dest], key=len)
                yield f"#### `{', '.join(row.option_strings)} {values}` <small>{parser.prog}</small> {{#{anchor}}}"
                yield escape((row.help or "") % vars(row))


def on_files(files: Any, config: Any) -> Any:
    """Add the page of all flags, which is no file of docs/."""
    from mkdocs.structure.files import File  # not there where only the tests' packages are

    page = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", "\n\n".join(all_flags()))
    files.append(File.generated(config, "all_flags.md", content=page))
    return files


def on_config(config: Any) -> Any:
    """Take the repository's address from pyproject.toml; mkdocs' own repo_url has readers ask GitHub for stars."""
    found = re.search(r'^Repository = "(.+?)/?"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    config.nav += [{"Repository": found[1]}] if found else []
    config.extra["repository"] = found and f"{found[1]}/blob/main"
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links to other files lead into the repository, or be text while it has no address; warn of a missing file."""

    def linked(found: re.Match[str]) -> str:
        if not (ROOT / found[2]).exists():
            _LOG.warning("%s links to ../%s, which is not there", page.file.src_uri, found[2])
        return f"[{found[1]}]({config.extra['repository']}/{found[2]})" if config.extra["repository"] else found[1]

    return _OUTSIDE.sub(linked, markdown)
