"""The flags of `train.py` about its data: images, labels and augmentation."""

from __future__ import annotations

from dataclasses import replace

from tlt import kinds
from tlt.data.sources import KINDS
from volo.config import value_types as t
from volo.config.flag_table import Group, Need, flag, needing, switch

POOLS = ("fast", "avg", "max", "avgmax", "avgmaxc", "token")
INTERPOLATIONS = ("", "bilinear", "bicubic")
FILE_BACKENDS = ("torchvision", "pil", "dali-cpu", "dali-gpu")

DENSE = "dense targets (--token-label-data, --token-label-teacher or a --token-label-size; with size 1 there are none)"
DENSE_TARGETS = Need(DENSE, lambda a: a.token_label_size != 1)
# Without dense targets there is no dense loss; then a weight of 0 is accepted, since it changes nothing.
DENSE_LOSS_LABELS = Need("--token-label", lambda a: a.token_label or a.dense_weight == 0)
DENSE_LOSS_TARGETS = Need(DENSE, lambda a: a.token_label_size != 1 or a.dense_weight == 0)
DENSE_LOSS = Need("--dense-weight above 0", lambda a: a.dense_weight > 0)
LABEL_FILES = Need("--token-label-data or --val-label-data", lambda a: bool(a.token_label_data or a.val_label_data))
LABELS = Need(
    "--token-label-data or --token-label-teacher", lambda a: bool(a.token_label_data or a.token_label_teacher)
)
JPEG_BACKEND = Need("--data-backend torchvision or dali-cpu", lambda a: a.data_backend in ("torchvision", "dali-cpu"))
FILES = Need("image files (--data-backend synthetic has none)", lambda a: a.data_backend != "synthetic")
LABELLED = Need("labels and validation (--kd-only has neither)", lambda a: not a.kd_only)
DENSE_HEAD = (FILES, LABELLED, "--token-label", DENSE_TARGETS, DENSE_LOSS)
VAL_SPLIT = Need("a split of its own (no --val-fraction)", lambda a: not a.val_fraction)
PROCESSES = Need("--workers above 0 (dali-* has threads)", lambda a: a.workers != 0 and a.data_backend[:4] != "dali")
AUGMENTED = Need("augmentation (--no-aug)", lambda a: not a.no_aug)

_KINDS = f"{', '.join(KINDS)} (docs/data.md); folders and shards: none"
DATASET = flag("-d --dataset", t.TEXT, "", _KINDS, metavar="KIND", needs=FILES)

CLASS_MAP = flag("--class-map", t.FILE, "", "class folders in the order of the outputs, one a line", needs=FILES)

# Flags that several programs have.
LABEL_AREA = flag(
    "--token-label-area",
    ("full", "center"),
    None,
    "part of the image that the maps show (as the label folder says; else full)",
    needs=(LABEL_FILES, FILES),
)
LABEL_TAIL = flag(
    "--label-tail",
    ("zero", "exact"),
    "zero",
    "logit of classes that a cell does not list: 0, as published, or what leaves them their share",
    needs=LABELS,
)
BAD_LABEL = flag(
    "--bad-label",
    ("stop", "skip", "uniform"),
    "stop",
    "unreadable map: stop, train that image on its class alone, or use a uniform map",
    needs=(LABEL_FILES, FILES),
)
DEVICE = flag("--device", t.device_name, None, "cpu, cuda, or cuda:N or N (a GPU where there is one)", metavar="NAME")
DEBUG = switch("--debug", "show the traceback of an error that is normally told in one line")
POOL = flag("--gp", POOLS, None, f"global pooling: {', '.join(POOLS)}", metavar="POOL")
MODEL_KWARGS = flag("--model-kwargs", t.key_value, {}, "more arguments for the model", nargs="*", metavar="K=V")
PREPROCESSING = (
    flag("--img-size", t.POSITIVE, None, "image side in px (the model's own)", excludes=("input_size",)),
    flag("--input-size", t.POSITIVE, None, "channels, height and width in px", nargs=3),
    flag("--crop-pct", t.ABOVE_ZERO, None, "crop / resized side in validation (the model's own)"),
    flag("--mean", t.FLOAT, None, "pixel means in 0..1 (the model's own)", nargs="+"),
    flag("--std", t.ABOVE_ZERO, None, "their deviations (the model's own)", nargs="+"),
    flag("--interpolation", INTERPOLATIONS, "", "resize filter in validation (the model's own)"),
)
WORKERS = flag(
    "-j --workers", t.COUNT, None, "decoding processes per rank, dali-*: threads; 0: none (8, at most its CPUs)"
)
LOADING = (
    switch("--pin-mem", "page-locked host memory for faster copies to the GPU"),
    switch("--no-prefetcher", "do not copy the next batch to the device ahead of time"),
)
LIMITS = (
    *needing(
        FILES,
        flag("--max-bad-images", t.COUNT, None, "end after more unreadable images (0.1 %%, 10 to 100)"),
        flag("--max-pixels", t.POSITIVE, 50_000_000, "refuse images of more pixels, which take 12 to 16 bytes each"),
    ),
    flag("--loader-timeout", t.COUNT, 300, "seconds to wait for a batch; 0: for ever", metavar="S"),
)

DATA = Group(
    "Data",
    flag(
        "data_dir", t.SOURCE, None, "DATA_DIR/SPLIT/CLASS/IMAGE, or shards", nargs="?", metavar="DATA_DIR", needs=FILES
    ),
    flag("--data-dir", t.DIR, None, "the same as a flag", renamed="data_dir_option"),
    DATASET,
    flag("--train-split", t.NAME, "train", "folder of the training images", needs=FILES),
    flag("--val-fraction", t.SHARE, 0.0, "validate on this part of the training images, drawn by --seed"),
    CLASS_MAP,
    flag(
        "--val-split", t.NAME, "validation", "validation images (val is found too)", needs=(FILES, LABELLED, VAL_SPLIT)
    ),
    *PREPROCESSING,
    flag("-b --batch-size", t.POSITIVE, 128, "training images per device and step; fewer for small data"),
    *needing(
        LABELLED,
        flag("-vb --validation-batch-size-multiplier", t.POSITIVE, 1, "validation batch as a multiple of --batch-size"),
        flag("--validation-batch-size", t.POSITIVE, None, "per device", excludes=("validation_batch_size_multiplier",)),
    ),
    WORKERS,
    *LOADING,
    switch("--use-multi-epochs-loader", "keep the decoding processes from epoch to epoch", needs=PROCESSES),
    switch("--drop-last", "leave out the last, smaller global batch of an epoch"),
    flag("--data-backend", (*FILE_BACKENDS, "synthetic"), "torchvision", "what decodes and resizes images"),
    switch("--full-decode", "decode JPEGs of over 8 million px at full size", needs=JPEG_BACKEND),
    *LIMITS,
    switch("--save-images", "write the input batch as a picture at every --log-interval"),
)


IMAGE_SIZES = Group(
    "Image sizes",
    flag("--train-img-sizes", t.POSITIVE, None, "sides in px: train each batch on images of one of them", nargs="+"),
    *needing(
        "--train-img-sizes",
        flag("--train-batch-sizes", t.count_or_auto, None, "batch at each; auto: equal pixels", nargs="+", metavar="N"),
        flag("--train-size-probs", t.AMOUNT, None, "weight of each (equal)", nargs="+"),
        flag("--train-size-schedule", ("constant", "progressive"), "constant", "weights stay, or move to the last one"),
        *needing(
            "--train-size-schedule progressive",
            flag("--train-size-schedule-spread", t.AMOUNT, 0.65, "how many sizes beside the present one come, too"),
            flag("--train-size-random-mix", t.SHARE, 0.1, "part of the batches that may have any of the sizes"),
        ),
        flag("--variable-batch-loss-scale", ("none", "sqrt", "linear"), "none", "rate of an update by its images"),
    ),
    flag("--val-img-size", t.POSITIVE, None, "side in px of validation images (--img-size)", needs=LABELLED),
)

TOKEN_LABELS = Group(
    "Token labels",
    switch("--token-label", "train every output token on its own label, with MixToken"),
    flag(
        "--token-label-data",
        t.DIR,
        "",
        "label maps: a tree DIR/CLASS/IMAGE.pt, an archive (volo label, tlt pack) or shards (tlt pack-images)",
        needs="--token-label",
        excludes=("token_label_teacher",),
    ),
    flag("--val-label-data", t.DIR, "", "label maps of the validation images: measure dense_top1", needs=DENSE_HEAD),
    flag(
        "--token-label-teacher", t.SOURCE, "", "label the batches themselves, by this annotator", needs="--token-label"
    ),
    *needing(
        "--token-label-teacher",
        flag("--token-label-teacher-checkpoint", t.WEIGHTS, "", "its weights (the published ones)"),
        flag("--token-label-teacher-top-k", t.POSITIVE, 5, "classes it names per place"),
    ),
    flag(
        "--token-label-size",
        t.POSITIVE,
        None,
        "tokens per side (the model's; 1, or absent without label data: class targets alone, ReLabel)",
        needs="--token-label",
    ),
    flag("--compat", t.TEXT, None, "do as published: rows of docs/parity.md, or upstream", nargs="+", metavar="ROW"),
    flag("--dense-weight", t.AMOUNT, 0.5, "weight of the dense loss", needs=(DENSE_LOSS_LABELS, DENSE_LOSS_TARGETS)),
    flag("--cls-weight", t.AMOUNT, 1.0, "weight of the class loss", needs="--token-label"),
    switch("--no-mix-token", "do not mix two images after the patch embedding", needs="--token-label"),
    switch("--ground-truth", "blend the true class into the class target", needs=("--token-label", DENSE_TARGETS)),
    flag("--gt-weight-agree", t.SHARE, 0.5, "truth's share where the map agrees", needs="--ground-truth"),
    flag("--gt-weight-disagree", t.SHARE, 0.1, "truth's share where it does not", needs="--ground-truth"),
    LABEL_AREA,
    flag(
        "--uncovered",
        ("ignore", "uniform"),
        "ignore",
        "where a crop shows fill or its map nothing: leave it out, or take all classes as equally likely",
        needs="--token-label-data",
    ),
    LABEL_TAIL,
    BAD_LABEL,
)

TOKENS = "--kd-distill-type token"
SEVERAL = Need("several teachers (--kd-model-name A B)", lambda a: len(a.kd_model_name) > 1)

_OF_A_TEACHER = (
    flag("--kd-model-name", t.WEIGHTS, "", "frozen teachers: a timm model, hf-hub:..., local-dir:..., a run"),
    *needing(
        "--kd-model-name",
        flag("--kd-distill-type", (*kinds.KINDS,), ["logit"], "logits, pooled features, or tokens"),
        flag("--kd-loss-weight --distill-loss-weight", t.ABOVE_ZERO, [1.0], "weight of its loss beside the labels'"),
        flag("--kd-temperature", t.ABOVE_ZERO, [4.0], "by which logits are divided", needs="--kd-distill-type logit"),
        flag("--kd-dense-loss", kinds.DENSE_LOSSES, ["cosine"], "loss of the tokens", needs=TOKENS),
        flag("--kd-size", t.POSITIVE, None, "side, or height and width, in px that it sees (the student's)"),
        flag("--kd-view", ("crop", "whole"), ["crop"], "it sees the student's crop, or the whole image", needs=TOKENS),
    ),
)
PER_TEACHER = tuple(replace(row, nargs="+") for row in _OF_A_TEACHER)

DISTILLATION = Group(
    "Distillation",
    *PER_TEACHER,
    *needing(
        "--kd-model-name",
        flag("--kd-drop", t.SHARE, 0.0, "share of images that leave a teacher out, as UNIC", needs=SEVERAL),
        switch("--kd-only", "learn from them alone: no labels, heads or validation; images may lie anywhere"),
    ),
    note="One value of --kd-... is for all teachers, else there is one for each.",
)

AUGMENTATION = Group(
    "Augmentation",
    switch("--no-aug", "squash the image to its size and do nothing else to it; not with the flags below"),
    *needing(
        AUGMENTED,
        flag("--scale", t.AMOUNT, [0.08, 1.0], "area of the random crop, least and most", nargs=2),
        flag("--ratio", t.AMOUNT, [3.0 / 4.0, 4.0 / 3.0], "its aspect ratio, least and most", nargs=2),
        flag("--hflip", t.SHARE, 0.5, "probability of a horizontal flip"),
        flag("--vflip", t.SHARE, 0.0, "probability of a vertical flip"),
        flag("--aa", t.TEXT, "rand-m9-mstd0.5-inc1", "RandAugment in timm's grammar; '' for none", metavar="POLICY"),
        flag("--color-jitter", t.AMOUNT, 0.4, "colour jitter, used where --aa is ''"),
    ),
    flag("--aug-repeats", t.COUNT, 0, "show each image so often in a batch, and fewer images"),
    flag("--train-interpolation", ("", "random", "bilinear", "bicubic"), "random", "training resize filter"),
    *needing(
        AUGMENTED,
        flag("--reprob", t.SHARE, 0.25, "probability of random erasing"),
        flag("--remode", ("const", "rand", "pixel"), "pixel", "what erased areas are filled with", needs="--reprob"),
        flag("--recount", t.POSITIVE, 1, "erased areas per image", needs="--reprob"),
    ),
)
