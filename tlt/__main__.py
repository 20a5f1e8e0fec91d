"""`python -m tlt`: the `tlt` command where it is not installed."""

import sys

from tlt.cli import main

sys.exit(main())
