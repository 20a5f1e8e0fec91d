"""The flags of `train.py`, one row each; `--help` shows them in the order of `TRAIN_GROUPS`.

`flags_data` has the flags about images and labels.

Names, types, defaults and meanings are those of the published VOLO `main.py` (103 flags). Two of them differ if they
are not set, `--lr` and `--token-label-size`: see docs/flags.md. Newer flags have timm's names.
"""

from __future__ import annotations

from argparse import Namespace

from volo.config.flag_table import (
    ABOVE_ZERO,
    AMOUNT,
    COUNT,
    DIR,
    EPOCHS,
    FILE,
    FLOAT,
    INT,
    NAME,
    PATH,
    POSITIVE,
    SEED,
    SHARE,
    SOURCE,
    TEXT,
    WEIGHTS,
    Group,
    Need,
    Number,
    flag,
    key_value,
    name_below,
    needing,
    switch,
)
from volo.config.flags_data import (
    AUGMENTATION,
    DATA,
    DEBUG,
    DEVICE,
    DISTILLATION,
    IMAGE_SIZES,
    LABELLED,
    MODEL_KWARGS,
    POOL,
    TOKEN_LABELS,
)

# Flags whose defaults depend on the data if neither command line nor recipe sets them (volo/train/run.py).
FITTED = (
    *("batch_size", "checkpoint_hist", "cooldown_epochs", "drop_last", "lr_base_scale", "model_ema_decay"),
    *("num_classes", "warmup_epochs"),
)
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
OUTLOOK_KERNELS = ("auto", "triton", "windows", "reference")
DROP_PATH_MODES = ("mask", "subset")
NO_TORCHSCRIPT = "TorchScript is not supported: use --torchcompile"
_NO_DROP_BLOCK = "no VOLO or LV-ViT has DropBlock; use --drop-path (other models: --model-kwargs drop_block_rate=...)"
_SPLITS = "AugMix splits and the Jensen-Shannon loss are not supported: remove the flag"


def _cuts(args: Namespace) -> bool:
    return args.cutmix > 0 or args.cutmix_minmax is not None


def mixes(args: Namespace) -> bool:
    """Return whether Mixup or CutMix is on."""
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
STATISTICS = Need("statistics that change (no --freeze-bn, no --freeze)", lambda a: not (a.freeze_bn or a.freeze))
DROPPING = Need("--drop-path above 0", lambda a: a.drop_path or "drop_path_rate" in a.model_kwargs)

MIXED_PRECISION = (
    switch("--amp --apex-amp --native-amp", "mixed precision, by torch under each of these names"),
    flag("--amp-dtype", ("float16", "bfloat16"), None, "(float16 on GPUs, bfloat16 on CPUs)", needs=(AMP,)),
)
CHANNELS_LAST = switch("--channels-last", "channels-last memory layout")
COMPILE = (
    flag("--torchcompile", TEXT, None, "compile (inductor)", nargs="?", const="inductor", metavar="BACKEND"),
    flag("--torchcompile-mode", COMPILE_MODES, None, ", ".join(COMPILE_MODES), metavar="MODE", needs=(INDUCTOR,)),
    flag(
        "--torchcompile-scope",
        ("blocks", "model"),
        None,
        "one graph per kind of block, or of the model",
        needs=(COMPILED,),
    ),
)
OUTLOOK_KERNEL = flag("--outlook-kernel", OUTLOOK_KERNELS, "auto", "how VOLO's outlook attention is computed")
BIND = flag(
    "--bind", ("auto", "none", "cpu", "cpu+mem"), "auto", "keep ranks on CPUs, memory and network card near their GPU"
)

CYCLIC_SCHEDULES, STABLE_SCHEDULES = ("cosine", "tanh", "poly"), ("wsd", "rsqrt")
ENDING_SCHEDULES = CYCLIC_SCHEDULES + STABLE_SCHEDULES  # schedules that end at --min-lr
DECAYS = ("linear", "1-sqrt", "cosine", "power", "exp")
SCHEDULES = (*ENDING_SCHEDULES, "step", "multistep", "constant")
CLIPPED = Need("--clip-grad", lambda a: a.clip_grad is not None)
NOISY = Need("--lr-noise", lambda a: a.lr_noise is not None)
# The default warm-up is at most a fifth of the epochs (volo/train/run.py), so there is none below 5 epochs.
WARMED_UP = Need(
    "--warmup-epochs",
    lambda a: a.warmup_epochs > 0 and not ("warmup_epochs" in getattr(a, "defaulted", ()) and a.epochs < 5),
)
STABLE = Need("--sched wsd or rsqrt", lambda a: a.sched in STABLE_SCHEDULES)
RSQRT = Need("--sched rsqrt", lambda a: a.sched == "rsqrt")
STEPPED = Need("--sched step, wsd or rsqrt", lambda a: a.sched == "step" or STABLE.met(a))
MULTISTEP = Need("--sched multistep", lambda a: a.sched == "multistep")
DECAYING = Need(
    "--sched step, multistep, poly or several cosine cycles",
    lambda a: a.sched in ("step", "multistep", "poly") or (a.sched == "cosine" and a.lr_cycle_limit > 1),
)
CYCLIC = Need("--sched cosine, tanh or poly", lambda a: a.sched in CYCLIC_SCHEDULES)
K_DECAYING = Need("--sched cosine or poly", lambda a: a.sched in ("cosine", "poly"))
ENDING = Need("--sched cosine, tanh, poly, wsd or rsqrt", lambda a: a.sched in ENDING_SCHEDULES)
# A cool-down of 0 epochs is accepted with every schedule, since it changes nothing.
COOLED_DOWN = Need(ENDING.of, lambda a: ENDING.met(a) or a.cooldown_epochs == 0)
SEVERAL_CYCLES = Need("--lr-cycle-limit above 1", lambda a: a.lr_cycle_limit > 1)

RUN = Group(
    "Run",
    flag("-c --config", FILE, "", "YAML recipe, or its name; flags win over it"),
    flag("--output", DIR, "", "folder for run directories (output/train)"),
    flag("--experiment", name_below, "", "name of the run directory (TIME-MODEL-SIZE)", metavar="NAME"),
    flag("--seed", SEED, 42, "seed of weights, data order, augmentation and MixToken"),
    DEVICE,
    switch("--dry-run", "check flags, data and model, print what would run, and stop before the first step"),
    DEBUG,
)

MODEL = Group(
    "Model",
    flag("--model", SOURCE, "volo_d1", "volo_d1..d5, lvvit_t/s/m/l or any timm model"),
    switch("--pretrained", "start from the published weights"),
    flag("--initial-checkpoint", WEIGHTS, "", "start from weights that must fit exactly", excludes=("pretrained",)),
    flag(
        "--finetune --pretrained-path",
        WEIGHTS,
        "",
        "start from weights of another image size or class count",
        excludes=("initial_checkpoint", "pretrained"),
    ),
    flag("--num-classes", POSITIVE, None, "number of classes (the class folders)"),
    flag("--in-chans", Number(int, 1, 3), None, "3: RGB; 1: grey (the model's own)"),
    switch("--freeze", "train the heads alone (linear probe), with BatchNorm's running statistics"),
    POOL,
    flag("--head-init-scale", FLOAT, None, "multiply the heads' initial weights"),
    flag("--head-init-bias", FLOAT, None, "initial value of the heads' biases"),
    MODEL_KWARGS,
)


OPTIMIZER = Group(
    "Optimizer",
    flag("--opt", NAME, "adamw", "any of timm's; fused... from apex where it is installed"),
    flag("--opt-eps", AMOUNT, None, "epsilon (the optimizer's own)"),
    flag("--opt-betas", FLOAT, None, "betas (the optimizer's own)", nargs="+"),
    flag("--momentum", SHARE, 0.9, "momentum, where the optimizer has one"),
    flag("--weight-decay", AMOUNT, 0.05, "weight decay"),
    flag("--layer-decay", SHARE, None, "learning rate factor from layer to layer"),
    flag("--clip-grad", ABOVE_ZERO, None, "gradient clipping threshold (none)"),
    flag("--clip-mode", ("norm", "value", "agc"), "norm", "what is clipped; agc: not the heads", needs=(CLIPPED,)),
    flag("--opt-kwargs", key_value, {}, "more arguments for it", nargs="*", metavar="K=V"),
    flag("--grad-accum-steps", POSITIVE, 1, "batches per update"),
)

SCHEDULE = Group(
    "Schedule",
    flag(
        "--lr",
        AMOUNT,
        None,
        "learning rate, absolute (else from --lr-base)",
        metavar="LR",
        excludes=("lr_base", "lr_base_size", "lr_base_scale"),
    ),
    flag("--lr-base", AMOUNT, 1.6e-3, "learning rate at --lr-base-size images", metavar="LR"),
    flag("--lr-base-size", POSITIVE, 1024, "global batch that --lr-base is meant for"),
    flag("--lr-base-scale", ("linear", "sqrt"), "linear", "how it grows with the global batch"),
    flag("--sched", SCHEDULES, "cosine", "course of the learning rate"),
    switch("--sched-on-updates", "change the learning rate at every update, not every epoch"),
    flag("--epochs", POSITIVE, 300, "epochs without the cool-down"),
    flag("--warmup-epochs", EPOCHS, 20, "epochs of linear warm-up; at most a fifth of --epochs"),
    flag("--warmup-lr", AMOUNT, 1e-6, "learning rate at the start of the warm-up", metavar="LR", needs=(WARMED_UP,)),
    switch("--warmup-prefix", "put the warm-up before --epochs, not into them", needs=(WARMED_UP,)),
    flag("--cooldown-epochs", EPOCHS, 10, "more epochs at --min-lr; 0 below 30 --epochs", needs=(COOLED_DOWN,)),
    flag("--min-lr", AMOUNT, 1e-5, "learning rate at the end", metavar="LR", needs=(ENDING,)),
    flag("--start-epoch", COUNT, None, "first epoch, from 0 (the checkpoint's); --resume auto goes on from beyond it"),
    flag("--decay-epochs", ABOVE_ZERO, 30.0, "of a step; of the decay, or its share (0.2)", needs=(STEPPED,)),
    flag("--decay-milestones", POSITIVE, [90, 180, 270], "epochs of the steps", nargs="+", needs=(MULTISTEP,)),
    flag("--lr-decay-fn", DECAYS, None, "course of the decay (wsd: 1-sqrt, rsqrt: linear)", needs=(STABLE,)),
    flag("--lr-stable-timescale", ABOVE_ZERO, None, "of 1 / sqrt(1 + epochs / X) (the warm-up's)", needs=(RSQRT,)),
    flag("--decay-rate --dr", AMOUNT, 0.1, "per step or cycle (cosine); exponent (poly)", needs=(DECAYING,)),
    flag("--patience-epochs", COUNT, 10, "refused", refused="--sched plateau is not supported: remove the flag"),
    flag("--lr-cycle-mul", Number(float, low=1), 1.0, "length of a cycle over the one before", needs=(SEVERAL_CYCLES,)),
    flag("--lr-k-decay", ABOVE_ZERO, 1.0, "exponent of the time in the curve (arXiv:2004.05909)", needs=(K_DECAYING,)),
    flag("--lr-cycle-limit", POSITIVE, 1, "number of cycles", needs=(CYCLIC,)),
    flag("--lr-noise", SHARE, None, "noise from (to) this part of the epochs", nargs="+"),
    flag("--lr-noise-pct", AMOUNT, 0.67, "largest relative noise", needs=(NOISY,)),
    flag("--lr-noise-std", AMOUNT, 1.0, "relative standard deviation of the noise", needs=(NOISY,)),
)

REGULARISATION = Group(
    "Regularisation",
    flag("--smoothing", SHARE, 0.1, "label smoothing", needs=(LABELLED,)),
    switch("--bce-loss", "binary cross-entropy over the classes", needs=(CLASS_LABELS,)),
    flag("--bce-target-thresh", SHARE, None, "take targets above it as 1, others as 0", needs=(BCE,)),
    switch("--bce-sum", "sum it over the classes, not the mean", needs=(BCE,)),
    flag("--bce-pos-weight", ABOVE_ZERO, None, "weight of targets 1", needs=(BCE,)),
    flag("--drop", SHARE, 0.0, "dropout rate"),
    flag("--drop-path --drop-connect", SHARE, None, "stochastic depth rate (the model's own)"),
    flag("--drop-path-mode", DROP_PATH_MODES, "mask", "mask what is dropped, or skip its work", needs=(DROPPING,)),
    flag("--drop-block", SHARE, None, "DropBlock rate; refused", refused=_NO_DROP_BLOCK),
    switch("--outlooker-drop-path", "stochastic depth in the outlooker stage as well", needs=(DROPPING,)),
    flag("--mixup", AMOUNT, 0.0, "Mixup alpha; 0: off"),
    flag("--cutmix", AMOUNT, 0.0, "CutMix alpha; 0: off"),
    flag("--cutmix-minmax", SHARE, None, "CutMix box sides, least and most", nargs=2),
    flag("--mixup-prob", SHARE, 1.0, "probability of Mixup or CutMix", needs=(MIXING,)),
    flag("--mixup-switch-prob", SHARE, 0.5, "probability of CutMix where both are on", needs=(BOTH_MIX,)),
    flag("--mixup-mode", ("batch", "pair", "elem"), "batch", "mix per batch, pair or image", needs=(MIXING,)),
    flag("--mixup-off-epoch", COUNT, 0, "stop mixing after so many epochs; 0: never", needs=(MIXING,)),
    flag("--aug-splits", COUNT, 0, "AugMix splits; refused", refused=_SPLITS),
    switch("--jsd", "Jensen-Shannon loss over the splits; refused", refused=_SPLITS),
    switch("--resplit", "no erasing on the first split; refused", refused=_SPLITS),
)

BATCH_NORM = Group(
    "BatchNorm",
    flag("--bn-momentum", SHARE, None, "momentum of every BatchNorm", needs=(STATISTICS,)),
    flag("--bn-eps", ABOVE_ZERO, None, "epsilon of every BatchNorm"),
    switch("--bn-tf", "TensorFlow's momentum 0.01 and epsilon 1e-3"),
    switch("--sync-bn", "statistics over all ranks", needs=(STATISTICS,)),
    switch("--freeze-bn", "normalise by the running statistics and leave them as they are"),
    flag("--dist-bn", ("", "broadcast", "reduce"), "", "share running statistics each epoch", needs=(STATISTICS,)),
    switch("--split-bn", "a BatchNorm per split; refused", refused=_SPLITS),
)

EMA = Group(
    "EMA",
    switch("--model-ema", "keep a moving average of the weights and validate it too"),
    flag(
        "--model-ema-decay",
        SHARE,
        0.99992,
        "share of the old average per update; less in short runs",
        needs=(AVERAGED,),
    ),
    switch("--model-ema-warmup", "let the decay grow from small values at the start", needs=(AVERAGED,)),
    switch("--model-ema-force-cpu", "keep the average on the CPU of rank 0, not validated", needs=(AVERAGED,)),
)

PRECISION = Group(
    "Precision and speed",
    *MIXED_PRECISION,
    flag("--model-dtype", ("float32", "bfloat16"), "float32", "bfloat16: throughout, float32 master weights"),
    CHANNELS_LAST,
    switch("--grad-checkpointing", "recompute activations in the backward pass to save memory"),
    *COMPILE,
    switch("--no-cuda-graph", "launch each operation of a step, which a GPU else repeats as one CUDA graph"),
    flag("--activation-memory-budget", SHARE, None, "keep this share of a graph's activations (1)", needs=(INDUCTOR,)),
    OUTLOOK_KERNEL,
    switch("--torchscript", "refused: use --torchcompile", refused=NO_TORCHSCRIPT),
)

CHECKPOINTS = Group(
    "Checkpoints and logging",
    flag("--resume", PATH, "", "checkpoint to go on from, or auto: the newest of the run"),
    switch("--no-resume-opt", "take weights alone from --resume", needs=(RESUMED,)),
    switch("--allow-changed-data", "resume on other images or labels than the checkpoint's", needs=(RESUMED,)),
    flag("--stop-epoch", POSITIVE, None, "end after so many epochs; the schedule stays as it is"),
    flag("--save-epochs", POSITIVE, None, "keep milestone-N.pth.tar after N epochs, to branch from", nargs="+"),
    flag("--checkpoint-hist", POSITIVE, 10, "best checkpoints to keep; fewer below 30 epochs"),
    flag("--recovery-interval", COUNT, 0, "updates between saves in an epoch; 0: none"),
    flag("--checkpoint-minutes", AMOUNT, 0.0, "minutes between saves; 0: none"),
    switch("--checkpoint-sync", "wait for every save; without, training goes on from a copy in host memory"),
    flag("--max-failed-saves", COUNT, 10, "stop after more failed saves in a row"),
    *needing(
        LABELLED,
        flag("--eval-metric", ("top1", "top5", "loss"), "top1", "what makes a checkpoint the best"),
        flag("--patience", COUNT, 0, "stop after so many epochs without a better one; 0: never"),
        flag("--val-interval", POSITIVE, 1, "epochs between validations"),
    ),
    flag("--log-interval", POSITIVE, 50, "updates between lines of the log"),
    flag("--profile", POSITIVE, None, "profile N updates of a warm run: a table, and a trace in its directory"),
    flag("--max-nonfinite --skip-nonfinite", COUNT, 10, "skip up to N updates in a row that are not finite, then stop"),
    flag("--tta", Number(int, 0, 1), 0, "test-time augmentation; more than 1 is refused"),
)

# Each tracker's name is also that of its package and of the pip extra.
TRACKERS = {"wandb": "Weights & Biases", "tensorboard": "TensorBoard", "mlflow": "MLflow", "trackio": "Trackio"}
WANDB = Need("--log-wandb", lambda a: a.log_wandb)
TRACKED = Need("--log-wandb, --log-mlflow or --log-trackio", lambda a: a.log_wandb or a.log_mlflow or a.log_trackio)

TRACKING = Group(
    "Trackers",
    *(switch(f"--log-{name}", f"send metrics to {title}") for name, title in TRACKERS.items()),
    flag(
        "--tracker-project --wandb-project",
        NAME,
        "",
        "project of W&B and Trackio, experiment of MLflow (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or volo-tlt)",
        needs=(TRACKED,),
    ),
    flag("--wandb-tags", TEXT, None, "tags of the W&B run", nargs="+", metavar="TAG", needs=(WANDB,)),
)

DISTRIBUTED = Group(
    "Distributed",
    flag("--shard", POSITIVE, 1, "divide weights, gradients, optimizer state and EMA among N ranks (FSDP2)"),
    flag("--tensor-parallel", POSITIVE, 1, "divide heads and MLPs among N ranks, which see the same images"),
    flag("--grad-compression", ("none", "bf16"), "none", "bf16: sum gradients over the ranks in bfloat16"),
    flag("--local_rank --local-rank", INT, 0, "of old launchers; where set, LOCAL_RANK or SLURM_LOCALID wins"),
    flag("--dist-timeout", POSITIVE, 120, "end a run that hangs for S (600 at start, validation, saves)", metavar="S"),
    BIND,
)

TRAIN_GROUPS = (
    RUN,
    DATA,
    MODEL,
    IMAGE_SIZES,
    TOKEN_LABELS,
    DISTILLATION,
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
