"""The learning rate is one pure function of the update number."""

from __future__ import annotations

import math

import pytest
import torch
from timm.scheduler import CosineLRScheduler, PolyLRScheduler, StepLRScheduler, TanhLRScheduler

from tests.train.small_run import arguments
from volo.train.schedule import LrSchedule, resolve_lr


def published(epoch: int, peak: float = 1.6e-3) -> float:
    """The published curve written out: linear warm-up inside 300 epochs, half a cosine, 10 epochs at the minimum."""
    if epoch < 20:
        return 1e-6 + epoch * (peak - 1e-6) / 20
    if epoch < 300:
        return 1e-5 + (peak - 1e-5) * 0.5 * (1 + math.cos(math.pi * epoch / 300))
    return 1e-5


def test_published_310_epochs() -> None:
    schedule = LrSchedule(arguments(), 1.6e-3, updates_per_epoch=7)
    assert schedule.total_epochs == 310 and schedule.total_updates == 2170
    for update in range(schedule.total_updates):
        assert schedule(update) == pytest.approx(published(update // 7), rel=1e-12), update
    # Worked out by hand, so that the formula above cannot drift together with the code.
    assert schedule(10 * 7) == pytest.approx(8.005e-4) and schedule(150 * 7) == pytest.approx(8.05e-4)


def timm_rates(line: str, peak: float, steps: int) -> list[float]:
    """The same flags through timm's classes, stepped one after the other as timm's own loop does."""
    args = arguments(line)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    warmup = {"warmup_t": args.warmup_epochs, "warmup_lr_init": args.warmup_lr, "warmup_prefix": args.warmup_prefix}
    cycle = {"cycle_mul": args.lr_cycle_mul, "cycle_limit": args.lr_cycle_limit}
    if args.lr_noise:
        noise = [share * args.epochs for share in args.lr_noise]
        cycle |= {"noise_range_t": noise, "noise_pct": args.lr_noise_pct, "noise_std": args.lr_noise_std}
        cycle |= {"noise_seed": args.seed}
    scheduler = {
        "cosine": lambda: CosineLRScheduler(
            optimizer, args.epochs, args.min_lr, cycle_decay=args.decay_rate, k_decay=args.lr_k_decay, **cycle, **warmup
        ),
        "tanh": lambda: TanhLRScheduler(optimizer, args.epochs, lr_min=args.min_lr, **cycle, **warmup),
        "poly": lambda: PolyLRScheduler(optimizer, args.epochs, args.decay_rate, args.min_lr, **cycle, **warmup),
        "step": lambda: StepLRScheduler(optimizer, args.decay_epochs, args.decay_rate, **warmup),
        "constant": lambda: StepLRScheduler(optimizer, 1, 1.0, **warmup),
    }[args.sched]()
    rates = []
    for step in range(steps):
        scheduler.step(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(
    ("line", "epochs"),
    [
        ("--epochs 30", 40),
        ("--epochs 30 --warmup-prefix --lr-k-decay 2", 60),
        ("--epochs 12 --warmup-epochs 3 --lr-cycle-limit 3 --lr-cycle-mul 1.5 --decay-rate 0.5", 67),
        ("--sched tanh --epochs 12 --warmup-epochs 3 --lr-cycle-limit 2", 34),
        ("--sched poly --epochs 12 --decay-rate 0.9 --warmup-epochs 0", 22),
        ("--sched step --epochs 12 --decay-epochs 2.5 --decay-rate 0.9 --warmup-epochs 2", 12),
        ("--sched constant --epochs 12 --warmup-epochs 3", 12),
        ("--epochs 30 --lr-noise 0.2 0.9 --lr-noise-pct 0.3 --lr-noise-std 0.5 --seed 1", 40),
    ],
)
def test_curves_are_timms(line: str, epochs: int) -> None:
    schedule = LrSchedule(arguments(line), 3e-3, updates_per_epoch=2)
    assert schedule.total_epochs == epochs
    expected = timm_rates(line, 3e-3, epochs)
    assert [schedule(2 * epoch + epoch % 2) for epoch in range(epochs)] == pytest.approx(expected, rel=1e-12)


def test_step_by_update() -> None:
    schedule = LrSchedule(arguments("--sched-on-updates"), 1.6e-3, updates_per_epoch=7)
    assert schedule.total_epochs == 310
    # The same curve with every length in updates.
    rates = [schedule(update) for update in range(schedule.total_updates)]
    assert rates[70] == pytest.approx(8.005e-4) and rates[71] > rates[70]
    assert rates[1050] == pytest.approx(8.05e-4) and rates[1051] < rates[1050]
    assert set(rates[2100:]) == {1e-5}


@pytest.mark.parametrize(
    ("line", "global_batch", "lr", "formula"),
    [
        ("", 256, 4e-4, "0.0004 = --lr-base 0.0016 x global batch 256 / 1024"),
        ("--lr-base-scale sqrt", 256, 8e-4, "0.0008 = --lr-base 0.0016 x global batch sqrt(256 / 1024)"),
        ("--lr 8e-6", 256, 8e-6, "8e-06 (--lr)"),
        ("--lr-base 1e-3 --lr-base-size 256", 512, 2e-3, "0.002 = --lr-base 0.001 x global batch 512 / 256"),
    ],
)
def test_peak_rate(line: str, global_batch: int, lr: float, formula: str) -> None:
    got, shown = resolve_lr(arguments(line), global_batch)
    assert got == pytest.approx(lr, rel=1e-12) and shown == formula
