"""Models that a folder or the Hugging Face Hub describes: `--model local-dir:PATH` and `--model hf-hub:ORG/NAME`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import timm
from timm.models import load_model_config_from_hf
from timm.models._hub import download_from_hf, load_cfg_from_json, load_model_config_from_path

from tlt.errors import UserError
from tlt.models import transformers_vit


class _Place(NamedTuple):
    """Where models are described.

    Attributes:
        load: timm's function for its own descriptions.
        file_of: Returns the path of one file; OSError where it is missing.
        source: The part of `pretrained_cfg` by which timm finds the weights.
    """

    load: Callable[[str], tuple[dict[str, Any], str, dict[str, Any]]]
    file_of: Callable[[str, str], str]
    source: Callable[[str], dict[str, str]]


_PLACES = {
    "local-dir": _Place(
        load_model_config_from_path,
        lambda folder, name: str(Path(folder, name)),
        lambda folder: {"file": folder, "source": "local-dir"},
    ),
    "hf-hub": _Place(load_model_config_from_hf, download_from_hf, lambda name: {"hf_hub_id": name, "source": "hf-hub"}),
}


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
    if not colon or prefix not in _PLACES:
        return Architecture(model, {}, None)
    place = _PLACES[prefix]
    try:
        described = load_cfg_from_json(place.file_of(name, "config.json"))
        if transformers_vit.describes_vit(described):
            return _transformers_vit(described, name, place)
        config, name, kwargs = place.load(name)
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


def _transformers_vit(described: dict[str, Any], name: str, place: _Place) -> Architecture:
    try:
        processor = load_cfg_from_json(place.file_of(name, "preprocessor_config.json"))
    except OSError:  # it has none; huggingface_hub's errors derive from it
        processor = {}
    kwargs, config = transformers_vit.timm_config(described, processor)
    return Architecture(transformers_vit.NAME, kwargs, config | place.source(name))
