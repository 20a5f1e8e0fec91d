"""The flags of `train.py`, one row each; `--help` shows them in the order of `TRAIN_GROUPS`.

`flags_data` has the flags about images and labels.

Names, types, defaults and meanings are those of the published VOLO `main.py` (103 flags). Two of them differ if they
are not set, `--lr` and `--token-label-size`: see docs/flags.md. Newer flags have timm's names.
"""

from __future__ import annotations

from argparse import Namespace

from volo.config import value_types as t
from volo.config.flag_table import Group, Need, flag, needing, switch
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


INDUCTOR = "--torchcompile inductor"
MIXING = Need("--mixup or --cutmix", mixes)
BOTH_MIX = Need("--mixup and --cutmix", lambda a: a.mixup > 0 and _cuts(a))
CLASS_LABELS = Need("class labels alone (no --token-label)", lambda a: not a.token_label)
STATISTICS = Need("statistics that change (no --freeze-bn, no --freeze)", lambda a: not (a.freeze_bn or a.freeze))
DROPPING = Need("--drop-path above 0", lambda a: a.drop_path or "drop_path_rate" in a.model_kwargs)

MIXED_PRECISION = (
    switch("--amp --apex-amp --native-amp", "mixed precision, by torch under each of these names"),
    flag("--amp-dtype", ("float16", "bfloat16"), None, "(float16 on GPUs, bfloat16 on CPUs)", needs="--amp"),
)
CHANNELS_LAST = switch("--channels-last", "channels-last memory layout")
COMPILE = (
    flag("--torchcompile", t.TEXT, None, "compile (inductor)", nargs="?", const="inductor", metavar="BACKEND"),
    flag("--torchcompile-mode", COMPILE_MODES, None, ", ".join(COMPILE_MODES), metavar="MODE", needs=INDUCTOR),
    flag(
        "--torchcompile-scope",
        ("blocks", "model"),
        None,
        "one graph per kind of block, or of the model",
        needs="--torchcompile",
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
# The default warm-up is at most a fifth of the epochs (volo/train/run.py), so there is none below 5 epochs.
WARMED_UP = Need(
    "--warmup-epochs",
    lambda a: a.warmup_epochs > 0 and not ("warmup_epochs" in getattr(a, "defaulted", ()) and a.epochs < 5),
)
STABLE = Need("--sched wsd or rsqrt", lambda a: a.sched in STABLE_SCHEDULES)
RSQRT = "--sched rsqrt"
STEPPED = Need("--sched step, wsd or rsqrt", lambda a: a.sched == "step" or STABLE.met(a))
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
    flag("-c --config", t.FILE, "", "YAML recipe, or its name; flags win over it"),
    flag("--output", t.DIR, "", "folder for run directories (output/train)"),
    flag("--experiment", t.name_below, "", "name of the run directory (TIME-MODEL-SIZE)", metavar="NAME"),
    flag("--seed", t.SEED, 42, "seed of weights, data order, augmentation and MixToken"),
    DEVICE,
    switch("--dry-run", "check flags, data and model, print what would run, and stop before the first step"),
    DEBUG,
)

MODEL = Group(
    "Model",
    flag("--model", t.SOURCE, "volo_d1", "volo_d1..d5, lvvit_t/s/m/l or any timm model"),
    switch("--pretrained", "start from the published weights"),
    flag("--initial-checkpoint", t.WEIGHTS, "", "start from weights that must fit exactly", excludes=("pretrained",)),
    flag(
        "--finetune --pretrained-path",
        t.WEIGHTS,
        "",
        "start from weights of another image size or class count",
        excludes=("initial_checkpoint", "pretrained"),
    ),
    flag("--num-classes", t.POSITIVE, None, "number of classes (the class folders)"),
    flag("--in-chans", t.Number(int, 1, 3), None, "3: RGB; 1: grey (the model's own)"),
    switch("--freeze", "train the heads alone (linear probe), with BatchNorm's running statistics"),
    POOL,
    flag("--head-init-scale", t.FLOAT, None, "multiply the heads' initial weights"),
    flag("--head-init-bias", t.FLOAT, None, "initial value of the heads' biases"),
    MODEL_KWARGS,
)


OPTIMIZER = Group(
    "Optimizer",
    flag("--opt", t.NAME, "adamw", "any of timm's; fused... from apex where it is installed"),
    flag("--opt-eps", t.AMOUNT, None, "epsilon (the optimizer's own)"),
    flag("--opt-betas", t.FLOAT, None, "betas (the optimizer's own)", nargs="+"),
    flag("--momentum", t.SHARE, 0.9, "momentum, where the optimizer has one"),
    flag("--weight-decay", t.AMOUNT, 0.05, "weight decay"),
    flag("--layer-decay", t.SHARE, None, "learning rate factor from layer to layer"),
    flag("--clip-grad", t.ABOVE_ZERO, None, "gradient clipping threshold (none)"),
    flag("--clip-mode", ("norm", "value", "agc"), "norm", "what is clipped; agc: not the heads", needs="--clip-grad"),
    flag("--opt-kwargs", t.key_value, {}, "more arguments for it", nargs="*", metavar="K=V"),
    flag("--grad-accum-steps", t.POSITIVE, 1, "batches per update"),
)

SCHEDULE = Group(
    "Schedule",
    flag(
        "--lr",
        t.AMOUNT,
        None,
        "learning rate, absolute (else from --lr-base)",
        metavar="LR",
        excludes=("lr_base", "lr_base_size", "lr_base_scale"),
    ),
    flag("--lr-base", t.AMOUNT, 1.6e-3, "learning rate at --lr-base-size images", metavar="LR"),
    flag("--lr-base-size", t.POSITIVE, 1024, "global batch that --lr-base is meant for"),
    flag("--lr-base-scale", ("linear", "sqrt"), "linear", "how it grows with the global batch"),
    flag("--sched", SCHEDULES, "cosine", "course of the learning rate"),
    switch("--sched-on-updates", "change the rate at every update, not every epoch (wsd, rsqrt: on)"),
    flag("--epochs", t.POSITIVE, 300, "epochs without the cool-down"),
    flag("--warmup-epochs", t.EPOCHS, 20, "epochs of linear warm-up; at most a fifth of --epochs"),
    flag("--warmup-lr", t.AMOUNT, 1e-6, "learning rate at the start of the warm-up", metavar="LR", needs=WARMED_UP),
    switch("--warmup-prefix", "put the warm-up before --epochs, not into them", needs=WARMED_UP),
    flag("--cooldown-epochs", t.EPOCHS, 10, "more epochs at --min-lr; 0 below 30 --epochs", needs=COOLED_DOWN),
    flag("--min-lr", t.AMOUNT, 1e-5, "learning rate at the end", metavar="LR", needs=ENDING),
    flag(
        "--start-epoch", t.COUNT, None, "first epoch, from 0 (the checkpoint's); --resume auto goes on from beyond it"
    ),
    flag("--decay-epochs", t.ABOVE_ZERO, 30.0, "of a step; of the decay, or its share (0.2)", needs=STEPPED),
    flag("--decay-milestones", t.POSITIVE, [90, 180, 270], "epochs of the steps", nargs="+", needs="--sched multistep"),
    flag("--lr-decay-fn", DECAYS, None, "course of the decay (wsd: 1-sqrt, rsqrt: linear)", needs=STABLE),
    flag("--lr-stable-timescale", t.ABOVE_ZERO, None, "of 1 / sqrt(1 + epochs / X) (the warm-up's)", needs=RSQRT),
    flag("--decay-rate --dr", t.AMOUNT, 0.1, "per step or cycle (cosine); exponent (poly)", needs=DECAYING),
    flag("--patience-epochs", t.COUNT, 10, "refused", refused="--sched plateau is not supported: remove the flag"),
    flag("--lr-cycle-mul", t.Number(float, low=1), 1.0, "length of a cycle over the one before", needs=SEVERAL_CYCLES),
    flag("--lr-k-decay", t.ABOVE_ZERO, 1.0, "exponent of the time in the curve (arXiv:2004.05909)", needs=K_DECAYING),
    flag("--lr-cycle-limit", t.POSITIVE, 1, "number of cycles", needs=CYCLIC),
    flag("--lr-noise", t.SHARE, None, "noise from (to) this part of the epochs", nargs="+"),
    flag("--lr-noise-pct", t.AMOUNT, 0.67, "largest relative noise", needs="--lr-noise"),
    flag("--lr-noise-std", t.AMOUNT, 1.0, "relative standard deviation of the noise", needs="--lr-noise"),
)

REGULARISATION = Group(
    "Regularisation",
    flag("--smoothing", t.SHARE, 0.1, "label smoothing", needs=LABELLED),
    switch("--bce-loss", "binary cross-entropy over the classes", needs=CLASS_LABELS),
    flag("--bce-target-thresh", t.SHARE, None, "take targets above it as 1, others as 0", needs="--bce-loss"),
    switch("--bce-sum", "sum it over the classes, not the mean", needs="--bce-loss"),
    flag("--bce-pos-weight", t.ABOVE_ZERO, None, "weight of targets 1", needs="--bce-loss"),
    flag("--drop", t.SHARE, 0.0, "dropout rate"),
    flag("--drop-path --drop-connect", t.SHARE, None, "stochastic depth rate (the model's own)"),
    flag("--drop-path-mode", DROP_PATH_MODES, "mask", "mask what is dropped, or skip its work", needs=DROPPING),
    flag("--drop-block", t.SHARE, None, "DropBlock rate; refused", refused=_NO_DROP_BLOCK),
    switch("--outlooker-drop-path", "stochastic depth in the outlooker stage as well", needs=DROPPING),
    flag("--mixup", t.AMOUNT, 0.0, "Mixup alpha; 0: off"),
    flag("--cutmix", t.AMOUNT, 0.0, "CutMix alpha; 0: off"),
    flag("--cutmix-minmax", t.SHARE, None, "CutMix box sides, least and most", nargs=2),
    flag("--mixup-prob", t.SHARE, 1.0, "probability of Mixup or CutMix", needs=MIXING),
    flag("--mixup-switch-prob", t.SHARE, 0.5, "probability of CutMix where both are on", needs=BOTH_MIX),
    flag("--mixup-mode", ("batch", "pair", "elem"), "batch", "mix per batch, pair or image", needs=MIXING),
    flag("--mixup-off-epoch", t.COUNT, 0, "stop mixing after so many epochs; 0: never", needs=MIXING),
    flag("--aug-splits", t.COUNT, 0, "AugMix splits; refused", refused=_SPLITS),
    switch("--jsd", "Jensen-Shannon loss over the splits; refused", refused=_SPLITS),
    switch("--resplit", "no erasing on the first split; refused", refused=_SPLITS),
)

BATCH_NORM = Group(
    "BatchNorm",
    flag("--bn-momentum", t.SHARE, None, "momentum of every BatchNorm", needs=STATISTICS),
    flag("--bn-eps", t.ABOVE_ZERO, None, "epsilon of every BatchNorm"),
    switch("--bn-tf", "TensorFlow's momentum 0.01 and epsilon 1e-3"),
    switch("--sync-bn", "statistics over all ranks", needs=STATISTICS),
    switch("--freeze-bn", "normalise by the running statistics and leave them as they are"),
    flag("--dist-bn", ("", "broadcast", "reduce"), "", "share running statistics each epoch", needs=STATISTICS),
    switch("--split-bn", "a BatchNorm per split; refused", refused=_SPLITS),
)

EMA = Group(
    "EMA",
    switch("--model-ema", "keep a moving average of the weights and validate it too"),
    *needing(
        "--model-ema",
        flag("--model-ema-decay", t.SHARE, 0.99992, "share of the old average per update; less in short runs"),
        switch("--model-ema-warmup", "let the decay grow from small values at the start"),
        switch("--model-ema-force-cpu", "keep it on rank 0's CPU, not validated: each update waits for all weights"),
    ),
)

PRECISION = Group(
    "Precision and speed",
    *MIXED_PRECISION,
    flag("--model-dtype", ("float32", "bfloat16"), "float32", "bfloat16: throughout, float32 master weights"),
    CHANNELS_LAST,
    switch("--grad-checkpointing", "recompute activations in the backward pass to save memory"),
    *COMPILE,
    switch("--cuda-graph", "repeat a step as one CUDA graph on several GPUs, too", excludes=("no_cuda_graph",)),
    switch("--no-cuda-graph", "launch each operation of a step, which one GPU else repeats as one CUDA graph"),
    flag("--activation-memory-budget", t.SHARE, None, "keep this share of a graph's activations (1)", needs=INDUCTOR),
    OUTLOOK_KERNEL,
    switch("--torchscript", "refused: use --torchcompile", refused=NO_TORCHSCRIPT),
)

RESUMED = Need("--resume or --branch", lambda a: a.resume or a.branch)
CHECKPOINTS = Group(
    "Checkpoints and logging",
    flag("--resume", t.PATH, "", "checkpoint to go on from, or auto: the newest of the run"),
    flag("--branch", t.PATH, "", "another run's checkpoint to begin at; --resume auto goes on from the run's own"),
    switch("--no-resume-opt", "take weights alone from --resume", needs=RESUMED),
    switch("--allow-changed-data", "resume on other images or labels than the checkpoint's", needs=RESUMED),
    flag("--stop-epoch", t.POSITIVE, None, "end after so many epochs; the schedule stays as it is"),
    flag("--save-epochs", t.POSITIVE, None, "keep milestone-N.pth.tar after N epochs, to branch from", nargs="+"),
    flag("--checkpoint-hist", t.POSITIVE, 10, "best checkpoints to keep; fewer below 30 epochs"),
    flag("--recovery-interval", t.COUNT, 0, "updates between saves in an epoch; 0: none"),
    flag("--checkpoint-minutes", t.AMOUNT, 0.0, "minutes between saves; 0: none"),
    switch("--checkpoint-sync", "wait for every save; without, training goes on from a copy in host memory"),
    flag("--max-failed-saves", t.COUNT, 10, "stop after more failed saves in a row"),
    *needing(
        LABELLED,
        flag("--eval-metric", ("top1", "top5", "loss"), "top1", "what makes a checkpoint the best"),
        flag("--patience", t.COUNT, 0, "stop after so many epochs without a better one; 0: never"),
        flag("--val-interval", t.POSITIVE, 1, "epochs between validations"),
    ),
    flag("--log-interval", t.POSITIVE, 50, "updates between lines of the log"),
    flag("--profile", t.POSITIVE, None, "profile N updates of a warm run: a table, and a trace in its directory"),
    flag(
        "--max-nonfinite --skip-nonfinite", t.COUNT, 10, "skip up to N updates in a row that are not finite, then stop"
    ),
    flag("--tta", t.Number(int, 0, 1), 0, "test-time augmentation; more than 1 is refused"),
)

# Each tracker's name is also that of its package and of the pip extra.
TRACKERS = {"wandb": "Weights & Biases", "tensorboard": "TensorBoard", "mlflow": "MLflow", "trackio": "Trackio"}
TRACKED = Need("--log-wandb, --log-mlflow or --log-trackio", lambda a: a.log_wandb or a.log_mlflow or a.log_trackio)

TRACKING = Group(
    "Trackers",
    *(switch(f"--log-{name}", f"send metrics to {title}") for name, title in TRACKERS.items()),
    flag(
        "--tracker-project --wandb-project",
        t.NAME,
        "",
        "project of W&B and Trackio, experiment of MLflow (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or volo-tlt)",
        needs=TRACKED,
    ),
    flag("--wandb-tags", t.TEXT, None, "tags of the W&B run", nargs="+", metavar="TAG", needs="--log-wandb"),
)

DISTRIBUTED = Group(
    "Distributed",
    flag("--shard", t.POSITIVE, 1, "divide weights, gradients, optimizer state and EMA among N ranks (FSDP2)"),
    flag("--tensor-parallel", t.POSITIVE, 1, "divide heads and MLPs among N ranks, which see the same images"),
    flag("--grad-compression", ("none", "bf16"), "none", "bf16: sum gradients over the ranks in bfloat16"),
    flag("--local_rank --local-rank", t.INT, 0, "of old launchers; where set, LOCAL_RANK or SLURM_LOCALID wins"),
    flag(
        "--dist-timeout", t.POSITIVE, 120, "end a run that hangs for S (600 at start, validation, saves)", metavar="S"
    ),
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

# Flags whose defaults depend on the data if neither command line nor recipe sets them (volo/train/run.py).
FITTED = (
    *("batch_size", "checkpoint_hist", "cooldown_epochs", "drop_last", "lr_base_scale", "model_ema_decay"),
    *("num_classes", "sched_on_updates", "warmup_epochs"),
)
STARTS = ("pretrained", "initial_checkpoint", "finetune")  # weights to start from
# Recipes for few images: of a command without a model, and of one that starts from weights.
FROM_NOTHING, FINE_TUNING = "scratch_small", "finetune_small"
# Arguments that say only how a run was started, and so are no settings of it.
START_ONLY = {
    *("config", "notes", "local_rank", "debug", "dry_run", "resume", "no_resume_opt", "start_epoch"),
    "allow_changed_data",
}
# The settings that define an experiment, without the places of files, the machines, and what is only measured.
EXPERIMENT = {
    row.dest
    for group in (
        *(MODEL, IMAGE_SIZES, TOKEN_LABELS, DISTILLATION),
        *(OPTIMIZER, SCHEDULE, AUGMENTATION, REGULARISATION, BATCH_NORM, EMA),
    )
    for row in group.flags
} | {"seed", "batch_size", "branch"}
EXPERIMENT -= {"token_label_data", "val_label_data", "val_img_size", "model_ema_force_cpu"}
EXPERIMENT -= {"grad_accum_steps"}  # it depends on the number of ranks
