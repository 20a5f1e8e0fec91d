"""Token labeling for a training loop of one's own: the names that `import tlt` offers, those of other modules included.

`volo train` uses the same targets, boxes and loss (`volo.train.criterion`) and makes the same batches: equal seeds give
equal numbers. docs/python_api.md has such a loop, examples/ whole programs.

Shapes: B images, N tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_STD
from torch import Tensor

from tlt import mixtoken
from tlt.data.augment.counter import key
from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.index_stream import IndexStream
from tlt.data.augment.plan import AugmentConfig
from tlt.data.backends.choice import create_backend
from tlt.data.backends.decode import Backend
from tlt.data.batch import Batch
from tlt.data.dataset import LabelReader, LabelView, TrainDataset
from tlt.data.loader import SkipCounter, TrainLoader
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS
from tlt.data.sources.open_images import open_images as open_images
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.label_map import FULL_AREA, Area
from tlt.label_map import LabelBatch as LabelBatch
from tlt.labels.store import open_labels as open_labels
from tlt.loss import LossTerms, token_label_loss
from tlt.mix import MixRatios
from tlt.models.wrap import TOKEN_LABEL_MODELS
from tlt.models.wrap import with_dense_head as with_dense_head
from tlt.targets import Targets, make_targets

if TYPE_CHECKING:
    from typing_extensions import Self

Grid = tuple[int, int]

# Random streams of one step, different from each other and from those of the data (tlt.data.augment.plan.Stream) and of
# other users of a step's generators.
_TORCH_STREAM, _MIX_BOX_STREAM = 0x57E9, 0x57EA


@dataclass(frozen=True)
class StepKey:
    """Identifies one forward pass of a run: every random number drawn in it is a function of these four numbers.

    Attributes:
        update: Optimizer steps before this one.
        micro_batch: Forward passes before this one in the same update.
    """

    seed: int
    update: int
    micro_batch: int = 0
    rank: int = 0

    def seed_torch(self) -> None:
        """Seed dropout and stochastic depth: torch's generators restart with the seed of this step."""
        torch.manual_seed(int(self._key(_TORCH_STREAM)) >> 1)  # 63 bits

    def generator(self, stream: int) -> np.random.Generator:
        """Return the generator of one random stream of this step."""
        return np.random.Generator(np.random.Philox(key=int(self._key(stream))))

    def _key(self, stream: int) -> np.uint64:
        return key(self.seed, stream, self.update, self.micro_batch, self.rank)


def draw_box(step: StepKey, grid: Grid) -> Sequence[int]:
    """Draw MixToken's box `(row0, col0, row1, col1)` of a step, in tokens of `grid`, from its own random stream."""
    return mixtoken.sample_box(step.generator(_MIX_BOX_STREAM), grid)


@dataclass(frozen=True)
class TokenLabelLoss:
    """Class loss plus dense loss on token labels. `TokenLabelLoss.of(model, img_size)` fits a model.

    Args:
        grid: Token rows and columns of the model at the training resolution.
        num_classes: Outputs of both heads.
        token_label_size: None: one label per token; 1: one label per crop, no dense loss (ReLabel).
        smoothing: Label smoothing in [0, 1).
        cls_weight, dense_weight, ground_truth, gt_weight_agree, gt_weight_disagree: See `tlt.loss.token_label_loss`.
        uncovered: The target of tokens without a known label, see `tlt.targets.make_targets`.
        window: The part of an image that the tokens cover (`tlt.models.token_places`).
    """

    grid: Grid
    num_classes: int
    token_label_size: int | None = None
    smoothing: float = 0.1
    cls_weight: float = 1.0
    dense_weight: float = 0.5
    ground_truth: bool = False
    gt_weight_agree: float = 0.5
    gt_weight_disagree: float = 0.1
    uncovered: str = "ignore"
    window: Area = FULL_AREA

    @classmethod
    def of(cls, model: Any, img_size: tuple[int, int], **settings: Any) -> Self:
        """Return the loss for a model and images of (H, W) pixels.

        Args:
            model: VOLO, LV-ViT, or what `with_dense_head` returned; not wrapped by DistributedDataParallel or compiled.
            settings: Other arguments of the class.

        Raises:
            UserError: The model has no dense head, or does not take this size.
        """
        if not isinstance(model, TOKEN_LABEL_MODELS):
            raise UserError(f"{type(model).__name__} has no dense head: call tlt.with_dense_head(model, img_size)")
        grid = model.token_grid(img_size)
        return cls(grid, model.num_classes, window=model.token_places(img_size).window(grid, img_size), **settings)

    def targets(self, batch: Batch) -> Targets:
        """Return the targets of a batch, whose images are not mixed yet, on its device."""
        return make_targets(
            batch.labels,
            batch.affine,
            batch.visible,
            batch.classes,
            self.grid,
            self.num_classes,
            self.smoothing,
            self.token_label_size,
            self.uncovered,
            self.window,
        )

    def __call__(
        self,
        outputs: tuple[Tensor, Tensor | None],
        targets: Targets,
        box: mixtoken.Box | None = None,
        ratios: MixRatios | None = None,
    ) -> LossTerms:
        """Return the losses, scalars: means over the batch.

        Args:
            outputs: Of `model(images, dense=True, mix_box=box)`: class logits (B, C), token logits (B, N, C) or None.
            box: The box of that forward pass; None for no MixToken.
            ratios: What `tlt.mix.Mixup.draw` drew; None where the images were not mixed by Mixup or CutMix.
        """
        cls_logits, token_logits = outputs
        return token_label_loss(
            cls_logits,
            token_logits,
            targets,
            box,
            ratios,
            cls_weight=self.cls_weight,
            dense_weight=self.dense_weight,
            ground_truth=self.ground_truth,
            gt_weight_agree=self.gt_weight_agree,
            gt_weight_disagree=self.gt_weight_disagree,
        )


class Loader(TrainLoader):
    """Augmented training batches with token labels, those of `volo train`. Each pass is the next epoch.

    It deals the images to the ranks by itself: frameworks must not shard it again. `epoch(number, start_update)` yields
    the batches of an epoch from any update on, which is all that resuming takes.

    Args:
        images: What `open_images` found.
        labels: What `open_labels` found; None: every token has the class of its image.
        augment: Augmentation and size of the images.
        batch_size: Images of one rank in a batch.
        seed: Of order and augmentation.
        mean, std: By which the images are normalised, in [0, 1]; one of each makes grey images. None: `augment.mean`.
        device: Where the batches are finished and stay.
        workers: Decoding processes; 0 decodes in this one.
        world_size, rank: How many processes train, and which of them this is.
        backend: Decoder: "torchvision", "pil", "dali-cpu", "dali-gpu", or an object.
        max_pixels: Larger images count as unreadable.
        full_decode: Decode huge JPEGs at their full size, not at 1/2 to 1/8.
        max_bad_images: How many images may be unreadable, see `SkipCounter`.
        drop_last: Leave out the last, smaller batch of an epoch.
        micro_batches: Batches of one update.
        repeats: How often an epoch shows each of its images.
        label_view: See `TrainDataset`.
        loading: `pin_memory`, `prefetch`, `persistent_workers` and `timeout` of `TrainLoader`.

    Raises:
        UserError: Fewer images than a global batch, or an unknown backend.
    """

    def __init__(
        self,
        images: ImageSource,
        labels: LabelReader | None,
        augment: AugmentConfig,
        batch_size: int,
        seed: int = 42,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] = IMAGENET_DEFAULT_STD,
        device: torch.device | str = "cpu",
        workers: int = 8,
        world_size: int = 1,
        rank: int = 0,
        backend: str | Backend = "torchvision",
        max_pixels: int = DEFAULT_MAX_PIXELS,
        full_decode: bool = False,
        max_bad_images: int | None = None,
        drop_last: bool = False,
        micro_batches: int = 1,
        repeats: int = 1,
        label_view: LabelView | None = None,
        **loading: Any,
    ) -> None:
        if isinstance(backend, str):
            backend = create_backend(backend, max_pixels, workers, device, dct_scaling=not full_decode)
        global_batch = batch_size * micro_batches * world_size
        super().__init__(
            TrainDataset(images, augment, seed, labels, backend, label_view),
            IndexStream(len(images), global_batch, seed, world_size, rank, micro_batches, drop_last, repeats),
            DeviceStage(augment, augment.mean if mean is None else mean, std).to(device),
            device=device,
            workers=workers,
            skips=SkipCounter(len(images), max_bad_images),
            **loading,
        )
        self._next = 0

    @property
    def sampler(self) -> Self:
        """Itself: frameworks call `loader.sampler.set_epoch(number)`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self._next = epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch. Raises as `TrainLoader.epoch`."""
        epoch, self._next = self._next, self._next + 1
        yield from (batch for _, _, batch in self.epoch(epoch))
