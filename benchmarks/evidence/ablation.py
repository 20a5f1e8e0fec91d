"""`benchmark.py ablation`: does what this project does differently make better models?

Fixed on 2026-11-24, before any two arms were compared, and not changed after it:

    data      made-up scenes of which the truth is known (benchmarks/evidence/scenes.py), 3,000 to train, 1,000 held out
    model     `volo_test` (0.3 M parameters) at 64 px with 8 x 8 tokens; 10 epochs in batches of 20, AdamW 1e-3,
              cosine, one epoch of warm-up; RandomResizedCrop at its published scale (0.08 to 1), MixToken, nothing else
    seeds     0 to 4, which give weights, order, crops and boxes, the same in all arms
    figures   top-1 on the held-out scenes as `model(x)` gives it, and the share of the tokens with a digit that the
              dense head names, both after the last epoch
    test      differences by seed to the arm `against`, paired t-test, 95 % interval of the mean, not corrected for the
              number of arms; the first question is `published` against `true`, the second `annotator-published` against
              `annotator`

Arms with labels of the truth, read where the token is (`true`), in the published window (`published`: mirrored, scaled
by the map's width), in that of the next crop of the batch (`other`); `class` has the class alone. `annotator` and
`annotator-published`: the same with labels by a small network trained on crops; `-tail`: exact tail (`--label-tail
exact`); `-truth`: `--ground-truth` with the published weights, and `-truth-reversed`: with both exchanged. `center`:
labels of the truth that cover the central square, and `center-stretched`: taken for the whole image.

Batch, rate and epochs were chosen by runs of `true` alone: eight with seed 1000, and two with seeds 0 and 1 of an
earlier design, in which the truth named the image's class for plain ground, and from which they learnt little (25.5 and
19.6 %). Eleven arms of five runs, some three minutes on one core each: 80 minutes on two. Every finished run is a line
of `runs.jsonl`; a further start trains what is missing.

Added after these 55 runs had been seen, before the first run of it: the four arms of the two first questions with three
times the epochs (`--epochs 30 --arms true published annotator annotator-published`, the same seeds and figures), to
see whether the difference is one of speed alone.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import tlt
import volo.models  # noqa: F401  registers them
from benchmarks.conditions import conditions, heading
from benchmarks.evidence.scenes import CLASSES, HALF, MAP, TOP_K, write_scenes
from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.index_stream import IndexStream
from tlt.data.augment.plan import AugmentConfig
from tlt.data.dataset import LabelView, TrainDataset
from tlt.data.loader import TrainLoader
from tlt.errors import UserError
from tlt.label_map import LabelBatch
from tlt.models.token_labeling import DENSE_SHARE
from tlt.upstream.behaviour import views

VALIDATION, BATCH, RATE, WARMUP = 1000, 20, 1e-3, 1
SIDE, TOKEN = 64, 8  # px, of images and of what a token shows
_MEAN, _STD = (0.4, 0.4, 0.4), (0.25, 0.25, 0.25)
_CROP = 96  # px of the annotator's training crops, in which digits are as large as in what it labels
_ANNOTATOR = 8 * MAP  # px of what it labels: its stride times the cells of a map


def _next_window(config: AugmentConfig, steps: Any, plan: Any, labels: LabelBatch) -> tuple[LabelBatch, Tensor, Tensor]:
    affine, visible = (torch.from_numpy(part).float() for part in (plan.normalised_affine(), plan.visible()))
    return labels, affine.roll(1, 0), visible.roll(1, 0)


@dataclass(frozen=True)
class Arm:
    """A way to train: the label archive, how its maps are read, what the loss makes of them.

    Attributes:
        labels: Of the archives `train-*`; "" for none.
        against: The arm that this one is compared with.
        view: See `tlt.data.dataset.TrainDataset`.
    """

    labels: str
    against: str = ""
    view: LabelView | None = None
    area: str | None = None
    label_tail: str = "zero"
    loss: Mapping[str, Any] = field(default_factory=dict)


_WINDOW = views({"label-crop", "label-scale"})
_TRUTH = {"ground_truth": True}
ARMS = {
    "true": Arm("truth"),
    "published": Arm("truth", "true", _WINDOW),
    "annotator": Arm("annotator"),
    "annotator-published": Arm("annotator", "annotator", _WINDOW),
    "class": Arm("", "true", loss={"dense_weight": 0.0}),
    "other": Arm("truth", "true", _next_window),
    "center": Arm("center", "true", area="center"),
    "center-stretched": Arm("center", "center", views({"label-area"}), "center"),
    "annotator-tail": Arm("annotator", "annotator", label_tail="exact"),
    "annotator-truth": Arm("annotator", "annotator", loss=_TRUTH),
    "annotator-truth-reversed": Arm(
        "annotator", "annotator-truth", loss=_TRUTH | {"gt_weight_agree": 0.1, "gt_weight_disagree": 0.5}
    ),
}


@dataclass(frozen=True)
class Scenes:
    """Validation images (N, 3, H, W), normalised, their classes (N,), and the digit that each token shows (N, tokens);
    -1 for tokens of which less than half is a digit's share by the truth."""

    images: Tensor
    classes: Tensor
    tokens: Tensor


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    runs, settings = Path(args.output), {"epochs": args.epochs, "images": args.images}
    arms = list(dict.fromkeys(args.arms or ARMS))
    if unknown := set(arms) - ARMS.keys():
        raise UserError(f"--arms {' '.join(sorted(unknown))}: there are {', '.join(ARMS)}")
    data = runs / f"scenes-{args.images}"
    prepare(data, args.images, any(ARMS[arm].labels == "annotator" for arm in arms))
    file = runs / "runs.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    asked = [{"arm": arm, "seed": seed, **settings} for arm in arms for seed in range(args.seeds)]
    missing = [each for each in asked if not any(each.items() <= row.items() for row in done)]
    for count, row in enumerate(trained(data, missing, args.jobs), 1):
        done.append(row)
        with file.open("a") as log:
            log.write(json.dumps(row) + "\n")
        print(f"{count}/{len(missing)}: {row['arm']}, seed {row['seed']}: top-1 {row['top1'][-1]:.1f} %", flush=True)
    found = [row for each in asked for row in done if each.items() <= row.items()]
    if args.json:
        print(json.dumps(conditions(args.command_line) | {"runs": found, "effects": list(effects(found))}))
    else:
        print("\n".join([*heading(args.command_line), *table(found)]))
    if args.plot:
        plot(found, Path(args.plot))
    return 0


def prepare(data: Path, images: int, annotate: bool) -> None:
    """Write the scenes and the archives of their labels, as far as they are not there."""
    if images < 2 * CLASSES:
        raise UserError(f"--images {images}: at least {2 * CLASSES} are needed, so that there are some of every class")
    if not (data / "done").exists():
        write_scenes(data, images, VALIDATION)
        (data / "done").touch()
    if annotate and not (data / "train-annotator" / "manifest.json").exists():
        flags = "--model-kwargs output_stride=8 --hflip 0 --aa none --color-jitter 0 --reprob 0 --scale 0.3 1.0"
        common = f"--experiment annotator --output {data} --epochs 12 --warmup-epochs 1 --cooldown-epochs 0 --lr 4e-3"
        _volo(f"train {data} --model test_resnet --img-size {_CROP} -b 50 --resume auto {flags} {common}")
        checkpoint = data / "annotator" / "model_best.pth.tar"
        size = f"--img-size {_ANNOTATOR} --model-kwargs output_stride=8 --top-k {TOP_K} -b 50"
        _volo(f"label {data} {data / 'train-annotator'} --format archive --checkpoint {checkpoint} {size}")


def _volo(line: str) -> None:
    subprocess.run([sys.executable, "-m", "volo", *line.split()], check=True)


def trained(data: Path, rows: Sequence[dict[str, Any]], jobs: int) -> Iterator[dict[str, Any]]:
    """Train what `rows` ask for, `jobs` at a time on one thread each, and yield each with its results."""
    threads = torch.get_num_threads()
    if jobs == 1:
        torch.set_num_threads(1)
        try:
            yield from (row | train(data, row["arm"], row["seed"], row["epochs"]) for row in rows)
        finally:
            torch.set_num_threads(threads)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        started = {pool.submit(train, data, row["arm"], row["seed"], row["epochs"]): row for row in rows}
        for future in as_completed(started):
            yield started[future] | future.result()


def train(data: Path, arm: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train one model; return its seconds, and what `evaluate` finds after each epoch."""
    began, how = time.perf_counter(), ARMS[arm]
    torch.manual_seed(seed)
    model: Any = timm.create_model("volo_test", num_classes=CLASSES, img_size=SIDE, patch_size=TOKEN // 2)
    images = tlt.open_images(str(data), "train")
    labels = (
        tlt.open_labels(str(data / f"train-{how.labels}"), images.paths, how.area, CLASSES, label_tail=how.label_tail)
        if how.labels
        else None
    )
    config = AugmentConfig((SIDE, SIDE), hflip=0.0, auto_augment=None, color_jitter=None, reprob=0.0, mean=_MEAN)
    dataset = TrainDataset(images, config, seed, labels, None, how.view)
    stream, stage = IndexStream(len(images), BATCH, seed), DeviceStage(config, _MEAN, _STD)
    loader = TrainLoader(dataset, stream, stage)
    criterion = tlt.TokenLabelLoss.of(model, (SIDE, SIDE), **how.loss)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.05)
    updates, held_out = len(loader), read_validation(data)
    found: dict[str, Any] = {"top1": [], "loss": [], "tokens": []}
    for epoch in range(epochs):
        model.train()
        for number, (_, _, batch) in enumerate(loader.epoch(epoch)):
            update = epoch * updates + number
            for group in optimizer.param_groups:
                group["lr"] = rate(update, updates * epochs, WARMUP * updates)
            step = tlt.StepKey(seed, update)
            step.seed_torch()
            box = tlt.draw_box(step, criterion.grid)
            outputs = model(batch.images, dense=True, mix_box=box)
            loss = criterion(outputs, criterion.targets(batch), box)
            optimizer.zero_grad()
            loss.total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        for name, value in evaluate(model, held_out, criterion.dense_weight > 0).items():
            found[name].append(value)
    return found | {"seconds": time.perf_counter() - began}


def rate(update: int, updates: int, warmup: int) -> float:
    """Return the learning rate of an update: a linear warm-up, then a half cosine to zero."""
    if update < warmup:
        return RATE * (update + 1) / warmup
    return RATE * 0.5 * (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup)))


@torch.inference_mode()
def evaluate(model: Any, scenes: Scenes, dense: bool) -> dict[str, float]:
    """Return top-1 in percent and cross-entropy, with half the maximum of a trained dense head as in every evaluation,
    and the percentage of tokens with a digit that this head names."""
    model.eval()
    top1 = loss = tokens = 0.0
    for images, classes, truth in zip(*(each.split(200) for each in vars(scenes).values()), strict=True):
        logits, token_logits = model(images, dense=True)
        if dense:
            tokens += int((token_logits.argmax(2) == truth).sum())
            logits = logits + DENSE_SHARE * token_logits.amax(1)
        top1 += int((logits.argmax(1) == classes).sum())
        loss += float(F.cross_entropy(logits, classes, reduction="sum"))
    count, shown = len(scenes.classes), int((scenes.tokens >= 0).sum())
    return {"top1": 100 * top1 / count, "loss": loss / count} | ({"tokens": 100 * tokens / shown} if dense else {})


@functools.cache
def read_validation(data: Path) -> Scenes:
    """Read the central squares of the validation scenes, and what each token shows by the truth."""
    images = tlt.open_images(str(data), "val")
    labels = tlt.open_labels(str(data / "val-truth"), images.paths, num_classes=CLASSES)
    pixels, tokens = [], []
    for index in range(len(images)):
        with Image.open(images.path(index)) as image:
            width, height = image.size
            side = min(width, height)
            x, y = (width - side) // 2, (height - side) // 2
            square = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC, (x, y, x + side, y + side))
        pixels.append(torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255.0)
        label_map = labels.read(index, width, height)
        digit = np.where(label_map.values[0] > HALF, label_map.ids[0], -1)
        centres = (np.arange(SIDE // TOKEN) + 0.5) * TOKEN / SIDE * side
        rows, columns = (((start + centres) / length * MAP).astype(int) for start, length in ((y, height), (x, width)))
        tokens.append(torch.from_numpy(digit[np.ix_(rows, columns)].astype(np.int64).ravel()))
    mean, std = (torch.tensor(each)[:, None, None] for each in (_MEAN, _STD))
    return Scenes((torch.stack(pixels) - mean) / std, torch.from_numpy(images.classes.copy()), torch.stack(tokens))


def effects(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each arm and figure the mean difference to the arm that it is compared with, over the seeds that both
    have, with its 95 % interval and the p-value of a paired t-test; nothing for fewer than two seeds."""
    for arm, how in ARMS.items():
        for name in ("top1", "tokens"):
            last = {(row["arm"], row["seed"]): row[name][-1] for row in rows if row[name]}
            pairs = [
                value - last[how.against, seed]
                for (a, seed), value in last.items()
                if a == arm and (how.against, seed) in last
            ]
            if len(pairs) > 1:
                found = dict(zip(("difference", "interval", "p"), mean_and_interval(pairs), strict=True))
                yield {"arm": arm, "against": how.against, "figure": name, "seeds": len(pairs), **found}


def mean_and_interval(values: Sequence[float]) -> tuple[float, tuple[float, float], float | None]:
    """Return the mean of two values or more, its 95 % interval by Student's t, and the p-value of a mean of zero; None
    for values that are all the same."""
    from scipy import stats

    if len(set(values)) == 1:
        return values[0], (values[0], values[0]), None
    test = stats.ttest_1samp(values, 0.0)
    low, high = map(float, test.confidence_interval(0.95))
    return statistics.mean(values), (low, high), float(test.pvalue)


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the tables: the arms, and their differences."""
    yield from ("| arm | seeds | top-1, % (95 % interval) | loss | tokens, % |", "|---|---|---|---|---|")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = [row for row in rows if row["arm"] == arm]
        shown = (_in_cell([row[name][-1] for row in of_arm if row[name]]) for name in ("top1", "loss", "tokens"))
        yield f"| {arm} | {len(of_arm)} | {' | '.join(shown)} |"
    yield from (
        "",
        "| arm | against | figure | seeds | difference, points | 95 % interval | p |",
        "|---|---|---|---|---|---|---|",
    )
    for each in effects(rows):
        low, high = each["interval"]
        p = "-" if each["p"] is None else f"{each['p']:.2g}"
        pair = f"{each['arm']} | {each['against']} | {each['figure']} | {each['seeds']}"
        yield f"| {pair} | {each['difference']:+.2f} | {low:+.2f} to {high:+.2f} | {p} |"


def _in_cell(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    mean, (low, high), _ = mean_and_interval(values)
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw top-1 over the epochs, each run and the mean of each arm: with labels of the truth, and of the annotator."""
    from matplotlib.figure import Figure

    figure = Figure((11, 4))
    for panel, title in zip(figure.subplots(1, 2, sharey=True), ("truth", "annotator"), strict=True):
        arms = [arm for arm in ARMS if (ARMS[arm].labels == "annotator") == (title == "annotator")]
        for number, arm in enumerate(arms):
            curves = [row["top1"] for row in rows if row["arm"] == arm]
            for curve in curves:
                panel.plot(range(1, 1 + len(curve)), curve, color=f"C{number}", alpha=0.3, linewidth=0.7)
            if curves:
                mean = np.mean(curves, 0)
                panel.plot(
                    range(1, 1 + len(mean)), mean, color=f"C{number}", linewidth=2, label=f"{arm}: {mean[-1]:.1f}"
                )
        panel.set(xlabel="epoch", title=f"labels of the {title}", ylim=(0, 100))
        if panel.lines:
            panel.legend(loc="upper left", fontsize=8, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("top-1, %")
    figure.savefig(file, bbox_inches="tight", dpi=90)
