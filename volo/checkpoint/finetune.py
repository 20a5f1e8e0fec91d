"""Loads weights into a model: `load_weights` needs a file that fits completely, `load_finetune` takes what fits."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
from torch import nn

from tlt.errors import UserError
from tlt.io.files import blamed_on
from tlt.io.weights import check_finite, clean_state_dict, load_clean, read_checkpoint, unwrap
from tlt.models.fit_weights import (
    LEARNER,
    Classes,
    Fit,
    fit_state_dict,
    head_names,
    is_dense_head,
    joined_state_dict,
    place_of,
)
from tlt.models.wrap import WithDenseHead
from volo import models as models  # registers the models with timm
from volo.checkpoint.model_config import model_config_of

# If a smaller share of the backbone fits, it fits only by coincidence (a class token, a norm of equal width).
_LEAST_SHARE = 0.1
_NAMES_SHOWN = 12


@dataclass(frozen=True)
class FinetuneReport:
    """What happened to each tensor of the file and of the model. `str()` gives lines for the log."""

    path: str
    entry: str  # key of the weights in the file; "" if the file is a bare state dict
    resized: list[str]  # loaded with another shape: position embedding, input convolution
    kept: list[str]  # loaded unchanged
    dropped: list[str]  # in the file, but not loaded
    missing: list[str]  # in the model, but not in the file; these keep their initial values
    share: float  # share of the backbone's values that came from the file, in [0, 1]
    notes: dict[str, str] = field(default_factory=dict)  # the reason for each resized or dropped name
    prefix: str = ""  # prefix that was removed from names in the file; names without it are ignored

    def __str__(self) -> str:
        taken = len(self.kept) + len(self.resized)
        place = place_text(self.entry, self.prefix)
        lines = [
            f"{self.path} ({place}): {taken} of {taken + len(self.missing)} tensors of the model loaded, "
            f"{100 * self.share:.1f} % of the values before its heads",
            f"  kept {len(self.kept)}",
            f"  resized {self._listed(self.resized)}",
            f"  dropped {self._listed(self.dropped)}",
            f"  missing {self._listed(self.missing, noted=False)}" + (" (left as initialised)" if self.missing else ""),
        ]
        return "\n".join(lines)

    def _listed(self, names: list[str], noted: bool = True) -> str:
        items = [f"{n} ({self.notes[n]})" if noted and n in self.notes else n for n in names[:_NAMES_SHOWN]]
        items += ["..."] if len(names) > _NAMES_SHOWN else []
        return f"{len(names)}" + (": " + ", ".join(items) if names else "")


def place_text(entry: str, prefix: str) -> str:
    """Return the result of `place_of` in words."""
    return (entry or "the whole file") + (f", names without their {prefix}" if prefix else "")


def load_weights(
    model: nn.Module,
    path: str | Path,
    use_ema: bool | None = None,
    checkpoint: dict[str, Any] | None = None,
    class_names: Classes = (),
) -> FinetuneReport:
    """Load weights whose names and shapes must all fit, except in three cases: the position embedding may be of another
    image size, the classes in another order, and the file may lack the dense head that `with_dense_head` added to a
    timm model. Raises UserError if the file can't be read, holds NaN, or is of another model (the message names it if
    it can).

    Args:
        model: The bare model, or one wrapped by DDP or torch.compile.
        path: safetensors or .pth(.tar).
        use_ema: True loads the moving average, False the plain weights, None the moving average if there is one.
        checkpoint: The result of `read_checkpoint(path)`, which avoids reading the file twice.
        class_names: Names of the model's classes, by which it takes the rows of heads if the file names its own.
    """
    checkpoint = read_checkpoint(path) if checkpoint is None else checkpoint
    fit, report = _fit(model, checkpoint, use_ema, path, class_names)
    missing = needed(fit.missing)
    if isinstance(unwrap(model), WithDenseHead):
        missing = [n for n in missing if not is_dense_head(n)]
    if missing or fit.dropped or (fit.changeable & set(fit.resized) and not fit.reordered):
        raise UserError(explain_misfit(model, fit, checkpoint, path))
    check_finite(fit.weights, path)
    load_clean(model, fit.weights, strict=False)
    return report


def load_finetune(
    model: nn.Module, path: str | Path, use_ema: bool | None = None, class_names: Classes = ()
) -> FinetuneReport:
    """Load what fits from weights that were trained at another image size, or with other classes or input channels.

    The position embedding is resized, and the input convolution is adapted as in timm. Both heads keep the rows of the
    classes that have the same names; without names they are dropped if the numbers of classes differ, and with them the
    norm of a dense head. All else, the other norms and their statistics too, is taken where the shapes agree. Arguments
    as in `load_weights`. Raises UserError if the file can't be read, holds NaN, belongs to another architecture, or
    almost nothing of it fits.
    """
    checkpoint = read_checkpoint(path)
    fit, report = _fit(model, checkpoint, use_ema, path, class_names)
    misfits = [name for name in needed(fit.missing) + fit.dropped if name not in fit.changeable]
    if misfits and (architecture_name := other_architecture(model, checkpoint)):
        raise UserError(f"checkpoint is {architecture_name}, --model is {architecture(model)}: {path} (--finetune)")
    if fit.of_other_size:
        name = fit.of_other_size[0]
        raise UserError(
            f"--finetune {path}: {name}: {fit.notes[name]}; {architecture(model)} has no rule to "
            "resize it to another image size: train it at the checkpoint's (--img-size)"
        )
    if report.share < _LEAST_SHARE:
        raise UserError(
            f"--finetune {path} does not fit --model {architecture(model)}: {len(fit.dropped)} of its tensors have "
            f"other names or shapes, {100 * report.share:.1f} % of the model would be loaded"
        )
    check_finite(fit.weights, path)
    load_clean(model, fit.weights, strict=False)
    return report


def explain_misfit(model: nn.Module, fit: Fit, checkpoint: dict[str, Any], path: str | Path) -> str:
    """Return one line that says why the weights don't fit the model, and the remedy."""
    model_name = architecture(model)
    if other := other_architecture(model, checkpoint):
        return f"checkpoint is {other}, --model is {model_name}: {path}"
    notes = [f"{name}: {fit.notes[name]}" for name in fit.dropped + fit.resized]
    notes += [f"{name} is missing from it" for name in needed(fit.missing)]
    remedy = "the model, --img-size, --num-classes and in_chans have to be the checkpoint's"
    if any(name.startswith(LEARNER) for name in (*fit.dropped, *fit.resized, *needed(fit.missing))[:1]):
        remedy = "as many teachers (--kd-model-name) with features as wide as the checkpoint's have to be there"
    return f"{path} does not fit --model {model_name} ({notes[0]}): {remedy}; volo train --finetune takes what fits"


def needed(names: Iterable[str]) -> list[str]:
    """Return `names` without BatchNorm's counters, which files of torch before 0.4.1 lack."""
    return [n for n in names if not n.endswith("num_batches_tracked")]


def architecture(model: nn.Module) -> str:
    """Return the name by which timm created the model, without its tag."""
    model = unwrap(model)
    config = getattr(model, "pretrained_cfg", None) or {}
    return config.get("architecture") or type(model).__name__


def other_architecture(model: nn.Module, checkpoint: dict[str, Any]) -> str | None:
    """Return the checkpoint's model name if timm knows it and it is not the name of `model`, else None."""
    name = str(checkpoint.get("arch")).split(".")[0]
    return name if timm.is_model(name) and name != architecture(model) else None


def _fit(
    model: nn.Module, checkpoint: dict[str, Any], use_ema: bool | None, path: str | Path, class_names: Classes
) -> tuple[Fit, FinetuneReport]:
    with blamed_on(path):
        config = model_config_of(checkpoint, path) or {}
        trained_size = tuple(config["img_size"]) if "img_size" in config else None
        state = joined_state_dict(model, checkpoint, use_ema, path)
        fit = fit_state_dict(model, state, trained_size, config.get("class_names", ()), class_names)
    heads = tuple(f"{h}." for h in head_names(model))
    expected = clean_state_dict(model)
    backbone = {n: v.numel() for n, v in expected.items() if not n.startswith(heads)}
    share = sum(count for n, count in backbone.items() if n in fit.weights) / max(sum(backbone.values()), 1)
    entry, prefix = place_of(model, checkpoint, use_ema, path)
    fates = fit.resized, fit.kept, fit.dropped, fit.missing
    return fit, FinetuneReport(str(path), entry, *fates, share, fit.notes, prefix)
