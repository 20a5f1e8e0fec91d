"""The flags of `train.py`: one row each, in the order in which `--help` shows them.

Names, types, defaults and meanings are those of the published VOLO `main.py` (103 flags; the two whose absence now
means something, `--lr` and `--token-label-size`, are told in docs/flags.md); newer ones borrow timm's names.
"""

from __future__ import annotations

from volo.engine.flag_table import ABOVE_ZERO, AMOUNT, COUNT, FLOAT, INT, POSITIVE, SEED, SHARE, Group, flag, switch

INTERPOLATIONS = ("", "bilinear", "bicubic")
POOLS = ("fast", "avg", "max", "avgmax", "avgmaxc", "token")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
SCHEDULES = ("cosine", "tanh", "poly", "step", "constant")

RUN = Group(
    "Run",
    (
        flag("-c", "--config", default="", metavar="FILE", help="YAML recipe; flags on the command line win over it"),
        flag("--output", default="", metavar="DIR", help="folder for run directories (output/train)"),
        flag("--experiment", default="", metavar="NAME", help="name of the run directory (TIME-MODEL-SIZE)"),
        flag(
            "--seed", default=42, type=SEED, metavar="N", help="seed of weights, data order, augmentation and MixToken"
        ),
        flag("--device", default=None, metavar="NAME", help="cpu, cuda or cuda:N (a GPU where there is one)"),
        switch("--dry-run", help="check flags, data and model, print what would run, and stop before the first step"),
        switch("--debug", help="show the traceback of an error that is normally told in one line"),
    ),
)

DATA = Group(
    "Data",
    (
        flag("data_dir", default=None, nargs="?", metavar="DATA_DIR", help="dataset: DATA_DIR/SPLIT/CLASS/IMAGE"),
        flag("--data-dir", default=None, metavar="DIR", renamed="data_dir_option", help="the same as a flag"),
        flag("-d", "--dataset", default="", metavar="NAME", help="kind of dataset; image folders alone for now"),
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
        flag("-j", "--workers", default=8, type=COUNT, metavar="N", help="decoding processes per rank; 0: none"),
        switch("--pin-mem", help="page-locked host memory for faster copies to the GPU"),
        switch("--no-prefetcher", help="do not copy the next batch to the device ahead of time"),
        switch("--use-multi-epochs-loader", help="keep the decoding processes from epoch to epoch"),
        switch("--drop-last", help="leave out the last, smaller global batch of an epoch"),
        flag(
            "--data-backend",
            default="torchvision",
            choices=("torchvision", "pil", "synthetic"),
            help="who decodes and resizes",
        ),
        flag(
            "--max-bad-images",
            default=None,
            type=COUNT,
            metavar="N",
            help="unreadable images to bear (0.1 %%, 10 to 100)",
        ),
        flag("--max-pixels", default=50_000_000, type=POSITIVE, metavar="N", help="refuse images of more pixels"),
        flag("--loader-timeout", default=300, type=COUNT, metavar="S", help="seconds to wait for a batch; 0: for ever"),
        switch("--save-images", help="write the input batch as a picture at every --log-interval"),
    ),
)

MODEL = Group(
    "Model",
    (
        flag("--model", default="volo_d1", metavar="NAME", help="volo_d1..d5, lvvit_t/s/m/l or any timm model"),
        switch("--pretrained", help="start from the published weights"),
        flag(
            "--initial-checkpoint", default="", metavar="PATH", help="start from these weights, which must fit exactly"
        ),
        flag("--finetune", default="", metavar="PATH", help="start from weights of another image size or class count"),
        flag(
            "--num-classes", default=None, type=POSITIVE, metavar="N", help="number of classes (the model's own, 1000)"
        ),
        flag("--gp", default=None, choices=POOLS, metavar="POOL", help=f"global pooling: {', '.join(POOLS)}"),
        flag("--head-init-scale", default=None, type=FLOAT, metavar="R", help="multiply the heads' initial weights"),
        flag("--head-init-bias", default=None, type=FLOAT, metavar="B", help="initial value of the heads' biases"),
        flag(
            "--model-kwargs", default={}, nargs="*", key_values=True, metavar="K=V", help="more arguments for the model"
        ),
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
            "--token-label-size",
            default=None,
            type=POSITIVE,
            metavar="N",
            help="tokens per side (the model's; 1, or absent without label data: class targets alone, ReLabel)",
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
            "--bad-label",
            default="stop",
            choices=("stop", "skip", "uniform"),
            help="unreadable map: stop, train that image on its class alone, or use a uniform map",
        ),
    ),
)

OPTIMIZER = Group(
    "Optimizer",
    (
        flag("--opt", default="adamw", metavar="NAME", help="any of timm's; fused... from apex where it is installed"),
        flag("--opt-eps", default=None, type=AMOUNT, metavar="E", help="epsilon (the optimizer's own)"),
        flag("--opt-betas", default=None, type=FLOAT, nargs="+", metavar="B", help="betas (the optimizer's own)"),
        flag("--momentum", default=0.9, type=SHARE, metavar="M", help="momentum, where the optimizer has one"),
        flag("--weight-decay", default=0.05, type=AMOUNT, metavar="W", help="weight decay"),
        flag("--layer-decay", default=None, type=SHARE, metavar="R", help="learning rate factor from layer to layer"),
        flag("--clip-grad", default=None, type=AMOUNT, metavar="N", help="gradient clipping threshold (none)"),
        flag("--clip-mode", default="norm", choices=("norm", "value", "agc"), help="what is clipped"),
        flag("--grad-accum-steps", default=1, type=POSITIVE, metavar="N", help="batches per update"),
    ),
)

SCHEDULE = Group(
    "Schedule",
    (
        flag("--lr", default=None, type=AMOUNT, metavar="LR", help="learning rate, absolute (else from --lr-base)"),
        flag("--lr-base", default=1.6e-3, type=AMOUNT, metavar="LR", help="learning rate at --lr-base-size images"),
        flag(
            "--lr-base-size", default=1024, type=POSITIVE, metavar="N", help="global batch that --lr-base is meant for"
        ),
        flag(
            "--lr-base-scale", default="linear", choices=("linear", "sqrt"), help="how it grows with the global batch"
        ),
        flag("--sched", default="cosine", metavar="NAME", help=f"schedule: {', '.join(SCHEDULES)}"),
        switch("--sched-on-updates", help="change the learning rate at every update, not every epoch"),
        flag("--epochs", default=300, type=POSITIVE, metavar="N", help="epochs without the cool-down"),
        flag("--warmup-epochs", default=20, type=COUNT, metavar="N", help="epochs of linear warm-up"),
        flag("--warmup-lr", default=1e-6, type=AMOUNT, metavar="LR", help="learning rate at the start of the warm-up"),
        switch("--warmup-prefix", help="put the warm-up before --epochs, not into them"),
        flag("--cooldown-epochs", default=10, type=COUNT, metavar="N", help="epochs at --min-lr after the schedule"),
        flag("--min-lr", default=1e-5, type=AMOUNT, metavar="LR", help="learning rate at the end"),
        flag("--start-epoch", default=None, type=COUNT, metavar="N", help="first epoch (the checkpoint's, or 0)"),
        flag("--decay-epochs", default=30.0, type=AMOUNT, metavar="N", help="epochs between decays (step)"),
        flag(
            "--decay-rate",
            "--dr",
            default=0.1,
            type=AMOUNT,
            metavar="R",
            help="decay per step (step) or cycle (cosine); exponent (poly)",
        ),
        flag(
            "--patience-epochs", default=10, type=COUNT, metavar="N", help="of the plateau schedule, which is refused"
        ),
        flag("--lr-cycle-mul", default=1.0, type=AMOUNT, metavar="R", help="length of a cycle over the one before"),
        flag("--lr-cycle-limit", default=1, type=POSITIVE, metavar="N", help="number of cycles"),
        flag(
            "--lr-noise",
            default=None,
            type=AMOUNT,
            nargs="+",
            metavar="R",
            help="noise from (to) this part of the epochs",
        ),
        flag("--lr-noise-pct", default=0.67, type=AMOUNT, metavar="R", help="largest relative noise"),
        flag("--lr-noise-std", default=1.0, type=AMOUNT, metavar="R", help="relative standard deviation of the noise"),
    ),
)

AUGMENTATION = Group(
    "Augmentation",
    (
        switch("--no-aug", help="squash the image to its size and do nothing else to it; not with the flags below"),
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

REGULARISATION = Group(
    "Regularisation",
    (
        flag("--smoothing", default=0.1, type=SHARE, metavar="S", help="label smoothing"),
        flag("--drop", default=0.0, type=SHARE, metavar="P", help="dropout rate"),
        flag("--drop-path", default=None, type=SHARE, metavar="P", help="stochastic depth rate (the model's own)"),
        flag("--drop-connect", default=None, type=SHARE, metavar="P", help="old name of --drop-path"),
        flag("--drop-block", default=None, type=SHARE, metavar="P", help="DropBlock rate; no model here has it"),
        switch("--outlooker-drop-path", help="stochastic depth in the outlooker stage as well (published: not there)"),
        flag("--mixup", default=0.0, type=AMOUNT, metavar="A", help="Mixup alpha; 0: off"),
        flag("--cutmix", default=0.0, type=AMOUNT, metavar="A", help="CutMix alpha; 0: off"),
        flag(
            "--cutmix-minmax", default=None, type=SHARE, nargs="+", metavar="R", help="CutMix box sides, least and most"
        ),
        flag("--mixup-prob", default=1.0, type=SHARE, metavar="P", help="probability of Mixup or CutMix"),
        flag(
            "--mixup-switch-prob", default=0.5, type=SHARE, metavar="P", help="probability of CutMix where both are on"
        ),
        flag("--mixup-mode", default="batch", choices=("batch", "pair", "elem"), help="mix per batch, pair or image"),
        flag("--mixup-off-epoch", default=0, type=COUNT, metavar="N", help="stop mixing at this epoch; 0: never"),
        flag("--aug-splits", default=0, type=COUNT, metavar="N", help="AugMix splits; refused"),
        switch("--jsd", help="Jensen-Shannon loss over the splits; refused"),
        switch("--resplit", help="no erasing on the first split; refused"),
    ),
)

BATCH_NORM = Group(
    "BatchNorm",
    (
        flag("--bn-momentum", default=None, type=SHARE, metavar="M", help="momentum of every BatchNorm"),
        flag("--bn-eps", default=None, type=ABOVE_ZERO, metavar="E", help="epsilon of every BatchNorm"),
        switch("--bn-tf", help="TensorFlow's momentum 0.01 and epsilon 1e-3"),
        switch("--sync-bn", help="statistics over all ranks"),
        switch("--freeze-bn", help="normalise by the running statistics and leave them as they are"),
        flag(
            "--dist-bn",
            default="",
            choices=("", "broadcast", "reduce"),
            help="share running statistics after each epoch",
        ),
        switch("--split-bn", help="a BatchNorm per augmentation split; refused"),
    ),
)

EMA = Group(
    "EMA",
    (
        switch("--model-ema", help="keep a moving average of the weights and validate it too"),
        flag("--model-ema-decay", default=0.99992, type=SHARE, metavar="R", help="share of the old average per update"),
        switch("--model-ema-warmup", help="let the decay grow from small values at the start"),
        switch("--model-ema-force-cpu", help="keep the average on the CPU of rank 0; it is not validated then"),
    ),
)

PRECISION = Group(
    "Precision and speed",
    (
        switch("--amp", help="mixed precision"),
        flag("--amp-dtype", default=None, choices=("float16", "bfloat16"), help="(float16 on GPUs, bfloat16 on CPUs)"),
        switch("--apex-amp", help="the same as --amp"),
        switch("--native-amp", help="the same as --amp"),
        switch("--channels-last", help="channels-last memory layout"),
        switch("--grad-checkpointing", help="recompute activations in the backward pass to save memory"),
        flag("--torchcompile", default=None, nargs="?", const="inductor", metavar="BACKEND", help="compile (inductor)"),
        flag("--torchcompile-mode", default=None, choices=COMPILE_MODES, metavar="MODE", help=", ".join(COMPILE_MODES)),
        switch("--torchscript", help="refused: use --torchcompile"),
    ),
)

CHECKPOINTS = Group(
    "Checkpoints and logging",
    (
        flag("--resume", default="", metavar="PATH", help="checkpoint to go on from, or auto: the newest of the run"),
        switch("--no-resume-opt", help="take weights alone from --resume"),
        switch("--allow-changed-data", help="resume on other images or labels than the checkpoint's"),
        flag("--checkpoint-hist", default=10, type=POSITIVE, metavar="N", help="best checkpoints to keep"),
        flag(
            "--recovery-interval", default=0, type=COUNT, metavar="N", help="updates between saves in an epoch; 0: none"
        ),
        flag("--checkpoint-minutes", default=0.0, type=AMOUNT, metavar="M", help="minutes between saves; 0: none"),
        switch("--checkpoint-sync", help="wait for every save; without, training goes on from a copy in host memory"),
        flag("--max-failed-saves", default=10, type=COUNT, metavar="N", help="stop after more failed saves in a row"),
        flag(
            "--eval-metric", default="top1", choices=("top1", "top5", "loss"), help="what makes a checkpoint the best"
        ),
        flag("--val-interval", default=1, type=POSITIVE, metavar="N", help="epochs between validations"),
        flag("--log-interval", default=50, type=POSITIVE, metavar="N", help="updates between lines of the log"),
        flag(
            "--max-nonfinite", default=10, type=COUNT, metavar="N", help="stop after more non-finite updates in a row"
        ),
        flag("--tta", default=0, type=COUNT, metavar="N", help="test-time augmentation; more than 1 is refused"),
    ),
)

DISTRIBUTED = Group(
    "Distributed",
    (
        flag(
            "--local_rank",
            "--local-rank",
            default=0,
            type=INT,
            metavar="N",
            help="from old launchers; LOCAL_RANK or SLURM_LOCALID in the environment wins",
        ),
    ),
)

TRAIN_GROUPS = (
    RUN,
    DATA,
    MODEL,
    TOKEN_LABELS,
    OPTIMIZER,
    SCHEDULE,
    AUGMENTATION,
    REGULARISATION,
    BATCH_NORM,
    EMA,
    PRECISION,
    CHECKPOINTS,
    DISTRIBUTED,
)
