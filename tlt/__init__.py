"""Token-labeling toolbox: label maps from archive to loss, and the LV-ViT models.

Importing it registers `lvvit_t`, `lvvit_s`, `lvvit_m` and `lvvit_l` with timm. It imports nothing from `volo`.
"""

import sys
from pathlib import Path

_NAMES = ("train", "validate", "generate_label", "benchmark", "report", "show_attention", "export", "preflight")
_PROGRAMS = {*_NAMES, *(f"volo-{name.replace('_', '-')}" for name in _NAMES), "tlt"}


def _starts_program() -> bool:
    """Whether Python was started to run a program of this project, which registers the models when it needs them.

    Until then it imports no torch: `--help` and mistakes are answered at once, and a process is bound to CPUs and
    memory (`volo.cluster.binding`) before any thread of torch is there.
    """
    program = Path(sys.argv[0])
    if sys.argv[0] == "-m":  # as long as Python looks for the module
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv else ""
        return module.partition(".")[0] in ("volo", "tlt")
    # Others may have a train.py, too.
    root, parent = Path(__file__).resolve().parents[1], program.resolve().parent
    if program.suffix == ".py" and parent == root / "volo" / "commands":
        return program.stem == "launch"
    beside = program.suffix == ".py" and parent == root
    return program.stem in _PROGRAMS and (beside or program.stem.startswith("volo-") or program.stem == "tlt")


starts_program = _starts_program()

if not starts_program:
    from tlt import models as models
