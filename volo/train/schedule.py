"""Learning rates: one number per update, a pure function of the update's number."""

from __future__ import annotations

import math
from argparse import Namespace

import torch
from timm.scheduler import create_scheduler_v2


def resolve_lr(args: Namespace, global_batch: int) -> tuple[float, str]:
    """Return the peak learning rate and the formula that gave it.

    Args:
        args: `lr` (absolute, None where not given), `lr_base`, `lr_base_size`, `lr_base_scale`.
        global_batch: Images per update: per device x devices x accumulation steps.
    """
    if args.lr is not None:
        return args.lr, f"{args.lr:g} (--lr)"
    ratio = global_batch / args.lr_base_size
    if args.lr_base_scale == "sqrt":
        lr, factor = args.lr_base * math.sqrt(ratio), f"sqrt({global_batch} / {args.lr_base_size})"
    else:
        lr, factor = args.lr_base * ratio, f"{global_batch} / {args.lr_base_size}"
    return lr, f"{lr:g} = --lr-base {args.lr_base:g} x global batch {factor}"


class LrSchedule:
    """The learning rate before layer decay: `schedule(update)` is a pure function of the update.

    The curve is timm's. By default it changes from epoch to epoch, as published; with `sched_on_updates` at every
    update. Warm-up counts into the epochs unless `warmup_prefix`; `cooldown_epochs` at the smallest rate follow
    (cosine, tanh, poly).

    Args:
        args: The flags of the group "Schedule", and `seed`, which keys the noise.
        lr: Peak learning rate.
        updates_per_epoch: Optimizer steps per epoch, at least 1.
    """

    def __init__(self, args: Namespace, lr: float, updates_per_epoch: int) -> None:
        self.updates_per_epoch, self.peak = updates_per_epoch, lr
        self._on_updates: bool = args.sched_on_updates
        # timm's schedulers need an optimizer to write the learning rate into.
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
        self._scheduler, self.total_epochs = create_scheduler_v2(
            self._optimizer,
            **_curve(args),
            num_epochs=args.epochs,
            warmup_epochs=args.warmup_epochs,
            warmup_lr=args.warmup_lr,
            warmup_prefix=args.warmup_prefix,
            cooldown_epochs=args.cooldown_epochs,
            min_lr=args.min_lr,
            cycle_mul=args.lr_cycle_mul,
            cycle_limit=args.lr_cycle_limit,
            k_decay=args.lr_k_decay,
            noise=args.lr_noise,
            noise_pct=args.lr_noise_pct,
            noise_std=args.lr_noise_std,
            noise_seed=args.seed,
            step_on_epochs=not self._on_updates,
            updates_per_epoch=updates_per_epoch,
        )

    @property
    def total_updates(self) -> int:
        """Updates of the whole run, cool-down included."""
        return self.total_epochs * self.updates_per_epoch

    @property
    def largest(self) -> float:
        """The largest rate with which an epoch begins or ends: about `peak`, unless the warm-up takes too long."""
        ends = range(0, self.total_updates, self.updates_per_epoch)
        return max(map(self, (update + last for update in ends for last in (0, self.updates_per_epoch - 1))))

    def __call__(self, update: int) -> float:
        """Return the learning rate of update number `update`, counted from 0 over the whole run."""
        if self._on_updates:
            self._scheduler.step_update(update)
        else:
            self._scheduler.step(update // self.updates_per_epoch)
        return float(self._optimizer.param_groups[0]["lr"])


def _curve(args: Namespace) -> dict[str, float | str]:
    """Return the arguments of timm that depend on the kind of schedule."""
    return {
        "sched": args.sched,
        "decay_epochs": args.decay_epochs,
        "decay_rate": args.decay_rate,
        # As published: a new cosine cycle starts at decay_rate times the one before, a tanh cycle where it started.
        "cycle_decay": args.decay_rate if args.sched == "cosine" else 1.0,
    }
