"""Hooks of mkdocs.yml: the page of all flags, links out of docs/, and the pages as Markdown, with llms.txt."""

from __future__ import annotations

import logging
import re
from argparse import SUPPRESS
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.program import COMMANDS as BENCHMARKS
from benchmarks.program import program_of
from tlt.tools.cli import parser as tlt_parser
from volo.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
_LOG = logging.getLogger("mkdocs.hooks")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def all_flags() -> Iterator[str]:
    """The page of all flags, by paragraph. Each flag is a heading with its program: that is what a search shows."""
    yield "# All flags\n\nWhat `--help` says in every program; in brackets are defaults."
    ours, tlt = [command.program.parser() for command in COMMANDS.values()], tlt_parser()._subparsers
    for parser in [*ours, *tlt._group_actions[0].choices.values(), *(program_of(name).parser() for name in BENCHMARKS)]:
        yield f"## {parser.prog}\n\n{escape(parser.description, quote=False)}\n\n```\n{parser.usage}\n```"
        for group in parser._action_groups:
            rows = [row for row in group._group_actions if row.help != SUPPRESS and row.dest not in ("help", "version")]
            yield f"### {group.title}\n\n{group.description or ''}" if rows else ""
            for row in rows:
                values = row.metavar or (f"{{{','.join(map(str, row.choices))}}}" if row.choices else "")
                program = parser.prog.replace("python benchmark.py ", "benchmark-").split()[-1]
                anchor = program + max(row.option_strings or [row.dest], key=len)
                yield f"#### `{', '.join(row.option_strings)} {values}` <small>{parser.prog}</small> {{#{anchor}}}"
                yield escape((row.help or "") % vars(row), quote=False)


def on_files(files: Any, config: Any) -> Any:
    """Add the page of all flags, which is no file of docs/."""
    from mkdocs.structure.files import File  # not there where only the tests' packages are

    page = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", "\n\n".join(filter(None, all_flags())))
    files.append(File.generated(config, "all_flags.md", content=page))
    return files


def on_config(config: Any) -> Any:
    """Take the repository's address from pyproject.toml; mkdocs' own repo_url has readers ask GitHub for stars."""
    found = re.search(r'^Repository = "(.+?)/?"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    config.nav += [{"Repository": found[1]}] if found else []
    config.extra["repository"] = found and f"{found[1]}/blob/main"
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links to other files lead into the repository, or be text while it has no address; warn of a missing file.
    Leave out comments, and give the page its description."""

    def linked(found: re.Match[str]) -> str:
        if not (ROOT / found[2]).exists():
            _LOG.warning("%s links to ../%s, which is not there", page.file.src_uri, found[2])
        return f"[{found[1]}]({config.extra['repository']}/{found[2]})" if config.extra["repository"] else found[1]

    if not (about := config.extra["about"].get(page.file.src_uri)):
        _LOG.warning("extra.about of mkdocs.yml has no sentence on %s", page.file.src_uri)
    page.meta["description"] = about
    return _OUTSIDE.sub(linked, re.sub(r"^<!--.*?-->\n", "", markdown, flags=re.MULTILINE | re.DOTALL))


def on_env(env: Any, config: Any, files: Any) -> None:
    """Write each page's Markdown beside it, llms.txt, their list (llmstxt.org), and llms-full.txt, their texts."""
    pages = [files.get_file_from_path("index.md").page]
    while pages[-1].next_page:
        pages.append(pages[-1].next_page)
    index = f"# {config.site_name}\n\n> {config.site_description}.\n"
    for section, group in groupby(pages, lambda page: page.parent.title if page.parent else "Start"):
        rows = ((page.title, page.file.src_uri, config.extra["about"].get(page.file.src_uri)) for page in group)
        links = (f"- [{title}]({config.site_url or ''}{uri}): {about}\n" for title, uri, about in rows)
        index += f"\n## {section}\n\n{''.join(links)}"
    texts = {page.file.src_uri: page.markdown for page in pages if page.markdown}  # None: not built anew (--dirty)
    texts |= {"llms.txt": index, "llms-full.txt": "\n".join(texts.values())}
    for name, text in texts.items():
        path = Path(config.site_dir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def on_page_content(html: str, **_: Any) -> str:
    """Let a picture lead to its file, where it can be enlarged: a phone shows it at the width of the page."""
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html)
