"""What data and checkpoint decide before anything is built: defaults, and the global batch on other processes."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.train.small_run import arguments, schedule_of
from tlt.errors import UserError
from volo.cluster.distributed import World
from volo.commands.run_start import surprises
from volo.config.settings_train import FITTED, FROM_NOTHING
from volo.config.train import TRAIN
from volo.record.records import duration
from volo.train import loop, meter
from volo.train.run import batch_record, parts_to_keep, recipe_from_nothing, resolve_args

SIZES = "--train-img-sizes 96 224 --train-batch-sizes auto"

_RECIPES_AA = "rand-m5-n4-mstd0.5-inc1"


@pytest.mark.parametrize(
    ("flags", "images", "taken"),
    [
        ("", 600, True),
        ("--epochs 7 --no-aug", 600, True),
        ("--resume auto", 600, True),
        ("", 1_281_167, False),
        ("--model volo_d1", 600, False),
        ("--pretrained", 600, False),
        ("--finetune weights.pth", 600, False),
        ("-c finetune_small", 600, False),
        ("--data-backend synthetic", 600, False),
    ],
)
def test_a_command_without_a_model_takes_the_recipe_from_nothing(flags, images, taken):
    given = TRAIN.parse([*["data"] * ("synthetic" not in flags), *flags.split()]).noting("bound to CPU 0")
    args = recipe_from_nothing(given, images, 1)
    assert "bound to CPU 0" in args.notes
    assert (args is not given) == taken == (args.network.model != "volo_d1")
    if taken:
        length = "" if "--epochs" in flags else "--epochs 100 --val-interval 4"
        recipe = TRAIN.parse(["data", "-c", FROM_NOTHING, *length.split(), *flags.split()])
        assert args.values() == recipe.values()
        asked = {name for name in ("epochs", "no_aug", "resume") if f"--{name}".replace("_", "-") in flags}
        assert {name for name, source in args.sources.items() if source == "command line"} == {"data_dir", *asked}
        assert {args.sources[name] for name in ("config", "model", "batch_size", "val_interval")} == {"recipe"}
        assert f"-c {FROM_NOTHING}" in args.notes[-1] and f"{images} images" in args.notes[-1]


@pytest.mark.parametrize(
    ("flags", "images", "world_size", "fitted"),
    [
        ("", 9000, 1, (20, 1, 16, "none")),
        ("", 2000, 8, (30, 2, 16, "none")),
        ("--aa rand-m3", 9000, 1, (20, 1, 16, "rand-m3")),
        ("--no-aug", 9000, 1, (20, 1, 16, "rand-m9-mstd0.5-inc1")),  # its default, which is not used
        ("", 1999, 1, (31, 2, 16, "rand-m5-n2-mstd0.5-inc1")),
        ("", 999, 1, (61, 3, 16, _RECIPES_AA)),
        ("", 90, 1, (600, 24, 16, _RECIPES_AA)),
        ("", 90, 8, (600, 24, 2, _RECIPES_AA)),
        ("", 8, 1, (600, 24, 2, _RECIPES_AA)),
        ("", 1, 1, (600, 24, 1, _RECIPES_AA)),
        ("--epochs 7 -b 8", 90, 1, (7, 1, 8, _RECIPES_AA)),
    ],
)
def test_recipe_from_nothing_fits(flags, images, world_size, fitted):
    args = recipe_from_nothing(TRAIN.parse(["data", *flags.split()]), images, world_size)
    found = args.schedule.epochs, args.checkpoints.val_interval, args.images.batch_size, args.augment.aa
    assert found == fitted
    assert (" --aa " in args.notes[-1]) == (images >= 1000 and not flags)


@pytest.mark.parametrize(
    ("flags", "images", "classes", "fitted"),
    [
        ("--epochs 4", 54, 3, "num_classes 3 batch_size 8 lr_base_scale sqrt warmup 0 cooldown 0 hist 3"),
        ("--epochs 4 --lr 1e-3", 54, 3, "num_classes 3 batch_size 8 warmup 0 cooldown 0 hist 3"),
        ("--epochs 4 -b 2 --cooldown-epochs 2", 54, 3, "num_classes 3 warmup 0 hist 3"),
        ("--epochs 30 --warmup-epochs 5 -b 64", 1_281_167, 1000, "hist 3"),  # the published fine-tuning
        ("", 1_281_167, 1000, ""),
        ("", 512, 1000, ""),
        ("--grad-accum-steps 2", 512, 1000, "batch_size 64 lr_base_scale sqrt"),
        ("--num-classes 7", 4, 7, "batch_size 2 lr_base_scale sqrt"),  # of two for BatchNorm
        ("--num-classes 7", 3, 7, "batch_size 2 lr_base_scale sqrt drop_last True"),  # as is the last one
        ("--num-classes 7", 1, 7, "batch_size 1 lr_base_scale sqrt"),
        ("--num-classes 7 --grad-accum-steps 2", 33, 7, "batch_size 4 lr_base_scale sqrt drop_last True"),
        ("--num-classes 7", 128 * 9 + 1, 7, "drop_last True"),
        ("--num-classes 7 --no-drop-last", 33, 7, "batch_size 8 lr_base_scale sqrt"),
        ("--num-classes 7 -b 8", 33, 7, ""),
        ("--model-ema -b 512", 1_281_167, 1000, ""),
        ("--model-ema -b 1024 --epochs 30 --cooldown-epochs 10", 1_281_167, 1000, "hist 3 warmup 6 decay 0.999867"),
        ("--model-ema --model-ema-decay 0.99992 -b 64 --epochs 30", 512, 1000, "hist 3 warmup 6"),
        ("--model-ema --model-ema-warmup -b 64 --epochs 30", 512, 1000, "hist 3 warmup 6"),
        ("--sched wsd --epochs 30", 1_281_167, 1000, "hist 3 warmup 6 cooldown 0 sched_on_updates True"),
        ("--sched rsqrt --no-sched-on-updates", 1_281_167, 1000, "cooldown 0"),
        # Batches of 40 and of 8 images.
        (f"--model-ema -b 8 --epochs 8 {SIZES}", 5000, 1000, "hist 3 warmup 1 cooldown 0 decay 0.99701"),
        # The smallest images come in batches that are twelve times as large, and an epoch of them has four updates.
        (f"--num-classes 7 {SIZES.replace('96', '64')}", 512, 7, "batch_size 8 lr_base_scale sqrt"),
    ],
)
def test_defaults_fit_the_data_and_what_is_given_stays(flags, images, classes, fitted):
    args = arguments(flags)
    short = {"hist": "checkpoint_hist", "decay": "model_ema_decay"}
    short |= {"warmup": "warmup_epochs", "cooldown": "cooldown_epochs"}
    words = fitted.split()
    expected = {short.get(name, name): value for name, value in zip(words[::2], words[1::2], strict=True)}
    resolved, _, told = resolve_args(args, {}, images, classes, 1)
    assert {k: str(v) for k, v in resolved.values().items() if v != args[k]} == expected
    assert all(f"--{k.replace('_', '-')} {v}".replace(" True", "") in told[0] for k, v in expected.items())


@pytest.mark.parametrize(("flags", "images"), [("-b 8 --epochs 3", 64), ("-b 2 --epochs 1", 5), ("--epochs 50", 900)])
def test_average_forgets_initial_weights_or_a_warning_says_so(flags, images):
    """Of n updates the first ones' share is decay ** n. timm's warm-up forgets them in any case."""
    args, batch, told = resolve_args(arguments(f"{flags} --model-ema"), {}, images, 1000, 2)
    updates, fitted = args.schedule.epochs * -(-images // batch["global"]), args.ema.model_ema_decay
    assert fitted**updates < 0.01 and (updates < 100 or fitted > 0.9)
    assert f"--model-ema-decay {fitted}" in told[0] and len(told) == 1
    for decay, share in (("0.99992", 100 * 0.99992**updates), ("0", 0)):
        told = resolve_args(arguments(f"{flags} --model-ema --model-ema-decay {decay}"), {}, images, 1000, 2)[2]
        warning = f"after the {updates} updates of this run {share:.0f} % of its moving average are still the initial"
        assert [warning in line for line in told if "warning" in line] == [True] * (share > 10)
        assert share <= 10 or f"--model-ema-decay {decay} was given, without it one is fitted to the run" in told[-1]


@pytest.mark.parametrize(
    ("flags", "images", "classes", "told"),
    [
        ("--epochs 300 --warmup-epochs 20", 100, 3, []),
        ("--epochs 10 --warmup-epochs 2", 100, 3, []),
        ("--epochs 5 --warmup-epochs 20", 100, 3, ["never gets beyond 0.000201 of 0.001: --warmup-epochs 20 is"]),
        ("--epochs 20 --warmup-epochs 21", 100, 3, ["beyond 0.000905 of 0.001"]),
        ("--epochs 6 --warmup-epochs 3", 100, 3, ["0.000667 of 0.001: --warmup-epochs 3 is long for --epochs 6"]),
        ("--epochs 6 --warmup-epochs 3 --sched-on-updates", 100, 3, []),
        ("--epochs 5 --warmup-epochs 20 --warmup-prefix", 100, 3, []),
        ("--epochs 10 --warmup-epochs 0", 19, 3, ["190 updates are few: more --epochs"]),
        ("--epochs 10 --warmup-epochs 0", 20, 3, []),
        ("--epochs 10 --warmup-epochs 0", 100, 1, ["all training images are of one class"]),
        ("--epochs 10 --warmup-epochs 0 --kd-only --kd-model-name x", 100, 1, []),
        ("--epochs 1 --warmup-epochs 1", 9, 1, ["one class", "beyond 1e-06 of 0.001", "updates are few"]),
        ("--epochs 2 --warmup-epochs 2 --lr 0", 100, 3, ["beyond 1e-06 of 0: --warmup-epochs 2 is long for"]),
        ("--epochs 10 --sched poly --decay-rate 9", 100, 3, ["the fitted --warmup-epochs 2 is long for --epochs 10"]),
    ],
)
def test_run_that_learns_little_is_warned(flags, images, classes, told):
    args = arguments(f"{flags} --cooldown-epochs 0")
    args = args if args.set_by_user("warmup_epochs") else args.decide("data", warmup_epochs=2)
    peak = 1e-3 if args.schedule.lr is None else args.schedule.lr
    lines = surprises(args, schedule_of(args, peak, images), np.arange(images) % classes)  # one image an update
    assert len(lines) == len(told) and all(text in line for text, line in zip(told, lines, strict=True)), lines


@pytest.mark.parametrize("dist_bn", ["reduce", "broadcast"])
def test_ranks_share_statistics_before_they_validate(dist_bn, monkeypatch):
    done: list[tuple[Any, ...]] = []
    monkeypatch.setattr(loop, "distribute_bn", lambda model, ranks, reduce: done.append((model, ranks, reduce)))
    state = Mock(ema=None)
    run = Mock(world=Mock(size=2), settings=arguments(f"--dist-bn {dist_bn} --kd-only --kd-model-name x"))
    assert loop.validate_epoch(run, Mock(state=state), 0) == {}
    assert done == [(state.model, 2, dist_bn == "reduce")]


def test_interval_across_a_resume_has_the_times_of_both(monkeypatch):
    now = 0.0
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now)
    run = Mock(world=World(0, 0, 1, torch.device("cpu")), guard=Mock(waited=0.0))
    state = Mock(update=3, epoch=0, updates_per_epoch=10, loaded_progress={})
    training = Mock(state=state, precision=Mock(**{"skipped.counts.return_value": [0, 0]}), distillation=None)
    (first := meter.Meter(run, training)).begin()
    now, run.guard.waited = 8.0, 2.0
    state.loaded_progress = first.progress()
    now, run.guard.waited = 100.0, 0.5
    (second := meter.Meter(run, training)).begin()
    now, run.guard.waited = 103.0, 1.5
    assert second.progress()["seconds"] == [8.0 + 3.0, 2.0 + 1.0, 0.0]
    # The checkpoint of a version that did not tell a teacher's loss: the report begins anew.
    training.distillation, state.loaded_progress = Mock(names=["teacher"]), first.progress()
    (third := meter.Meter(run, training)).begin()
    assert third.progress()["seconds"] == [0.0, 0.0, 0.0] and len(third.progress()["epoch"]) == 6


@pytest.mark.parametrize(
    ("log_interval", "updates", "told"),
    [(50, 9, (7, 6, 6.0)), (50, 3, (3, 2, 2.0)), (3, 9, (3, 2, 2.0)), (50, 1, (1, 1, 100.0))],
)
def test_updates_after_the_first_say_how_long_it_takes(log_interval, updates, told, monkeypatch):
    """The first one compiles for 100 s, 4 of which it waits for workers to start; any other takes 1 s."""
    now, state = 0.0, Mock(update=0, epoch=0, updates_per_epoch=updates, loaded_progress={})
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now)
    args = arguments(f"--log-interval {log_interval} --val-interval 2")
    run = Mock(world=World(0, 0, 1, torch.device("cpu")), guard=Mock(waited=0.0), settings=args)
    run.logger.work, state.metadata = range(100 * updates + 1), {"model_config": {"img_size": (8, 8)}}
    loader = Mock(index_stream=Mock(global_batch=10, sizes=None))
    training = Mock(state=state, validation=Mock(dataset=range(60)), loader=loader, distillation=None)
    training.precision.skipped.pop.return_value = {}
    training.schedule.last_epoch = 100
    (counting := meter.Meter(run, training)).begin()
    for update in range(updates):
        now, run.guard.waited = now + (1.0 if update else 100.0), 4.0
        state.update += 1
        counting.update_done(0.1, torch.ones(()))
    # With an average, two passes over 60 images every second epoch, at a third of the time of training.
    at, counted, seconds = told
    each, wait = seconds / counted, 4.0 * (updates > 1)
    left = (100 * updates - at) * each + 100 * (wait + 2 / 2 * (wait + 60 * each / 10 / 3) + 0.5)
    line = f"the run takes about {duration(left)}: {counted} of its updates took {seconds:.1f} s"
    assert [call.args for call in run.logger.line.call_args_list] == [(line,)]


def test_a_resumed_run_keeps_what_its_checkpoint_was_fitted_to():
    args = arguments("--epochs 4")
    fresh, batch, _ = resolve_args(args, {}, 54, 3, 1)
    assert [fresh[name] for name in ("batch_size", "num_classes", "warmup_epochs")] == [8, 3, 0]
    assert {fresh.sources[name] for name in FITTED} == {"data"}
    checkpoint = {"args": fresh.values(), "model_config": {"num_classes": 3}, "batch": batch}
    # More images and classes than before, on two processes: the same batch, classes and schedule.
    again, _, told = resolve_args(args, checkpoint, 5000, 4, 2)
    fitted = "--warmup-epochs 0 --cooldown-epochs 0 --checkpoint-hist 3 --num-classes 3 --batch-size 4 "
    assert told == [f"as the run has begun: {fitted}--lr-base-scale sqrt"]
    assert str([again[name] for name in ("batch_size", "num_classes", "warmup_epochs")]) == "[4, 3, 0]"
    assert {again.sources[name] for name in ("batch_size", "num_classes", "warmup_epochs")} == {"checkpoint"}
    given = resolve_args(arguments("--epochs 4 -b 2 --num-classes 9"), checkpoint, 54, 9, 1)[0]
    assert (given.images.batch_size, given.network.num_classes) == (2, 9)
    assert given.sources["batch_size"] == "command line" and given.sources["warmup_epochs"] == "checkpoint"
    batch["global"] = 16
    kept = resolve_args(args.decide("command line", batch_size=8), checkpoint, 54, 3, 1)[0]
    assert (kept.optim.grad_accum_steps, kept.sources["grad_accum_steps"]) == (2, "checkpoint")


@pytest.mark.parametrize(
    ("trunk", "branch", "more"),
    [
        ("--epochs 300", "--epochs 10", {"epoch": 7}),
        ("--epochs 10", "--epochs 300", {"epoch": 9}),
        ("--epochs 40 --sched wsd", "--epochs 40 --sched cosine", {}),
        ("--epochs 40 --model-ema", "--epochs 40 --model-ema -b 16", {}),
        ("--epochs 40", "--epochs 40 --model-ema", {}),
        ("--epochs 30 --model-ema", "--epochs 10 --model-ema", {"epoch": 7}),
        (f"--epochs 8 --model-ema {SIZES}", "--epochs 40 --model-ema", {}),
    ],
)
def test_what_is_fitted_to_a_length_is_fitted_again(trunk, branch, more):
    fresh, batch, _ = resolve_args(arguments(f"-b 8 {trunk}"), {}, 5000, 1000, 1)
    checkpoint = {"args": fresh.values(), "batch": batch, **more}
    sizes = trunk[trunk.find("--train-img") :] if "sizes" in trunk else ""
    args = arguments(f"-b 8 {branch} {sizes}")
    expected = resolve_args(args, {}, 5000, 1000, 1)[0].values()
    resolved = resolve_args(args, checkpoint, 5000, 1000, 1)[0]
    assert resolved.values() == expected
    # What the trunk was given stays, on the same images and on others.
    given = {"warmup_epochs": 3, "cooldown_epochs": 3, "checkpoint_hist": 7}
    checkpoint["args"] = fresh.values() | given
    again = resolve_args(args, checkpoint, 900, 1000, 1)[0]
    assert {name: again[name] for name in given} == given


@pytest.mark.parametrize("flags", ["--epochs 300 --model-ema", "--epochs 10"])
def test_short_branch_forgets_its_trunks_average(flags):
    trunk, batch, _ = resolve_args(arguments(f"{flags} -b 8"), {}, 400, 1000, 1)
    checkpoint = {"args": trunk.values(), "batch": batch, "epoch": 7}
    branch = resolve_args(arguments("--epochs 10 --model-ema -b 8"), checkpoint, 400, 1000, 1)[0]
    # Without an average, it begins at the branch.
    left = trunk.ema.model_ema_decay ** (8 * 50) if trunk.ema.model_ema else 1
    assert left * branch.ema.model_ema_decay ** (2 * 50) == pytest.approx(0.1, rel=0.1)


def test_subsets_are_judged_by_the_checkpoints_batch():
    args = arguments("--epochs 4 --num-classes 3 --drop-path 0.1 --drop-path-mode subset")
    with pytest.raises(UserError, match="--drop-path-mode subset"):  # of batches of two images
        resolve_args(args, {}, 10, 3, 1)
    assert resolve_args(args, {"args": {"batch_size": 16}}, 10, 3, 1)[0].images.batch_size == 16
    with pytest.raises(UserError, match="--drop-path-mode subset"):
        resolve_args(args, {"args": {"batch_size": 2}}, 500, 3, 1)
    for sizes in ("-b 16 --train-batch-sizes 16 2", "-b 4 --train-batch-sizes auto"):
        with pytest.raises(UserError, match="--drop-path-mode subset"):
            flags = "--num-classes 3 --drop-path 0.1 --drop-path-mode subset --train-img-sizes 64 224"
            resolve_args(arguments(f"{flags} {sizes}"), {}, 500, 3, 1)
    flags += " -b 2 --train-batch-sizes 16 8"  # what -b says is the batch of no update
    assert resolve_args(arguments(flags), {}, 500, 3, 1)[0].images.batch_size == 2


def test_fault_61_checkpoint_values_are_checked_as_flags():
    bad: dict[str, list[Any]] = {
        "batch_size": [0, 10**5000, torch.ones(2), "many"],
        "checkpoint_hist": [-1, True, {}],
        "warmup_epochs": [-3, 2.5, float("nan")],
        "cooldown_epochs": [10**9, [1]],
        "lr_base_scale": ["cubic", 1, b"sqrt"],
    }
    for name, values in bad.items():
        flag, good = f"--{name.replace('_', '-')}", "sqrt" if name == "lr_base_scale" else "7"
        for value in values:
            with pytest.raises(UserError, match=f"^{flag} in the checkpoint: .*; give {flag} a value") as told:
                resolve_args(arguments("--epochs 4"), {"args": {name: value}}, 54, 3, 1)
            assert len(str(told.value)) < 300 and "\n" not in str(told.value)
            given = resolve_args(arguments(f"--epochs 4 {flag} {good}"), {"args": {name: value}}, 54, 3, 1)[0]
            assert str(given[name]) == good
        for nothing in (None, ""):  # timm's --lr-base-scale
            resolve_args(arguments("--epochs 4"), {"args": {name: nothing}}, 54, 3, 1)


@pytest.mark.parametrize(
    ("before", "now", "parts", "told"),
    [
        ((8, 1, 8), (8, 1, 8), (1, 8), None),
        ((8, 1, 8), (8, 1, 4), (2, 8), "8 processes before, 4 now: 2 accumulation steps, not 1, keep the global batch"),
        ((8, 4, 1), (8, 4, 4), (1, 8), "keep the global batch of 32"),
        ((8, 1, 8), (4, 4, 4), (4, 4), None),
        ((8, 1, 8), (8, 1, 3), (1, 8), "was 64, it is 24 now"),
        ((8, 1, 8), (4, 1, 8), (1, 4), "was 64, it is 32 now"),
        ((4, 1, 3), (4, 1, 2), (2, 3), "2 accumulation steps, not 1, of batches of 3 images, not 4, keep the global"),
        ((4, 2, 2), (4, 2, 8), (1, 2), "1 accumulation steps, not 2, of batches of 2 images, not 4, keep the global"),
        ((8, 1, 26), (8, 1, 16), (1, 8), "was 208, it is 128 now"),  # 13 images each: only one by one
    ],
)
def test_fault_13_global_batch_is_kept_or_reported(before, now, parts, told):
    record = {"batch": batch_record(*before, before[0] * before[1])}
    *kept, message = parts_to_keep(record, *now, arguments().sizes)
    assert tuple(kept) == parts
    assert message is None if told is None else told in str(message)
