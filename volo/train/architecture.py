"""What `--model` names: an architecture of timm, a folder (`local-dir:PATH`) or a repository of the Hugging Face Hub
(`hf-hub:ORG/NAME`); and what a program asks of a model. This module builds no models."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import timm
from timm.layers import to_2tuple
from timm.models import load_model_config_from_hf
from timm.models._hub import download_from_hf, load_cfg_from_json, load_model_config_from_path

from tlt.errors import UserError
from tlt.io.files import blamed_on
from tlt.models import transformers_vit
from volo.config.parser import look_of
from volo.config.rules import other_sizes
from volo.config.settings_shared import Pixels
from volo.config.settings_train import Network, TrainSettings


class Architecture(NamedTuple):
    """A model that timm can build: its registered name, its arguments, and where its weights are."""

    name: str
    kwargs: dict[str, Any]
    pretrained_cfg: dict[str, Any] | None


@cache
def architecture_of(model: str) -> Architecture:
    """Return the architecture that `--model` names. Raise UserError if the name is unknown (the message suggests the
    nearest ones), or the folder or repository can't be read or describes a model that timm doesn't know."""
    prefix, colon, name = model.partition(":")
    if not colon or prefix not in ("local-dir", "hf-hub"):
        if not timm.is_model(model):
            near = ", ".join(nearest_models(model))
            raise UserError(f"--model {model}: timm knows no such model" + (f"; did you mean {near}?" if near else ""))
        return Architecture(model, {}, None)
    with blamed_on(f"--model {model}", "can't be read", "see its name, and whether it can be reached"):
        described = load_cfg_from_json(_file(prefix, name, "config.json"))
        if transformers_vit.describes_vit(described):
            return _transformers_vit(described, prefix, name)
        load = load_model_config_from_path if prefix == "local-dir" else load_model_config_from_hf
        config, name, kwargs = load(name)
    if not timm.is_model(name):
        raise UserError(f"--model {model} is a {name}, which timm does not know: install the package that registers it")
    return Architecture(name, kwargs or {}, config)


def nearest_models(name: str) -> list[str]:
    """Return the names of at most three models that `name` may mean: those that look the same, those that have all its
    words, this project's and the shortest first, or the most similar ones."""
    architecture = name.rpartition("/")[2].partition(".")[0]
    plain = architecture.lower().replace("-", "_")
    known = timm.list_models()
    if same := [model for model in known if look_of(model) == look_of(architecture)]:
        return same
    containing = [model for model in known if {*plain.split("_")} <= {*model.split("_")}]
    near = sorted(containing, key=lambda model: (not is_ours(model), len(model), model))
    return near[:3] or difflib.get_close_matches(plain, known, n=3)


def _file(prefix: str, name: str, file: str) -> str:
    """Return the path of one file of a description. Raises OSError if it is missing."""
    return str(Path(name, file)) if prefix == "local-dir" else download_from_hf(name, file)


def _transformers_vit(described: dict[str, Any], prefix: str, name: str) -> Architecture:
    try:
        processor = load_cfg_from_json(_file(prefix, name, "preprocessor_config.json"))
    except OSError:  # the file is missing; huggingface_hub's errors are OSErrors as well
        processor = {}
    kwargs, config = transformers_vit.timm_config(described, processor)
    where = {"file": name} if prefix == "local-dir" else {"hf_hub_id": name}  # timm finds the weights by this
    return Architecture(transformers_vit.NAME, kwargs, config | {"source": prefix} | where)


def image_size_of(pixels: Pixels, model_kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (H, W) from `--input-size`, `--img-size` or `--model-kwargs img_size=`; None if none is used."""
    if pixels.input_size is not None:
        return pixels.input_size[1], pixels.input_size[2]
    size = model_kwargs.get("img_size") if pixels.img_size is None else pixels.img_size
    return None if size is None else to_2tuple(size)


def known_config(model: str) -> dict[str, Any]:
    """Return what is known about `--model` before it is built: `input_size`, `num_classes`, `fixed_input_size`, ..."""
    name, kwargs, stored = architecture_of(model)
    registered = timm.get_pretrained_cfg(name)
    return (registered.to_dict() if registered else {}) | (stored or {}) | kwargs


def image_size_by_name(network: Network, pixels: Pixels) -> tuple[int, int]:
    """Return the image size (H, W) from flags or the model's name, before it is built; 224 x 224 by default."""
    config = known_config(network.model)
    own = config.get("img_size") or config.get("input_size", (3, 224, 224))[1:]
    return to_2tuple(image_size_of(pixels, network.model_kwargs) or own)


def takes_image_size(name: str) -> bool:
    """Whether the model is built for one image size, as this project's and timm's vision transformers are."""
    return is_ours(architecture_of(name).name) or known_config(name).get("fixed_input_size", False)


def is_ours(name: str) -> bool:
    """Whether the registered model `name` belongs to this project."""
    return timm.model_entrypoint(name).__module__.split(".")[0] in ("volo", "tlt")


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """What a program asks of a model. None leaves a value to the checkpoint, and then to the model.

    Attributes:
        name: What `--model` names.
        image_size: (H, W).
        in_chans: 3 for RGB, 1 for grey images.
        preparation: Of crop_pct, crop_mode, mean, std and interpolation those that the flags set.
        other_sizes: Further image sizes (H, W) that it has to take.
        kwargs: More arguments of its constructor.
        file_flag: The flag that names a file of weights, for messages; "" for a network without such a flag.
    """

    name: str
    pretrained: bool = False
    num_classes: int | None = None
    image_size: tuple[int, int] | None = None
    in_chans: int | None = None
    preparation: Mapping[str, Any] = field(default_factory=dict)
    other_sizes: tuple[tuple[int, int], ...] = ()
    global_pool: str | None = None
    drop_rate: float | None = None
    drop_path_rate: float | None = None
    outlooker_drop_path: bool = False
    drop_path_mode: str = "mask"
    outlook_kernel: str = "auto"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    file_flag: str = ""


def requested_by(settings: TrainSettings) -> ModelRequest:
    """Return what train.py asks of its model."""
    network = settings.network
    pixels = settings.images.pixels
    regular = settings.regular
    return ModelRequest(
        name=network.model,
        pretrained=network.pretrained,
        num_classes=network.num_classes,
        image_size=image_size_of(pixels, network.model_kwargs),
        in_chans=pixels.input_size[0] if pixels.input_size else network.in_chans,
        preparation=preparation_of(pixels),
        other_sizes=tuple(other_sizes(settings.sizes)),
        global_pool=network.gp,
        drop_rate=regular.drop or None,
        drop_path_rate=regular.drop_path,
        outlooker_drop_path=regular.outlooker_drop_path,
        drop_path_mode=regular.drop_path_mode,
        outlook_kernel=settings.precision.outlook_kernel,
        kwargs=network.model_kwargs,
        file_flag="--initial-checkpoint",
    )


def preparation_of(pixels: Pixels, crop_mode: str = "") -> dict[str, Any]:
    """Return those settings of the preparation of images that the flags set, by timm's names."""
    names = ("crop_pct", "mean", "std", "interpolation")
    given = {name: getattr(pixels, name) for name in names} | {"crop_mode": crop_mode}
    return {name: value for name, value in given.items() if value not in (None, "")}


def model_kwargs(request: ModelRequest) -> dict[str, Any]:
    """Return the arguments of the model's constructor. A value that is None leaves the model's default."""
    names = ("pretrained", "num_classes", "in_chans", "global_pool", "drop_rate", "drop_path_rate")
    kwargs = {name: getattr(request, name) for name in (*names, "outlooker_drop_path")}
    if request.image_size is not None and takes_image_size(request.name):
        kwargs["img_size"] = request.image_size
    kwargs = {k: v for k, v in kwargs.items() if v is not None and v is not False}
    for key, argument in request.kwargs.items():
        value = to_2tuple(argument) if key == "img_size" else argument
        if kwargs.setdefault(key, value) != value:
            flag = f"the flag for it, which says {kwargs[key]}"
            raise UserError(f"--model-kwargs {key}={value} contradicts {flag}: keep one of them")
    return kwargs
