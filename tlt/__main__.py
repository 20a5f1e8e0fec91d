"""`python -m tlt`: the `tlt` command where it is not installed."""

import sys

from tlt.tools.cli import main

sys.exit(main())
