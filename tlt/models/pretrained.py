"""Registers models with timm, and finds their published weights or explains why it can't."""

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlparse

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    list_models,
    load_pretrained,
    register_model,
    resolve_pretrained_cfg,
)
from torch import Tensor, nn

from tlt.errors import UserError, reason_of
from tlt.io.weights import read_checkpoint, state_dict_of
from tlt.models.fit_weights import adapt_state_dict, source_grid

Entrypoint: TypeAlias = Callable[..., nn.Module]


def register(module: str, names: Iterable[str], build: Entrypoint) -> dict[str, Entrypoint]:
    """Register one entry point per name with timm, `build(name, pretrained, **kwargs)`, and set it as an attribute of
    the module (its `__name__`), which holds timm's `default_cfgs`, as in timm's model files."""
    entrypoints = {}
    for name in names:
        entrypoint = _entrypoint(module, name, build)
        setattr(sys.modules[module], name, entrypoint)
        entrypoints[name] = register_model(entrypoint)
    return entrypoints


def _entrypoint(module: str, name: str, build: Entrypoint) -> Entrypoint:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return build(name, pretrained, **kwargs)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = module
    entrypoint.__doc__ = f"{name}: see the table of {module}."
    return entrypoint


def create(
    model_cls: type[nn.Module],
    name: str,
    pretrained: bool,
    pyramid: int | tuple[int, ...],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Build a model with the arguments of `timm.create_model`. With `pretrained`, load the published weights, converted
    to this image size and these channels and classes; raise UserError if they do not exist or can't be fetched.
    `pyramid` are the default `out_indices` of `features_only=True`. `device` and `dtype` are those of the weights, as
    timm's newest models take them; None takes torch's defaults."""
    builder: Callable[..., nn.Module] = model_cls
    if pretrained:
        cfg = resolve_pretrained_cfg(name, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
        if not (cfg.file or cfg.state_dict or cfg.source):  # timm loads a source that the caller names
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
    if isinstance(model, model_cls):  # `features_only` returns a wrapper
        model.record_size()  # type: ignore[operator]
    return model if dtype is None else model.to(dtype)


def published_weights(cfg: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a `pretrained_cfg`, from torch's hub folder or downloaded from their release. Raise
    UserError if there are no weights, or they can't be downloaded; the message says where to put the file."""
    url = cfg.get("url")
    name = ".".join(filter(None, (cfg.get("architecture"), cfg.get("tag"))))
    if not url:
        tags = list_models(f"{cfg['architecture']}.*", pretrained=True)
        instead = f"there are {' and '.join(tags)}" if tags else "build the model with pretrained=False"
        raise UserError(f"{name}: no weights are published under this name; {instead}")
    file = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    try:
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(file), progress=False)
    except OSError as error:  # includes the errors of urllib and ssl
        raise UserError(
            f"{name}: the weights can't be fetched ({type(error).__name__}: {reason_of(error, 120)}). "
            f"Download {url} and save it as {file}"
        ) from error
    return state_dict_of(read_checkpoint(file))


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
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")  # the size of a saved model
    grid = source_grid(model, state_dict, size[1:]) if size else None
    return adapt_state_dict(model, state_dict, grid)[0]


def published_cfgs(
    variants: Mapping[str, Any], weights: Mapping[tuple[str, int], str], tag: str, first_conv: str, **about: str
) -> dict[str, Any]:
    """Return timm's `default_cfgs` for models with two heads, from rows with `img_size` and `crop_pct`, and the URLs of
    the weights by (model, image size). The tag is `tag` for the variant's own size, else `tag`_SIZE. `first_conv` names
    the input convolution; `about` are entries that all have in common."""

    def cfg(name: str, size: int, **source: str) -> dict[str, Any]:
        return {
            "num_classes": 1000,
            "input_size": (3, size, size),
            "fixed_input_size": True,  # makes timm pass the tag's size to the constructor
            "crop_pct": variants[name].crop_pct,
            "interpolation": "bicubic",
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": first_conv,
            "classifier": ("head", "aux_head"),
            "license": "apache-2.0",
            **about,
            **source,
        }

    cfgs = {}
    for (name, size), url in weights.items():
        is_first = size == variants[name].img_size
        cfgs[f"{name}.{tag}" if is_first else f"{name}.{tag}_{size}"] = cfg(name, size, url=url)
    without = [name for name in variants if f"{name}.{tag}" not in cfgs]
    # The star makes the variant's size the default even if only other sizes have weights (lvvit_l).
    return generate_default_cfgs(cfgs | {f"{name}.*": cfg(name, variants[name].img_size) for name in without})
