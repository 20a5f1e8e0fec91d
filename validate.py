#!/usr/bin/env python3
"""`python validate.py`: the program is volo/commands/validate.py."""

import sys

from volo.cli import run

if __name__ == "__main__":
    sys.exit(run("validate"))
