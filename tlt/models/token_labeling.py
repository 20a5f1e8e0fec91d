"""What VOLO and LV-ViT have in common: two heads, MixToken, image sizes and timm's interface.

Shapes: B images, C = `num_features` channels, N = rows * columns tokens of the final grid, K classes. A model defines
how it embeds an image, which stages the tokens go through and how they end. This file defines the order of the steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.compiler.config as compiler_config
import torch.fx
from timm.layers import to_2tuple
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tlt.errors import UserError, in_range, one_of
from tlt.mixtoken import Box, mix_tokens, unmix_tokens
from tlt.models.fast_ops import linear
from tlt.models.layers import (
    Constants,
    ResidualBlock,
    TransformerBlock,
    draw_masks,
    draw_subsets,
    drop_index_of,
    init_linear,
    kept_share,
    resize_pos_embed,
)
from tlt.models.spatial import TokenPositions

RunBlock = Callable[[nn.Module, Tensor], Tensor]  # runs a block with its draw of stochastic depth
DENSE_SHARE = 0.5  # factor of the dense head's maximum in the class logits (published rule)

# These functions branch on sizes, which a traced graph does not have.
torch.fx.wrap("resize_pos_embed")
torch.fx.wrap("draw_masks")

# Make the four ints of `mix_box` run-time values of the compiled graph from the first box on. Otherwise torch.compile
# treats the first box as a constant and compiles again at the second.
_BOX_SOURCE = r"L\['mix_box'\]\[\d\]"
compiler_config.dynamic_sources = ",".join(filter(None, (compiler_config.dynamic_sources, _BOX_SOURCE)))


class TokenLabelModel(Constants):
    """The base class of VOLO and LV-ViT.

    `model(x)` returns (B, K): class logits plus half the maximum over tokens of the dense head, also in training.
    `model(x, dense=True, mix_box=None)` returns `(class logits (B, K), token logits (B, N, K))`, the tokens un-mixed.

    A subclass sets `patch_embed`, `pos_grid` and `feature_info`, calls `_find_drop_paths` and `_init_heads` last, and
    defines `stage`, `stage_map` and `finish`; without a convolutional stem also `token_grid` and `token_positions`.

    Args:
        img_size: In pixels, one side or (H, W).
        global_pool: "token", "avg" (mean over the other tokens) or "" (head on every token).
        dense_head: Whether to use the dense head (see `set_dense_head`).
    """

    dynamic_img_size = True  # tells timm that the model takes any (H, W), not only that of its construction
    block_types: tuple[type[nn.Module], ...] = (TransformerBlock,)  # classes of the repeated blocks
    class_tokens = 1  # in the output of `forward_features`; timm's num_prefix_tokens counts those in stages
    dense_trained = True  # whether the dense head, if it is on, learns and adds to `model(x)`
    mix_scale = 1  # cells of the embedding per token of the final grid, along each axis

    patch_embed: Any  # images (B, in_chans, H, W) -> (B, rows * mix_scale, columns * mix_scale, channels)
    patch_size: int  # pixels per cell of the embedding
    stem_stride: int  # pixels per cell of the map from which patches are made
    pos_embed: nn.Parameter | None
    pos_grid: tuple[int, int]  # rows and columns of pos_embed
    feature_info: list[dict[str, Any]]
    pretrained_cfg: dict[str, Any]
    default_cfg: dict[str, Any]
    _shares: list[int]  # from `kept_share`, for the two branches of each block with stochastic depth
    _shares_on_device: Tensor  # the same numbers, (branches, 1)
    _traits: dict[str, Any]  # timm's record of the current size, in versions of timm that have one

    def __init__(
        self,
        num_features: int,
        img_size: int | tuple[int, int],
        in_chans: int,
        num_classes: int,
        global_pool: str,
        dense_head: bool,
    ) -> None:
        super().__init__()
        self.num_features = self.head_hidden_size = self.embed_dim = num_features
        self.img_size: tuple[int, int] = to_2tuple(img_size)
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.global_pool = _checked_pool(global_pool)
        self.dense_head = dense_head
        self.grad_checkpointing = False
        self.blocks_draw = True
        self.drop_path_mode = "mask"

    # What a model defines ------------------------------------------------------------------------------------------

    def stage(self, x: Tensor, index: int, run: RunBlock) -> Tensor:
        """Run stage `index` of `feature_info` and what precedes it. Call each block by `run(block, x)`."""
        raise NotImplementedError

    def stage_map(self, x: Tensor, index: int, grid: tuple[int, int], norm: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output of stage `index` as (B, H, W, channels), and its class token (B, 1, C), or None if the
        class token joins later."""
        raise NotImplementedError

    def finish(self, x: Tensor, run: RunBlock) -> Tensor:
        """Turn the last stage's output into (B, 1 + N, C), the class token first, and apply the final norm."""
        raise NotImplementedError

    def token_grid(self, img_size: int | tuple[int, int] | None = None) -> tuple[int, int]:
        """Return rows and columns of the final grid for images of (H, W) pixels (default: the model's own size). As the
        convolutions do, it ignores pixels beyond the last whole token. Raise UserError for images smaller than one
        token."""
        height, width = to_2tuple(img_size or self.img_size)
        kernel = self.patch_size // self.stem_stride
        rows, cols = (((side - 1) // self.stem_stride + 1) // kernel // self.mix_scale for side in (height, width))
        if min(rows, cols) < 1:
            least = self.patch_size * self.mix_scale
            raise UserError(f"image size {height}x{width} is too small for this model: at least {least} pixels a side")
        return rows, cols

    def token_positions(self, img_size: int | tuple[int, int] | None = None) -> TokenPositions:
        """Return where the tokens lie in an image. The first cell of the stem, a 7x7 convolution with padding 3, has
        its centre at 0.5 pixels; the centre of a token is the mean of those of its cells."""
        pitch = self.patch_size * self.mix_scale
        first = (pitch - self.stem_stride) / 2 + 0.5
        return TokenPositions((pitch, pitch), (first, first))

    # Forward -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, dense: bool = False, mix_box: Box | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Classify images. Return (B, K); with `dense` (B, K) and (B, N, K). If `num_classes` is 0, these are features
        instead of logits. Raise UserError if `dense` is set, but the dense head is switched off or there is no pooling.

        Args:
            x: (B, in_chans, H, W) of any size that gives at least one token.
            dense: Whether to return the logits of the two heads separately.
            mix_box: A box of `tlt.mixtoken` in tokens of the final grid. The images are mixed after the embedding.
                Without `dense` the result belongs to the mixed image.
        """
        if isinstance(x, torch.fx.Proxy):  # torch.fx traces `model(x)`
            return self.forward_head(self.forward_features(x))
        return self.apply_heads(self.forward_features(x, mix_box), (x.shape[-2], x.shape[-1]), dense, mix_box)

    def apply_heads(self, tokens: Tensor, img_size: tuple[int, int], dense: bool, mix_box: Box | None) -> Any:
        """Return what `forward` returns, given the features (B, 1 + N, C) of images of (H, W)."""
        if dense and not self.dense_head:
            raise UserError("dense=True needs the dense head, which is switched off: call set_dense_head(True)")
        if dense and not self.global_pool:
            raise UserError("dense=True needs global_pool 'token' or 'avg', not ''")
        if not dense:
            return self.forward_head(tokens)
        patches = tokens[:, 1:]
        if mix_box is not None:
            # The head treats tokens separately, so we un-mix its input (C channels) rather than its output (K).
            patches = unmix_tokens(patches, mix_box, self.token_grid(img_size))
        return self.head(self.pool(tokens)), linear(self.aux_head, patches)

    def forward_features(self, x: Tensor, mix_box: Box | None = None) -> Tensor:
        """Turn images into (B, 1 + N, C): class token, then final-grid tokens row by row, after the final norm."""
        if not (torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(x, torch.fx.Proxy)):
            self.token_grid((x.shape[-2], x.shape[-1]))  # refuses images smaller than a token
        _compile_for_any_batch(self.patch_embed, x)
        x = self.patch_embed(x)
        if mix_box is not None:
            x = mix_tokens(x, mix_box, self.mix_scale)
        run = self._runner(x)
        for index in range(len(self.feature_info)):
            x = self.stage(x, index, run)
        return self.finish(x, run)

    mixed_features = forward_features  # `WithDenseHead` has its own method of this name

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Turn features (B, 1 + N, C) into logits (B, K), or with `pre_logits` into pooled features (B, C)."""
        pooled = self.pool(x)
        if pre_logits:
            return pooled
        logits = self.head(pooled)
        if self.dense_head and self.dense_trained and self.num_classes > 0 and self.global_pool:
            logits = self.both_heads(logits, linear(self.aux_head, x[:, 1:]))
        return logits

    def both_heads(self, cls_logits: Tensor, token_logits: Tensor) -> Tensor:
        """Combine the logits of `model(x, dense=True)`, (B, K) and (B, N, K), into those of `model(x)`, (B, K)."""
        return cls_logits + DENSE_SHARE * token_logits.max(dim=1).values if self.dense_trained else cls_logits

    def pool(self, x: Tensor) -> Tensor:
        """Pool (B, 1 + N, C) to (B, C): class token or mean of the others. Pooling '' returns all tokens unchanged."""
        if self.global_pool == "token":
            return x[:, 0]
        return x[:, 1:].mean(dim=1) if self.global_pool == "avg" else x

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        return_prefix_tokens: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """Return feature maps after chosen stages; unless `intermediates_only`, the final features (B, 1 + N, C) come
        first, or the raw output of the last stage that ran if `stop_early` skipped some. The arguments are timm's.

        Args:
            indices: n for the last n stages, a list of stages, or None for all.
            norm: Whether to apply the final norm to the maps that have its number of channels.
            stop_early: Whether to skip the stages after the last requested one.
            output_fmt: "NCHW", "NHWC" or "NLC" (B, H * W, C).
            intermediates_only: Whether to return only the maps.
            return_prefix_tokens: Whether to pair each map with the class token (B, 1, C), if its stage has one.
        """
        if output_fmt not in ("NCHW", "NHWC", "NLC"):
            raise ValueError(f"output_fmt is NCHW, NHWC or NLC, not {output_fmt}")
        chosen, last = feature_take_indices(len(self.feature_info), indices)
        grid = self.token_grid((x.shape[-2], x.shape[-1]))
        _compile_for_any_batch(self.patch_embed, x)
        x = self.patch_embed(x)
        run = self._runner(x)
        maps: list[Any] = []
        stages = last + 1 if stop_early or intermediates_only else len(self.feature_info)
        for index in range(stages):
            x = self.stage(x, index, run)
            if index in chosen:
                feature, prefix = self.stage_map(x, index, grid, norm)
                feature = feature.flatten(1, 2) if output_fmt == "NLC" else feature
                feature = feature.permute(0, 3, 1, 2) if output_fmt == "NCHW" else feature
                maps.append((feature, prefix) if return_prefix_tokens and prefix is not None else feature)
        if intermediates_only:
            return maps
        return (self.finish(x, run) if stages == len(self.feature_info) else x), maps

    def named_blocks(self) -> list[tuple[str, nn.Module]]:
        """Return the repeated blocks in the order in which they run, with their names in the state dict."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, self.block_types)]

    def _runner(self, x: Tensor) -> RunBlock:
        """Draw which branches each of the B images of x (B, ...) keeps; return a function that runs a block so."""
        drawn: Any = None
        if self.training and self._shares:
            subsets = self.drop_path_mode == "subset"
            drawn = draw_subsets(self._shares, x) if subsets else draw_masks(self._shares_on_device, x)
        return partial(self._run_block, drawn)

    def _run_block(self, drawn: Any, block: nn.Module, x: Tensor) -> Tensor:
        """Run a block. `drawn` has two entries per block with stochastic depth, or is None outside training."""
        index = None if drawn is None else drop_index_of(block)
        inputs = (x,) if index is None else (x, drawn[2 * index], drawn[2 * index + 1])
        _compile_for_any_batch(block, *inputs)
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=self.blocks_draw)
        return block(*inputs)

    def _find_drop_paths(self) -> None:
        """Number the blocks with stochastic depth. A subclass calls this after its blocks have changed."""
        blocks = [block for _, block in self.named_blocks() if isinstance(block, ResidualBlock)]
        dropping = [block for block in blocks if block.drop_path > 0]
        places = {block: index for index, block in enumerate(dropping)}
        for block in blocks:
            block.drop_index = places.get(block)
        self._shares = [kept_share(block.drop_path) for block in dropping for _ in range(2)]
        shares = torch.tensor(self._shares, dtype=torch.int64, device="cpu")[:, None] if self._shares else None
        self.hold(_shares_on_device=shares)

    def set_drop_path_mode(self, mode: str) -> None:
        """Choose how stochastic depth drops residual branches in training: "mask" multiplies them by 0, as published;
        "subset" computes them only for a fixed number of images (see `tlt.models.layers`)."""
        one_of("drop_path_mode", mode, ("mask", "subset"))
        self.drop_path_mode = mode

    # Heads ---------------------------------------------------------------------------------------------------------

    def set_dense_head(self, enabled: bool, trained: bool = True) -> None:
        """Switch the dense head on or off, before you build the optimizer. Switched off or not `trained`, its
        parameters remain but get no gradient, and `model(x)` returns the class token's logits only. Switched off, it
        refuses `dense=True`, too."""
        self.dense_head = enabled
        self.dense_trained = trained
        self.aux_head.requires_grad_(enabled and trained)

    def get_classifier(self) -> nn.Module:
        """Return the class head; the dense head is `aux_head`."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace both heads by freshly initialised ones. With 0 classes the model returns features. `global_pool` is
        "token", "avg" or "", as in the constructor; None keeps the present one."""
        in_range("num_classes", num_classes, 0)
        if global_pool is not None:
            self.global_pool = _checked_pool(global_pool)
        self.num_classes = num_classes
        self._init_heads()

    def _init_heads(self) -> None:
        self.head = new_head(self, self.num_features)
        self.aux_head = new_head(self, self.num_features)
        self.aux_head.requires_grad_(self.dense_head and self.dense_trained)

    # Image size ----------------------------------------------------------------------------------------------------

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Make one side or (H, W) in pixels the model's own image size, and resize the position embedding permanently.
        Raise UserError, and change nothing, if the images are smaller than one token. The embedding is replaced by a
        new parameter, so call this before you build the optimizer."""
        in_range("img_size", img_size, 1, counts=(1, 2))
        grid = self.token_grid(img_size)
        if self.pos_embed is not None:
            resized = self.resized_pos_embed(grid).detach().clone()
            self.pos_embed = nn.Parameter(resized, requires_grad=self.pos_embed.requires_grad)
        self.img_size = to_2tuple(img_size)
        self.pos_grid = grid
        self.record_size()

    def record_size(self) -> None:
        """Record the model's size where timm looks for it, to prepare images and to save the model."""
        if hasattr(self, "_traits"):
            self._traits = {**self._traits, "img_size": self.img_size}
        if getattr(self, "pretrained_cfg", None):
            size = (self.in_chans, *self.img_size)
            self.pretrained_cfg = self.default_cfg = {**self.pretrained_cfg, "input_size": size}

    def resized_pos_embed(self, grid: tuple[int, int]) -> Tensor:
        """Return the position embedding for another grid: (1, rows, columns, C) or (1, 1 + N, C)."""
        assert self.pos_embed is not None
        return resize_pos_embed(self.pos_embed, grid, self.pos_grid)

    # What optimizers and wrappers ask ------------------------------------------------------------------------------

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay, besides norms and biases."""
        return {"pos_embed", "cls_token"}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Choose whether the backward pass recomputes each block, so that its activations need no memory."""
        self.grad_checkpointing = enable
        # Without dropout a block draws no random numbers (stochastic depth is drawn outside), so recomputing it needs
        # no generator state, which is not available in a CUDA graph.
        parts = [part for _, block in self.named_blocks() for part in block.modules()]
        drops = [part.p if isinstance(part, nn.Dropout) else getattr(part, "attn_drop", 0.0) for part in parts]
        self.blocks_draw = any(drops)


def _compile_for_any_batch(module: nn.Module, *inputs: Tensor) -> None:
    """Mark the batch dimension of a compiled module's inputs as dynamic. Otherwise torch.compile would specialise the
    graph to the first batch size, and a run resumed at another size would compile a different graph."""
    if module._compiled_call_impl is not None:
        for tensor in inputs:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def new_head(model: Any, channels: int) -> nn.Module:
    """Return a fresh linear layer from `channels` to the model's classes, with its dtype and device, or an identity if
    the model has no classes."""
    if model.num_classes == 0:
        return nn.Identity()
    like = next(model.parameters())
    head = nn.Linear(channels, model.num_classes, device=like.device, dtype=like.dtype)
    init_linear(head)
    return head.train(model.training)


def _checked_pool(global_pool: str) -> str:
    if global_pool not in ("token", "avg", ""):
        raise UserError(f"global_pool (--gp) is token, avg or '', not {global_pool!r}")
    return global_pool
