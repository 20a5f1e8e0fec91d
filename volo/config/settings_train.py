"""The settings of `train.py`: `TrainSettings`, in the order of `--help`, and its groups.

`settings_data` has the groups about images and labels.

Names, types, defaults and meanings are those of the published VOLO `main.py` (103 flags). Two of them differ if they
are not set, `--lr` and `--token-label-size`: see docs/flags.md. Newer flags have timm's names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from volo.config import settings_shared as shared
from volo.config import value_types as t
from volo.config.fields import Group, Need, Settings, flag, flags_of, group, needing, switch
from volo.config.settings_data import LABELLED, Augmentation, Images, ImageSizes, Teachers, TokenLabels

DROP_PATH_MODES = ("mask", "subset")
_NO_DROP_BLOCK = "no VOLO or LV-ViT has DropBlock; use --drop-path (other models: --model-kwargs drop_block_rate=...)"
_SPLITS = "AugMix splits and the Jensen-Shannon loss are not supported: remove the flag"


need: Callable[[str, Callable[[TrainSettings], bool]], Need] = Need  # with the groups, so that mypy checks the names

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


class RunSettings(Group):
    """Run"""

    config: t.File = flag("", "YAML recipe, or its name; flags win over it", also="-c")
    output: t.Dir = flag("", "folder for run directories (output/train)")
    experiment: t.NameBelow = flag("", "name of the run directory (TIME-MODEL-SIZE)", metavar="NAME")
    seed: t.Seed = flag(42, "seed of weights, data order, augmentation and MixToken")
    device: t.Device | None = shared.DEVICE()
    dry_run: bool = switch("check flags, data and model, print what would run, and stop before the first step")
    debug: bool = shared.DEBUG()


class Network(Group):
    """Model"""

    model: t.Source = flag("volo_d1", "volo_d1..d5, lvvit_t/s/m/l or any timm model")
    pretrained: bool = switch("start from the published weights")
    initial_checkpoint: t.Weights = flag("", "start from weights that must fit exactly", excludes=("pretrained",))
    finetune: t.Weights = flag(
        "",
        "start from weights of another image size or class count",
        also="--pretrained-path",
        excludes=("initial_checkpoint", "pretrained"),
    )
    num_classes: t.Positive | None = flag(None, "number of classes (the class folders)")
    in_chans: int | None = flag(None, "3: RGB; 1: grey (the model's own)", t.Number(int, 1, 3))
    freeze: bool = switch("train the heads alone (linear probe), with BatchNorm's running statistics")
    gp: str | None = shared.POOL()
    head_init_scale: float | None = flag(None, "multiply the heads' initial weights")
    head_init_bias: float | None = flag(None, "initial value of the heads' biases")
    model_kwargs: dict[str, Any] = shared.MODEL_KWARGS()


class Optimizer(Group):
    """Optimizer"""

    opt: t.Name = flag("adamw", "any of timm's; fused... from apex where it is installed")
    opt_eps: t.Amount | None = flag(None, "epsilon (the optimizer's own)")
    opt_betas: list[float] | None = flag(None, "betas (the optimizer's own)")
    momentum: t.Share = flag(0.9, "momentum, where the optimizer has one")
    weight_decay: t.Amount = flag(0.05, "weight decay")
    layer_decay: t.Share | None = flag(None, "learning rate factor from layer to layer")
    clip_grad: t.AboveZero | None = flag(None, "gradient clipping threshold (none)")
    clip_mode: Literal["norm", "value", "agc"] = flag(
        "norm", "what is clipped; agc: not the heads", needs="--clip-grad"
    )
    opt_kwargs: dict[str, Any] = flag({}, "more arguments for it")
    grad_accum_steps: t.Positive = flag(1, "batches per update")


class Schedule(Group):
    """Schedule"""

    lr: t.Amount | None = flag(
        None,
        "learning rate, absolute (else from --lr-base)",
        metavar="LR",
        excludes=("lr_base", "lr_base_size", "lr_base_scale"),
    )
    lr_base: t.Amount = flag(1.6e-3, "learning rate at --lr-base-size images", metavar="LR")
    lr_base_size: t.Positive = flag(1024, "global batch that --lr-base is meant for")
    lr_base_scale: Literal["linear", "sqrt"] = flag("linear", "how it grows with the global batch")
    sched: str = flag("cosine", "course of the learning rate", SCHEDULES)
    sched_on_updates: bool = switch("change the rate at every update, not every epoch (wsd, rsqrt: on)")
    epochs: t.Positive = flag(300, "epochs without the cool-down")
    warmup_epochs: t.Epochs = flag(20, "epochs of linear warm-up; at most a fifth of --epochs")
    warmup_lr: t.Amount = flag(1e-6, "learning rate at the start of the warm-up", metavar="LR", needs=WARMED_UP)
    warmup_prefix: bool = switch("put the warm-up before --epochs, not into them", needs=WARMED_UP)
    cooldown_epochs: t.Epochs = flag(10, "more epochs at --min-lr; 0 below 30 --epochs", needs=COOLED_DOWN)
    min_lr: t.Amount = flag(1e-5, "learning rate at the end", metavar="LR", needs=ENDING)
    start_epoch: t.Count | None = flag(
        None, "first epoch, from 0 (the checkpoint's); --resume auto goes on from beyond it"
    )
    decay_epochs: t.AboveZero = flag(30.0, "of a step; of the decay, or its share (0.2)", needs=STEPPED)
    decay_milestones: list[t.Positive] = flag([90, 180, 270], "epochs of the steps", needs="--sched multistep")
    lr_decay_fn: str | None = flag(None, "course of the decay (wsd: 1-sqrt, rsqrt: linear)", DECAYS, needs=STABLE)
    lr_stable_timescale: t.AboveZero | None = flag(None, "of 1 / sqrt(1 + epochs / X) (the warm-up's)", needs=RSQRT)
    decay_rate: t.Amount = flag(0.1, "per step or cycle (cosine); exponent (poly)", also="--dr", needs=DECAYING)
    patience_epochs: t.Count = flag(10, "refused", refused="--sched plateau is not supported: remove the flag")
    lr_cycle_mul: float = flag(
        1.0, "length of a cycle over the one before", t.Number(float, low=1), needs=SEVERAL_CYCLES
    )
    lr_k_decay: t.AboveZero = flag(1.0, "exponent of the time in the curve (arXiv:2004.05909)", needs=K_DECAYING)
    lr_cycle_limit: t.Positive = flag(1, "number of cycles", needs=CYCLIC)
    lr_noise: list[t.Share] | None = flag(None, "noise from (to) this part of the epochs")
    lr_noise_pct: t.Amount = flag(0.67, "largest relative noise", needs="--lr-noise")
    lr_noise_std: t.Amount = flag(1.0, "relative standard deviation of the noise", needs="--lr-noise")


class Regularisation(Group):
    """Regularisation"""

    smoothing: t.Share = flag(0.1, "label smoothing", needs=LABELLED)
    bce_loss: bool = switch("binary cross-entropy over the classes", needs=CLASS_LABELS)
    bce_target_thresh: t.Share | None = flag(None, "take targets above it as 1, others as 0", needs="--bce-loss")
    bce_sum: bool = switch("sum it over the classes, not the mean", needs="--bce-loss")
    bce_pos_weight: t.AboveZero | None = flag(None, "weight of targets 1", needs="--bce-loss")
    drop: t.Share = flag(0.0, "dropout rate")
    drop_path: t.Share | None = flag(None, "stochastic depth rate (the model's own)", also="--drop-connect")
    drop_path_mode: str = flag("mask", "mask what is dropped, or skip its work", DROP_PATH_MODES, needs=DROPPING)
    drop_block: t.Share | None = flag(None, "DropBlock rate; refused", refused=_NO_DROP_BLOCK)
    outlooker_drop_path: bool = switch("stochastic depth in the outlooker stage as well", needs=DROPPING)
    mixup: t.Amount = flag(0.0, "Mixup alpha; 0: off")
    cutmix: t.Amount = flag(0.0, "CutMix alpha; 0: off")
    cutmix_minmax: list[t.Share] | None = flag(None, "CutMix box sides, least and most", nargs=2)
    mixup_prob: t.Share = flag(1.0, "probability of Mixup or CutMix", needs=MIXING)
    mixup_switch_prob: t.Share = flag(0.5, "probability of CutMix where both are on", needs=BOTH_MIX)
    mixup_mode: Literal["batch", "pair", "elem"] = flag("batch", "mix per batch, pair or image", needs=MIXING)
    mixup_off_epoch: t.Count = flag(0, "stop mixing after so many epochs; 0: never", needs=MIXING)
    aug_splits: t.Count = flag(0, "AugMix splits; refused", refused=_SPLITS)
    jsd: bool = switch("Jensen-Shannon loss over the splits; refused", refused=_SPLITS)
    resplit: bool = switch("no erasing on the first split; refused", refused=_SPLITS)

    @property
    def cuts(self) -> bool:
        """Whether CutMix is on."""
        return self.cutmix > 0 or self.cutmix_minmax is not None

    @property
    def mixes(self) -> bool:
        """Whether Mixup or CutMix is on."""
        return self.mixup > 0 or self.cuts


class BatchNorms(Group):
    """BatchNorm"""

    bn_momentum: t.Share | None = flag(None, "momentum of every BatchNorm", needs=STATISTICS)
    bn_eps: t.AboveZero | None = flag(None, "epsilon of every BatchNorm")
    bn_tf: bool = switch("TensorFlow's momentum 0.01 and epsilon 1e-3")
    sync_bn: bool = switch("statistics over all ranks", needs=STATISTICS)
    freeze_bn: bool = switch("normalise by the running statistics and leave them as they are")
    dist_bn: Literal["", "broadcast", "reduce"] = flag("", "share running statistics each epoch", needs=STATISTICS)
    split_bn: bool = switch("a BatchNorm per split; refused", refused=_SPLITS)


_averaging = needing("--model-ema")


class Average(Group):
    """EMA"""

    model_ema: bool = switch("keep a moving average of the weights and validate it too")
    model_ema_decay: t.Share = _averaging(0.99992, "share of the old average per update; less in short runs")
    model_ema_warmup: bool = _averaging(False, "let the decay grow from small values at the start")
    model_ema_force_cpu: bool = _averaging(
        False, "keep it on rank 0's CPU, not validated: each update waits for all weights"
    )


class Precision(Group):
    """Precision and speed"""

    mixed: shared.MixedPrecision = group(shared.MixedPrecision)
    channels_last: bool = shared.CHANNELS_LAST()
    grad_checkpointing: bool = switch("recompute activations in the backward pass to save memory")
    compilation: shared.Compilation = group(shared.Compilation)
    outlook_kernel: str = shared.OUTLOOK_KERNEL()
    torchscript: bool = shared.TORCHSCRIPT()


_validated = needing(LABELLED)


class Checkpoints(Group):
    """Checkpoints and logging"""

    resume: t.Path = flag("", "checkpoint to go on from, or auto: the newest of the run")
    branch: t.Path = flag("", "another run's checkpoint to begin at; --resume auto goes on from the run's own")
    no_resume_opt: bool = switch("take weights alone from --resume", needs=RESUMED)
    allow_changed_data: bool = switch("resume on other images or labels than the checkpoint's", needs=RESUMED)
    stop_epoch: t.Positive | None = flag(None, "end after so many epochs; the schedule stays as it is")
    save_epochs: list[t.Positive] | None = flag(None, "keep milestone-N.pth.tar after N epochs, to branch from")
    checkpoint_hist: t.Positive = flag(10, "best checkpoints to keep; fewer below 30 epochs")
    recovery_interval: t.Count = flag(0, "updates between saves in an epoch; 0: none")
    checkpoint_minutes: t.Amount = flag(0.0, "minutes between saves; 0: none")
    checkpoint_sync: bool = switch("wait for every save; without, training goes on from a copy in host memory")
    max_failed_saves: t.Count = flag(10, "stop after more failed saves in a row")
    eval_metric: Literal["top1", "top5", "loss"] = _validated("top1", "what makes a checkpoint the best")
    patience: t.Count = _validated(0, "stop after so many epochs without a better one; 0: never")
    val_interval: t.Positive = _validated(1, "epochs between validations")
    log_interval: t.Positive = flag(50, "updates between lines of the log")
    profile: t.Positive | None = flag(None, "profile N updates of a warm run: a table, and a trace in its directory")
    max_nonfinite: t.Count = flag(
        10, "skip up to N updates in a row that are not finite, then stop", also="--skip-nonfinite"
    )
    tta: int = flag(0, "test-time augmentation; more than 1 is refused", t.Number(int, 0, 1))


class Tracking(Group):
    """Trackers"""

    log_wandb: bool = switch(f"send metrics to {TRACKERS['wandb']}")
    log_tensorboard: bool = switch(f"send metrics to {TRACKERS['tensorboard']}")
    log_mlflow: bool = switch(f"send metrics to {TRACKERS['mlflow']}")
    log_trackio: bool = switch(f"send metrics to {TRACKERS['trackio']}")
    tracker_project: t.Name = flag(
        "",
        "project of W&B and Trackio, experiment of MLflow (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or volo-tlt)",
        also="--wandb-project",
        needs=TRACKED,
    )
    wandb_tags: list[str] | None = flag(None, "tags of the W&B run", metavar="TAG", needs="--log-wandb")


class Distributed(Group):
    """Distributed"""

    shard: t.Positive = flag(1, "divide weights, gradients, optimizer state and EMA among N ranks (FSDP2)")
    tensor_parallel: t.Positive = flag(1, "divide heads and MLPs among N ranks, which see the same images")
    grad_compression: Literal["none", "bf16"] = flag("none", "bf16: sum gradients over the ranks in bfloat16")
    local_rank: int = flag(
        0, "of old launchers; where set, LOCAL_RANK or SLURM_LOCALID wins", names="--local_rank --local-rank"
    )
    audit: t.Count = flag(0, "every N updates compute another rank's batch again, to find one that is wrong; 0: never")
    dist_timeout: t.Positive = flag(120, "end a run that hangs for S (600 at start, validation, saves)", metavar="S")
    bind: str = shared.BIND()


class TrainSettings(Settings):
    """Train VOLO, LV-ViT or any timm model. Token labels are optional."""

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
