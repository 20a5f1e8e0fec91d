"""`python -m volo`: the `volo` command where it is not installed."""

import sys

from volo.cli import main

sys.exit(main())
