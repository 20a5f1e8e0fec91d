"""Judges a run: whether validation is better than chance, and if not, what may help with the settings in use."""

import math
from pathlib import Path

import numpy as np

from volo.checkpoint.start import Kind
from volo.checkpoint.state import ranked_by
from volo.config.settings_train import FROM_NOTHING, STARTS
from volo.record.history import epochs_of
from volo.record.metrics import chance_interval
from volo.train.architecture import known_config
from volo.train.run import Run, Training

WARM = 0.8  # share of the peak learning rate: with the default warm-up, a cosine reaches 0.9
_FEW_IMAGES = 10_000
_FEW_UPDATES = 2000
_LARGE_BATCH = 16
_FITS = 0.6  # share of the loss of guesses below which a model has learnt its training images
# Usual peak rates by a part of the optimizer's name: least, most from nothing, most from trained weights.
_USUAL_RATES = {"adam": (3e-5, 4e-3, 1e-3), "sgd": (3e-3, 1.0, 0.1), "momentum": (3e-3, 1.0, 0.1)}


def judge_epoch(run: Run, training: Training, epoch: int) -> None:
    """Print a warning if validation is at chance, after the warm-up and then after each tenth of the run but the last.
    Without validation at such an epoch, the next validated one is judged."""
    warm = run.settings.schedule.warmup_epochs
    last = training.schedule.last_epoch
    scores = training.state.scores
    metric = ranked_by(run.settings.values())
    if not run.world.is_primary or metric not in scores[epoch] or epoch + 1 == last:
        return
    before = max((number + 1 for number in scores if number < epoch and metric in scores[number]), default=0)
    points = (warm, *(last * tenth / 10 for tenth in range(1, 10)))
    if any(before < point <= epoch + 1 for point in points if point >= warm):
        line = chance_line(run, training, epoch, most=1)
        run.logger.verdict(line and f"warning: epoch {epoch + 1}: {line}")


def chance_line(run: Run, training: Training, epoch: int, best_of: int = 1, most: int = 3) -> str:
    """Return a line if the accuracy of a validated epoch, the best of `best_of` validations, of the weights that rank
    epochs, is one that guesses reach, else "". It names at most `most` remedies."""
    scores = training.state.scores[epoch]
    classes = training.validation.dataset.classes
    state = training.state
    top1 = scores["top1_ema" if ranked_by(run.settings.values()).endswith("_ema") else "top1"]
    count = len(classes)
    named = np.bincount(classes[classes >= 0]).max(initial=0)
    low, high = (100 * end for end in chance_interval(named / count, count, best_of))
    half = 50 / count  # of an image, in percent
    if not 0 < named < count or run.settings.images.loading.data_backend == "synthetic" or top1 > high + half:
        return ""
    several = f", for the best of {best_of} validations" if best_of > 1 else ""
    helps = "; ".join(remedies(run, training, weights_learn=scores["top1"] > high + half)[:most])
    if high + half > 100:
        helps = f"more validation images, as with {count} no accuracy differs from chance"
    return (
        f"{top1:.1f} % is no better than naming the largest class, {100 * named / count:.1f} %: by chance {low:.1f} to "
        f"{high:.1f} % of {count} images are right (95 % interval{several}); {state.update} of "
        f"{training.schedule.total_updates} updates are done. What may help: {helps} (docs/wrong.md)"
    )


def remedies(run: Run, training: Training, weights_learn: bool = False) -> list[str]:
    """Return what may help a run at chance, the likeliest first: only what its settings leave open. `weights_learn`
    says that the weights are better than chance, and only their average is not."""
    settings = run.settings
    schedule = training.schedule
    classes = training.loader.dataset.classes
    if weights_learn:
        return [f"a smaller --model-ema-decay than {settings.ema.model_ema_decay:g}: without the average, it is better"]
    shares = np.unique(classes, return_counts=True)[1] / len(classes)
    guesses = -(shares * np.log(shares)).sum()
    losses = [row.get("train_cls_loss") for row in epochs_of(run.directory)]
    if losses and (losses[-1] or math.inf) < _FITS * guesses and not settings.regular.bce_loss:
        return [
            f"other validation images, or the right folders for them: the training loss, {losses[-1]:.2f}, is far "
            f"below that of guesses, {guesses:.2f}"
        ]
    started = any(settings[dest] for dest in (*STARTS, "branch")) or run.start.kind is Kind.BRANCH
    weights = [known_config(settings.network.model).get(key) for key in ("url", "hf_hub_id", "file")]
    part = next((part for part in _USUAL_RATES if part in settings.optim.opt), "")
    least, *most = _USUAL_RATES.get(part, (0.0, math.inf, math.inf))
    rate = f"learning rate ({'--lr-base' if settings.schedule.lr is None else '--lr'}) than {schedule.peak:.3g}"
    few = schedule.total_updates < _FEW_UPDATES
    recipe = len(classes) <= _FEW_IMAGES and not started and Path(settings.run.config).stem != FROM_NOTHING
    follows = {
        f"a larger {rate}": schedule.peak < least,
        f"a smaller {rate}": schedule.peak > most[started] and not settings.network.freeze,
        f"fewer --warmup-epochs than {settings.schedule.warmup_epochs}": schedule.largest < WARM * schedule.peak,
        f"-c {FROM_NOTHING}, which trains a small network from nothing": recipe,
        "--pretrained weights": not started and any(weights) and not settings.network.model_kwargs,
        "training without --freeze": settings.network.freeze,
        f"more --epochs than {settings.schedule.epochs}": few,
        f"a smaller --batch-size than {settings.images.batch_size}, for more updates": few
        and settings.images.batch_size > _LARGE_BATCH,
        "`tlt check`, which tells how often labels name the class": settings.labels.token_label_data,
    }
    found = [text for text, holds in follows.items() if holds]
    return found or ["a look at first_batch.png, whether images and classes fit"]
