#!/usr/bin/env python3
"""`python validate.py`: the program itself is volo/programs/validate.py."""

import sys

from volo.programs.validate import main

if __name__ == "__main__":
    sys.exit(main())
