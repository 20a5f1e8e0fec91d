"""The learning rate is one pure function of the update number."""

import itertools
import math
from argparse import Namespace

import numpy as np
import pytest
import torch
from timm.scheduler import create_scheduler

from tests.train.small_run import arguments, schedule_of
from tlt.errors import UserError
from volo.commands.run_start import surprises
from volo.config.settings_train import ENDING_SCHEDULES, TrainSettings
from volo.train.run import resolve_args
from volo.train.schedule import resolve_lr


def timm_rates(settings: TrainSettings, peak: float, steps: int) -> list[float]:
    """The same flags through timm's factory, stepped one after the other as timm's own loop does."""
    args = Namespace(**settings.values())
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    args.lr_cycle_decay = args.decay_rate if args.sched == "cosine" else 1.0  # as published
    args.decay_milestones = sorted(args.decay_milestones)
    scheduler, _ = create_scheduler(args, optimizer, updates_per_epoch=2)
    rates = []
    for step in range(steps):
        (scheduler.step_update if args.sched_on_updates else scheduler.step)(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_published_rates_as_worked_out_by_hand():
    schedule = schedule_of(arguments(), 1.6e-3, updates_per_epoch=7)
    assert [schedule(7 * epoch) for epoch in (0, 10, 150, 300)] == pytest.approx([1e-6, 8.005e-4, 8.05e-4, 1e-5])


@pytest.mark.parametrize(
    ("line", "epochs"),
    [
        ("", 310),  # as published
        ("--epochs 30 --warmup-prefix --lr-k-decay 2", 60),
        ("--epochs 12 --warmup-epochs 3 --lr-cycle-limit 3 --lr-cycle-mul 1.5 --decay-rate 0.5", 67),
        ("--sched tanh --epochs 12 --warmup-epochs 3 --lr-cycle-limit 2", 34),
        ("--sched poly --epochs 12 --decay-rate 0.9 --warmup-epochs 0", 22),
        ("--sched step --epochs 12 --decay-epochs 2.5 --decay-rate 0.9 --warmup-epochs 2", 12),
        ("--sched constant --epochs 12 --warmup-epochs 3", 12),
        ("--sched multistep --epochs 12 --decay-milestones 9 3 --warmup-epochs 1", 12),
        ("--epochs 30 --sched-on-updates", 40),
        ("--epochs 30 --lr-noise 0.2 0.9 --lr-noise-pct 0.3 --lr-noise-std 0.5 --seed 1", 40),
    ],
)
def test_curves_are_timms(line, epochs):
    schedule = schedule_of(args := arguments(line), 3e-3, updates_per_epoch=2)
    assert schedule.total_epochs == epochs
    on_updates = args.schedule.sched_on_updates
    expected = timm_rates(args, 3e-3, schedule.total_updates if on_updates else epochs)
    updates = range(schedule.total_updates) if on_updates else [2 * epoch + epoch % 2 for epoch in range(epochs)]
    assert [schedule(update) for update in updates] == pytest.approx(expected, rel=1e-12)


def written_out(t: float, warmup: float, decay: float, end: float, timescale: float, fall: str) -> float:
    """A rate with a stable phase: linear warm-up from 1e-6 to 1, 1 / sqrt(1 + t / timescale) from there, then down to
    1e-5 at `end`. Infinite timescale: constant."""
    if t < warmup:
        return 1e-6 + t / warmup * (1 - 1e-6)
    stable, done = (1 + (t - warmup) / timescale) ** -0.5, min(max(0.0, (t - end + decay) / decay), 1.0)
    left = {"1-sqrt": 1 - math.sqrt(done), "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[fall]
    return 1e-5 + (stable - 1e-5) * left


@pytest.mark.parametrize(
    ("line", "epochs", "curve"),
    [
        ("--sched wsd", 22, (2, 2, 12, math.inf, "1-sqrt")),  # a fifth of the ten epochs after the warm-up
        ("--sched wsd --warmup-prefix --decay-epochs 3 --lr-decay-fn cosine", 24, (2, 3, 14, math.inf, "cosine")),
        ("--sched rsqrt --decay-epochs 0.5 --cooldown-epochs 0", 12, (2, 5, 12, 2, "linear")),
        ("--sched rsqrt --lr-stable-timescale 7", 22, (2, 2, 12, 7, "linear")),
    ],
)
@pytest.mark.parametrize("each", [1, 5])
def test_a_stable_phase(line, epochs, curve, each):
    args = arguments(f"--epochs 12 --warmup-epochs 2 {line} {'--sched-on-updates' * (each == 5)}")
    schedule = schedule_of(args, 1.0, updates_per_epoch=5)
    assert (schedule.total_epochs, schedule.decay_begins) == (epochs, 5 * (curve[2] - curve[1]))
    expected = [written_out(update // 5 if each == 1 else update / 5, *curve) for update in range(5 * epochs)]
    assert [schedule(update) for update in range(5 * epochs)] == pytest.approx(expected, rel=1e-9)
    assert [schedule(update) for update in reversed(range(5 * epochs))] == pytest.approx(expected[::-1], rel=1e-9)


def test_a_run_that_stops_has_the_same_schedule():
    whole, part = (schedule_of(arguments(f"--sched wsd {more}"), 1.0, 2) for more in ("", "--stop-epoch 200"))
    assert part.total_updates == 400 and all(part(update) == whole(update) for update in range(whole.total_updates))


CURVES = [f"--sched {sched} {more}" for sched in ENDING_SCHEDULES for more in ("", "--sched-on-updates --min-lr 1e-4")]
CURVES += [f"--sched {sched} --no-sched-on-updates --decay-epochs 1 --lr-decay-fn linear" for sched in ("wsd", "rsqrt")]
CURVES += ["--sched wsd --cooldown-epochs 1", "--sched cosine --lr-cycle-limit 2 --lr-noise 0.95", "--sched constant"]
CURVES += ["--sched step --decay-epochs 4", "--sched step --warmup-epochs 3", "--sched multistep --decay-rate 0.5"]
CURVES += ["--sched multistep --decay-milestones 2 9 --lr-noise 0.5", "--sched poly --warmup-epochs 1 --warmup-prefix"]


@pytest.mark.parametrize("line", CURVES)
def test_a_curve_ends_where_it_says_or_a_line_tells_of_it(line):
    told = set[bool]()
    for epochs, updates in itertools.product((1, 2, 3, 4, 5, 8, 13, 29, 30, 100), (1, 4, 30)):
        args = resolve_args(arguments(f"--epochs {epochs} {line}"), {}, 128 * updates, 1000, 1)[0]
        try:
            schedule = schedule_of(args, 1e-3, updates)
        except UserError as refused:
            assert "--sched" in str(refused) and epochs < 5
            continue
        flags = args.schedule
        last, steps = schedule(schedule.total_updates - 1), {"step": 1, "multistep": len(flags.decay_milestones)}
        says = flags.min_lr if flags.sched in ENDING_SCHEDULES else 1e-3 * flags.decay_rate ** steps.get(flags.sched, 0)
        lines = [line for line in surprises(args, schedule, np.arange(9)) if line.startswith("the learning rate ")]
        near = 1.7 if flags.lr_noise else 1.01
        if last > near * says + 1e-4 * (flags.sched in ENDING_SCHEDULES):
            assert lines, (epochs, updates, last)
        elif last <= near * says:
            assert not lines or "never gets beyond" in lines[0], (epochs, updates, lines)
        told.add(bool(lines))
    assert told


@pytest.mark.parametrize(
    ("line", "global_batch", "lr", "formula"),
    [
        ("", 256, 4e-4, "0.0004 = --lr-base 0.0016 x global batch 256 / 1024"),
        ("--lr-base-scale sqrt", 256, 8e-4, "0.0008 = --lr-base 0.0016 x global batch sqrt(256 / 1024)"),
        ("--lr 8e-6", 256, 8e-6, "8e-06 (--lr)"),
        ("--lr-base 1e-3 --lr-base-size 256", 512, 2e-3, "0.002 = --lr-base 0.001 x global batch 512 / 256"),
    ],
)
def test_peak_rate(line, global_batch, lr, formula):
    got, shown = resolve_lr(arguments(line).schedule, global_batch)
    assert got == pytest.approx(lr, rel=1e-12) and shown == formula
