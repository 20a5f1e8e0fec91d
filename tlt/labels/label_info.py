"""What all label maps of a store have in common; `labels.json` says it of a tree. Published trees have none."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tlt.errors import UserError
from tlt.io.files import read_json, write_whole
from tlt.io.text import printable
from tlt.label_map import Area

INFO_NAME = "labels.json"
FORMAT = "volo-tlt label tree, version 1"
AREAS = ("full", "center")


@dataclass(frozen=True)
class LabelInfo:
    """The description of label maps.

    Attributes:
        k, grid: Every map is k x grid[0] x grid[1].
        num_classes: Class ids are below it; None: not known.
        area: `"full"`, `"center"` (the centred square of each image) or `(x0, y0, x1, y1)` shares of the image
            (a network with padding at its edges labels positions that reach outside of it).
        annotator: What made the labels.
        class_names: Name of every class id: the class folders, or the annotator's own classes; None: not known.
        transfer: The ids are the annotator's own classes, which are not those of the class folders.
        skipped: Images, relative to the image folder, that could not be read and have no map.
        log_sum_exp: Whether the maps have the log-sum-exp of all the annotator's logits.
        max_id: The largest class id; None: not known.
    """

    k: int
    grid: tuple[int, int]
    num_classes: int | None = None
    area: str | Area = "full"
    annotator: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    transfer: bool = False
    skipped: list[str] = field(default_factory=list)
    log_sum_exp: bool = False
    max_id: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(k, h, w) of every map."""
        return (self.k, *self.grid)

    def write(self, path: str | Path) -> None:
        """Write `labels.json`, replacing `path` in one step."""
        write_whole(path, (json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: str | Path) -> LabelInfo | None:
        """Read the file that `write` made; None if there is no such file. Raises UserError if it is something else."""
        return cls.from_json(read_json(path, FORMAT), path) if os.path.lexists(path) else None

    @classmethod
    def from_json(cls, content: dict[str, Any], path: str | Path) -> LabelInfo:
        """The description in a JSON object of a file `path`; other entries are left out. Raises UserError."""
        try:
            info = cls(**{each.name: content[each.name] for each in fields(cls) if each.name in content})
            rows, cols = info.grid
            info = replace(info, grid=(rows, cols), area=_checked_area(info.area), annotator=dict(info.annotator))
            counts = [*info.shape, *(each for each in (info.num_classes, info.max_id) if each is not None)]
            if not all(isinstance(each, int) and 0 <= each < 2**31 for each in counts) or 0 in info.shape:
                raise ValueError(f"its counts {counts} can't be those of label maps")
            names = [*(() if info.class_names is None else info.class_names), *info.skipped]
            if not all(isinstance(each, str) for each in names):
                raise ValueError("a name is no text")
            return info
        except (TypeError, ValueError) as error:
            raise UserError(f"{printable(str(path))}: {error}") from error


def _checked_area(area: Any) -> str | Area:
    if area in AREAS:
        return area
    x0, y0, x1, y1 = map(float, area)
    if not (-1 < x0 < x1 < 2 and -1 < y0 < y1 < 2):
        raise ValueError(f"area {area} is none of {', '.join(AREAS)} and not (x0, y0, x1, y1) in shares of the image")
    return (x0, y0, x1, y1)
