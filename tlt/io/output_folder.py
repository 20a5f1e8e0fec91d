"""A folder that a long command writes: a killed command goes on where it was, and a marker says when it is complete.

`OUT/MARKER` is a JSON file: what the folder is (`format` and the settings of the command), and whether it is
`complete`. It is written first, and a second time when everything else is on the disk. `OUT/.lock` is locked meanwhile.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tlt.errors import UserError
from tlt.io.files import sync_folder, write_whole
from tlt.io.text import printable

_SHOWN = 60  # characters of a setting in a message


class OutputFolder:
    """The folder of a command that writes into it, locked until `close`.

    Args:
        root: Made if need be.
        marker: Name of the JSON file.
        settings: `format` and what must be equal for a command to go on with what another one began.
        files: Names of the other files that the command writes.
        overwrite: Begin anew: the marker and `files` of an earlier command are removed, and nothing else.

    Attributes:
        complete: The same command has ended here before.

    Raises:
        UserError: The folder holds something else, or another command is writing into it.
        OSError: It can't be written.
    """

    def __init__(
        self, root: str | Path, marker: str, settings: Mapping[str, Any], files: Iterable[str], overwrite: bool = False
    ) -> None:
        self.root, self.marker, self.settings = Path(root), Path(root) / marker, dict(settings)
        self._shown = f"OUT {printable(str(root))}"
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"{self._shown} is not a folder")
        self.root.mkdir(parents=True, exist_ok=True)
        other = sorted(name for name in os.listdir(self.root) if not name.startswith("."))
        if other and not self.marker.exists():
            raise UserError(f"{self._shown} holds other things ({printable(other[0])}): choose another folder")
        self._lock = FileLock(self.root / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(f"{self._shown}: another command is writing into it; wait until it ends") from error
        found = read_marker(self.marker, self.settings["format"]) if self.marker.exists() else None
        if found is not None and overwrite:
            self._write(found, complete=False)  # first: what is left when this is interrupted is known to be incomplete
            for name in files:
                (self.root / name).unlink(missing_ok=True)
            found = None
        if found is None:
            self._write(self.settings, complete=False)
        else:
            self._refuse_other_settings(found)
        self.complete = found is not None and found["complete"] is True

    def finish(self, more: Mapping[str, Any]) -> None:
        """Say that the folder is complete, with `more` than the settings; the other files are on the disk."""
        sync_folder(self.root)
        self._write({**self.settings, **more}, complete=True)
        self.complete = True

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def _write(self, content: Mapping[str, Any], complete: bool) -> None:
        content = {**content, "complete": complete}
        write_whole(self.marker, (json.dumps({**content, "crc32": marker_crc(content)}, indent=1) + "\n").encode())
        sync_folder(self.root)

    def _refuse_other_settings(self, found: Mapping[str, Any]) -> None:
        """Refuse to go on with what a command of other settings began."""
        old, new = _flat(found), _flat(json.loads(json.dumps(self.settings)))  # lists for tuples
        for key in sorted(new, key="area".__eq__):  # in order, but the area last: it follows from the others
            if old.get(key) != new[key]:
                was, says = (printable(str(each))[:_SHOWN] for each in (old.get(key), new[key]))
                raise UserError(
                    f"{self._shown} was made with {key} {was}, this command says {says}: choose another OUT, or "
                    "--overwrite"
                )


def read_marker(path: str | Path, format_name: str) -> dict[str, Any]:
    """The content of a marker. Raises UserError if it is something else or damaged."""
    shown = printable(str(path))
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{shown} can't be read as JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != format_name:
        raise UserError(f"{shown} does not describe a {format_name}")
    if content.pop("crc32", None) != marker_crc(content):
        raise UserError(f"{shown} is damaged (crc32 is wrong): copy or make the folder again")
    return content


def marker_crc(content: Mapping[str, Any]) -> int:
    """The crc32 that is stored in a marker of this content."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, those in nested objects by their own names."""
    inner = {k: v for value in content.values() if isinstance(value, dict) for k, v in value.items()}
    return {k: v for k, v in content.items() if not isinstance(v, dict)} | inner
