"""Token-labeling toolbox: label maps from archive to loss, and the LV-ViT models.

Importing it registers `lvvit_t`, `lvvit_s`, `lvvit_m` and `lvvit_l` with timm. It imports nothing from `volo`.
"""

import sys
from pathlib import Path

_NAMES = ("train", "validate", "generate_label", "benchmark", "report", "show_attention")
_PROGRAMS = {*_NAMES, *(f"volo-{name.replace('_', '-')}" for name in _NAMES), "tlt"}

# A program that only prints its --help needs no model and must not spend seconds on importing torch.
answering_help = Path(sys.argv[0]).stem in _PROGRAMS and not {"-h", "--help"}.isdisjoint(sys.argv[1:])

if not answering_help:
    from tlt import models as models
