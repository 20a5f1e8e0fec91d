"""Token-labeling toolbox: label maps from archive to loss, and the LV-ViT models.

Importing it registers `lvvit_t`, `lvvit_s`, `lvvit_m` and `lvvit_l` with timm. It imports nothing from `volo`.
"""

import sys
from pathlib import Path

_NAMES = ("train", "validate", "generate_label", "benchmark", "report", "show_attention")
_PROGRAMS = {*_NAMES, *(f"volo-{name.replace('_', '-')}" for name in _NAMES), "tlt"}
_MODULES = {"volo.engine.preflight"}  # of `python -m`; argv[0] is "-m" while their packages are imported

# A program that builds no model, or only prints its --help, must not spend seconds on importing timm.
_program = Path(sys.argv[0]).stem
_answering_help = _program in _PROGRAMS and not {"-h", "--help"}.isdisjoint(sys.argv[1:])
_without_models = _program == "volo-preflight" or (_program == "-m" and not _MODULES.isdisjoint(sys.orig_argv))
needs_models = not (_answering_help or _without_models)

if needs_models:
    from tlt import models as models
