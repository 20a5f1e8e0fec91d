"""Token-labeling toolbox: label maps, from the archive to the loss, and the LV-ViT models.

Importing it registers `lvvit_t`, `lvvit_s`, `lvvit_m` and `lvvit_l` with timm. It imports nothing from `volo`. The
names in `__all__` are for training loops of your own (docs/python_api.md); their modules are loaded at first use.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # as in pyproject.toml

if TYPE_CHECKING:
    from tlt.api import Loader as Loader
    from tlt.api import StepKey as StepKey
    from tlt.api import draw_box as draw_box
    from tlt.data.augment.plan import AugmentConfig as AugmentConfig
    from tlt.data.batch import Batch as Batch
    from tlt.data.size_schedule import SizeSchedule as SizeSchedule
    from tlt.data.sources import open_images as open_images
    from tlt.distill import DistillLoss as DistillLoss
    from tlt.distill import with_projector as with_projector
    from tlt.errors import UserError as UserError
    from tlt.label_map import LabelBatch as LabelBatch
    from tlt.labels.features import open_features as open_features
    from tlt.labels.store import open_labels as open_labels
    from tlt.loss import TokenLabelLoss as TokenLabelLoss
    from tlt.models.wrap import with_dense_head as with_dense_head
    from tlt.targets import Targets as Targets
    from tlt.targets import make_targets as make_targets
    from tlt.teacher import FeatureTeacher as FeatureTeacher
    from tlt.teacher import StoredTeacher as StoredTeacher

_NAMES = {  # names of modules that are loaded at first use
    "tlt.api": ("Loader", "StepKey", "draw_box"),
    "tlt.data.augment.plan": ("AugmentConfig",),
    "tlt.data.batch": ("Batch",),
    "tlt.data.size_schedule": ("SizeSchedule",),
    "tlt.data.sources": ("open_images",),
    "tlt.distill": ("DistillLoss", "with_projector"),
    "tlt.errors": ("UserError",),
    "tlt.label_map": ("LabelBatch",),
    "tlt.labels.features": ("open_features",),
    "tlt.labels.store": ("open_labels",),
    "tlt.loss": ("TokenLabelLoss",),
    "tlt.models.wrap": ("with_dense_head",),
    "tlt.targets": ("Targets", "make_targets"),
    "tlt.teacher": ("FeatureTeacher", "StoredTeacher"),
}
__all__ = sorted(name for names in _NAMES.values() for name in names)

_SCRIPTS = ("train.py", "validate.py", "generate_label.py", "benchmark.py")  # files in the root of a checkout
_COMMANDS = ("volo", "tlt")


def _starts_program() -> bool:
    """Return whether Python was started to run a program of this project, which registers the models when needed.

    Such a program imports no torch at first: `--help` and wrong flags are answered at once, and the process is bound to
    CPUs and memory (`volo.cluster.binding`) before torch has threads. `sys.argv` is not used, because the importing
    program may have changed or emptied it.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:  # true while Python looks for the module of `-m`, with `-c`, and at a prompt
        mode = next((index for index, word in enumerate(sys.orig_argv[:-1]) if word in ("-c", "-m")), None)
        module = "" if mode is None or sys.orig_argv[mode] == "-c" else sys.orig_argv[mode + 1]
        return module.partition(".")[0] in _COMMANDS
    program = Path(file)
    root = Path(__file__).resolve().parents[1]
    if program.name in _SCRIPTS:  # other projects may have a train.py, too
        return program.resolve().parent == root
    return program.name in _COMMANDS or program.resolve() == root / "volo" / "commands" / "launch.py"


starts_program = _starts_program()

if not starts_program:
    from tlt import models as models


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
