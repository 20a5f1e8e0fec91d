"""Token-labeling toolbox: label maps from archive to loss, and the LV-ViT models.

Importing it registers `lvvit_t`, `lvvit_s`, `lvvit_m` and `lvvit_l` with timm. It imports nothing from `volo`. The
names of `__all__` are for training loops of one's own (docs/python_api.md); they are loaded when first asked for.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt._version import __version__ as __version__

if TYPE_CHECKING:
    from tlt.api import (
        AugmentConfig,
        Batch,
        DistillLoss,
        FeatureTeacher,
        LabelBatch,
        Loader,
        StepKey,
        Targets,
        TokenLabelLoss,
        UserError,
        draw_box,
        make_targets,
        open_images,
        open_labels,
        with_dense_head,
        with_projector,
    )

__all__ = [
    "AugmentConfig",
    "Batch",
    "DistillLoss",
    "FeatureTeacher",
    "LabelBatch",
    "Loader",
    "StepKey",
    "Targets",
    "TokenLabelLoss",
    "UserError",
    "draw_box",
    "make_targets",
    "open_images",
    "open_labels",
    "with_dense_head",
    "with_projector",
]

_SCRIPTS = ("train.py", "validate.py", "generate_label.py", "benchmark.py")  # at the root of a checkout
_COMMANDS = ("volo", "tlt")


def _starts_program() -> bool:
    """Whether Python was started to run a program of this project, which registers the models when it needs them.

    Until then it imports no torch: `--help` and mistakes are answered at once, and a process is bound to CPUs and
    memory (`volo.cluster.binding`) before any thread of torch is there. `sys.argv` is not asked: it belongs to the
    importing program, which may have changed or emptied it.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:  # as long as Python looks for the module of `-m`; with `-c`; at a prompt
        mode = next((index for index, word in enumerate(sys.orig_argv[:-1]) if word in ("-c", "-m")), None)
        module = "" if mode is None or sys.orig_argv[mode] == "-c" else sys.orig_argv[mode + 1]
        return module.partition(".")[0] in _COMMANDS
    program, root = Path(file), Path(__file__).resolve().parents[1]
    if program.name in _SCRIPTS:  # others may have a train.py, too
        return program.resolve().parent == root
    return program.name in _COMMANDS or program.resolve() == root / "volo" / "commands" / "launch.py"


starts_program = _starts_program()

if not starts_program:
    from tlt import models as models


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("tlt.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
