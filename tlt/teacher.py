"""A frozen teacher, computed or stored: what a student learns (`tlt.distill`), and the scale of its features.

Shapes: B images, T = h * w cells of the teacher's map, C channels of its features or classes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from tlt.data.augment.device_stage import check_normalisation
from tlt.data.batch import Batch
from tlt.errors import UserError, size_of
from tlt.kinds import KINDS, kind_of
from tlt.label_map import Area
from tlt.models.spatial import Size
from tlt.models.wrap import bare, check_interface, evaluated, find_tokens, probe

if TYPE_CHECKING:
    from tlt.labels.features import FeatureStore

MeanStd = tuple[Sequence[float], Sequence[float]]


class View(NamedTuple):
    """What a teacher gives for the images of a batch, and where it looked.

    Attributes:
        outputs: (B, C), or tokens (B, T, C), float32.
        affine, visible, indices: As in `Batch`, of the images that it saw; an index of -1 has no image.
    """

    outputs: Tensor
    affine: Tensor
    visible: Tensor
    indices: Tensor


class Renormalise:
    """Maps images that are normalised with one mean and deviation per channel to images normalised with others."""

    def __init__(self, source: MeanStd, target: MeanStd, device: torch.device) -> None:
        rows = (torch.tensor(row, dtype=torch.float32, device=device)[:, None, None] for row in (*source, *target))
        mean, std, target_mean, target_std = rows
        self._scale, self._shift = std / target_std, (mean - target_mean) / target_std

    def __call__(self, images: Tensor) -> Tensor:
        return torch.addcmul(self._shift, images, self._scale)


class FeatureTeacher:
    """A frozen network that computes logits or features of images.

    Args:
        model: Any timm model, VOLO or LV-ViT. It is put into evaluation mode and frozen.
        img_size: (H, W) of the images that it receives.
        mean, std: Normalisation of these images; the model's own is in `model.pretrained_cfg`.
        amp_dtype: Dtype of autocast; None for float32.
        compiled: Compiles a function, or returns it as it is.
    """

    def __init__(
        self,
        model: Any,
        img_size: Size,
        mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
        std: Sequence[float] = IMAGENET_DEFAULT_STD,
        amp_dtype: torch.dtype | None = None,
        compiled: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda function: function,
    ) -> None:
        model = bare(model, "FeatureTeacher", inside=True)
        check_interface(model, "forward_features", "pretrained_cfg")
        self.img_size = size_of("img_size", img_size)
        self.amp_dtype = amp_dtype
        check_normalisation(mean, std)
        self.channels: int = getattr(model, "in_chans", 3)
        own: MeanStd = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
        # For grey images all have one mean, as in training.
        rows = [row if len(row) == self.channels else (sum(row) / len(row),) for row in (mean, std, *own)]
        like = next(model.parameters())
        self._renormalise = Renormalise((rows[0], rows[1]), (rows[2], rows[3]), like.device)
        self._dtype = like.dtype
        self.model = model.eval().requires_grad_(False)
        self._run = compiled(_outputs)

    @functools.cached_property
    def tokens(self) -> tuple[Size, Area, int]:
        """Grid of the last map, the part of the image that it covers, and C. Raises UserError if there is no map."""
        return token_map(self.model, self.img_size)

    def width(self, kind: str) -> int:
        """Return C for this kind of teacher. Raise UserError if the model has no such output."""
        return width_of(self.model, self.img_size, kind)

    def see(self, batch: Batch, kind: str, seen: Batch | None = None, images: Tensor | None = None) -> View:
        """Return what this kind of teacher gives for a batch; the arguments are those of `DistillLoss.lesson`."""
        view = batch if seen is None else seen
        known = {getattr(each.key, "indices", ()) for each in (batch, view)} - {()}  # in host memory
        other = len(known) > 1 or {view.size, batch.size if images is None else len(images)} != {batch.size}
        if other or (seen is not None and images is not None):
            raise UserError("a lesson: `seen` has to show the images of the batch, and none that are mixed (`images`)")
        outputs = self(view.images if images is None else images, kind)
        return View(outputs, view.affine, view.visible, view.indices)

    def __call__(self, images: Tensor, kind: str = "token") -> Tensor:
        """Return, in float32, what this kind of teacher gives for images (B, channels, H, W): (B, C), or tokens
        (B, T, C)."""
        of_places = kind_of(kind).of_places
        if images.shape[1] != self.channels:
            raise UserError(f"the teacher takes images of {self.channels} channels, not {images.shape[1]}")
        if of_places and tuple(images.shape[2:]) != self.img_size:
            raise UserError(f"the teacher is for images of img_size {self.img_size}, not {tuple(images.shape[2:])}")
        with torch.inference_mode(), torch.autocast(images.device.type, self.amp_dtype, self.amp_dtype is not None):
            outputs = self._run(self.model, self._renormalise(images).to(self._dtype), kind)
        return outputs.to(torch.float32, copy=True)  # a tensor of inference mode can't be part of a loss


class StoredTeacher:
    """A teacher whose tokens are stored: no network runs, and a step costs what it does without a teacher. The batches
    must have its features: `tlt.Loader(..., features=[features])`.

    Args:
        features: From `tlt.open_features`.
    """

    def __init__(self, features: "FeatureStore") -> None:
        info = features.info
        self.key = features.key
        self.tokens: tuple[Size, Area, int] = info.grid, info.area, info.channels

    def width(self, kind: str) -> int:
        """Return D. Raise UserError for a kind of teacher that gives no tokens."""
        if not KINDS[kind].of_places:
            raise UserError(f"{self.key} holds the features of tokens: kind {kind!r} needs the teacher itself")
        return self.tokens[2]

    def see(self, batch: Batch, kind: str, seen: Batch | None = None, images: Tensor | None = None) -> View:
        """Return the stored tokens of a batch. The arguments are those of `DistillLoss.lesson`; raises UserError if
        there are other views, mixed images, or no features in the batch."""
        self.width(kind)
        if seen is not None or (images is not None and images is not batch.images):
            raise UserError(f"{self.key} holds the features of whole images: no other view (`seen`), and none mixed")
        if self.key not in batch.features:
            raise UserError(f"the batch has no features of {self.key}: give tlt.Loader(..., features=[...]) them")
        stored = batch.features[self.key]
        whole = torch.eye(2, 3, device=stored.values.device).expand(batch.size, 2, 3)
        visible = whole.new_zeros(batch.size, 4)
        visible[:, 2:] = 1
        return View(stored.tokens(), whole, visible, torch.where(stored.present, batch.indices, -1))


Teacher: TypeAlias = FeatureTeacher | StoredTeacher


def _outputs(model: Any, images: Tensor, kind: str) -> Tensor:
    return KINDS[kind].of_teacher(model, images)


def width_of(model: Any, img_size: Size, kind: str) -> int:
    """Return the channels of what a network gives for `kind`, tried with an image of (H, W). Raise UserError if it does
    not take this size, or for tokens if it has no map."""
    if KINDS[kind].of_places:
        return token_map(model, img_size)[2]
    images = probe(model, 1, size_of("img_size", img_size))
    return evaluated(model, images, lambda x: _outputs(model, x, kind)).shape[-1]


def token_map(model: Any, img_size: Size) -> tuple[Size, Area, int]:
    """Return the grid of a model's last map, the part of the image that it covers, and its channels."""
    img_size = size_of("img_size", img_size)
    grid, positions, channels, *_ = find_tokens(model, img_size)
    return grid, positions.window(grid, img_size), channels


class TeacherScale(nn.Module):
    """The mean (C,) and variance of a teacher's features, by which features are normalised. That makes the losses of
    several teachers comparable: a student that predicts the mean has a mean squared error of 1. The dense loss `gram`,
    which compares cosines, needs no such unit, nor do logits, whose loss is in nats as that of labels.

    UNIC (arXiv:2408.05088) standardises features by running means and deviations. Here one number scales all channels,
    the root of their mean variance, as in PHI-S (arXiv:2410.01680), so that a channel that varies little counts little.
    The running values are means over all features so far, because a frozen teacher does not change. All ranks of
    torch.distributed must call `update` together, and have equal values afterwards. If a rank's features are not
    all finite, the values stay as they are.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, shape in (("mean", (channels,)), ("variance", ()), ("count", ())):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float32))

    @torch.no_grad()
    def update(self, features: Tensor, present: Tensor | None = None) -> None:
        """Add features (B, ..., C) to the running values, of the images (B,) that are `present`. The host does not wait
        for the device."""
        off = (features - self.mean).flatten(0, -2)  # relative to the mean so far, which keeps precision
        counted = features.new_ones(len(features)) if present is None else present.to(features)
        counted = counted.repeat_interleave(len(off) // len(features))
        off = off * counted[:, None]
        sums = torch.cat([off.sum(0), off.square().mean(1).sum()[None], counted.sum()[None]])
        if dist.is_initialized():
            dist.all_reduce(sums)
        count, finite = self.count + sums[-1], sums.isfinite().all()
        step = sums[:-2] / count.clamp(min=1)
        variance = (self.variance * self.count + sums[-2]) / count.clamp(min=1) - step.square().mean()
        new = self.mean + step, variance.clamp(min=1e-12), count  # constant features must not divide by 0
        for value, changed in zip((self.mean, self.variance, self.count), new, strict=True):
            value.copy_(torch.where(finite, changed, value))

    def forward(self, features: Tensor) -> Tensor:
        """Return features (..., C) minus their mean, divided by their deviation."""
        return (features - self.mean) / self.variance.sqrt()
