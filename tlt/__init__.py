"""Token-labeling toolbox: label maps from archive to loss, and the LV-ViT models.

Importing it registers `lvvit_t`, `lvvit_s`, `lvvit_m` and `lvvit_l` with timm. It imports nothing from `volo`.
"""

import sys
from pathlib import Path

_SCRIPTS = ("train.py", "validate.py", "generate_label.py", "benchmark.py")  # at the root of a checkout
_COMMANDS = ("volo", "tlt")


def _starts_program() -> bool:
    """Whether Python was started to run a program of this project, which registers the models when it needs them.

    Until then it imports no torch: `--help` and mistakes are answered at once, and a process is bound to CPUs and
    memory (`volo.cluster.binding`) before any thread of torch is there.
    """
    if sys.argv[0] == "-m":  # as long as Python looks for the module
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv else ""
        return module.partition(".")[0] in ("volo", "tlt")
    program, root = Path(sys.argv[0]), Path(__file__).resolve().parents[1]
    if program.name in _SCRIPTS:  # others may have a train.py, too
        return program.resolve().parent == root
    return program.name in _COMMANDS or program.resolve() == root / "volo" / "commands" / "launch.py"


starts_program = _starts_program()

if not starts_program:
    from tlt import models as models
