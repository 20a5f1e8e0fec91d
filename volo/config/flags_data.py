"""The flags of `train.py` that say what it is trained on: images, their labels and augmentation."""

from __future__ import annotations

from volo.config.flag_table import ABOVE_ZERO, AMOUNT, COUNT, FLOAT, POSITIVE, SHARE, Group, flag, switch

INTERPOLATIONS = ("", "bilinear", "bicubic")
FILE_BACKENDS = ("torchvision", "pil", "dali-cpu", "dali-gpu")
WORKER_TYPES = ("process", "thread")

DATASET = flag(
    "-d",
    "--dataset",
    default="",
    metavar="KIND",
    help="wds/NAME, tfrecord, tfds/NAME, hfds/NAME or torch/cifar10 (docs/data.md); folders and shards need none",
)

DATA = Group(
    "Data",
    (
        flag(
            "data_dir",
            default=None,
            nargs="?",
            metavar="DATA_DIR",
            help="dataset: DATA_DIR/SPLIT/CLASS/IMAGE, or shards",
        ),
        flag("--data-dir", default=None, metavar="DIR", renamed="data_dir_option", help="the same as a flag"),
        DATASET,
        flag("--train-split", default="train", metavar="NAME", help="folder of the training images"),
        flag(
            "--val-split",
            default="validation",
            metavar="NAME",
            help="folder of the validation images (val is found too)",
        ),
        flag("--img-size", default=None, type=POSITIVE, metavar="N", help="image side in px (the model's own)"),
        flag(
            "--input-size", default=None, type=POSITIVE, nargs=3, metavar="N", help="channels, height and width in px"
        ),
        flag(
            "--crop-pct",
            default=None,
            type=ABOVE_ZERO,
            metavar="R",
            help="validation crop / resized side (the model's own)",
        ),
        flag("--mean", default=None, type=FLOAT, nargs="+", metavar="M", help="pixel means in 0..1 (the model's own)"),
        flag(
            "--std",
            default=None,
            type=ABOVE_ZERO,
            nargs="+",
            metavar="S",
            help="pixel deviations in 0..1 (the model's own)",
        ),
        flag("--interpolation", default="", choices=INTERPOLATIONS, help="validation resize filter (the model's own)"),
        flag("-b", "--batch-size", default=128, type=POSITIVE, metavar="N", help="training images per device and step"),
        flag(
            "-vb",
            "--validation-batch-size-multiplier",
            default=1,
            type=POSITIVE,
            metavar="N",
            help="validation batch as a multiple of --batch-size",
        ),
        flag("--validation-batch-size", default=None, type=POSITIVE, metavar="N", help="validation images per device"),
        flag(
            "-j",
            "--workers",
            default=8,
            type=COUNT,
            metavar="N",
            help="decoding processes or threads per rank; 0: none",
        ),
        flag(
            "--worker-type",
            default=None,
            choices=WORKER_TYPES,
            help="processes, or threads of the rank's own process (process; dali-*: thread)",
        ),
        switch("--pin-mem", help="page-locked host memory for faster copies to the GPU"),
        switch("--no-prefetcher", help="do not copy the next batch to the device ahead of time"),
        switch("--use-multi-epochs-loader", help="keep the decoding processes from epoch to epoch"),
        switch("--drop-last", help="leave out the last, smaller global batch of an epoch"),
        flag(
            "--data-backend",
            default="torchvision",
            choices=(*FILE_BACKENDS, "synthetic"),
            help="who decodes and resizes",
        ),
        switch("--full-decode", help="decode training JPEGs of over 8 million px at full size, not at 1/2 to 1/8"),
        flag(
            "--max-bad-images",
            default=None,
            type=COUNT,
            metavar="N",
            help="unreadable images to bear (0.1 %%, 10 to 100)",
        ),
        flag(
            "--max-pixels",
            default=50_000_000,
            type=POSITIVE,
            metavar="N",
            help="refuse images of more pixels; decoding a PNG or WebP takes 12 to 16 bytes of memory for each",
        ),
        flag("--loader-timeout", default=300, type=COUNT, metavar="S", help="seconds to wait for a batch; 0: for ever"),
        switch("--save-images", help="write the input batch as a picture at every --log-interval"),
    ),
)

TOKEN_LABELS = Group(
    "Token labels",
    (
        switch("--token-label", help="train every output token on its own label, with MixToken"),
        flag(
            "--token-label-data",
            default="",
            metavar="DIR",
            help="label maps: a tree DIR/CLASS/IMAGE.pt (generate_label.py) or an archive (tlt pack)",
        ),
        flag(
            "--token-label-teacher", default="", metavar="NAME", help="label the batches themselves, by this annotator"
        ),
        flag(
            "--token-label-teacher-checkpoint",
            default="",
            metavar="PATH",
            help="its weights (the published ones)",
        ),
        flag("--token-label-teacher-top-k", default=5, type=POSITIVE, metavar="K", help="classes it names per place"),
        flag(
            "--token-label-size",
            default=None,
            type=POSITIVE,
            metavar="N",
            help="tokens per side (the model's; 1, or absent without label data: class targets alone, ReLabel)",
        ),
        flag(
            "--compat",
            default=None,
            nargs="+",
            metavar="ROW",
            help="do as the published code does: upstream, or rows of docs/flags.md; no-ROW takes one out of upstream",
        ),
        flag("--dense-weight", default=0.5, type=AMOUNT, metavar="W", help="weight of the dense loss"),
        flag("--cls-weight", default=1.0, type=AMOUNT, metavar="W", help="weight of the class loss"),
        switch("--no-mix-token", help="do not mix two images after the patch embedding"),
        switch("--ground-truth", help="blend the true class into the class target"),
        flag("--gt-weight-agree", default=0.5, type=SHARE, metavar="W", help="truth's share where the map agrees"),
        flag("--gt-weight-disagree", default=0.1, type=SHARE, metavar="W", help="truth's share where it does not"),
        flag(
            "--token-label-area",
            default=None,
            choices=("full", "center"),
            help="part of the image that the maps show (as the label folder says; else full)",
        ),
        flag(
            "--uncovered",
            default="ignore",
            choices=("ignore", "uniform"),
            help="where a crop shows fill or its map nothing: leave it out, or take all classes as equally likely",
        ),
        flag(
            "--label-tail",
            default="zero",
            choices=("zero", "exact"),
            help="logit of classes that a cell does not list: 0, as published, or what leaves them their share",
        ),
        flag(
            "--bad-label",
            default="stop",
            choices=("stop", "skip", "uniform"),
            help="unreadable map: stop, train that image on its class alone, or use a uniform map",
        ),
    ),
)

AUGMENTATION = Group(
    "Augmentation",
    (
        switch("--no-aug", help="squash the image to its size and do nothing else to it; not with the flags below"),
        flag(
            "--aug-order",
            default="timm",
            choices=("timm", "published"),
            help="timm: crop, flip, RandAugment; published: flip, RandAugment on the full image, crop",
        ),
        flag("--scale", default=[0.08, 1.0], type=AMOUNT, nargs="+", metavar="R", help="area of the random crop"),
        flag("--ratio", default=[3.0 / 4.0, 4.0 / 3.0], type=AMOUNT, nargs="+", metavar="R", help="its aspect ratio"),
        flag("--hflip", default=0.5, type=SHARE, metavar="P", help="probability of a horizontal flip"),
        flag("--vflip", default=0.0, type=SHARE, metavar="P", help="probability of a vertical flip"),
        flag(
            "--aa", default="rand-m9-mstd0.5-inc1", metavar="POLICY", help="RandAugment in timm's grammar; '' for none"
        ),
        flag("--color-jitter", default=0.4, type=AMOUNT, metavar="R", help="colour jitter, used where --aa is ''"),
        flag(
            "--train-interpolation",
            default="random",
            choices=("", "random", "bilinear", "bicubic"),
            help="training resize filter",
        ),
        flag("--reprob", default=0.25, type=SHARE, metavar="P", help="probability of random erasing"),
        flag("--remode", default="pixel", choices=("const", "rand", "pixel"), help="what erased areas are filled with"),
        flag("--recount", default=1, type=POSITIVE, metavar="N", help="erased areas per image"),
    ),
)
