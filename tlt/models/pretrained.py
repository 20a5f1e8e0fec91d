"""Registration with timm, and published weights: where they are looked for and what is said when they can't be had."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from urllib.error import HTTPError
from urllib.parse import urlparse
from urllib.request import Request, urlopen

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    build_model_with_cfg,
    list_models,
    load_pretrained,
    load_state_dict_from_hf,
    register_model,
    resolve_pretrained_cfg,
)
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.io.weights import read_checkpoint, state_dict_of
from tlt.models.fit_weights import adapt_state_dict, source_grid

Entrypoint: TypeAlias = Callable[..., nn.Module]

PROBE_SECONDS = 10


def register(module: str, names: Iterable[str], build: Entrypoint) -> dict[str, Entrypoint]:
    """Register an entry point per name with timm and put it into the module, as timm's own model files have it.

    Args:
        module: `__name__` of the module, which holds timm's `default_cfgs`.
        names: Models, as `timm.create_model` will know them.
        build: `build(name, pretrained, **kwargs)`.
    """
    return {name: _register_one(sys.modules[module], name, build) for name in names}


def _register_one(module: ModuleType, name: str, build: Entrypoint) -> Entrypoint:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return build(name, pretrained, **kwargs)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = module.__name__
    entrypoint.__doc__ = f"{name}: see the table of {module.__name__}."
    setattr(module, name, entrypoint)
    return register_model(entrypoint)


def create(
    model_cls: type[nn.Module],
    name: str,
    pretrained: bool,
    pyramid: int | tuple[int, ...],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Build a model as `timm.create_model` asks for it.

    Args:
        pretrained: Load the published weights, converted to the image size, channels and classes asked for.
        pyramid: Stages that `features_only=True` returns unless `out_indices` says otherwise.
        device, dtype: Of the weights, as timm's newest models take them; None: torch's own.
        **kwargs: timm's and the constructor's.

    Raises:
        UserError: The weights do not exist or can't be fetched.
    """
    builder: Callable[..., nn.Module] = model_cls
    if pretrained:
        cfg = resolve_pretrained_cfg(name, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
        if not (cfg.file or cfg.state_dict or cfg.source):  # a source the caller named is timm's business
            builder = partial(_build_loaded, model_cls, cfg.to_dict(), published_weights(cfg.to_dict()))
            pretrained = False
    with nullcontext() if device is None else torch.device(device):
        model: nn.Module = build_model_with_cfg(
            builder,
            name,
            pretrained,
            pretrained_filter_fn=_to_model_size,
            feature_cfg={"out_indices": pyramid, "feature_cls": "getter"},
            **kwargs,
        )
    if isinstance(model, model_cls):  # not one of `features_only`
        model.record_size()  # type: ignore[operator]
    return model if dtype is None else model.to(dtype)


def published_weights(cfg: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of a `pretrained_cfg`: torch's hub folder, else the Hugging Face hub, else the release they came from.

    Raises:
        UserError: There are none, or none can be fetched; the message says where to put the file.
    """
    url, hub_id = cfg.get("url"), cfg.get("hf_hub_id")
    name = ".".join(filter(None, (cfg.get("architecture"), cfg.get("tag"))))
    if not url:
        tags = list_models(f"{cfg['architecture']}.*", pretrained=True)
        instead = f"there are {' and '.join(tags)}" if tags else "build the model with pretrained=False"
        raise UserError(f"{name}: no weights are published under this name; {instead}")
    file = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    hub_id = hub_id if importlib.util.find_spec("huggingface_hub") else None
    for local in (file, *(_hub_cache(hub_id) if hub_id else ())):
        if local.is_file():
            return state_dict_of(read_checkpoint(local))
    try:
        if hub_id:
            _probe(import_module("huggingface_hub").constants.ENDPOINT)
            return load_state_dict_from_hf(hub_id)
        _probe(url)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(file), progress=False)
    except _network_errors() as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"{name}: the weights can't be fetched ({type(error).__name__}: {reason}). "
            f"Download {url} and save it as {file}, or give the file with --initial-checkpoint"
        ) from error
    return state_dict_of(read_checkpoint(file))


def _hub_cache(hub_id: str) -> list[Path]:
    """Files of the model that the Hugging Face hub's own cache holds."""
    hub = import_module("huggingface_hub")
    files = (hub.try_to_load_from_cache(hub_id, name) for name in ("model.safetensors", "pytorch_model.bin"))
    return [Path(file) for file in files if isinstance(file, str)]


def _probe(url: str) -> None:
    """Fail within seconds where there is no network; the hub's client alone would retry for most of a minute."""
    try:
        urlopen(Request(url, method="HEAD"), timeout=PROBE_SECONDS).close()
    except HTTPError:
        return  # the server answered; whether it has the file is for the download to find out


def _network_errors() -> tuple[type[Exception], ...]:
    """What a failed download raises: OSError covers urllib, requests and sockets; the hub's client may be httpx."""
    if importlib.util.find_spec("httpx"):
        return OSError, import_module("httpx").HTTPError
    return (OSError,)


def _build_loaded(
    model_cls: type[nn.Module], cfg: dict[str, Any], state_dict: dict[str, Tensor], **kwargs: Any
) -> nn.Module:
    model = model_cls(**kwargs)
    load_pretrained(
        model,
        pretrained_cfg={**cfg, "state_dict": state_dict},
        num_classes=kwargs.get("num_classes", cfg["num_classes"]),
        in_chans=kwargs.get("in_chans", cfg["input_size"][0]),
        filter_fn=_to_model_size,
    )
    return model


def _to_model_size(state_dict: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")  # a saved model's own
    grid = source_grid(model, state_dict, size[1:]) if size else None
    return adapt_state_dict(model, state_dict, grid)[0]


def imagenet_cfg(
    size: int, crop_pct: float, first_conv: str, paper_id: str, origin_url: str, **source: str
) -> dict[str, Any]:
    """timm's configuration of a model with two heads at `size` pixels; `source` is that of its ImageNet weights."""
    return {
        "num_classes": 1000,
        "input_size": (3, size, size),
        "fixed_input_size": True,  # timm then passes the size of the tag to the constructor
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": first_conv,
        "classifier": ("head", "aux_head"),
        "license": "apache-2.0",
        "paper_ids": paper_id,
        "origin_url": origin_url,
        **source,
    }
