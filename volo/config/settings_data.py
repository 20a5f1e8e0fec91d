"""Settings about images, labels and augmentation: those that several programs share, then those of train.py alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from tlt import kinds
from volo.config import value_types as t
from volo.config.checkpoint_files import holds_features
from volo.config.fields import Group, Need, flag, group, needing, switch
from volo.config.settings_shared import CLASS_MAP, DATASET, FILE_BACKENDS, FILES, Pixels


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


need: Callable[[str, Callable[[_Groups], bool]], Need] = Need  # with the groups, so that mypy checks the names

DENSE = "dense targets (--token-label-data, --token-label-teacher or a --token-label-size; with size 1 there are none)"
DENSE_TARGETS = need(DENSE, lambda s: s.labels.token_label_size != 1)
# Without dense targets there is no dense loss; then a weight of 0 is accepted, since it changes nothing.
DENSE_LOSS_LABELS = need("--token-label", lambda s: s.labels.token_label or s.labels.dense_weight == 0)
DENSE_LOSS_TARGETS = need(DENSE, lambda s: s.labels.token_label_size != 1 or s.labels.dense_weight == 0)
DENSE_LOSS = need("--dense-weight above 0", lambda s: s.labels.dense_weight > 0)
LABEL_FILES = need(
    "--token-label-data or --val-label-data", lambda s: bool(s.labels.token_label_data or s.labels.val_label_data)
)
MAP_FILES = need(
    f"{LABEL_FILES.of}, or stored features (--kd-model-name)",
    lambda s: LABEL_FILES.met(s) or any(map(holds_features, s.teachers.kd_model_name)),
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


class LabelMaps(Group):
    """How label maps are read."""

    token_label_area: Literal["full", "center"] | None = flag(
        None, "part of the image that the maps show (as the label folder says; else full)", needs=(LABEL_FILES, FILES)
    )
    uncovered: Literal["ignore", "uniform"] = flag(
        "ignore",
        "where a crop shows fill or its map nothing: leave it out, or take all classes as equally likely",
        needs="--token-label-data",
    )
    label_tail: Literal["zero", "exact"] = flag(
        "zero",
        "classes that a cell does not list: logit 0, as published (of masks: none), or what leaves them their share",
        needs=LABELS,
    )
    bad_label: Literal["stop", "skip", "uniform"] = flag(
        "stop",
        "unreadable map: stop, train that image on its class alone, or use a uniform map",
        needs=(MAP_FILES, FILES),
    )


_on_files = needing(FILES)


class Loading(Group):
    """How images are read, decoded and brought to the device. train.py alone takes all its settings and backends."""

    workers: t.Count | None = flag(
        None, "decoding processes per rank, dali-*: threads; 0: none (8, at most its CPUs)", also="-j"
    )
    pin_mem: bool = switch("page-locked host memory for faster copies to the GPU")
    no_prefetcher: bool = switch("do not copy the next batch to the device ahead of time")
    use_multi_epochs_loader: bool = switch("keep the decoding processes from epoch to epoch", needs=PROCESSES)
    drop_last: bool = switch("leave out the last, smaller global batch of an epoch")
    data_backend: str = flag("torchvision", "what decodes and resizes images", FILE_BACKENDS)
    full_decode: bool = switch("decode JPEGs of over 8 million px at full size", needs=JPEG_BACKEND)
    max_bad_images: t.Count | None = _on_files(None, "end after more unreadable images (0.1 %%, 10 to 100)")
    max_pixels: t.Positive = _on_files(50_000_000, "refuse images of more pixels, which take 12 to 16 bytes each")
    loader_timeout: t.Count = flag(300, "seconds to wait for a batch; 0: for ever", metavar="S")


class TrainLoading(Loading):
    """Loading of train.py, which can do without files."""

    data_backend: str = flag("torchvision", "what decodes and resizes images", (*FILE_BACKENDS, "synthetic"))


class Images(Group):
    """Data"""

    data_dir: t.Source | None = flag(
        None, "DATA_DIR/SPLIT/CLASS/IMAGE, or shards", positional=True, nargs="?", metavar="DATA_DIR", needs=FILES
    )
    data_dir_option: t.Dir | None = flag(None, "the same as a flag", names="--data-dir")
    dataset: str = DATASET(needs=FILES)
    train_split: t.Name = flag("train", "folder of the training images", needs=FILES)
    val_fraction: t.Share = flag(0.0, "validate on this part of the training images, drawn by --seed")
    class_map: t.File = CLASS_MAP(needs=FILES)
    val_split: t.Name = flag("validation", "validation images (val is found too)", needs=(FILES, LABELLED, VAL_SPLIT))
    pixels: Pixels = group(Pixels)
    batch_size: t.Positive = flag(128, "training images per device and step; fewer for small data", also="-b")
    validation_batch_size_multiplier: t.Positive = flag(
        1, "validation batch as a multiple of --batch-size", also="-vb", needs=LABELLED
    )
    validation_batch_size: t.Positive | None = flag(
        None, "per device", needs=LABELLED, excludes=("validation_batch_size_multiplier",)
    )
    loading: TrainLoading = group(TrainLoading)
    save_images: bool = switch("write the input batch as a picture at every --log-interval")


_sized = needing("--train-img-sizes")
PROGRESSIVE = "--train-size-schedule progressive"


class ImageSizes(Group):
    """Image sizes"""

    train_img_sizes: list[t.Positive] | None = flag(None, "sides in px: train each batch on images of one of them")
    train_batch_sizes: list[t.CountOrAuto] | None = _sized(None, "batch at each; auto: equal pixels", metavar="N")
    train_size_probs: list[t.Amount] | None = _sized(None, "weight of each (equal)")
    train_size_schedule: Literal["constant", "progressive"] = _sized(
        "constant", "weights stay, or move to the last one"
    )
    train_size_schedule_spread: t.Amount = _sized(
        0.65, "how many sizes beside the present one come, too", needs=PROGRESSIVE
    )
    train_size_random_mix: t.Share = _sized(
        0.1, "part of the batches that may have any of the sizes", needs=PROGRESSIVE
    )
    variable_batch_loss_scale: Literal["none", "sqrt", "linear"] = _sized("none", "rate of an update by its images")
    val_img_size: t.Positive | None = flag(None, "side in px of validation images (--img-size)", needs=LABELLED)


_labelling = needing("--token-label")
_annotating = needing("--token-label-teacher")


class TokenLabels(Group):
    """Token labels"""

    token_label: bool = switch("train every output token on its own label, with MixToken")
    token_label_data: t.Dir = _labelling(
        "",
        "label maps: a tree DIR/CLASS/IMAGE.pt, an archive (volo label, tlt pack) or shards (tlt pack-images)",
        excludes=("token_label_teacher",),
    )
    val_label_data: t.Dir = flag("", "label maps of the validation images: measure dense_top1", needs=DENSE_HEAD)
    token_label_teacher: t.Source = _labelling("", "label the batches themselves, by this annotator")
    token_label_teacher_checkpoint: t.Weights = _annotating("", "its weights (the published ones)")
    token_label_teacher_top_k: t.Positive = _annotating(5, "classes it names per place")
    token_label_size: t.Positive | None = _labelling(
        None, "tokens per side (the model's; 1, or absent without label data: class targets alone, ReLabel)"
    )
    compat: list[str] | None = flag(None, "do as published: rows of docs/parity.md, or upstream", metavar="ROW")
    dense_weight: t.Amount = flag(0.5, "weight of the dense loss", needs=(DENSE_LOSS_LABELS, DENSE_LOSS_TARGETS))
    cls_weight: t.Amount = _labelling(1.0, "weight of the class loss")
    no_mix_token: bool = _labelling(False, "do not mix two images after the patch embedding")
    ground_truth: bool = _labelling(False, "blend the true class into the class target", needs=DENSE_TARGETS)
    gt_weight_agree: t.Share = flag(0.5, "truth's share where the map agrees", needs="--ground-truth")
    gt_weight_disagree: t.Share = flag(0.1, "truth's share where it does not", needs="--ground-truth")
    maps: LabelMaps = group(LabelMaps)


TOKENS = "--kd-distill-type token"
SEVERAL = need("several teachers (--kd-model-name A B)", lambda s: len(s.teachers.kd_model_name) > 1)
_taught = needing("--kd-model-name")


class Teachers(Group):
    """Distillation

    One value of --kd-... is for all teachers, else there is one for each.
    """

    kd_model_name: list[t.Teacher] | Literal[""] = flag(
        "", "frozen teachers: a timm model, hf-hub:..., local-dir:..., a run, features (volo features)", nargs="+"
    )
    kd_distill_type: list[str] = _taught(["logit"], "logits, pooled features, or tokens", (*kinds.KINDS,))
    kd_loss_weight: list[t.AboveZero] = _taught(
        [1.0], "weight of its loss beside the labels'", also="--distill-loss-weight"
    )
    kd_temperature: list[t.AboveZero] = _taught([4.0], "by which logits are divided", needs="--kd-distill-type logit")
    kd_dense_loss: list[str] = _taught(["cosine"], "loss of the tokens", kinds.DENSE_LOSSES, needs=TOKENS)
    kd_size: list[t.Positive] | None = _taught(None, "side, or height and width, in px that it sees (the student's)")
    kd_view: list[Literal["crop", "whole"]] = _taught(
        ["crop"], "it sees the student's crop, or the whole image", needs=TOKENS
    )
    kd_drop: t.Share = _taught(0.0, "share of images that leave a teacher out, as UNIC", needs=SEVERAL)
    kd_only: bool = _taught(False, "learn from them alone: no labels, heads or validation; images may lie anywhere")


_augmented = needing(AUGMENTED)


class Augmentation(Group):
    """Augmentation"""

    no_aug: bool = switch("squash the image to its size and do nothing else to it; not with the flags below")
    scale: list[t.Amount] = _augmented([0.08, 1.0], "area of the random crop, least and most", nargs=2)
    ratio: list[t.Amount] = _augmented([3.0 / 4.0, 4.0 / 3.0], "its aspect ratio, least and most", nargs=2)
    hflip: t.Share = _augmented(0.5, "probability of a horizontal flip")
    vflip: t.Share = _augmented(0.0, "probability of a vertical flip")
    aa: str = _augmented("rand-m9-mstd0.5-inc1", "RandAugment in timm's grammar; '' for none", metavar="POLICY")
    color_jitter: t.Amount = _augmented(0.4, "colour jitter, used where --aa is ''")
    aug_repeats: t.Count = flag(0, "show each image so often in a batch, and fewer images")
    train_interpolation: Literal["", "random", "bilinear", "bicubic"] = flag("random", "training resize filter")
    reprob: t.Share = _augmented(0.25, "probability of random erasing")
    remode: Literal["const", "rand", "pixel"] = _augmented(
        "pixel", "what erased areas are filled with", needs="--reprob"
    )
    recount: t.Positive = _augmented(1, "erased areas per image", needs="--reprob")
