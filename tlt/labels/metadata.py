"""`labels.json`: the description of a label tree's maps. Published trees have none."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tlt.errors import UserError
from tlt.io.text import printable
from tlt.label_map import Area

METADATA_NAME = "labels.json"
FORMAT = "volo-tlt label tree, version 1"
AREAS = ("full", "center")


@dataclass(frozen=True)
class TreeMetadata:
    """The description of a label tree; written by the label-making program when the tree is complete.

    Attributes:
        k, grid: Every map is k x grid[0] x grid[1].
        num_classes: Class ids are below it.
        area: `"full"`, `"center"` (the centred square of each image) or `(x0, y0, x1, y1)` shares of the image
            (a network with padding at its edges labels places that reach outside of it).
        annotator: What made the labels.
        class_names: Folder name of every class id; None where the ids are of another data set than the folders.
        skipped: Images, relative to the image folder, that could not be read and have no map.
    """

    k: int
    grid: tuple[int, int]
    num_classes: int
    area: str | Area = "full"
    annotator: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    skipped: list[str] = field(default_factory=list)

    def write(self, path: str | Path) -> None:
        """Write as JSON, replacing `path` in one step."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # several ranks may write it at a time
        temporary.write_text(self.text())
        os.replace(temporary, path)

    def text(self) -> str:
        """The text of the file that `write` makes."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, path: str | Path) -> TreeMetadata | None:
        """Read the file that `write` made; None if there is no such file.

        Raises:
            UserError: The file is something else.
        """
        try:
            text = Path(path).read_text()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{printable(str(path))} can't be read as JSON: {error}") from error
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: str | Path) -> TreeMetadata:
        """The metadata in the text of a file `path`.

        Raises:
            UserError: The text is something else.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise UserError(f"{printable(str(path))} can't be read as JSON: {error}") from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise UserError(f"{printable(str(path))} does not describe a label tree ({FORMAT})")
        try:
            metadata = cls(**content)
            rows, cols = metadata.grid
            return cls(**(content | {"grid": (int(rows), int(cols)), "area": _checked_area(metadata.area)}))
        except (TypeError, ValueError) as error:
            raise UserError(f"{printable(str(path))}: {error}") from error


def _checked_area(area: Any) -> str | Area:
    if area in AREAS:
        return area
    x0, y0, x1, y1 = map(float, area)
    if not (-1 < x0 < x1 < 2 and -1 < y0 < y1 < 2):
        raise ValueError(f"area {area} is none of {', '.join(AREAS)} and not (x0, y0, x1, y1) in shares of the image")
    return (x0, y0, x1, y1)
