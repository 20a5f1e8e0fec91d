"""VOLO models and the programs that train them.

Importing this package registers the models with timm (docs/models.md). `volo.train(...)` and `volo.predict(...)` are
functions of `volo.api` (docs/python_api.md); `volo.train` is a package as well.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tlt import __version__ as __version__
from tlt import starts_program

if TYPE_CHECKING:
    from volo.api import predict as predict
    from volo.api import train as train
else:
    from volo import train


class _CallablePackage(ModuleType):
    def __call__(self, *data_dir: Any, **flags: Any) -> Any:
        """Train as `volo train DATA_DIR --flags` does; `help(volo.api.train)` says more."""
        return import_module("volo.api").train(*data_dir, **flags)


train.__class__ = _CallablePackage

if not starts_program:
    from volo import models as models


def __getattr__(name: str) -> Any:
    if name == "predict":
        return import_module("volo.api").predict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
