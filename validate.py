#!/usr/bin/env python3
"""`python validate.py`: the program is volo/commands/validate.py."""

import sys

from volo.cli import validate

if __name__ == "__main__":
    sys.exit(validate())
