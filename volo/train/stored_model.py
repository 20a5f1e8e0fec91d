"""Models that a folder or the Hugging Face Hub describes: `--model local-dir:PATH` and `--model hf-hub:ORG/NAME`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import timm
from timm.models import load_model_config_from_hf
from timm.models._hub import download_from_hf, load_cfg_from_json, load_model_config_from_path

from tlt.errors import UserError
from tlt.models import transformers_vit


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
    prefix, colon, name = model.partition(":")
    if not colon or prefix not in ("local-dir", "hf-hub"):
        return Architecture(model, {}, None)
    try:
        described = load_cfg_from_json(_file(prefix, name, "config.json"))
        if transformers_vit.describes_vit(described):
            return _transformers_vit(described, prefix, name)
        load = load_model_config_from_path if prefix == "local-dir" else load_model_config_from_hf
        config, name, kwargs = load(name)
    except UserError as error:
        raise UserError(f"--model {model}: {error}") from error
    except KeyError as error:
        raise UserError(f"--model {model}: its config.json does not tell {error}") from error
    except Exception as error:  # huggingface_hub and requests derive theirs from nothing narrower
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"--model {model} can't be read: {reason}") from error
    if not timm.is_model(name):
        raise UserError(f"--model {model} is a {name}, which timm does not know: install the package that registers it")
    return Architecture(name, kwargs or {}, config)


def _file(prefix: str, name: str, file: str) -> str:
    """Return the path of one file of a description. Raises OSError where it is missing."""
    return str(Path(name, file)) if prefix == "local-dir" else download_from_hf(name, file)


def _transformers_vit(described: dict[str, Any], prefix: str, name: str) -> Architecture:
    try:
        processor = load_cfg_from_json(_file(prefix, name, "preprocessor_config.json"))
    except OSError:  # it has none; huggingface_hub's errors derive from it
        processor = {}
    kwargs, config = transformers_vit.timm_config(described, processor)
    where = {"file": name} if prefix == "local-dir" else {"hf_hub_id": name}  # by which timm finds the weights
    return Architecture(transformers_vit.NAME, kwargs, config | {"source": prefix} | where)
