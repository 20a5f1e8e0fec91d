"""Computes dense logits with an annotator network: its logits at every position of its last feature map.

A network that averages its last map and applies a linear layer to the mean can apply that layer to every position
instead: the mean of these dense logits is then its ordinary output. This holds for most ConvNets, for Swin, and for
vision transformers that normalise before they average.

Some networks have a layer norm or RMS norm between the average and the linear layer (ConvNeXt, most vision transformers
with average pooling). Their head is linear except that the norm divides by the deviation of the average. We divide all
positions of an image by this one deviation, so that the mean of the dense logits is exactly the output. Applying the
head to one position alone would differ by one positive factor before the constant term.

Other networks (with an activation after the pooling, attention pooling, or a class token) have no exact dense logits,
and `check_dense` refuses them. Models with a dense head were trained to label their positions; we use that head.
"""

import functools
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.io.chunks import image_chunks
from tlt.io.files import blamed_on
from tlt.label_map import Area
from tlt.models.spatial import feature_map, is_channels_last, norm_after_pooling, norm_with_scale_of, prefix_tokens
from tlt.models.token_labeling import TokenLabelModel
from tlt.models.wrap import TOKEN_LABEL_MODELS, WithDenseHead, find_tokens

_SUGGESTION = (
    "use a ConvNet (resnet50, convnext_tiny, dm_nfnet_f0), Swin, a vision transformer with average pooling, or a model "
    "with a dense head"
)
# Allowed error as a share of the largest logit. Linear heads agree to about 1e-6 in float32, a few 1e-4 in TF32.
_TOLERANCE = 1e-3


def labelled_area(model: nn.Module, img_size: tuple[int, int]) -> Area:
    """Return the area of (H, W) images that the positions of an annotator's last map cover, `(x0, y0, x1, y1)` in
    shares of the image. It reaches beyond the image if a position looks at padding."""
    layout = find_tokens(model, img_size)
    return layout.positions.window(layout.grid, img_size)


class Annotation(NamedTuple):
    """The labels that an annotator gives B images."""

    values: Tensor  # (B, k, h, w) float16 logits
    ids: Tensor  # (B, k, h, w) int32 class ids
    log_sum_exp: Tensor  # (B, h, w) float32, over all logits of a position, the listed ones rounded as in `values`


@dataclass
class Annotator:
    """Labels images with a network. Its memory use does not grow with the number of classes."""

    model: nn.Module  # in evaluation mode, with a dense head, or with timm's `forward_features` and `forward_head`
    k: int  # number of classes to list per position
    amp_dtype: torch.dtype | None = None  # of autocast; None for float32
    compiled: InitVar[Callable[..., Any]] = lambda function: function  # compiles a function, or returns it unchanged

    def __post_init__(self, compiled: Callable[..., Any]) -> None:
        # We don't compile the head: this class decides how many images go through it at once.
        self._features = compiled(_features)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Annotation:
        """Label (B, 3, H, W) normalised images. Raise UserError if the features are no map or the dense head is off."""
        parts = []
        autocast = functools.partial(torch.autocast, images.device.type)
        with autocast(enabled=False):  # the caller's autocast would round the steps after the head
            with autocast(dtype=self.amp_dtype, enabled=self.amp_dtype is not None):
                features, tokens = self._features(self.model, images)
            numbers = features[0, ..., 0].numel() * cast(int, self.model.num_classes)
            for rows in image_chunks(len(images), numbers, images.device):
                with autocast(dtype=self.amp_dtype, enabled=self.amp_dtype is not None):
                    dense = _classify(self.model, features[rows], tokens)
                parts.append(_annotation(dense, self.k))
            return Annotation(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))


def _annotation(dense: Tensor, k: int) -> Annotation:
    """Return the min(k, C) largest logits of every position of `dense` (B, h, w, C), in descending order. Overwrites
    `dense`."""
    dense = dense.float()
    top, classes = dense.topk(min(k, dense.shape[-1]), dim=-1)  # (B, h, w, k)
    values = top.permute(0, 3, 1, 2).half()
    ids = classes.permute(0, 3, 1, 2).int()
    # We sum the tail itself: the difference of two sums would lose the digits of a small tail.
    tail = dense.scatter_(-1, classes, -torch.inf).logsumexp(-1)
    total = torch.logaddexp(values.double().logsumexp(1), tail.double()).float()
    return Annotation(values, ids, total)


def check_dense(model: nn.Module, images: Tensor, name: str = "the annotator") -> None:
    """Refuse an annotator if the mean of its dense logits is not its own output. Raise UserError if the two differ, or
    the model has no dense logits. The message begins with `name`. The model is in evaluation mode; one with a dense
    head is accepted without a check. Two real images (B, 3, H, W), normalised, are enough. We compare in float32."""
    if isinstance(model, TOKEN_LABEL_MODELS):
        return
    with blamed_on(name, of=UserError), torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        features, tokens = _features(model, images)
        # Small features may use only the nearly linear range of a nonlinear head, and small images may give a map
        # of one position. So we also try large features of both signs on a 3 x 3 map.
        generator = torch.Generator("cpu").manual_seed(0)
        probe = torch.randn((2, 3, 3, features.shape[-1]), generator=generator, device="cpu").to(features)
        pairs = [
            (model(images), _classify(model, features, tokens)),
            (_head(model, 10 * probe, tokens), _classify(model, 10 * probe, tokens)),
        ]
    for class_logits, dense in pairs:
        mean = dense.mean((1, 2))
        difference = float((mean - class_logits).abs().max())
        largest = float(class_logits.abs().max())
        if not difference <= _TOLERANCE * largest:
            raise UserError(
                f"{name} can't annotate: the mean of its dense logits is up to {difference:.3g} away from its own "
                f"logits (largest {largest:.3g}), because its head is more than a linear layer on averaged features; "
                f"{_SUGGESTION}"
            )


def _features(model: nn.Module, images: Tensor) -> tuple[Tensor, bool]:
    """Return the model's last features (B, h, w, channels), and whether a timm model has them as tokens."""
    kind = type(model).__name__
    size = (images.shape[-2], images.shape[-1])
    if isinstance(model, TOKEN_LABEL_MODELS):
        if not model.dense_head:
            raise UserError(f"{kind} can't annotate: its dense head is switched off; call set_dense_head(True)")
        return feature_map(model, model.forward_features(images), size), True
    if not hasattr(model, "forward_features") or not hasattr(model, "forward_head"):
        raise UserError(f"{kind} has no forward_features and forward_head; {_SUGGESTION}")
    features = cast(Callable[[Tensor], Any], model.forward_features)(images)
    as_tokens = isinstance(features, Tensor) and features.ndim == 3
    pool = getattr(model, "global_pool", "avg")
    if as_tokens and pool != "avg":
        raise UserError(f"{kind} can't annotate: its global pooling is {pool!r} and no average; {_SUGGESTION}")
    try:
        return feature_map(model, features, size), as_tokens
    except UserError as error:
        raise UserError(f"{error}, so it can't annotate; {_SUGGESTION}") from error


def _head(model: nn.Module, features: Tensor, tokens: bool) -> Tensor:
    """Compute the model's own output (B, C) from its features (B, h, w, channels)."""
    head = cast(Callable[[Tensor], Tensor], model.forward_head)
    if tokens:
        # Class token and registers should not count in the average; if they do, `check_dense` notices it.
        prefix = features.new_zeros(features.shape[0], prefix_tokens(model), features.shape[-1])
        return head(torch.cat([prefix, features.flatten(1, 2)], dim=1))
    return head(features if is_channels_last(model) else features.permute(0, 3, 1, 2))


def _classify(model: nn.Module, features: Tensor, tokens: bool) -> Tensor:
    """Apply the head to every position, (B, h, w, channels) -> (B, h, w, C); see the module's docstring."""
    if isinstance(model, TokenLabelModel):
        return model.aux_head(features)
    if isinstance(model, WithDenseHead):
        return model.aux_head(model.aux_norm(features))
    norm = norm_after_pooling(model)
    if norm is not None:
        classifier = cast(Callable[[], nn.Module], model.get_classifier)()
        if getattr(classifier, "in_features", None) != features.shape[-1]:
            raise UserError(
                f"{type(model).__name__} can't annotate: there is another layer between the norm of its head and its "
                f"classifier; {_SUGGESTION}"
            )
        return classifier(norm_with_scale_of(norm, features, features.mean((1, 2))).to(features.dtype))
    # Treat every position as an image of its own, so that all steps of the head are applied.
    batch, h, w, channels = features.shape
    return _head(model, features.reshape(batch * h * w, 1, 1, channels), tokens).view(batch, h, w, -1)
