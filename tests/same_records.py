"""Whether two runs have computed the same, by their records: every digit, without times and the use of the machine.

python tests/same_records.py RUN OTHER        exit code 1 and the first difference if there is one
"""

import csv
import json
import sys
from itertools import zip_longest
from pathlib import Path

TIME_KEYS = (
    *("seconds", "wait_seconds", "images_per_second", "time"),
    *("gpu_memory_bytes", "gpu_share", "tflops_per_second", "mfu"),
)


def without_times(file: Path) -> list[str]:
    """Return the lines of a metrics.jsonl or summary.csv without the values that depend on clock and machine.

    Two runs that computed the same give equal lists, however often either was interrupted.
    """
    with file.open(newline="", encoding="utf-8") as lines:
        records = list(csv.DictReader(lines)) if file.suffix == ".csv" else [json.loads(line) for line in lines]
    return [json.dumps({k: v for k, v in record.items() if k not in TIME_KEYS}) for record in records]


def main(run: Path, other: Path) -> int:
    for name in ("metrics.jsonl", "summary.csv"):
        pairs = zip_longest(without_times(run / name), without_times(other / name), fillvalue="nothing")
        for line, (one, two) in enumerate(pairs, start=1):
            if one != two:
                print(f"{name} differs in line {line}: {one} in {run}, {two} in {other}")
                return 1
    print(f"{run} and {other} have the same records")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
