#!/usr/bin/env python3
"""`python generate_label.py`: the program is volo/commands/generate_label.py."""

import sys

from volo.cli import generate_label

if __name__ == "__main__":
    sys.exit(generate_label())
