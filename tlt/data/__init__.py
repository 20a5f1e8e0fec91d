"""Loading, augmentation and targets.

The names that the published `tlt.data` exports are found here too; they are loaded when first asked for, so that
importing one of the modules below stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlt.upstream.functions import FastCollateTokenLabelMixup as FastCollateTokenLabelMixup
    from tlt.upstream.functions import TokenLabelMixup as TokenLabelMixup
    from tlt.upstream.functions import create_token_label_dataset as create_token_label_dataset
    from tlt.upstream.functions import create_token_label_loader as create_token_label_loader
    from tlt.upstream.functions import create_token_label_target as create_token_label_target

__all__ = [
    "FastCollateTokenLabelMixup",
    "TokenLabelMixup",
    "create_token_label_dataset",
    "create_token_label_loader",
    "create_token_label_target",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tlt.upstream import functions

    return getattr(functions, name)
