"""Loading and augmentation.

Two names that the published `tlt.data` exports are found here too. They belong to a room above this one
(`tlt.upstream.functions`) and are loaded when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLISHED = ("TokenLabelMixup", "create_token_label_target")


def __getattr__(name: str) -> Any:
    if name not in _PUBLISHED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("tlt.upstream.functions"), name)
