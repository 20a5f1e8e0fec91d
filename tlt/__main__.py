"""`python -m tlt` runs the `tlt` command without installing it."""

import sys

from tlt.tools.cli import main

sys.exit(main())
