"""Models that a folder or the Hugging Face Hub describes: `--model local-dir:PATH` and `--model hf-hub:ORG/NAME`."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import timm
from timm.models import load_model_config_from_hf
from timm.models._hub import load_model_config_from_path

from tlt.errors import UserError

_PREFIXES = {"local-dir:": load_model_config_from_path, "hf-hub:": load_model_config_from_hf}


class Architecture(NamedTuple):
    """A model that timm can build: its registered name, arguments, and where its weights are."""

    name: str
    kwargs: dict[str, Any]
    pretrained_cfg: dict[str, Any] | None


@cache
def architecture_of(model: str) -> Architecture:
    """Return what `--model` names; a registered name stands for itself, whether timm has it or not.

    Raises:
        UserError: The folder or the repository can't be read, or describes no model that timm knows here.
    """
    load = next((function for prefix, function in _PREFIXES.items() if model.startswith(prefix)), None)
    if load is None:
        return Architecture(model, {}, None)
    try:
        config, name, kwargs = load(model.partition(":")[2])
    except KeyError as error:
        raise UserError(f"--model {model}: its config.json does not tell {error}") from error
    except Exception as error:  # huggingface_hub and requests derive theirs from nothing narrower
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"--model {model} can't be read: {reason}") from error
    if not timm.is_model(name):
        raise UserError(f"--model {model} is a {name}, which timm does not know: install the package that registers it")
    return Architecture(name, kwargs or {}, config)
