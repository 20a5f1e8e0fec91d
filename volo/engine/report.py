"""stub"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from volo.engine.json_lines import read_json_lines
from volo.engine.run_directory import TIME_KEYS


def without_times(file: Path) -> list[str]:
    """The lines of a metrics.jsonl or summary.csv less what depends on the clock.

    Two runs that did the same give equal lists, however often either was interrupted.
    """
    if file.suffix == ".csv":
        with file.open(newline="", encoding="utf-8") as lines:
            records = list(csv.DictReader(lines))
    else:
        records, _ = read_json_lines(file)
    return [json.dumps({k: v for k, v in record.items() if k not in TIME_KEYS}) for record in records]
