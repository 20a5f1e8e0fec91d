"""VOLO models and the engine that trains them.

Importing it registers `volo_d1` ... `volo_d5` with timm.
"""

import sys
from pathlib import Path

_PROGRAMS = {"train", "validate", "generate_label", "volo-train", "volo-validate", "volo-generate-label"}

# A program that only prints its --help needs no model and must not spend seconds on importing torch.
_only_help = Path(sys.argv[0]).stem in _PROGRAMS and not {"-h", "--help"}.isdisjoint(sys.argv[1:])

if not _only_help:
    from volo import models as models
