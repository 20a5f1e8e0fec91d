"""The flags of `train.py`: one row each; `TRAIN_GROUPS` has the order in which `--help` shows them.

Those about images and labels are in `flags_data`, those of optimizer and schedule in `flags_optimizer`.

Names, types, defaults and meanings are those of the published VOLO `main.py` (103 flags; the two whose absence now
means something, `--lr` and `--token-label-size`, are told in docs/flags.md); newer ones borrow timm's names.
"""

from __future__ import annotations

from argparse import Namespace

from volo.config.flag_table import (
    ABOVE_ZERO,
    AMOUNT,
    COUNT,
    FLOAT,
    INT,
    POSITIVE,
    SEED,
    SHARE,
    Group,
    Need,
    Number,
    flag,
    switch,
)
from volo.config.flags_data import AUGMENTATION, DATA, TOKEN_LABELS
from volo.config.flags_optimizer import OPTIMIZER, SCHEDULE

# Flags whose defaults depend on the data where neither command line nor recipe has them (volo/train/fit_to_data.py).
FITTED = ("batch_size", "checkpoint_hist", "cooldown_epochs", "lr_base_scale", "num_classes", "warmup_epochs")
POOLS = ("fast", "avg", "max", "avgmax", "avgmaxc", "token")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
OUTLOOK_KERNELS = ("auto", "triton", "windows", "reference", "slices")
DROP_PATH_MODES = ("mask", "subset")
NO_TORCHSCRIPT = "TorchScript is not supported: use --torchcompile"
_SPLITS = "AugMix splits and the Jensen-Shannon loss are not supported: remove the flag"


def _cuts(args: Namespace) -> bool:
    return args.cutmix > 0 or args.cutmix_minmax is not None


def mixes(args: Namespace) -> bool:
    """Whether Mixup or CutMix is on."""
    return args.mixup > 0 or _cuts(args)


AMP = Need("--amp", lambda a: a.amp)
INDUCTOR = Need("--torchcompile inductor", lambda a: a.torchcompile == "inductor")
COMPILED = Need("--torchcompile", lambda a: bool(a.torchcompile))
MIXING = Need("--mixup or --cutmix", mixes)
BOTH_MIX = Need("--mixup and --cutmix", lambda a: a.mixup > 0 and _cuts(a))
CLASS_LABELS = Need("class labels alone (no --token-label)", lambda a: not a.token_label)
BCE = Need("--bce-loss", lambda a: a.bce_loss)
AVERAGED = Need("--model-ema", lambda a: a.model_ema)
RESUMED = Need("--resume", lambda a: bool(a.resume))
DROPPING = Need("--drop-path above 0", lambda a: a.drop_path or "drop_path_rate" in a.model_kwargs)

MIXED_PRECISION = (
    switch("--amp", help="mixed precision"),
    flag(
        "--amp-dtype",
        default=None,
        choices=("float16", "bfloat16"),
        help="(float16 on GPUs, bfloat16 on CPUs)",
        needs=(AMP,),
    ),
    switch("--apex-amp", help="the same as --amp"),
    switch("--native-amp", help="the same as --amp"),
)
CHANNELS_LAST = switch("--channels-last", help="channels-last memory layout")
COMPILE = (
    flag("--torchcompile", default=None, nargs="?", const="inductor", metavar="BACKEND", help="compile (inductor)"),
    flag(
        "--torchcompile-mode",
        default=None,
        choices=COMPILE_MODES,
        metavar="MODE",
        help=", ".join(COMPILE_MODES),
        needs=(INDUCTOR,),
    ),
    flag(
        "--torchcompile-scope",
        default=None,
        choices=("blocks", "model"),
        help="one graph for all blocks of a kind, or one of the model (blocks of VOLO and LV-ViT without CUDA graphs)",
        needs=(COMPILED,),
    ),
)
OUTLOOK_KERNEL = flag(
    "--outlook-kernel", default="auto", choices=OUTLOOK_KERNELS, help="how VOLO's outlook attention is computed"
)
BIND = flag(
    "--bind",
    default="auto",
    choices=("auto", "none", "cpu", "cpu+mem"),
    help="keep each rank on the CPUs, the memory and the network card nearest its GPU",
)


RUN = Group(
    "Run",
    (
        flag("-c", "--config", default="", metavar="FILE", help="YAML recipe, or its name; flags win over it"),
        flag("--output", default="", metavar="DIR", help="folder for run directories (output/train)"),
        flag("--experiment", default="", metavar="NAME", help="name of the run directory (TIME-MODEL-SIZE)"),
        flag("--seed", default=42, type=SEED, help="seed of weights, data order, augmentation and MixToken"),
        flag("--device", default=None, metavar="NAME", help="cpu, cuda or cuda:N (a GPU where there is one)"),
        switch("--dry-run", help="check flags, data and model, print what would run, and stop before the first step"),
        switch("--debug", help="show the traceback of an error that is normally told in one line"),
    ),
)

MODEL = Group(
    "Model",
    (
        flag("--model", default="volo_d1", metavar="NAME", help="volo_d1..d5, lvvit_t/s/m/l or any timm model"),
        switch("--pretrained", help="start from the published weights"),
        flag(
            "--initial-checkpoint",
            default="",
            metavar="PATH",
            help="start from these weights, which must fit exactly",
            excludes=("pretrained",),
        ),
        flag(
            "--finetune",
            default="",
            metavar="PATH",
            help="start from weights of another image size or class count",
            excludes=("initial_checkpoint", "pretrained"),
        ),
        flag("--pretrained-path", default=None, metavar="PATH", help="timm's name of --finetune"),
        flag("--num-classes", default=None, type=POSITIVE, help="number of classes (the class folders)"),
        flag("--in-chans", default=None, type=Number(int, 1, 3), help="3: RGB; 1: grey (the model's own)"),
        switch("--freeze", help="train the heads alone (linear probe), with BatchNorm's running statistics"),
        flag("--gp", default=None, choices=POOLS, metavar="POOL", help=f"global pooling: {', '.join(POOLS)}"),
        flag("--head-init-scale", default=None, type=FLOAT, metavar="R", help="multiply the heads' initial weights"),
        flag("--head-init-bias", default=None, type=FLOAT, metavar="B", help="initial value of the heads' biases"),
        flag(
            "--model-kwargs", default={}, nargs="*", key_values=True, metavar="K=V", help="more arguments for the model"
        ),
    ),
)


REGULARISATION = Group(
    "Regularisation",
    (
        flag("--smoothing", default=0.1, type=SHARE, metavar="S", help="label smoothing"),
        switch("--bce-loss", help="binary cross-entropy over the classes", needs=(CLASS_LABELS,)),
        flag(
            "--bce-target-thresh",
            default=None,
            type=SHARE,
            metavar="T",
            help="take targets above it as 1, others as 0",
            needs=(BCE,),
        ),
        switch("--bce-sum", help="sum it over the classes, not the mean", needs=(BCE,)),
        flag("--bce-pos-weight", default=None, type=ABOVE_ZERO, metavar="W", help="weight of targets 1", needs=(BCE,)),
        flag("--drop", default=0.0, type=SHARE, metavar="P", help="dropout rate"),
        flag(
            "--drop-path",
            default=None,
            type=SHARE,
            metavar="P",
            help="stochastic depth rate (the model's own)",
            excludes=("drop_connect",),
        ),
        flag(
            "--drop-path-mode",
            default="mask",
            choices=DROP_PATH_MODES,
            help="mask what is dropped, or skip its work",
            needs=(DROPPING,),
        ),
        flag("--drop-connect", default=None, type=SHARE, metavar="P", help="old name of --drop-path"),
        flag("--drop-block", default=None, type=SHARE, metavar="P", help="DropBlock rate; no model here has it"),
        switch(
            "--outlooker-drop-path",
            help="stochastic depth in the outlooker stage as well (published: not there)",
            needs=(DROPPING,),
        ),
        flag("--mixup", default=0.0, type=AMOUNT, metavar="A", help="Mixup alpha; 0: off"),
        flag("--cutmix", default=0.0, type=AMOUNT, metavar="A", help="CutMix alpha; 0: off"),
        flag(
            "--cutmix-minmax", default=None, type=SHARE, nargs="+", metavar="R", help="CutMix box sides, least and most"
        ),
        flag(
            "--mixup-prob", default=1.0, type=SHARE, metavar="P", help="probability of Mixup or CutMix", needs=(MIXING,)
        ),
        flag(
            "--mixup-switch-prob",
            default=0.5,
            type=SHARE,
            metavar="P",
            help="probability of CutMix where both are on",
            needs=(BOTH_MIX,),
        ),
        flag(
            "--mixup-mode",
            default="batch",
            choices=("batch", "pair", "elem"),
            help="mix per batch, pair or image",
            needs=(MIXING,),
        ),
        flag("--mixup-off-epoch", default=0, type=COUNT, help="stop mixing at this epoch; 0: never", needs=(MIXING,)),
        flag("--aug-splits", default=0, type=COUNT, help="AugMix splits; refused", refused=_SPLITS),
        switch("--jsd", help="Jensen-Shannon loss over the splits; refused", refused=_SPLITS),
        switch("--resplit", help="no erasing on the first split; refused", refused=_SPLITS),
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
        switch(
            "--split-bn",
            help="a BatchNorm per augmentation split; refused",
            refused="there are no augmentation splits, so BatchNorm cannot be split by them: remove the flag",
        ),
    ),
)

EMA = Group(
    "EMA",
    (
        switch("--model-ema", help="keep a moving average of the weights and validate it too"),
        flag(
            "--model-ema-decay",
            default=0.99992,
            type=SHARE,
            metavar="R",
            help="share of the old average per update",
            needs=(AVERAGED,),
        ),
        switch("--model-ema-warmup", help="let the decay grow from small values at the start", needs=(AVERAGED,)),
        switch(
            "--model-ema-force-cpu",
            help="keep the average on the CPU of rank 0; it is not validated then",
            needs=(AVERAGED,),
        ),
    ),
)

PRECISION = Group(
    "Precision and speed",
    (
        *MIXED_PRECISION,
        flag(
            "--model-dtype",
            default="float32",
            choices=("float32", "bfloat16"),
            help="bfloat16: compute in bfloat16 throughout, with float32 master weights",
        ),
        CHANNELS_LAST,
        switch(
            "--grad-checkpointing",
            help="recompute activations in the backward pass to save memory",
        ),
        *COMPILE,
        flag(
            "--activation-memory-budget",
            default=None,
            type=SHARE,
            metavar="SHARE",
            help="keep at most this share of the activations of a compiled graph, and recompute the others (1)",
            needs=(INDUCTOR,),
        ),
        OUTLOOK_KERNEL,
        switch("--torchscript", help="refused: use --torchcompile", refused=NO_TORCHSCRIPT),
    ),
)

CHECKPOINTS = Group(
    "Checkpoints and logging",
    (
        flag("--resume", default="", metavar="PATH", help="checkpoint to go on from, or auto: the newest of the run"),
        switch("--no-resume-opt", help="take weights alone from --resume", needs=(RESUMED,)),
        switch("--allow-changed-data", help="resume on other images or labels than the checkpoint's", needs=(RESUMED,)),
        flag("--checkpoint-hist", default=10, type=POSITIVE, help="best checkpoints to keep; fewer below 30 epochs"),
        flag("--recovery-interval", default=0, type=COUNT, help="updates between saves in an epoch; 0: none"),
        flag("--checkpoint-minutes", default=0.0, type=AMOUNT, metavar="M", help="minutes between saves; 0: none"),
        switch("--checkpoint-sync", help="wait for every save; without, training goes on from a copy in host memory"),
        flag("--max-failed-saves", default=10, type=COUNT, help="stop after more failed saves in a row"),
        flag(
            "--eval-metric", default="top1", choices=("top1", "top5", "loss"), help="what makes a checkpoint the best"
        ),
        flag("--patience", default=0, type=COUNT, help="stop after so many epochs without a better one; 0: never"),
        flag("--val-interval", default=1, type=POSITIVE, help="epochs between validations"),
        flag("--log-interval", default=50, type=POSITIVE, help="updates between lines of the log"),
        flag(
            "--max-nonfinite",
            "--skip-nonfinite",
            default=10,
            type=COUNT,
            help="skip up to N updates in a row whose gradients are not finite, stop after more",
        ),
        flag("--tta", default=0, type=COUNT, help="test-time augmentation; more than 1 is refused"),
    ),
)

# Each is the name of its package and of its pip extra.
TRACKERS = {"wandb": "Weights & Biases", "tensorboard": "TensorBoard", "mlflow": "MLflow", "trackio": "Trackio"}
TRACKED = Need("--log-wandb, --log-mlflow or --log-trackio", lambda a: a.log_wandb or a.log_mlflow or a.log_trackio)

TRACKING = Group(
    "Trackers",
    (
        *(switch(f"--log-{name}", help=f"send metrics to {title}") for name, title in TRACKERS.items()),
        flag(
            "--tracker-project",
            "--wandb-project",
            default="",
            metavar="NAME",
            help="project of W&B and Trackio, experiment of MLflow (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or volo-tlt)",
            needs=(TRACKED,),
        ),
        flag(
            "--wandb-tags",
            default=None,
            nargs="+",
            metavar="TAG",
            help="tags of the W&B run",
            needs=(Need("--log-wandb", lambda a: a.log_wandb),),
        ),
    ),
)

DISTRIBUTED = Group(
    "Distributed",
    (
        flag(
            "--shard",
            default=1,
            type=POSITIVE,
            help="divide weights, gradients, optimizer state and EMA among N ranks (FSDP2)",
        ),
        flag(
            "--tensor-parallel",
            default=1,
            type=POSITIVE,
            help="divide attention heads and MLPs among N neighbouring ranks, which see the same images",
        ),
        flag(
            "--grad-compression",
            default="none",
            choices=("none", "bf16"),
            help="bf16: sum gradients over the ranks in bfloat16, half the bytes",
        ),
        flag(
            "--local_rank",
            "--local-rank",
            default=0,
            type=INT,
            help="from old launchers; LOCAL_RANK or SLURM_LOCALID in the environment wins",
        ),
        flag(
            "--dist-timeout",
            default=120,
            type=POSITIVE,
            metavar="S",
            help="seconds without progress after which a hung run ends (600 before the first step and while saving)",
        ),
        BIND,
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
    TRACKING,
    DISTRIBUTED,
)
