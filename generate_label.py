#!/usr/bin/env python3
"""`python generate_label.py`: the program itself is volo/programs/generate_label.py."""

import sys

from volo.programs.generate_label import main

if __name__ == "__main__":
    sys.exit(main())
