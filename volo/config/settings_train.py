"""The settings of `train.py`: `TrainSettings`, in the order of `--help`, and its groups.

`settings_data` has the groups about images and labels.

Names, types, defaults and meanings are those of the published VOLO `main.py` (103 flags). Two of them differ if they
are not set, `--lr` and `--token-label-size`: see docs/flags.md. Newer flags have timm's names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from volo.config import value_types as t
from volo.config.fields import Need, Settings, flags_of, group, needing, setting
from volo.config.settings_data import LABELLED, Augmentation, Images, ImageSizes, Teachers, TokenLabels
from volo.config.settings_shared import (
    BIND,
    CHANNELS_LAST,
    DEBUG,
    DEVICE,
    INDUCTOR,
    MODEL_KWARGS,
    OUTLOOK_KERNEL,
    POOL,
    TORCHSCRIPT,
    Compilation,
    MixedPrecision,
)

DROP_PATH_MODES = ("mask", "subset")
_NO_DROP_BLOCK = "no VOLO or LV-ViT has DropBlock; use --drop-path (other models: --model-kwargs drop_block_rate=...)"
_SPLITS = "AugMix splits and the Jensen-Shannon loss are not supported: remove the flag"


def need(of: str, met: Callable[[TrainSettings], bool]) -> Need:
    """Return a need, whose test is written with the groups, so that mypy checks the names."""
    return Need(of, met)


MIXING = need("--mixup or --cutmix", lambda s: s.regular.mixes)
BOTH_MIX = need("--mixup and --cutmix", lambda s: s.regular.mixup > 0 and s.regular.cuts)
CLASS_LABELS = need("class labels alone (no --token-label)", lambda s: not s.labels.token_label)
STATISTICS = need(
    "statistics that change (no --freeze-bn, no --freeze)", lambda s: not (s.norms.freeze_bn or s.network.freeze)
)
DROPPING = need(
    "--drop-path above 0", lambda s: bool(s.regular.drop_path or "drop_path_rate" in s.network.model_kwargs)
)

CYCLIC_SCHEDULES = ("cosine", "tanh", "poly")
STABLE_SCHEDULES = ("wsd", "rsqrt")
ENDING_SCHEDULES = CYCLIC_SCHEDULES + STABLE_SCHEDULES  # schedules that end at --min-lr
DECAYS = ("linear", "1-sqrt", "cosine", "power", "exp")
SCHEDULES = (*ENDING_SCHEDULES, "step", "multistep", "constant")
# The default warm-up is at most a fifth of the epochs (volo/train/run.py), so there is none below 5 epochs.
WARMED_UP = need(
    "--warmup-epochs",
    lambda s: s.schedule.warmup_epochs > 0 and (s.set_by_user("warmup_epochs") or s.schedule.epochs >= 5),
)
STABLE = need("--sched wsd or rsqrt", lambda s: s.schedule.sched in STABLE_SCHEDULES)
RSQRT = "--sched rsqrt"
STEPPED = need("--sched step, wsd or rsqrt", lambda s: s.schedule.sched in ("step", *STABLE_SCHEDULES))
DECAYING = need(
    "--sched step, multistep, poly or several cosine cycles",
    lambda s: (
        s.schedule.sched in ("step", "multistep", "poly")
        or (s.schedule.sched == "cosine" and s.schedule.lr_cycle_limit > 1)
    ),
)
CYCLIC = need("--sched cosine, tanh or poly", lambda s: s.schedule.sched in CYCLIC_SCHEDULES)
K_DECAYING = need("--sched cosine or poly", lambda s: s.schedule.sched in ("cosine", "poly"))
ENDING = need("--sched cosine, tanh, poly, wsd or rsqrt", lambda s: s.schedule.sched in ENDING_SCHEDULES)
# A cool-down of 0 epochs is accepted with every schedule, since it changes nothing.
COOLED_DOWN = need(ENDING.of, lambda s: s.schedule.sched in ENDING_SCHEDULES or s.schedule.cooldown_epochs == 0)
SEVERAL_CYCLES = need("--lr-cycle-limit above 1", lambda s: s.schedule.lr_cycle_limit > 1)
RESUMED = need("--resume or --branch", lambda s: bool(s.checkpoints.resume or s.checkpoints.branch))
# Each tracker's name is also that of its package and of the pip extra.
TRACKERS = {"wandb": "Weights & Biases", "tensorboard": "TensorBoard", "mlflow": "MLflow", "trackio": "Trackio"}
TRACKED = need(
    "--log-wandb, --log-mlflow or --log-trackio",
    lambda s: s.tracking.log_wandb or s.tracking.log_mlflow or s.tracking.log_trackio,
)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Run"""

    config: str = setting("", "YAML recipe, or its name; flags win over it", t.FILE, names="-c --config")
    output: str = setting("", "folder for run directories (output/train)", t.DIR)
    experiment: str = setting("", "name of the run directory (TIME-MODEL-SIZE)", t.name_below, metavar="NAME")
    seed: int = setting(42, "seed of weights, data order, augmentation and MixToken", t.SEED)
    device: str | None = DEVICE()
    dry_run: bool = setting(False, "check flags, data and model, print what would run, and stop before the first step")
    debug: bool = DEBUG()


@dataclass(frozen=True, kw_only=True)
class Network:
    """Model"""

    model: str = setting("volo_d1", "volo_d1..d5, lvvit_t/s/m/l or any timm model", t.SOURCE)
    pretrained: bool = setting(False, "start from the published weights")
    initial_checkpoint: str = setting(
        "", "start from weights that must fit exactly", t.WEIGHTS, excludes=("pretrained",)
    )
    finetune: str = setting(
        "",
        "start from weights of another image size or class count",
        t.WEIGHTS,
        names="--finetune --pretrained-path",
        excludes=("initial_checkpoint", "pretrained"),
    )
    num_classes: int | None = setting(None, "number of classes (the class folders)", t.POSITIVE)
    in_chans: int | None = setting(None, "3: RGB; 1: grey (the model's own)", t.Number(int, 1, 3))
    freeze: bool = setting(False, "train the heads alone (linear probe), with BatchNorm's running statistics")
    gp: str | None = POOL()
    head_init_scale: float | None = setting(None, "multiply the heads' initial weights", t.FLOAT)
    head_init_bias: float | None = setting(None, "initial value of the heads' biases", t.FLOAT)
    model_kwargs: dict[str, Any] = MODEL_KWARGS()


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Optimizer"""

    opt: str = setting("adamw", "any of timm's; fused... from apex where it is installed", t.NAME)
    opt_eps: float | None = setting(None, "epsilon (the optimizer's own)", t.AMOUNT)
    opt_betas: list[float] | None = setting(None, "betas (the optimizer's own)", t.FLOAT)
    momentum: float = setting(0.9, "momentum, where the optimizer has one", t.SHARE)
    weight_decay: float = setting(0.05, "weight decay", t.AMOUNT)
    layer_decay: float | None = setting(None, "learning rate factor from layer to layer", t.SHARE)
    clip_grad: float | None = setting(None, "gradient clipping threshold (none)", t.ABOVE_ZERO)
    clip_mode: Literal["norm", "value", "agc"] = setting(
        "norm", "what is clipped; agc: not the heads", needs="--clip-grad"
    )
    opt_kwargs: dict[str, Any] = setting({}, "more arguments for it")
    grad_accum_steps: int = setting(1, "batches per update", t.POSITIVE)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedule"""

    lr: float | None = setting(
        None,
        "learning rate, absolute (else from --lr-base)",
        t.AMOUNT,
        metavar="LR",
        excludes=("lr_base", "lr_base_size", "lr_base_scale"),
    )
    lr_base: float = setting(1.6e-3, "learning rate at --lr-base-size images", t.AMOUNT, metavar="LR")
    lr_base_size: int = setting(1024, "global batch that --lr-base is meant for", t.POSITIVE)
    lr_base_scale: Literal["linear", "sqrt"] = setting("linear", "how it grows with the global batch")
    sched: str = setting("cosine", "course of the learning rate", SCHEDULES)
    sched_on_updates: bool = setting(False, "change the rate at every update, not every epoch (wsd, rsqrt: on)")
    epochs: int = setting(300, "epochs without the cool-down", t.POSITIVE)
    warmup_epochs: int = setting(20, "epochs of linear warm-up; at most a fifth of --epochs", t.EPOCHS)
    warmup_lr: float = setting(
        1e-6, "learning rate at the start of the warm-up", t.AMOUNT, metavar="LR", needs=WARMED_UP
    )
    warmup_prefix: bool = setting(False, "put the warm-up before --epochs, not into them", needs=WARMED_UP)
    cooldown_epochs: int = setting(10, "more epochs at --min-lr; 0 below 30 --epochs", t.EPOCHS, needs=COOLED_DOWN)
    min_lr: float = setting(1e-5, "learning rate at the end", t.AMOUNT, metavar="LR", needs=ENDING)
    start_epoch: int | None = setting(
        None, "first epoch, from 0 (the checkpoint's); --resume auto goes on from beyond it", t.COUNT
    )
    decay_epochs: float = setting(30.0, "of a step; of the decay, or its share (0.2)", t.ABOVE_ZERO, needs=STEPPED)
    decay_milestones: list[int] = setting([90, 180, 270], "epochs of the steps", t.POSITIVE, needs="--sched multistep")
    lr_decay_fn: str | None = setting(None, "course of the decay (wsd: 1-sqrt, rsqrt: linear)", DECAYS, needs=STABLE)
    lr_stable_timescale: float | None = setting(
        None, "of 1 / sqrt(1 + epochs / X) (the warm-up's)", t.ABOVE_ZERO, needs=RSQRT
    )
    decay_rate: float = setting(
        0.1, "per step or cycle (cosine); exponent (poly)", t.AMOUNT, names="--decay-rate --dr", needs=DECAYING
    )
    patience_epochs: int = setting(10, "refused", t.COUNT, refused="--sched plateau is not supported: remove the flag")
    lr_cycle_mul: float = setting(
        1.0, "length of a cycle over the one before", t.Number(float, low=1), needs=SEVERAL_CYCLES
    )
    lr_k_decay: float = setting(
        1.0, "exponent of the time in the curve (arXiv:2004.05909)", t.ABOVE_ZERO, needs=K_DECAYING
    )
    lr_cycle_limit: int = setting(1, "number of cycles", t.POSITIVE, needs=CYCLIC)
    lr_noise: list[float] | None = setting(None, "noise from (to) this part of the epochs", t.SHARE)
    lr_noise_pct: float = setting(0.67, "largest relative noise", t.AMOUNT, needs="--lr-noise")
    lr_noise_std: float = setting(1.0, "relative standard deviation of the noise", t.AMOUNT, needs="--lr-noise")


@dataclass(frozen=True, kw_only=True)
class Regularisation:
    """Regularisation"""

    smoothing: float = setting(0.1, "label smoothing", t.SHARE, needs=LABELLED)
    bce_loss: bool = setting(False, "binary cross-entropy over the classes", needs=CLASS_LABELS)
    bce_target_thresh: float | None = setting(
        None, "take targets above it as 1, others as 0", t.SHARE, needs="--bce-loss"
    )
    bce_sum: bool = setting(False, "sum it over the classes, not the mean", needs="--bce-loss")
    bce_pos_weight: float | None = setting(None, "weight of targets 1", t.ABOVE_ZERO, needs="--bce-loss")
    drop: float = setting(0.0, "dropout rate", t.SHARE)
    drop_path: float | None = setting(
        None, "stochastic depth rate (the model's own)", t.SHARE, names="--drop-path --drop-connect"
    )
    drop_path_mode: str = setting("mask", "mask what is dropped, or skip its work", DROP_PATH_MODES, needs=DROPPING)
    drop_block: float | None = setting(None, "DropBlock rate; refused", t.SHARE, refused=_NO_DROP_BLOCK)
    outlooker_drop_path: bool = setting(False, "stochastic depth in the outlooker stage as well", needs=DROPPING)
    mixup: float = setting(0.0, "Mixup alpha; 0: off", t.AMOUNT)
    cutmix: float = setting(0.0, "CutMix alpha; 0: off", t.AMOUNT)
    cutmix_minmax: list[float] | None = setting(None, "CutMix box sides, least and most", t.SHARE, nargs=2)
    mixup_prob: float = setting(1.0, "probability of Mixup or CutMix", t.SHARE, needs=MIXING)
    mixup_switch_prob: float = setting(0.5, "probability of CutMix where both are on", t.SHARE, needs=BOTH_MIX)
    mixup_mode: Literal["batch", "pair", "elem"] = setting("batch", "mix per batch, pair or image", needs=MIXING)
    mixup_off_epoch: int = setting(0, "stop mixing after so many epochs; 0: never", t.COUNT, needs=MIXING)
    aug_splits: int = setting(0, "AugMix splits; refused", t.COUNT, refused=_SPLITS)
    jsd: bool = setting(False, "Jensen-Shannon loss over the splits; refused", refused=_SPLITS)
    resplit: bool = setting(False, "no erasing on the first split; refused", refused=_SPLITS)

    @property
    def cuts(self) -> bool:
        """Whether CutMix is on."""
        return self.cutmix > 0 or self.cutmix_minmax is not None

    @property
    def mixes(self) -> bool:
        """Whether Mixup or CutMix is on."""
        return self.mixup > 0 or self.cuts


@dataclass(frozen=True, kw_only=True)
class BatchNorms:
    """BatchNorm"""

    bn_momentum: float | None = setting(None, "momentum of every BatchNorm", t.SHARE, needs=STATISTICS)
    bn_eps: float | None = setting(None, "epsilon of every BatchNorm", t.ABOVE_ZERO)
    bn_tf: bool = setting(False, "TensorFlow's momentum 0.01 and epsilon 1e-3")
    sync_bn: bool = setting(False, "statistics over all ranks", needs=STATISTICS)
    freeze_bn: bool = setting(False, "normalise by the running statistics and leave them as they are")
    dist_bn: Literal["", "broadcast", "reduce"] = setting("", "share running statistics each epoch", needs=STATISTICS)
    split_bn: bool = setting(False, "a BatchNorm per split; refused", refused=_SPLITS)


_averaging = needing("--model-ema")


@dataclass(frozen=True, kw_only=True)
class Average:
    """EMA"""

    model_ema: bool = setting(False, "keep a moving average of the weights and validate it too")
    model_ema_decay: float = _averaging(0.99992, "share of the old average per update; less in short runs", t.SHARE)
    model_ema_warmup: bool = _averaging(False, "let the decay grow from small values at the start")
    model_ema_force_cpu: bool = _averaging(
        False, "keep it on rank 0's CPU, not validated: each update waits for all weights"
    )


@dataclass(frozen=True, kw_only=True)
class TrainPrecision(MixedPrecision):
    """The precision of train.py, whose weights may have another type as well."""

    model_dtype: str = setting("float32", "bfloat16: throughout, float32 master weights", ("float32", "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class TrainCompilation(Compilation):
    """The compilation of train.py, which can trade speed for memory."""

    activation_memory_budget: float | None = setting(
        None, "keep this share of a graph's activations (1)", t.SHARE, needs=INDUCTOR
    )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Precision and speed"""

    mixed: TrainPrecision = group(TrainPrecision)
    channels_last: bool = CHANNELS_LAST()
    grad_checkpointing: bool = setting(False, "recompute activations in the backward pass to save memory")
    compilation: TrainCompilation = group(TrainCompilation)
    cuda_graph: bool = setting(
        False,
        "repeat a step as one CUDA graph on several GPUs, too",
        excludes=("no_cuda_graph",),
        after="torchcompile_scope",
    )
    no_cuda_graph: bool = setting(
        False, "launch each operation of a step, which one GPU else repeats as one CUDA graph", after="cuda_graph"
    )
    outlook_kernel: str = OUTLOOK_KERNEL()
    torchscript: bool = TORCHSCRIPT()


_validated = needing(LABELLED)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Checkpoints and logging"""

    resume: str = setting("", "checkpoint to go on from, or auto: the newest of the run", t.PATH)
    branch: str = setting("", "another run's checkpoint to begin at; --resume auto goes on from the run's own", t.PATH)
    no_resume_opt: bool = setting(False, "take weights alone from --resume", needs=RESUMED)
    allow_changed_data: bool = setting(False, "resume on other images or labels than the checkpoint's", needs=RESUMED)
    stop_epoch: int | None = setting(None, "end after so many epochs; the schedule stays as it is", t.POSITIVE)
    save_epochs: list[int] | None = setting(None, "keep milestone-N.pth.tar after N epochs, to branch from", t.POSITIVE)
    checkpoint_hist: int = setting(10, "best checkpoints to keep; fewer below 30 epochs", t.POSITIVE)
    recovery_interval: int = setting(0, "updates between saves in an epoch; 0: none", t.COUNT)
    checkpoint_minutes: float = setting(0.0, "minutes between saves; 0: none", t.AMOUNT)
    checkpoint_sync: bool = setting(False, "wait for every save; without, training goes on from a copy in host memory")
    max_failed_saves: int = setting(10, "stop after more failed saves in a row", t.COUNT)
    eval_metric: Literal["top1", "top5", "loss"] = _validated("top1", "what makes a checkpoint the best")
    patience: int = _validated(0, "stop after so many epochs without a better one; 0: never", t.COUNT)
    val_interval: int = _validated(1, "epochs between validations", t.POSITIVE)
    log_interval: int = setting(50, "updates between lines of the log", t.POSITIVE)
    profile: int | None = setting(
        None, "profile N updates of a warm run: a table, and a trace in its directory", t.POSITIVE
    )
    max_nonfinite: int = setting(
        10,
        "skip up to N updates in a row that are not finite, then stop",
        t.COUNT,
        names="--max-nonfinite --skip-nonfinite",
    )
    tta: int = setting(0, "test-time augmentation; more than 1 is refused", t.Number(int, 0, 1))


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Trackers"""

    log_wandb: bool = setting(False, f"send metrics to {TRACKERS['wandb']}")
    log_tensorboard: bool = setting(False, f"send metrics to {TRACKERS['tensorboard']}")
    log_mlflow: bool = setting(False, f"send metrics to {TRACKERS['mlflow']}")
    log_trackio: bool = setting(False, f"send metrics to {TRACKERS['trackio']}")
    tracker_project: str = setting(
        "",
        "project of W&B and Trackio, experiment of MLflow (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or volo-tlt)",
        t.NAME,
        names="--tracker-project --wandb-project",
        needs=TRACKED,
    )
    wandb_tags: list[str] | None = setting(None, "tags of the W&B run", t.TEXT, metavar="TAG", needs="--log-wandb")


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """Distributed"""

    shard: int = setting(1, "divide weights, gradients, optimizer state and EMA among N ranks (FSDP2)", t.POSITIVE)
    tensor_parallel: int = setting(1, "divide heads and MLPs among N ranks, which see the same images", t.POSITIVE)
    grad_compression: Literal["none", "bf16"] = setting("none", "bf16: sum gradients over the ranks in bfloat16")
    local_rank: int = setting(
        0, "of old launchers; where set, LOCAL_RANK or SLURM_LOCALID wins", t.INT, names="--local_rank --local-rank"
    )
    dist_timeout: int = setting(
        120, "end a run that hangs for S (600 at start, validation, saves)", t.POSITIVE, metavar="S"
    )
    bind: str = BIND()


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """The settings of train.py. Each group is a section of `--help`."""

    run: RunSettings = group(RunSettings)
    images: Images = group(Images)
    network: Network = group(Network)
    sizes: ImageSizes = group(ImageSizes)
    labels: TokenLabels = group(TokenLabels)
    teachers: Teachers = group(Teachers)
    optim: Optimizer = group(Optimizer)
    schedule: Schedule = group(Schedule)
    augment: Augmentation = group(Augmentation)
    regular: Regularisation = group(Regularisation)
    norms: BatchNorms = group(BatchNorms)
    ema: Average = group(Average)
    precision: Precision = group(Precision)
    checkpoints: Checkpoints = group(Checkpoints)
    tracking: Tracking = group(Tracking)
    distributed: Distributed = group(Distributed)


# Settings whose defaults depend on the data if neither command line nor recipe sets them (volo/train/run.py).
FITTED = (
    *("batch_size", "checkpoint_hist", "cooldown_epochs", "drop_last", "lr_base_scale", "model_ema_decay"),
    *("num_classes", "sched_on_updates", "warmup_epochs"),
)
STARTS = ("pretrained", "initial_checkpoint", "finetune")  # weights to start from
# Recipes for few images: of a command without a model, and of one that starts from weights.
FROM_NOTHING = "scratch_small"
FINE_TUNING = "finetune_small"
# Settings that say only how a run was started, and so are not recorded.
START_ONLY = {
    *("config", "local_rank", "debug", "dry_run", "resume", "no_resume_opt", "start_epoch", "data_dir_option"),
    "allow_changed_data",
}
# The settings that define an experiment, without the places of files, the machines, and what is only measured.
_DEFINING = ("network", "sizes", "labels", "teachers", "optim", "schedule", "augment", "regular", "norms", "ema")
EXPERIMENT = {row.dest for row in flags_of(TrainSettings).values() if row.path[0] in _DEFINING}
EXPERIMENT |= {"seed", "batch_size", "branch"}
EXPERIMENT -= {"token_label_data", "val_label_data", "val_img_size", "model_ema_force_cpu"}
EXPERIMENT -= {"grad_accum_steps"}  # it depends on the number of ranks
