"""Hook of mkdocs.yml: a link from a page to a file outside of docs/ becomes plain text, if that file is there."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace such links by their text; a warning, which ends a strict build, where there is no such file."""

    def plain(found: re.Match[str]) -> str:
        if not (ROOT / found[2]).exists():
            log = logging.getLogger("mkdocs.hooks")
            log.warning("%s links to ../%s, which is not there", page.file.src_uri, found[2])
        return found[1]

    return _OUTSIDE.sub(plain, markdown)
