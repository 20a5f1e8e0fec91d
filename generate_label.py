#!/usr/bin/env python3
"""`python generate_label.py`: the program is volo/commands/generate_label.py."""

import sys

from volo.cli import run

if __name__ == "__main__":
    sys.exit(run("label"))
