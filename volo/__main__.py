"""`python -m volo` is the `volo` command for a checkout that is not installed."""

import sys

from volo.cli import main

sys.exit(main())
