"""The published module `tlt.utils`, implemented with `tlt.io.weights` and `tlt.models.fit_weights`."""

from pathlib import Path

from torch import nn

from tlt.errors import UserError
from tlt.io.weights import check_finite, load_clean, read_checkpoint
from tlt.models.fit_weights import Classes, Fit, fit_state_dict, joined_state_dict


def load_pretrained_weights(
    model: nn.Module,
    checkpoint_path: str | Path,
    use_ema: bool = False,
    strict: bool = True,
    num_classes: int = 1000,
    class_names: Classes = (),
) -> Fit:
    """Load pretrained weights for fine-tuning, as published. Return which weights were loaded.

    Both heads are dropped only if the file has other classes than the model, by name or else by number. The position
    embedding is resized to the model's image size. Raise UserError if the file can't be read, holds NaN or lacks EMA
    weights; or a tensor misfits (not strict: all do).

    Args:
        model: The model to change. An error leaves it unchanged.
        checkpoint_path: A .safetensors or .pth(.tar) file.
        use_ema: Load the moving average of the weights.
        strict: Require that everything except dropped heads fits. False leaves out what does not fit.
        num_classes: Number of classes of the model. A number that contradicts the model is an error, except for the
            default 1000, which the published examples use for any model.
        class_names: Names of the model's classes, by which it takes the rows of heads if the file names its own.
    """
    model_classes = getattr(model, "num_classes", num_classes)
    if num_classes not in (model_classes, 1000):
        raise UserError(f"load_pretrained_weights: num_classes is {num_classes}, the model has {model_classes}")
    checkpoint = read_checkpoint(checkpoint_path)
    state = joined_state_dict(model, checkpoint, use_ema, checkpoint_path)
    config = checkpoint.get("model_config")
    theirs = config.get("class_names") if isinstance(config, dict) else None
    fit = fit_state_dict(model, state, None, theirs or (), class_names)
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
