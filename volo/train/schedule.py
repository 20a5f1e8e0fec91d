"""The learning rate of an update, a pure function of its number: the peak (`resolve_lr`) and the curve (`LrSchedule`).

`volo.train.loop.train_epoch` multiplies it by the images of the update over those of a mean one, to the power that
`--variable-batch-loss-scale` says (which scales no loss; the name is timm's), and `volo.train.optimizer.set_lr` by each
group's `lr_scale` (`--layer-decay`). With CUDA graphs it is rounded to float32. `fit_to_data` in `volo.train.run`
decides the defaults that follow from the data.
"""

import math

import torch
from timm.scheduler import WSDLRScheduler, create_scheduler_v2, scheduler_kwargs

from tlt.errors import UserError
from volo.config.settings_train import ENDING_SCHEDULES, Checkpoints, Schedule

_NEAR = 0.1  # a curve's last rate lies at most so far above its end, as a share of its last fall


def resolve_lr(flags: Schedule, global_batch: int) -> tuple[float, str]:
    """Return the peak learning rate for updates of `global_batch` images, and the formula that gave it."""
    if flags.lr is not None:
        return flags.lr, f"{flags.lr:g} (--lr)"
    factor = global_batch / flags.lr_base_size
    formula = f"{global_batch} / {flags.lr_base_size}"
    if flags.lr_base_scale == "sqrt":
        factor = math.sqrt(factor)
        formula = f"sqrt({formula})"
    lr = flags.lr_base * factor
    return lr, f"{lr:g} = --lr-base {flags.lr_base:g} x global batch {formula}"


class LrSchedule:
    """The learning rate before layer decay; `schedule(update)` is a pure function of the update's number.

    The curve is timm's. By default it changes once per epoch, as published; with `sched_on_updates` at every update.
    The epochs include the warm-up unless `warmup_prefix`. Then `cooldown_epochs` with the smallest rate follow (cosine,
    tanh, poly, wsd, rsqrt). UserError tells of a decay that is longer than the run, and of epochs that it doesn't have.

    Attributes:
        total_epochs: Epochs of the curve, including the cool-down.
        last_epoch: Epochs after which the run ends; fewer with `--stop-epoch`.
    """

    def __init__(self, flags: Schedule, checkpoints: Checkpoints, seed: int, lr: float, updates_per_epoch: int) -> None:
        self.updates_per_epoch = updates_per_epoch
        self.peak = lr
        self._flags = flags
        self._on_updates = flags.sched_on_updates
        # timm's schedulers write the learning rate into an optimizer, so they get one of their own.
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
        curve = scheduler_kwargs(flags) | {"decay_milestones": sorted(flags.decay_milestones), "noise_seed": seed}
        # As published, a new cosine cycle starts at decay_rate times the previous one; a tanh cycle starts as high.
        curve |= {"cycle_decay": flags.decay_rate if flags.sched == "cosine" else 1.0}
        try:
            created = create_scheduler_v2(self._optimizer, **curve, updates_per_epoch=updates_per_epoch)
            self._scheduler, self.total_epochs = created
        except ValueError as error:
            of = f"--epochs {flags.epochs}, --warmup-epochs {flags.warmup_epochs}"
            least = "the decay takes at least one epoch (or update: --sched-on-updates), at most all after the warm-up"
            reason = "--lr-stable-timescale is missing" if "timescale" in str(error) else least
            given = f"--sched {flags.sched} with {of}, --decay-epochs {flags.decay_epochs:g}"
            raise UserError(f"{given}: {reason}") from error
        self.last_epoch: int = checkpoints.stop_epoch or self.total_epochs
        # A branch may end before epochs that the recipe saves (`surprises` warns of it).
        saved = 0 if checkpoints.resume or checkpoints.branch else max(checkpoints.save_epochs or [0])
        for flag, epoch in {"--stop-epoch": self.last_epoch, "--save-epochs": saved}.items():
            if epoch > self.total_epochs:
                raise UserError(f"{flag} {epoch}: the run has {self.total_epochs} epochs")

    @property
    def total_updates(self) -> int:
        """Number of updates until the run ends, including the cool-down."""
        return self.last_epoch * self.updates_per_epoch

    @property
    def decay_begins(self) -> float:
        """Number of the update at which the rate begins to fall after a stable phase; infinity without such a phase."""
        if not isinstance(self._scheduler, WSDLRScheduler):
            return math.inf
        begin = self._scheduler.get_cycle_length() - self._scheduler.decay_t
        return begin * (1 if self._on_updates else self.updates_per_epoch)

    @property
    def missed_end(self) -> tuple[float, float] | None:
        """The last update's rate and the one that the curve promises for its end, if the last is well above it."""
        flags = self._flags
        last = self(self.total_epochs * self.updates_per_epoch - 1)
        times = {"cosine": flags.lr_cycle_limit, "step": 1, "multistep": len(flags.decay_milestones)}
        falls = times.get(flags.sched, 0)
        end = flags.min_lr if flags.sched in ENDING_SCHEDULES else self.peak * flags.decay_rate**falls
        stable = self.decay_begins < math.inf
        before = self(int(self.decay_begins)) if stable else self.peak * flags.decay_rate ** max(0, falls - 1)
        noise = flags.lr_noise_pct if flags.lr_noise else 0.0
        return (last, end) if last > (1 + noise) * (end + _NEAR * max(0.0, before - end)) else None

    @property
    def largest(self) -> float:
        """The largest rate at the beginning or end of an epoch: about `peak`, unless the warm-up is too long."""
        ends = range(0, self.total_epochs * self.updates_per_epoch, self.updates_per_epoch)
        return max(map(self, (update + last for update in ends for last in (0, self.updates_per_epoch - 1))))

    def __call__(self, update: int) -> float:
        """Return the learning rate of an update; updates count from 0 over the whole run."""
        if self._on_updates:
            self._scheduler.step_update(update)
        else:
            self._scheduler.step(update // self.updates_per_epoch)
        return float(self._optimizer.param_groups[0]["lr"])
