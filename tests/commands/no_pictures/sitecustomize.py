"""Python processes that have this folder in PYTHONPATH draw nothing: they start a second sooner."""

import sys

sys.modules["matplotlib"] = None  # type: ignore[assignment]
