"""Builds the model that the flags describe: creates it with timm, configures and wraps it, and records how."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from timm.layers import convert_sync_batchnorm
from timm.models import get_model_traits
from timm.models._hub import _EXT_PRIORITY, _PREFERRED_FILES
from torch import nn

from tlt.errors import UserError, reason_of
from tlt.io.files import blamed_on
from tlt.io.jobs import physical_memory
from tlt.io.weights import check_finite, clean_state_dict, read_checkpoint
from tlt.models.fit_weights import number_classes, rows_by_name
from tlt.models.flops import run_on_meta
from tlt.models.token_labeling import TokenLabelModel
from tlt.models.wrap import TOKEN_LABEL_MODELS, WithDenseHead, with_dense_head
from volo.checkpoint.model_config import own_names
from volo.cluster.distributed import World
from volo.cluster.shard import Meshes, distribute, shard, shard_meshes, units_of
from volo.cluster.tensor_parallel import divide_layers
from volo.config.fields import flags_of
from volo.config.rules import other_sizes, sharding_flag
from volo.config.settings_data import TokenLabels
from volo.config.settings_train import BatchNorms, TrainSettings
from volo.models import VOLO
from volo.train.architecture import ModelRequest, architecture_of, is_ours, known_config, model_kwargs, requested_by
from volo.train.compilation import Compiler
from volo.train.precision import compute_dtype

# A model with timm's interface (num_classes, get_classifier, ...), which the type nn.Module doesn't have.
TimmModel = Any

_SMALL = 10_000_000  # models with fewer weights are built even if the checkpoint has far fewer
_MANY_CLASSES = 100_000
_TF_BATCHNORM = {"momentum": 0.01, "eps": 1e-3}  # settings of --bn-tf


def build_model(request: ModelRequest, recorded: dict[str, Any] | None = None, weights: int = 0) -> TimmModel:
    """Build the requested model on the CPU. Raise UserError if that or the fetching of its weights fails, if it is too
    large or does not run with its arguments, or if a flag is for a part that it doesn't have.

    Args:
        recorded: The model's keyword arguments from a checkpoint; flags override them, except for `img_size`, that of
            training. The model is built for it if it takes the flags' size, too, as in the validation of training
            (`--val-img-size`): built for another size, some timm models have other windows or tables of positions.
        weights: Number of weights in that checkpoint. A model that is far larger is refused.
    """
    name, stored, source = architecture_of(request.name)
    kwargs = stored | (recorded or {}) | model_kwargs(request)
    fetched = kwargs.get("pretrained")
    folder = request.name.startswith("local-dir:")
    if fetched and folder:
        _check_folder(Path(request.name.partition(":")[2]), request.name)
    try:
        if recorded or kwargs.get("num_classes", 0) > _MANY_CLASSES:
            _refuse_huge(name, kwargs, weights if recorded else None)
        trained_size = (recorded or {}).get("img_size")
        sizes = request.other_sizes
        wanted: Any = kwargs.get("img_size")
        if resized := not is_ours(name) and trained_size not in (None, wanted):
            kwargs = kwargs | {"img_size": trained_size}
            sizes = (wanted, *sizes)
        kwargs |= _flexible(name, kwargs, sizes)
        model = timm.create_model(name, pretrained_cfg=copy.deepcopy(source), **kwargs)
        if not hasattr(model, "num_classes"):
            raise TypeError(f"{type(model).__name__} is no classifier")
    except UserError:
        raise
    except Exception as error:  # constructors, hubs and readers of weights raise errors of any type
        reason = reason_of(error)
        if fetched and not folder and "loading state_dict" not in reason:
            instead = f" with {request.file_flag}" if request.file_flag else " in its place"
            remedy = f"name a file of them{instead}"
            raise UserError(f"--model {name}: its published weights can't be fetched ({reason}): {remedy}") from error
        raise UserError(f"--model {request.name} cannot be built with {kwargs}: {reason}") from error
    try:
        channels, *own_size = data_config_of(request, model)["input_size"]
        for size in (tuple(own_size), *request.other_sizes):
            _try_size(model, request, kwargs, (channels, *size))
    except UserError:
        if not resized:
            raise
        # It takes images of one size only.
        return build_model(request, {**(recorded or {}), "img_size": wanted}, weights)
    if fetched:
        check_finite(clean_state_dict(model), f"the file of --model {request.name}")
    _set_modes(model, request.outlook_kernel, request.drop_path_mode)
    return model


def build_named_model(settings: TrainSettings, class_names: list[str]) -> tuple[TimmModel, list[str]]:
    """Return the model of train.py and lines for the user. Published weights that name their classes keep the rows of
    those that are among `class_names`, under the numbers that these have there."""
    request = requested_by(settings)
    named = request.pretrained and not settings.teachers.kd_only
    theirs = own_names(known_config(request.name), class_names) if named else []
    count = request.num_classes or len(theirs)
    if rows_by_name(theirs, class_names, (len(theirs), count)) is None:
        return build_model(request), []
    model = build_model(replace(request, num_classes=len(theirs)))
    lines, _ = number_classes(model, theirs, class_names, count)
    return model, [f"--model {request.name}: {line}" for line in lines]


def _flexible(name: str, kwargs: dict[str, Any], sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the keyword argument with which a timm model takes images of `sizes` besides its own size. Return {} if it
    needs none, or can't take them."""
    for option in ({}, {"dynamic_img_size": True}, {"strict_img_size": False}) if sizes and not is_ours(name) else ():
        with suppress(Exception), torch.device("meta"):  # constructors and layers raise errors of any type
            model = timm.create_model(name, **kwargs | option | {"pretrained": False})
            for size in sizes:
                model(torch.empty(2, kwargs.get("in_chans", 3), *size))
            return option
    return {}


def _try_size(model: nn.Module, request: ModelRequest, kwargs: dict[str, Any], size: tuple[int, int, int]) -> None:
    """Run a copy of a new model once, as in training. Images that are too small and contradictory arguments then raise
    UserError here, and not another error in the first step."""
    with suppress(Exception):  # a run on meta tensors is cheap, but shows only shapes and fails for some models
        run_on_meta(model, size)
        # Tables of positions may be too small for another size than that of the construction.
        is_known = isinstance(model, TokenLabelModel) or get_model_traits(model).get("img_size") in (None, size[1:])
        if is_known and not request.kwargs:
            return
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(model)(torch.zeros(2, *size))
    except Exception as error:  # layers raise errors of any type
        shape = " x ".join(map(str, size))
        reason = reason_of(error)
        flag = "--train-img-sizes, --val-img-size" if size[1:] in request.other_sizes else "--img-size"
        message = f"--model {request.name} does not run on images of {shape} ({flag}), built with {kwargs}: {reason}"
        raise UserError(message) from error


def _set_modes(model: nn.Module, kernel: str, drop_path_mode: str) -> None:
    """Apply `--outlook-kernel` and `--drop-path-mode`. Raise UserError if the model doesn't have them."""
    if kernel != "auto":
        if not isinstance(model, VOLO):
            raise UserError(f"--outlook-kernel {kernel} has no effect: only VOLO has outlook attention; leave it out")
        model.set_outlook_kernel(kernel)
    if drop_path_mode != "mask":
        if not isinstance(model, TokenLabelModel):
            raise UserError(f"--drop-path-mode {drop_path_mode} needs --model volo_... or lvvit_...")
        model.set_drop_path_mode(drop_path_mode)


def _check_folder(folder: Path, model: str) -> None:
    """Raise UserError unless the weights that timm would take from this folder can be read."""
    endings = (path.name for ending in _EXT_PRIORITY for path in sorted(folder.glob(f"*{ending}")))
    file = next((folder / name for name in (*_PREFERRED_FILES, *endings) if (folder / name).exists()), None)
    if file is None:
        raise UserError(f"--model {model}: there are no weights, such as {_PREFERRED_FILES[0]}")
    read_checkpoint(file)


def _refuse_huge(name: str, kwargs: dict[str, Any], weights: int | None) -> None:
    """Raise UserError for a model that is too large for the memory, or far larger than its checkpoint's `weights`."""
    with torch.device("meta"):
        wanted = sum(p.numel() for p in timm.create_model(name, **kwargs | {"pretrained": False}).parameters())
    if weights is not None and wanted > 4 * weights + _SMALL:
        described = f"the checkpoint describes a model of {wanted:,} weights"
        raise UserError(f"--model {name}: {described}, and holds {weights:,}")
    needed = 4 * wanted / 2**30
    memory = physical_memory() / 2**30
    if needed > memory:
        raise UserError(
            f"--model {name} with {kwargs.get('num_classes', 1000):,} classes (--num-classes) takes {needed:,.0f} GiB, "
            f"this machine has {memory:,.0f}"
        )


def data_config_of(request: ModelRequest, model: TimmModel, recorded: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return input_size (C, H, W), interpolation, mean, std, crop_pct and crop_mode. Flags override the checkpoint's
    values, which override the model's, so that training and validation agree."""
    names = ("crop_pct", "mean", "std", "interpolation", "crop_mode")
    known = {name: value for name in names if (value := (recorded or {}).get(name)) not in (None, "")}
    size = request.image_size or getattr(model, "img_size", None)
    data_config = known | dict(request.preparation) | {"input_size": None if size is None else (3, *size)}
    resolved: dict[str, Any] = resolve_data_config(data_config, model=model, use_test_size=False)
    channels = request.in_chans or getattr(model, "in_chans", resolved["input_size"][0])
    resolved["input_size"] = (channels, *resolved["input_size"][1:])
    if channels == 1:  # one mean for grey images, which the loader's stages make
        resolved |= {name: (sum(resolved[name]) / len(resolved[name]),) for name in ("mean", "std")}
    return resolved


def add_dense_head(model: TimmModel, labels: TokenLabels, image_size: tuple[int, int]) -> TimmModel:
    """Add a dense head to a timm model for `--token-label`; VOLO and LV-ViT have one already. Raise UserError if it has
    no spatial features, or MixToken is on and can't mix its tokens after the embedding."""
    if not labels.token_label:
        return model
    model = with_dense_head(model, image_size)
    if isinstance(model, WithDenseHead):
        if not labels.no_mix_token:
            model.check_mix_token()
        if labels.token_label_size == 1:  # there is no dense loss that would train the head
            model.set_dense_head(False)
    return model


def prepare_model(model: TimmModel, settings: TrainSettings, world: World) -> TimmModel:
    """Apply the flags for BatchNorm, gradient checkpointing and memory format, and move the model to its device."""
    set_batchnorm(model, settings.norms, settings.network.model)
    if settings.precision.grad_checkpointing:
        asked = f"--grad-checkpointing: --model {settings.network.model}"
        with blamed_on(asked, "can't recompute its activations", "leave the flag out"):
            model.set_grad_checkpointing(True)
    if settings.norms.sync_bn and world.size > 1:
        if world.device.type != "cuda":
            raise UserError("--sync-bn needs GPUs (torch has no SyncBatchNorm for the CPU); use --dist-bn reduce")
        model = convert_sync_batchnorm(model)
        if (mix_point := getattr(model, "mix_point", None)) is not None:
            mix_point.attach(model)  # here, and not in the first forward pass, which torch.compile traces
    return place_model(model, settings.precision.channels_last, world)


def place_model(model: TimmModel, channels_last: bool, world: World) -> TimmModel:
    """Move the model to its device, with the memory format of `--channels-last`."""
    return model.to(device=world.device, memory_format=torch.channels_last if channels_last else None)


def set_batchnorm(model: nn.Module, norms: BatchNorms, name: str) -> None:
    """Set momentum and epsilon of every BatchNorm layer from `--bn-tf`, `--bn-momentum` and `--bn-eps`. Raise UserError
    if a flag is for BatchNorm, and the model `name` has none."""
    values = dict(_TF_BATCHNORM) if norms.bn_tf else {}
    values |= {k: v for k, v in (("momentum", norms.bn_momentum), ("eps", norms.bn_eps)) if v is not None}
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not layers and (values or norms.freeze_bn or norms.sync_bn or norms.dist_bn):
        flags = ", ".join(row.label for row in flags_of(BatchNorms).values() if getattr(norms, row.dest) != row.default)
        raise UserError(f"--model {name} has no BatchNorm layer: remove {flags}")
    for layer in layers:
        for name, value in values.items():
            setattr(layer, name, value)


def meshes_of(settings: TrainSettings, world: World) -> Meshes | None:
    """Return the meshes over which `--shard` and `--tensor-parallel` divide the weights; None without these flags, and
    in a dry run, which needs no such number of processes. Raise UserError if that does not fit, or for float16."""
    divides = sharding_flag(settings.distributed)
    if divides and compute_dtype(settings.precision.mixed, world.device) is torch.float16:
        raise UserError(f"{divides}: a loss scale for float16 is not supported: --amp-dtype bfloat16")
    return shard_meshes(settings.distributed.shard, world) if divides and not settings.run.dry_run else None


def compiler_of(settings: TrainSettings) -> Compiler:
    """Return what compiles the models of train.py."""
    return Compiler(settings.precision.compilation, settings.network.model, 1 + len(other_sizes(settings.sizes)))


def wrap_model(model: TimmModel, settings: TrainSettings, world: World, meshes: Meshes | None = None) -> TimmModel:
    """Return the module that the loop calls: `model` wrapped for several ranks and compiled, as the flags say. The
    weights are divided over `meshes` in place, so copy the model before. A flag without effect raises UserError."""
    compression = settings.distributed.grad_compression
    if meshes is not None:
        if meshes.tensor is not None:
            divide_layers(model, meshes.tensor)
        compiler_of(settings).modules(units_of(model))
        half = torch.bfloat16 if settings.precision.mixed.model_dtype == "bfloat16" else None
        shard(model, meshes.data, half, compression)
        return model
    if world.size > 1:
        # Without a class loss, the class head and the class attention receive no gradients.
        unused = settings.teachers.kd_only or (settings.labels.token_label and settings.labels.cls_weight == 0)
        model = distribute(model, world.device, compression, unused)
    elif compression != "none":
        raise UserError(f"--grad-compression {compression} has no effect with one process: leave it out")
    elif settings.norms.dist_bn:
        raise UserError(f"--dist-bn {settings.norms.dist_bn} has no effect with one process: leave it out")
    return compiler_of(settings).model(model)


def heads_of(model: TimmModel) -> list[nn.Module]:
    """Return the class heads, and the dense head if the model has one."""
    classifier = model.get_classifier()
    heads = list(classifier) if isinstance(classifier, tuple) else [classifier]
    return heads + ([model.aux_head] if isinstance(model, TOKEN_LABEL_MODELS) else [])


def init_heads(model: TimmModel, scale: float | None, bias: float | None) -> None:
    """Multiply the heads' initial weights by `scale` and set their biases (`--head-init-scale`, `--head-init-bias`)."""
    heads: list[Any] = heads_of(model)
    if not all(isinstance(head, nn.Linear) for head in heads):
        raise UserError("--head-init-scale and --head-init-bias need a linear head")
    with torch.no_grad():
        for head in heads:
            if scale is not None:
                head.weight.mul_(scale)
                head.bias.mul_(scale)
            if bias is not None:
                head.bias.fill_(bias)


def model_config(
    model: TimmModel, settings: TrainSettings, data_config: dict[str, Any], class_names: list[str]
) -> dict[str, Any]:
    """Return the record from which other programs build and evaluate the model as it was trained."""
    flags = settings.labels
    labels: dict[str, Any] = {"compat": flags.compat or [], "uncovered": flags.maps.uncovered}
    labels |= {"label_tail": flags.maps.label_tail}
    labels |= {"teacher": flags.token_label_teacher} if flags.token_label_teacher else {}
    built = architecture_of(settings.network.model)
    kwargs = {k: v for k, v in built.kwargs.items() if k not in ("num_classes", "in_chans", "img_size")}
    pool, side = settings.network.gp, settings.sizes.val_img_size
    return {
        "name": built.name,
        "kwargs": kwargs | ({"global_pool": pool} if pool else {}) | settings.network.model_kwargs,
        "num_classes": model.num_classes,
        "img_size": list(data_config["input_size"][1:]),
        "val_img_size": [side, side] if side else None,
        "in_chans": data_config["input_size"][0],
        "dense_head": getattr(model, "dense_head", None),
        **{name: data_config[name] for name in ("crop_pct", "crop_mode", "mean", "std", "interpolation")},
        "class_names": class_names,
        "labels": labels if flags.token_label else None,  # how the run reads its token labels
    }
