#!/usr/bin/env python3
"""`python benchmark.py`: the program is benchmarks/program.py."""

import sys

from benchmarks.program import parse_benchmark
from volo.commands.console import run_program

if __name__ == "__main__":
    sys.exit(run_program(parse_benchmark, "benchmarks.program"))
