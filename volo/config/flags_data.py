"""The flags of `train.py` that say what it is trained on: images, their labels and augmentation."""

from __future__ import annotations

from volo.config.flag_table import ABOVE_ZERO, AMOUNT, COUNT, FLOAT, POSITIVE, SHARE, Group, Need, flag, needing, switch

INTERPOLATIONS = ("", "bilinear", "bicubic")
FILE_BACKENDS = ("torchvision", "pil", "dali-cpu", "dali-gpu")

DENSE = "dense targets (--token-label-data or --token-label-teacher, and no --token-label-size 1)"
TOKEN_LABEL = Need("--token-label", lambda a: a.token_label)
DENSE_TARGETS = Need(DENSE, lambda a: a.token_label_size != 1)
# Without dense targets there is no dense loss, so a weight of 0 says what happens.
TOKEN_LABEL_OR_0 = Need("--token-label", lambda a: a.token_label or a.dense_weight == 0)
DENSE_TARGETS_OR_0 = Need(DENSE, lambda a: a.token_label_size != 1 or a.dense_weight == 0)
TEACHER = Need("--token-label-teacher", lambda a: bool(a.token_label_teacher))
LABEL_DATA = Need("--token-label-data", lambda a: bool(a.token_label_data))
LABELS = Need(
    "--token-label-data or --token-label-teacher", lambda a: bool(a.token_label_data or a.token_label_teacher)
)
GROUND_TRUTH = Need("--ground-truth", lambda a: a.ground_truth)
JPEG_BACKEND = Need("--data-backend torchvision or dali-cpu", lambda a: a.data_backend in ("torchvision", "dali-cpu"))
ERASING = Need("--reprob", lambda a: a.reprob > 0)
AUGMENTED = Need("augmentation (--no-aug)", lambda a: not a.no_aug)

DATASET = flag(
    "-d",
    "--dataset",
    default="",
    metavar="KIND",
    help="wds/NAME, tfrecord, tfds/NAME, hfds/NAME, csv/FILE, torch/cifar10 (docs/data.md); folders and shards: none",
)

CLASS_MAP = flag(
    "--class-map", default="", metavar="FILE", help="class folders in the order of the model's outputs, one a line"
)

# What every program that loads images has.
LOADING = (
    switch("--pin-mem", help="page-locked host memory for faster copies to the GPU"),
    switch("--no-prefetcher", help="do not copy the next batch to the device ahead of time"),
)
LIMITS = (
    flag("--max-bad-images", default=None, type=COUNT, help="end after more unreadable images (0.1 %%, 10 to 100)"),
    flag(
        "--max-pixels",
        default=50_000_000,
        type=POSITIVE,
        help="refuse images of more pixels; decoding a PNG or WebP takes 12 to 16 bytes of memory for each",
    ),
    flag("--loader-timeout", default=300, type=COUNT, metavar="S", help="seconds to wait for a batch; 0: for ever"),
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
            "--val-fraction",
            default=0.0,
            type=SHARE,
            metavar="R",
            help="validate on this part of the training images, drawn by --seed, and train on the rest",
        ),
        CLASS_MAP,
        flag(
            "--val-split",
            default="validation",
            metavar="NAME",
            help="folder of the validation images (val is found too)",
        ),
        flag(
            "--img-size",
            default=None,
            type=POSITIVE,
            help="image side in px (the model's own)",
            excludes=("input_size",),
        ),
        flag("--input-size", default=None, type=POSITIVE, nargs=3, help="channels, height and width in px"),
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
        flag(
            "-b",
            "--batch-size",
            default=128,
            type=POSITIVE,
            help="training images per device and step; fewer for small data",
        ),
        flag(
            "-vb",
            "--validation-batch-size-multiplier",
            default=1,
            type=POSITIVE,
            help="validation batch as a multiple of --batch-size",
        ),
        flag(
            "--validation-batch-size",
            default=None,
            type=POSITIVE,
            help="validation images per device",
            excludes=("validation_batch_size_multiplier",),
        ),
        flag("-j", "--workers", default=8, type=COUNT, help="decoding processes per rank; dali-*: threads; 0: none"),
        *LOADING,
        switch("--use-multi-epochs-loader", help="keep the decoding processes from epoch to epoch"),
        switch("--drop-last", help="leave out the last, smaller global batch of an epoch"),
        flag(
            "--data-backend",
            default="torchvision",
            choices=(*FILE_BACKENDS, "synthetic"),
            help="who decodes and resizes",
        ),
        switch(
            "--full-decode",
            help="decode training JPEGs of over 8 million px at full size, not at 1/2 to 1/8",
            needs=(JPEG_BACKEND,),
        ),
        *LIMITS,
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
            needs=(TOKEN_LABEL,),
            excludes=("token_label_teacher",),
        ),
        flag(
            "--token-label-teacher",
            default="",
            metavar="NAME",
            help="label the batches themselves, by this annotator",
            needs=(TOKEN_LABEL,),
        ),
        flag(
            "--token-label-teacher-checkpoint",
            default="",
            metavar="PATH",
            help="its weights (the published ones)",
            needs=(TEACHER,),
        ),
        flag(
            "--token-label-teacher-top-k",
            default=5,
            type=POSITIVE,
            metavar="K",
            help="classes it names per place",
            needs=(TEACHER,),
        ),
        flag(
            "--token-label-size",
            default=None,
            type=POSITIVE,
            help="tokens per side (the model's; 1, or absent without label data: class targets alone, ReLabel)",
            needs=(TOKEN_LABEL,),
        ),
        flag(
            "--compat",
            default=None,
            nargs="+",
            metavar="ROW",
            help="repeat the published code's mistakes: rows of docs/parity.md, or upstream for all (no-ROW: but this)",
        ),
        flag(
            "--dense-weight",
            default=0.5,
            type=AMOUNT,
            metavar="W",
            help="weight of the dense loss",
            needs=(TOKEN_LABEL_OR_0, DENSE_TARGETS_OR_0),
        ),
        flag(
            "--cls-weight", default=1.0, type=AMOUNT, metavar="W", help="weight of the class loss", needs=(TOKEN_LABEL,)
        ),
        switch("--no-mix-token", help="do not mix two images after the patch embedding", needs=(TOKEN_LABEL,)),
        switch("--ground-truth", help="blend the true class into the class target", needs=(TOKEN_LABEL, DENSE_TARGETS)),
        flag(
            "--gt-weight-agree",
            default=0.5,
            type=SHARE,
            metavar="W",
            help="truth's share where the map agrees",
            needs=(GROUND_TRUTH,),
        ),
        flag(
            "--gt-weight-disagree",
            default=0.1,
            type=SHARE,
            metavar="W",
            help="truth's share where it does not",
            needs=(GROUND_TRUTH,),
        ),
        flag(
            "--token-label-area",
            default=None,
            choices=("full", "center"),
            help="part of the image that the maps show (as the label folder says; else full)",
            needs=(LABEL_DATA,),
        ),
        flag(
            "--uncovered",
            default="ignore",
            choices=("ignore", "uniform"),
            help="where a crop shows fill or its map nothing: leave it out, or take all classes as equally likely",
            needs=(LABEL_DATA,),
        ),
        flag(
            "--label-tail",
            default="zero",
            choices=("zero", "exact"),
            help="logit of classes that a cell does not list: 0, as published, or what leaves them their share",
            needs=(LABELS,),
        ),
        flag(
            "--bad-label",
            default="stop",
            choices=("stop", "skip", "uniform"),
            help="unreadable map: stop, train that image on its class alone, or use a uniform map",
            needs=(LABEL_DATA,),
        ),
    ),
)

AUGMENTATION = Group(
    "Augmentation",
    (
        switch("--no-aug", help="squash the image to its size and do nothing else to it; not with the flags below"),
        *needing(
            AUGMENTED,
            flag("--scale", default=[0.08, 1.0], type=AMOUNT, nargs="+", metavar="R", help="area of the random crop"),
            flag(
                "--ratio", default=[3.0 / 4.0, 4.0 / 3.0], type=AMOUNT, nargs="+", metavar="R", help="its aspect ratio"
            ),
            flag("--hflip", default=0.5, type=SHARE, metavar="P", help="probability of a horizontal flip"),
            flag("--vflip", default=0.0, type=SHARE, metavar="P", help="probability of a vertical flip"),
            flag(
                "--aa",
                default="rand-m9-mstd0.5-inc1",
                metavar="POLICY",
                help="RandAugment in timm's grammar; '' for none",
            ),
            flag("--color-jitter", default=0.4, type=AMOUNT, metavar="R", help="colour jitter, used where --aa is ''"),
        ),
        flag("--aug-repeats", default=0, type=COUNT, help="show each image so often in a batch, and fewer images"),
        flag(
            "--train-interpolation",
            default="random",
            choices=("", "random", "bilinear", "bicubic"),
            help="training resize filter",
        ),
        *needing(
            AUGMENTED,
            flag("--reprob", default=0.25, type=SHARE, metavar="P", help="probability of random erasing"),
            flag(
                "--remode",
                default="pixel",
                choices=("const", "rand", "pixel"),
                help="what erased areas are filled with",
                needs=(ERASING,),
            ),
            flag("--recount", default=1, type=POSITIVE, help="erased areas per image", needs=(ERASING,)),
        ),
    ),
)
