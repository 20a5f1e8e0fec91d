"""The page of `volo report --html`: one file with text and pictures, which any browser shows without a network."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

_PICTURES = (
    ("curve.png", "Loss and accuracy"),
    ("first_batch.png", "The first images, as the model got them"),
    ("report.png", "Over the whole run, restarts included"),
)
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "pre{font:13px/1.4 ui-monospace,monospace;background:#f6f6f6;padding:.8rem;overflow-x:auto}"
    "img{max-width:100%;height:auto}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}"
)


def page(run: Path, sections: Sequence[tuple[str, Sequence[str]]], texts: Mapping[str, str]) -> str:
    """Return the page of a run as HTML.

    Args:
        run: The run's directory, from which the pictures are taken that are there.
        sections: Title and lines of each part of the report.
        texts: Further texts by title, such as the arguments.
    """
    name = html.escape(run.resolve().name)
    parts = [f"<h1>{name}</h1>"]
    parts += [f"<h2>{html.escape(title)}</h2><pre>{_text(lines)}</pre>" for title, lines in sections]
    for file, title in _PICTURES:
        if (run / file).is_file():
            picture = base64.b64encode((run / file).read_bytes()).decode()
            parts.append(f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{picture}">')
    parts += [f"<h2>{html.escape(title)}</h2><pre>{html.escape(text)}</pre>" for title, text in texts.items() if text]
    head = f'<meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _text(lines: Sequence[str]) -> str:
    return html.escape("\n".join(lines or ["none noted"]))
