#!/usr/bin/env python3
"""`python export.py`: the program is volo/commands/export.py."""

import sys

from volo.cli import export

if __name__ == "__main__":
    sys.exit(export())
