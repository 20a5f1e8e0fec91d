"""`python -m volo.cluster.preflight`."""

import sys

from volo.cli import preflight

if __name__ == "__main__":
    sys.exit(preflight())
