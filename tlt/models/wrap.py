"""Token labeling for any timm model with spatial features: adds a dense head on its last map, and MixToken after its
embedding.

The model gets a second head, `aux_head` (after `aux_norm` if the model normalises only after pooling), and its class is
replaced by a subclass (`extend`). Its parameters keep their names, and `model(x)` remains timm's own forward pass.

Shapes: B images, maps of `h x w` tokens, N = h * w tokens, C channels, K classes.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from tlt.errors import UserError, reason_of, size_of
from tlt.io.files import blamed_on
from tlt.io.weights import unwrap
from tlt.mixtoken import Box, mix_cells, mix_tokens
from tlt.models.extension import Extension, extend
from tlt.models.spatial import Size, TokenPositions, downsampling_layers, feature_map, norm_after_pooling, positions_of
from tlt.models.token_labeling import TokenLabelModel, new_head

DENSE_LAYERS = ("aux_head", "aux_norm")
# timm's names of the last layer that has the whole image before the blocks, in search order.
_EMBEDDINGS = ("patch_embed", "stem", "maxpool", "bn1")
_NO_LAYERS = (type(None), nn.Identity, nn.ModuleList)
_TOLERANCE = 1e-3  # allowed difference as a share of the largest feature


class TokenLayout(NamedTuple):
    """Describes the last map of a model for images of one size."""

    grid: Size  # rows and columns of the map
    positions: TokenPositions  # where its tokens lie in the image
    channels: int
    cells: TokenPositions | None = None  # where the cells that MixToken mixes lie; None if they are the tokens

    def of_cells(self, axis: int, count: int, device: torch.device) -> Tensor:
        """Return (count,), the token of each cell along an axis. Cells beyond the outer tokens belong to these."""
        assert self.cells is not None
        centres = torch.arange(count, device=device) * self.cells.pitch[axis] + self.cells.first[axis]
        steps = (centres - self.positions.first[axis]) / self.positions.pitch[axis]
        return (steps + 0.5).floor().clamp(0, self.grid[axis] - 1)


class WithDenseHead(Extension):
    """The extension that gives a timm model the interface of `TokenLabelModel`.

    `model(x)` returns timm's output (B, K). `model(x, dense=True, mix_box=None)` returns `(class logits (B, K), token
    logits (B, N, K))`, the tokens un-mixed. Unlike in a TokenLabelModel the dense head never adds to `model(x)`.
    """

    dense_head: bool
    num_classes: int
    forward_features: Callable[[Tensor], Tensor]
    forward_head: Callable[[Tensor], Tensor]
    aux_head: Any
    aux_norm: nn.Module
    mix_point: "MixPoint | None"
    mix_refusal: str  # why there is no `mix_point`
    _layout_by_size: dict[Size, TokenLayout]

    def forward(self, x: Tensor, dense: bool = False, mix_box: Box | None = None) -> Any:
        """Classify images. Arguments and results are those of `TokenLabelModel.forward`. Raise UserError if `dense` is
        set, but the dense head is switched off; or a box is given, but the model can't mix."""
        if not dense and mix_box is None:
            return super().forward(x)
        return self.apply_heads(self.mixed_features(x, mix_box), (x.shape[-2], x.shape[-1]), dense, mix_box)

    def apply_heads(self, features: Any, img_size: Size, dense: bool, mix_box: Box | None) -> Any:
        """Return what `forward` returns, given the features of images of (H, W)."""
        if dense and not self.dense_head:
            raise UserError("dense=True needs the dense head, which is switched off: call set_dense_head(True)")
        logits = self.forward_head(features)
        if not dense:
            return logits
        tokens = feature_map(self, features, img_size)  # (B, h, w, C)
        if mix_box is not None:
            # The head treats tokens separately, so we un-mix its input (C channels) rather than its output (K).
            tokens = mix_tokens(tokens, mix_box)
        return logits, self.aux_head(self.aux_norm(tokens)).flatten(1, 2)

    def both_heads(self, cls_logits: Tensor, token_logits: Tensor) -> Tensor:
        """Return the class logits (B, K) only; see `TokenLabelModel.both_heads`."""
        return cls_logits

    def mixed_features(self, x: Tensor, mix_box: Box | None) -> Tensor:
        """Return the model's `forward_features` of images mixed by a box."""
        if mix_box is None:
            return self.forward_features(x)
        self.check_mix_token()
        assert self.mix_point is not None
        return self.mix_point.mixed(self, self.forward_features, x, mix_box, self._tokens((x.shape[-2], x.shape[-1])))

    def check_mix_token(self) -> None:
        """Raise UserError if images can't be mixed after this model's embedding."""
        if self.mix_point is None:
            raise UserError(f"{_name(self)} can't mix images: {self.mix_refusal}; use --no-mix-token")

    def token_grid(self, img_size: int | tuple[int, int] | None = None) -> tuple[int, int]:
        """Return rows and columns of the last map for images of (H, W) pixels (default: the model's own size). Raise
        UserError if the model does not take this size. The first call for a size runs the model once. This also finds
        `token_positions`."""
        return self._tokens(img_size).grid

    def token_positions(self, img_size: int | Size | None = None) -> TokenPositions:
        """Return where the tokens lie in images of (H, W) pixels (default: its own size). Raises like `token_grid`."""
        return self._tokens(img_size).positions

    def _tokens(self, img_size: int | Size | None) -> TokenLayout:
        size: Size = to_2tuple(_own_size(self) if img_size is None else img_size)
        if size not in self._layout_by_size:
            self._layout_by_size[size] = find_tokens(self, size, self.mix_point)
        return self._layout_by_size[size]

    def set_dense_head(self, enabled: bool, trained: bool = True) -> None:
        """Switch the dense head on or off, before you build the optimizer. Switched off or not `trained`, it remains
        but gets no gradient."""
        self.dense_head = enabled
        for layer in DENSE_LAYERS:
            getattr(self, layer).requires_grad_(enabled and trained)

    def reset_classifier(self, num_classes: int, *args: Any, **kwargs: Any) -> None:
        """Call timm's method, and replace the dense head by a fresh one with as many classes."""
        super().reset_classifier(num_classes, *args, **kwargs)  # type: ignore[misc]
        self.aux_head = new_head(self, next(iter(self._layout_by_size.values())).channels)
        self.set_dense_head(self.dense_head)


# The classes of models that the programs train with token labels.
TOKEN_LABEL_MODELS = (TokenLabelModel, WithDenseHead)


def with_dense_head(model: Any, img_size: tuple[int, int] | None = None) -> Any:
    """Add a dense head and MixToken to a timm model in place, and return it: it is now also a WithDenseHead. A model
    that has them is returned unchanged. Raise UserError if the model has no classes, weights or spatial features, or
    does not take this size. If images can't be mixed after its embedding, `check_mix_token` and `mix_box` raise
    UserError.

    Args:
        model: Any timm model, on any device that holds its weights.
        img_size: (H, W) in pixels of the training images (default: the model's own size).
    """
    if isinstance(bare(model), TOKEN_LABEL_MODELS):
        return model
    bare(model, "with_dense_head")
    check_interface(model, "num_classes", "forward_features", "forward_head")
    size = size_of("img_size", _own_size(model) if img_size is None else img_size)
    with blamed_on(f"{_name(model)} can't get a dense head", of=UserError):
        if not model.num_classes:
            raise UserError("it has no classes")
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UserError("it is on the meta device, where it can't be tried; move it there afterwards")
        if not isinstance(getattr(model, "patch_drop", None), nn.Identity | None):
            raise UserError("it drops patches in training (patch_drop_rate)")
        layout = find_tokens(model, size)
    extend(model, WithDenseHead)
    model._layout_by_size = {size: layout}
    model.aux_head = new_head(model, layout.channels)
    like: Any = {"device": model.aux_head.weight.device, "dtype": model.aux_head.weight.dtype}
    model.aux_norm = nn.Identity() if norm_after_pooling(model) is None else nn.LayerNorm(layout.channels, **like)
    model.set_dense_head(True)
    model.mix_point = None
    model.mix_refusal = ""
    try:
        model.mix_point, model._layout_by_size[size] = add_mix_point(model, probe(model, 2, size))
    except UserError as error:
        model.mix_refusal = str(error)
    return model


def bare(model: Any, action: str = "", inside: bool = False) -> Any:
    """Return the model inside wrappers such as torch.compile's, DistributedDataParallel and timm's ModelEmaV3. `action`
    says what changes the model, or runs a part of it; "" if the caller only reads what the model knows. Raise UserError
    if it is not possible any more: inside a wrapper it must be `inside`, and FSDP, of either version, allows it never,
    because it has divided the weights."""
    if not isinstance(model, nn.Module):
        return model
    inner = unwrap(model)
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    divided = any(kind.__module__.startswith("torch.distributed.fsdp") for kind in kinds)
    if action and (divided or (inner is not model and not inside)):
        raise UserError(f"{action}: {type(model).__name__} wraps or divides the model already: do this before")
    return inner


def check_interface(model: nn.Module, *names: str) -> None:
    """Raise UserError unless a model has these attributes, which timm's models have."""
    for name in names:
        if not hasattr(model, name):
            raise UserError(f"{_name(model)} is no model of timm: it has no {name}")


def find_tokens(model: Any, size: Size, mix_point: "MixPoint | None" = None) -> TokenLayout:
    """Return the layout of a model's last map. Run a timm model on an image of (H, W) for that; VOLO and LV-ViT know
    it. Raises like `with_dense_head`."""
    if isinstance(model, TokenLabelModel):
        return TokenLayout(model.token_grid(size), model.token_positions(size), model.num_features)
    bare(model, f"to find the tokens of images of {size}", inside=True)
    layer = getattr(model, mix_point.layer) if mix_point else model
    with downsampling_layers(model) as layers:
        features, output = _map_and_output(model, layer, probe(model, 1, size))
    grid = features.shape[1], features.shape[2]
    positions = positions_of(layers, grid, size)
    cells = None
    if mix_point and mix_point.layout != "NLC":
        rows = mix_point.layout.index("H")
        cells = positions_of(layers, (output.shape[rows], output.shape[rows + 1]), size)
    return TokenLayout(grid, positions, features.shape[3], cells)


def _last_map(model: Any, images: Tensor) -> Tensor:
    """Return the last features (B, h, w, C) in evaluation mode. Raise UserError if the model does not take the size."""
    return evaluated(model, images, lambda x: feature_map(model, model.forward_features(x), (x.shape[-2], x.shape[-1])))


@torch.no_grad()
def evaluated(model: Any, images: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `run(images)` in evaluation mode, and restore the model's mode. Raise UserError if layers refuse it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    size = images.shape[-2], images.shape[-1]
    try:
        return run(images)
    except UserError:
        raise
    except Exception as error:  # layers raise errors of any type for other sizes
        message = f"{_name(model)} does not take images of {size[0]} x {size[1]} px: {reason_of(error)}"
        raise UserError(message) from error
    finally:
        for module, training in modes:
            module.training = training


def probe(model: Any, batch: int, size: tuple[int, int]) -> Tensor:
    """Return noise (batch, channels, H, W) for a trial run of the model; the same on every rank."""
    config = getattr(model, "pretrained_cfg", None) or {}
    channels = getattr(model, "in_chans", config.get("input_size", (3,))[0])
    images = torch.randn(batch, channels, *size, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return images.to(next(model.parameters()))


def _own_size(model: Any) -> tuple[int, int]:
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return tuple(size) if size is not None else tuple(model.pretrained_cfg["input_size"][1:])


def _name(model: Any) -> str:
    config = getattr(model, "pretrained_cfg", None) or {}
    return f"--model {config['architecture']}" if config.get("architecture") else type(model).__name__


# Where MixToken mixes -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class MixPoint:
    """A forward hook that mixes the output of one layer, in those calls of the model that ask for it."""

    layer: str  # name of the layer
    layout: str  # "NLC" (patches row by row), "NHWC" or "NCHW"
    # Thread id -> the box and the token layout, for every running call that has yet to mix.
    calls: dict[int, tuple[Box, TokenLayout]] = field(default_factory=dict)

    def attach(self, model: nn.Module) -> None:
        """Hook the layer that has the name now: programs replace layers, for SyncBatchNorm, LoRA or quantization."""
        layer: nn.Module = getattr(model, self.layer)
        if self not in layer._forward_hooks.values():
            self.detach(model)
            layer.register_forward_hook(self)

    def detach(self, model: nn.Module) -> None:
        """Remove the hook from whichever layers have it."""
        for module in model.modules():
            for number in [number for number, hook in module._forward_hooks.items() if hook is self]:
                del module._forward_hooks[number]

    def mixed(
        self, model: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor, box: Box, tokens: TokenLayout
    ) -> Tensor:
        """Return `run(images)`, which runs the layer of `model`, while the hook mixes its output by `box`. Raise
        UserError if the layer ran without its hook, so that the images were not mixed."""
        self.attach(model)
        call = _this_call()
        self.calls[call] = box, tokens
        try:
            result = run(images)
        finally:
            unmixed = self.calls.pop(call, None)
        if unmixed is not None:
            raise UserError(
                f"{_name(model)} did not mix images: the hook of its {self.layer} was not called; if that layer alone "
                "is compiled, compile the whole model"
            )
        return result

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if (call := _this_call()) not in self.calls:
            return None
        box, tokens = self.calls.pop(call)
        if self.layout == "NLC":
            return mix_tokens(output.unflatten(1, tokens.grid), box).flatten(1, 2)
        x = output if self.layout == "NHWC" else output.permute(0, 2, 3, 1)
        rows, cols = (tokens.of_cells(axis, x.shape[axis + 1], x.device) for axis in (0, 1))
        mixed = mix_cells(x, box, rows, cols)
        return mixed if self.layout == "NHWC" else mixed.permute(0, 3, 1, 2)


def _this_call() -> int:
    """Return an id that distinguishes a call from those of other threads; a compiled graph is called by one thread."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def add_mix_point(model: nn.Module, images: Tensor) -> "tuple[MixPoint, TokenLayout]":
    """Hook a `MixPoint` to the embedding of a model and test it with any two images (2, 3, H, W): a box of all tokens
    must give the partner's features. Return it with the token layout for images of this size. Raise UserError, and
    leave no hook, if there is no such layer, its output is no map, or images also reach the features another way."""
    name = next((n for n in _EMBEDDINGS if type(getattr(model, n, None)) not in _NO_LAYERS), None)
    if name is None:
        raise UserError(f"none of its layers is one that MixToken knows ({', '.join(_EMBEDDINGS)})")
    layer: nn.Module = getattr(model, name)
    partner, output = _map_and_output(model, layer, images.flip(0))
    grid = partner.shape[1], partner.shape[2]
    lower = images.flip(0)
    lower[:, :, images.shape[2] // 2 :] *= -1
    point = MixPoint(name, _layout(name, layer, grid, output, _map_and_output(model, layer, lower)[1]))
    tokens = find_tokens(model, (images.shape[2], images.shape[3]), point)
    mixed = point.mixed(model, partial(_last_map, model), images, (0, 0, *grid), tokens)
    if not (mixed - partner).abs().max() <= _TOLERANCE * partner.abs().max():
        point.detach(model)
        raise UserError(f"images reach its features past its {name}, where MixToken would mix")
    return point, tokens


def _map_and_output(model: nn.Module, layer: nn.Module, images: Tensor) -> tuple[Tensor, Any]:
    """Return the last map of images, and the output of `layer`, or None unless `layer` ran exactly once."""
    outputs: list[Any] = []
    handle = layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        result = _last_map(model, images)
    finally:
        handle.remove()
    return result, outputs[0] if len(outputs) == 1 else None


def _layout(name: str, layer: nn.Module, grid: Size, output: Any, lower: Any) -> str:
    """Return the layout of the `output` of `layer`; `lower` is its output if only the lower half of the images differs.
    Raise UserError if the output can't be read as a map."""
    if not isinstance(output, Tensor) or output.ndim not in (3, 4):
        raise UserError(f"its {name} does not give one map of the image, for MixToken to mix")
    if output.ndim == 3:
        if not hasattr(layer, "dynamic_feat_size") or output.shape[1] != grid[0] * grid[1]:
            raise UserError(
                f"its {name} gives {output.shape[1]} tokens, not the {grid[0]} x {grid[1]} that MixToken mixes"
            )
        return "NLC"
    change = (output - lower).abs()

    def above(layout: str) -> float:
        rows = layout.index("H")
        return float(change.narrow(rows, 0, change.shape[rows] // 2).sum())

    return min("NCHW", "NHWC", key=above)  # under the right layout, the upper half of the rows changes least
