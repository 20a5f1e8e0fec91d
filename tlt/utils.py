"""The published `tlt.utils`, over `tlt.io.weights` and `tlt.models.fit_weights`."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from tlt.errors import UserError
from tlt.io.weights import check_finite, load_clean, read_checkpoint
from tlt.models.fit_weights import Fit, fit_state_dict, joined_state_dict


def load_pretrained_weights(
    model: nn.Module, checkpoint_path: str | Path, use_ema: bool = False, strict: bool = True, num_classes: int = 1000
) -> Fit:
    """Load pretrained weights for fine-tuning, as published; return which weights were loaded.

    Both heads are dropped where the file has another class count than the model, and only then. The position embedding
    is resized to the model's image size.

    Args:
        model: Left as it is if an error is raised.
        checkpoint_path: safetensors or .pth(.tar).
        use_ema: Take the moving average.
        strict: Everything but dropped heads has to fit. Else what does not fit is left out.
        num_classes: Of the model. The model knows its own number; one that contradicts it is an error, except for the
            default, which the published examples leave at 1000 for any model.

    Raises:
        UserError: The file can't be read or holds NaN; no EMA weights; something does not fit, or (not strict) nothing.
    """
    own = getattr(model, "num_classes", num_classes)
    if num_classes not in (own, 1000):
        raise UserError(f"load_pretrained_weights: num_classes is {num_classes}, the model has {own}")
    state = joined_state_dict(model, read_checkpoint(checkpoint_path), use_ema, checkpoint_path)
    fit = fit_state_dict(model, state)
    misfits = [
        n for n in fit.missing + fit.dropped if n not in fit.replaced_heads and not n.endswith("batches_tracked")
    ]
    if (strict and misfits) or not fit.weights:
        names = ", ".join(misfits[:4])
        raise UserError(
            f"{checkpoint_path} does not fit the model: {len(misfits)} of its or the model's tensors ({names})"
        )
    check_finite(fit.weights, checkpoint_path)
    load_clean(model, fit.weights, strict=False)
    return fit
