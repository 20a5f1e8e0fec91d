"""The output folder of a long command, which can be killed and continued. A marker says when it is complete.

`OUT/MARKER` is a JSON file with the kind of the folder (`format`), the settings of the command, and `complete`. It is
written first, and again when everything else is on the disk. `OUT/.lock` is locked while the command runs.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tlt.errors import UserError
from tlt.io.files import read_json, sync_folder, write_whole
from tlt.io.text import printable

META_NAME = "meta.json"  # the marker of an archive with one row per image
_SHOWN = 60  # characters of a setting in a message


class OutputFolder:
    """The output folder of a command, locked until `close`; it is created if it does not exist. Raises UserError if it
    holds something else, or another command is writing into it, and OSError if writing failed.

    Args:
        marker: Name of the JSON file.
        settings: `format`, and the settings that must be equal for continuing an interrupted command.
        files: Names of the other files that the command writes.
        overwrite: First remove the marker and `files` of an earlier command, and nothing else.
    """

    def __init__(
        self, root: str | Path, marker: str, settings: Mapping[str, Any], files: Iterable[str], overwrite: bool = False
    ) -> None:
        self.root = Path(root)
        self.marker = Path(root) / marker
        self.settings = dict(settings)
        label = f"OUT {printable(str(root))}"
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"{label} is not a folder")
        self.root.mkdir(parents=True, exist_ok=True)
        entries = sorted(name for name in os.listdir(self.root) if not name.startswith("."))
        if entries and not self.marker.exists():
            raise UserError(f"{label} holds other things ({printable(entries[0])}): choose another folder")
        self._lock = FileLock(self.root / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(f"{label}: another command is writing into it; wait until it ends") from error
        state = read_marker(self.marker, self.settings["format"]) if self.marker.exists() else None
        if state is not None and overwrite:
            self._write(state, complete=False)  # before removing, so that an interruption leaves it marked incomplete
            for name in files:
                (self.root / name).unlink(missing_ok=True)
            state = None
        if state is None:
            self._write(self.settings, complete=False)
        self.complete = state is not None and state["complete"] is True  # the same command has finished before
        for key, value in json.loads(json.dumps(self.settings)).items():  # JSON turns tuples into lists
            if state is not None and state.get(key, value) != value:  # older versions recorded fewer settings
                was, says = (printable(str(setting))[:_SHOWN] for setting in (state[key], value))
                raise UserError(
                    f"{label} was made with {key} {was}, this command says {says}: choose another OUT, or --overwrite"
                )

    def finish(self, more: Mapping[str, Any]) -> None:
        """Mark the folder as complete and add `more` to its settings. All other files must be on the disk."""
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


def read_marker(path: str | Path, format_name: str) -> dict[str, Any]:
    """Return the content of a marker. Raise UserError if it is of another kind or damaged."""
    content = read_json(path, format_name)
    if content.pop("crc32", None) != marker_crc(content):
        raise UserError(f"{printable(str(path))} is damaged (crc32 is wrong): copy or make the folder again")
    return content


def marker_crc(content: Mapping[str, Any]) -> int:
    """Return the crc32 that a marker with this content stores."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
