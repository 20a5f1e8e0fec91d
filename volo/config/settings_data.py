"""Settings about images, labels and augmentation: those that several programs share, then those of train.py alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from tlt import kinds
from volo.config import value_types as t
from volo.config.fields import Need, changed, group, needing, setting
from volo.config.settings_shared import CLASS_MAP, DATASET, FILE_BACKENDS, FILES, LimitedLoading, Loading, Pixels


class _Groups(Protocol):
    """The groups of `TrainSettings` that needs of this module look at."""

    @property
    def images(self) -> Images: ...
    @property
    def labels(self) -> TokenLabels: ...
    @property
    def teachers(self) -> Teachers: ...
    @property
    def augment(self) -> Augmentation: ...


def need(of: str, met: Callable[[_Groups], bool]) -> Need:
    """Return a need of a setting of train.py. Its test is written with the groups, so that mypy checks the names."""
    return Need(of, met)


DENSE = "dense targets (--token-label-data, --token-label-teacher or a --token-label-size; with size 1 there are none)"
DENSE_TARGETS = need(DENSE, lambda s: s.labels.token_label_size != 1)
# Without dense targets there is no dense loss; then a weight of 0 is accepted, since it changes nothing.
DENSE_LOSS_LABELS = need("--token-label", lambda s: s.labels.token_label or s.labels.dense_weight == 0)
DENSE_LOSS_TARGETS = need(DENSE, lambda s: s.labels.token_label_size != 1 or s.labels.dense_weight == 0)
DENSE_LOSS = need("--dense-weight above 0", lambda s: s.labels.dense_weight > 0)
LABEL_FILES = need(
    "--token-label-data or --val-label-data", lambda s: bool(s.labels.token_label_data or s.labels.val_label_data)
)
LABELS = need(
    "--token-label-data or --token-label-teacher",
    lambda s: bool(s.labels.token_label_data or s.labels.token_label_teacher),
)
JPEG_BACKEND = need(
    "--data-backend torchvision or dali-cpu", lambda s: s.images.loading.data_backend in ("torchvision", "dali-cpu")
)
LABELLED = need("labels and validation (--kd-only has neither)", lambda s: not s.teachers.kd_only)
DENSE_HEAD = (FILES, LABELLED, "--token-label", DENSE_TARGETS, DENSE_LOSS)
VAL_SPLIT = need("a split of its own (no --val-fraction)", lambda s: not s.images.val_fraction)
PROCESSES = need(
    "--workers above 0 (dali-* has threads)",
    lambda s: s.images.loading.workers != 0 and not s.images.loading.data_backend.startswith("dali"),
)
AUGMENTED = need("augmentation (--no-aug)", lambda s: not s.augment.no_aug)


@dataclass(frozen=True, kw_only=True)
class LabelMaps:
    """How label maps are read."""

    token_label_area: Literal["full", "center"] | None = setting(
        None, "part of the image that the maps show (as the label folder says; else full)", needs=(LABEL_FILES, FILES)
    )
    label_tail: Literal["zero", "exact"] = setting(
        "zero",
        "logit of classes that a cell does not list: 0, as published, or what leaves them their share",
        needs=LABELS,
    )
    bad_label: Literal["stop", "skip", "uniform"] = setting(
        "stop",
        "unreadable map: stop, train that image on its class alone, or use a uniform map",
        needs=(LABEL_FILES, FILES),
    )


@dataclass(frozen=True, kw_only=True)
class TrainLoading(LimitedLoading):
    """Loading of train.py, which can do without files."""

    use_multi_epochs_loader: bool = setting(
        False, "keep the decoding processes from epoch to epoch", needs=PROCESSES, after="no_prefetcher"
    )
    drop_last: bool = setting(
        False, "leave out the last, smaller global batch of an epoch", after="use_multi_epochs_loader"
    )
    data_backend: str = changed(Loading, "data_backend", type=(*FILE_BACKENDS, "synthetic"))
    full_decode: bool = setting(
        False, "decode JPEGs of over 8 million px at full size", needs=JPEG_BACKEND, after="data_backend"
    )


@dataclass(frozen=True, kw_only=True)
class Images:
    """Data"""

    data_dir: str | None = setting(
        None,
        "DATA_DIR/SPLIT/CLASS/IMAGE, or shards",
        t.SOURCE,
        positional=True,
        nargs="?",
        metavar="DATA_DIR",
        needs=FILES,
    )
    data_dir_option: str | None = setting(None, "the same as a flag", t.DIR, names="--data-dir")
    dataset: str = DATASET(needs=FILES)
    train_split: str = setting("train", "folder of the training images", t.NAME, needs=FILES)
    val_fraction: float = setting(0.0, "validate on this part of the training images, drawn by --seed", t.SHARE)
    class_map: str = CLASS_MAP(needs=FILES)
    val_split: str = setting(
        "validation", "validation images (val is found too)", t.NAME, needs=(FILES, LABELLED, VAL_SPLIT)
    )
    pixels: Pixels = group(Pixels)
    batch_size: int = setting(
        128, "training images per device and step; fewer for small data", t.POSITIVE, names="-b --batch-size"
    )
    validation_batch_size_multiplier: int = setting(
        1,
        "validation batch as a multiple of --batch-size",
        t.POSITIVE,
        names="-vb --validation-batch-size-multiplier",
        needs=LABELLED,
    )
    validation_batch_size: int | None = setting(
        None, "per device", t.POSITIVE, needs=LABELLED, excludes=("validation_batch_size_multiplier",)
    )
    loading: TrainLoading = group(TrainLoading)
    save_images: bool = setting(False, "write the input batch as a picture at every --log-interval")


_sized = needing("--train-img-sizes")
PROGRESSIVE = "--train-size-schedule progressive"


@dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """Image sizes"""

    train_img_sizes: list[int] | None = setting(
        None, "sides in px: train each batch on images of one of them", t.POSITIVE
    )
    train_batch_sizes: list[int | str] | None = _sized(
        None, "batch at each; auto: equal pixels", t.count_or_auto, metavar="N"
    )
    train_size_probs: list[float] | None = _sized(None, "weight of each (equal)", t.AMOUNT)
    train_size_schedule: Literal["constant", "progressive"] = _sized(
        "constant", "weights stay, or move to the last one"
    )
    train_size_schedule_spread: float = _sized(
        0.65, "how many sizes beside the present one come, too", t.AMOUNT, needs=PROGRESSIVE
    )
    train_size_random_mix: float = _sized(
        0.1, "part of the batches that may have any of the sizes", t.SHARE, needs=PROGRESSIVE
    )
    variable_batch_loss_scale: Literal["none", "sqrt", "linear"] = _sized("none", "rate of an update by its images")
    val_img_size: int | None = setting(None, "side in px of validation images (--img-size)", t.POSITIVE, needs=LABELLED)


_labelling = needing("--token-label")
_annotating = needing("--token-label-teacher")


@dataclass(frozen=True, kw_only=True)
class TokenLabels:
    """Token labels"""

    token_label: bool = setting(False, "train every output token on its own label, with MixToken")
    token_label_data: str = _labelling(
        "",
        "label maps: a tree DIR/CLASS/IMAGE.pt, an archive (volo label, tlt pack) or shards (tlt pack-images)",
        t.DIR,
        excludes=("token_label_teacher",),
    )
    val_label_data: str = setting(
        "", "label maps of the validation images: measure dense_top1", t.DIR, needs=DENSE_HEAD
    )
    token_label_teacher: str = _labelling("", "label the batches themselves, by this annotator", t.SOURCE)
    token_label_teacher_checkpoint: str = _annotating("", "its weights (the published ones)", t.WEIGHTS)
    token_label_teacher_top_k: int = _annotating(5, "classes it names per place", t.POSITIVE)
    token_label_size: int | None = _labelling(
        None, "tokens per side (the model's; 1, or absent without label data: class targets alone, ReLabel)", t.POSITIVE
    )
    compat: list[str] | None = setting(
        None, "do as published: rows of docs/parity.md, or upstream", t.TEXT, metavar="ROW"
    )
    dense_weight: float = setting(
        0.5, "weight of the dense loss", t.AMOUNT, needs=(DENSE_LOSS_LABELS, DENSE_LOSS_TARGETS)
    )
    cls_weight: float = _labelling(1.0, "weight of the class loss", t.AMOUNT)
    no_mix_token: bool = _labelling(False, "do not mix two images after the patch embedding")
    ground_truth: bool = _labelling(False, "blend the true class into the class target", needs=DENSE_TARGETS)
    gt_weight_agree: float = setting(0.5, "truth's share where the map agrees", t.SHARE, needs="--ground-truth")
    gt_weight_disagree: float = setting(0.1, "truth's share where it does not", t.SHARE, needs="--ground-truth")
    maps: LabelMaps = group(LabelMaps)
    uncovered: Literal["ignore", "uniform"] = setting(
        "ignore",
        "where a crop shows fill or its map nothing: leave it out, or take all classes as equally likely",
        needs="--token-label-data",
        after="token_label_area",
    )


TOKENS = "--kd-distill-type token"
SEVERAL = need("several teachers (--kd-model-name A B)", lambda s: len(s.teachers.kd_model_name) > 1)
_taught = needing("--kd-model-name")


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """Distillation

    One value of --kd-... is for all teachers, else there is one for each.
    """

    kd_model_name: list[str] | Literal[""] = setting(
        "", "frozen teachers: a timm model, hf-hub:..., local-dir:..., a run", t.WEIGHTS, nargs="+"
    )
    kd_distill_type: list[str] = _taught(["logit"], "logits, pooled features, or tokens", (*kinds.KINDS,))
    kd_loss_weight: list[float] = _taught(
        [1.0], "weight of its loss beside the labels'", t.ABOVE_ZERO, names="--kd-loss-weight --distill-loss-weight"
    )
    kd_temperature: list[float] = _taught(
        [4.0], "by which logits are divided", t.ABOVE_ZERO, needs="--kd-distill-type logit"
    )
    kd_dense_loss: list[str] = _taught(["cosine"], "loss of the tokens", kinds.DENSE_LOSSES, needs=TOKENS)
    kd_size: list[int] | None = _taught(
        None, "side, or height and width, in px that it sees (the student's)", t.POSITIVE
    )
    kd_view: list[Literal["crop", "whole"]] = _taught(
        ["crop"], "it sees the student's crop, or the whole image", needs=TOKENS
    )
    kd_drop: float = _taught(0.0, "share of images that leave a teacher out, as UNIC", t.SHARE, needs=SEVERAL)
    kd_only: bool = _taught(False, "learn from them alone: no labels, heads or validation; images may lie anywhere")


_augmented = needing(AUGMENTED)


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Augmentation"""

    no_aug: bool = setting(False, "squash the image to its size and do nothing else to it; not with the flags below")
    scale: list[float] = _augmented([0.08, 1.0], "area of the random crop, least and most", t.AMOUNT, nargs=2)
    ratio: list[float] = _augmented([3.0 / 4.0, 4.0 / 3.0], "its aspect ratio, least and most", t.AMOUNT, nargs=2)
    hflip: float = _augmented(0.5, "probability of a horizontal flip", t.SHARE)
    vflip: float = _augmented(0.0, "probability of a vertical flip", t.SHARE)
    aa: str = _augmented("rand-m9-mstd0.5-inc1", "RandAugment in timm's grammar; '' for none", t.TEXT, metavar="POLICY")
    color_jitter: float = _augmented(0.4, "colour jitter, used where --aa is ''", t.AMOUNT)
    aug_repeats: int = setting(0, "show each image so often in a batch, and fewer images", t.COUNT)
    train_interpolation: Literal["", "random", "bilinear", "bicubic"] = setting("random", "training resize filter")
    reprob: float = _augmented(0.25, "probability of random erasing", t.SHARE)
    remode: Literal["const", "rand", "pixel"] = _augmented(
        "pixel", "what erased areas are filled with", needs="--reprob"
    )
    recount: int = _augmented(1, "erased areas per image", t.POSITIVE, needs="--reprob")
