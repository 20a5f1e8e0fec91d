#!/usr/bin/env python3
"""`python train.py`: the program is volo/commands/train.py."""

import sys

from volo.cli import run

if __name__ == "__main__":
    sys.exit(run("train"))
