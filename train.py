#!/usr/bin/env python3
"""`python train.py`: the program itself is volo/programs/train.py."""

import sys

from volo.programs.train import main

if __name__ == "__main__":
    sys.exit(main())
