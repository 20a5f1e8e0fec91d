#!/usr/bin/env python3
"""`python report.py`: the program is volo/commands/report.py."""

import sys

from volo.cli import report

if __name__ == "__main__":
    sys.exit(report())
