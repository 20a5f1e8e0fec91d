"""What is said of a run: which epochs are judged, what counts as chance, what may help with the settings in use."""

import json
import re
from itertools import accumulate
from math import comb
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.train.small_run import arguments, schedule_of
from volo.commands.run_start import outcome
from volo.record.metrics import chance_interval
from volo.train.judge import chance_line, judge_epoch, remedies

Scores = dict[int, dict[str, float]]


def judged(tmp_path: Path, flags: str, scores: Scores, per_class: list[int], train: int = 900) -> tuple[Any, Any]:
    """A run whose epochs have these scores, so many validation images of each class, and 8 updates an epoch."""
    short = " ".join(f"{flag} {n}" for flag, n in (("-b", 8), ("--warmup-epochs", 0)) if flag not in flags.split())
    args = arguments(f"{flags} {short} --cooldown-epochs 0")
    schedule = schedule_of(args, 5e-4 if args.schedule.lr is None else args.schedule.lr, 8)
    classes, state = np.repeat(np.arange(len(per_class)), per_class), Mock(scores=scores, epoch=len(scores))
    state.update = 8 * len(scores)
    loader, validation = Mock(dataset=Mock(classes=np.arange(train) % 10)), Mock(dataset=Mock(classes=classes))
    training = Mock(state=state, schedule=schedule, validation=validation, loader=loader)
    return Mock(settings=args, directory=tmp_path), training


@pytest.mark.parametrize(
    ("share", "count", "best_of"),
    [(0.1, 400, 1), (0.1, 60, 12), (0.8, 100, 1), (1 / 3, 7, 1), (0.5, 1, 1), (0.01, 500, 100), (0.999, 50, 1)],
)
def test_the_interval_of_chance_is_the_binomial_distributions(share, count, best_of):
    terms = (comb(count, right) * share**right * (1 - share) ** (count - right) for right in range(count + 1))
    at_most = [probability**best_of for probability in accumulate(terms)]  # that all series have at most so many right
    expected = [next(n for n, p in enumerate(at_most) if p >= level or n == count) for level in (0.025, 0.975)]
    assert [round(end * count) for end in chance_interval(share, count, best_of)] == expected
    assert chance_interval(1.0, count) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("flags", "scores", "per_class", "best", "verdict"),
    [
        # Of 60 images 6 by chance, 2 to 11 in 95 %.
        ("", [13.3], [6] * 10, "best top1: 13.30 % \\(epoch 1, ", "warning: 13.3 % is no better than .* 10.0 %"),
        ("", [13.3], [6] * 10, "", "by chance 3.3 to 18.3 % of 60 images are right \\(95 % interval\\); 8 of 80"),
        ("", [100 * 11 / 60], [6] * 10, "", "18.3 % is no better"),
        ("", [20.0], [6] * 10, "best top1: 20.00 %", ""),
        # The best of 8 validations is 20 % or more by chance in 11 % of all runs: 1 - P(at most 11 of 60) ** 8.
        ("", [20.0, *[10.0] * 7], [6] * 10, "", "20.0 % is no .* \\(95 % interval, for the best of 8 validations\\)"),
        ("", [85.0], [80, 20], "", "no better than naming the largest class, 80.0 %"),
        ("", [100.0], [5], "best top1", ""),
        ("", [100.0], [2, 2], "", "more validation images, as with 4 no accuracy differs from chance"),
        ("", [50.0, 40.0, 60.0], [6] * 10, "epoch 3", "the best epoch is the last: it was still rising: more --epochs"),
        ("", [50.0, 60.0, 60.0], [6] * 10, "epoch 2", ""),
        ("", [50.0, 100.0], [6] * 10, "", ""),
        ("--stop-epoch 3", [50.0, 40.0, 60.0], [6] * 10, "", "the best epoch is the last: it was still rising$"),
        ("--model-ema", [(9.0, 60.0)], [6] * 10, "best top1_ema: 60.00 %", ""),
        ("--model-ema", [(60.0, 9.0)], [6] * 10, "", "What may help: a smaller --model-ema-decay than 0.99992: "),
        ("--model-ema", [(9.0, 8.0)], [6] * 10, "", "What may help: -c scratch_small"),
        ("--eval-metric loss", [(50.0, 1.2)], [6, 6], "best loss: 1.20 \\(", "no better"),
        ("--eval-metric loss", [(70.0, 1.2), (80.0, 1.1)], [60, 60], "best loss", "the last: it was still falling"),
        ("synthetic", [10.0], [6] * 10, "best top1", ""),
        ("--kd-only --kd-model-name x", [], [6] * 10, "", ""),
    ],
)
def test_a_run_ends_with_its_best_epoch_and_a_verdict(flags, scores, per_class, best, verdict, tmp_path):
    names = ("top1", "loss" if "loss" in flags else "top1_ema")
    rows = [dict(zip(names, row if isinstance(row, tuple) else (row,), strict=False)) for row in scores]
    given = flags.replace("synthetic", "") + " --epochs 10"
    run, training = judged(tmp_path, given, {0: {}} if not rows else dict(enumerate(rows)), per_class)
    if flags == "synthetic":
        run.settings = run.settings.decide("command line", data_backend="synthetic")
    training.state.epoch = training.schedule.last_epoch
    line, told = outcome(run, training)
    assert re.search(best, line) and bool(verdict) == bool(told) and re.search(verdict, told), (line, told)
    assert not line or line.endswith("/model_best.pth.tar)")


@pytest.mark.parametrize(
    ("flags", "interval", "warned"),
    [
        ("--epochs 100 --warmup-epochs 6", 1, [6, *range(10, 100, 10)]),
        ("--epochs 100 --warmup-epochs 25", 1, [25, *range(30, 100, 10)]),
        ("--epochs 30 --warmup-epochs 6", 4, [8, 12, 16, 20, 24, 28]),
        ("--epochs 5 --warmup-epochs 1", 1, [1, 2, 3, 4]),
        ("--epochs 40 --stop-epoch 20 --warmup-epochs 3", 1, [3, *range(4, 20, 2)]),
        ("--epochs 1", 1, []),
        ("--epochs 8 --warmup-epochs 9", 1, []),
    ],
)
def test_run_at_chance_is_reported_each_tenth(flags, interval, warned, tmp_path):
    scores: Scores = {}
    run, training = judged(tmp_path, flags, scores, [6] * 10)
    for epoch in range(training.schedule.last_epoch):
        scores[epoch] = {} if (epoch + 1) % interval else {"top1": 11.0}
        judge_epoch(run, training, epoch)
    told = [call.args[0] for call in run.logger.verdict.call_args_list]
    assert [int(re.match(r"warning: epoch (\d+): 11.0 %", line)[1]) for line in told] == warned  # type: ignore[index]
    assert all(line.count(";") == 1 for line in told)  # one remedy
    # A verdict that holds no longer is taken back; so it is in a run that resumed.
    if warned:
        scores[warned[-1] - 1] = {"top1": 60.0}
        judge_epoch(run, training, warned[-1] - 1)
        assert run.logger.verdict.call_args.args == ("",)


@pytest.mark.parametrize(
    ("flags", "train", "loss", "expected"),
    [
        ("--model volo_d1", 900, None, ["-c scratch_small", "--pretrained weights", "more --epochs than 10"]),
        ("--model volo_d0", 900, 2.29, ["-c scratch_small", "more --epochs than 10"]),  # there are no weights
        ("--model volo_d0 -b 64", 900, None, ["-c scratch", "more --epochs than 10", "a smaller --batch-size than 64"]),
        ("-c scratch_small --model volo_d0", 900, None, ["more --epochs than 10"]),
        ("-c SMALL --model volo_d0", 900, None, ["more --epochs than 10"]),
        ("--model volo_d1 --pretrained", 900, None, ["more --epochs than 10"]),
        ("--model volo_d1 --finetune FILE --freeze", 900, None, ["training without --freeze", "more --epochs than 10"]),
        ("--model volo_d1 --initial-checkpoint FILE", 900, None, ["more --epochs than 10"]),
        ("--model volo_d1 --branch FILE", 900, None, ["more --epochs than 10"]),
        ("--model volo_d1 --pretrained --epochs 300", 20_000, None, ["a look at first_batch.png"]),
        ("--model volo_d0 --epochs 300", 20_000, None, ["a look at first_batch.png"]),
        ("--model volo_d0 --epochs 300 --lr 0.1", 20_000, None, ["a smaller learning rate (--lr) than 0.1"]),
        ("--model volo_d0 --epochs 300 --lr 0.1 --opt sgd", 20_000, None, ["a look"]),
        ("--model volo_d0 --epochs 300 --lr 1e-7", 20_000, None, ["a larger learning rate (--lr) than 1e-07"]),
        ("--model volo_d1 --pretrained --epochs 300 --lr 2e-3", 20_000, None, ["a smaller learning rate"]),
        ("--model volo_d0 --epochs 250 --warmup-epochs 250 --sched constant --warmup-lr 0", 20_000, None, ["a look"]),
        ("--model volo_d0 --epochs 250 --warmup-epochs 900", 20_000, None, ["fewer --warmup-epochs than 900"]),
        ("--model volo_d0 --epochs 300 --token-label --token-label-data FILE", 20_000, None, ["`tlt check`"]),
        ("--model volo_d1", 900, 0.5, ["other validation images"]),  # guesses: 2.3
        ("--model volo_d1 --bce-loss", 900, 0.5, ["-c scratch_small", "--pretrained", "more --epochs than 10"]),
    ],
)
def test_advice_spares_given_flags(flags, train, loss, expected, tmp_path):
    (file := tmp_path / "scratch_small.yaml").write_text("epochs: 10\n")
    named = {"-c SMALL": f"-c {file}", "-c scratch_small": f"-c {file}", "FILE": str(file)}
    for name, path in named.items():
        flags = flags.replace(name, path)
    run, training = judged(tmp_path, flags if "--epochs" in flags else f"--epochs 10 {flags}", {}, [6] * 10, train)
    if loss is not None:
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"event": "epoch", "train_cls_loss": loss}) + "\n")
    found = remedies(run, training)
    assert len(found) == len(expected) and all(map(str.startswith, found, expected)), found
    training.state.scores = {0: {"top1": 10.0}}
    assert chance_line(run, training, 0, most=1).endswith(f"What may help: {found[0]} (docs/wrong.md)")
