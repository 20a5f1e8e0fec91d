#!/usr/bin/env python3
"""`python benchmark.py`: the program is benchmarks/program.py."""

import sys

from volo.cli import run

if __name__ == "__main__":
    sys.exit(run("benchmark"))
