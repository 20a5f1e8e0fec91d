#!/usr/bin/env python3
"""`python show_attention.py`: the program is volo/commands/show_attention.py."""

import sys

from volo.cli import show_attention

if __name__ == "__main__":
    sys.exit(show_attention())
