"""Do labels at the right place make a better model? Small models, trained in several ways on made-up scenes.

    python benchmark.py ablation        # 45 minutes on two cores

Scenes are scans of digits on textured ground. A large digit in the central square names the class; two smaller ones of
other classes lie anywhere. The arms differ in their labels alone: weights, order, crops and boxes of a seed are the
same. Every finished run is a line of `runs.jsonl`; a further start trains what is missing. docs/evidence.md has more.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor

import tlt
import volo.models  # noqa: F401  registers them
from benchmarks.rounds import BenchmarkSettings, Measuring, Range, Rows
from tlt.models.token_labeling import DENSE_SHARE
from tlt.upstream.behaviour import label_view
from volo.config import value_types as t
from volo.config.fields import flag, taken
from volo.config.settings_shared import DEBUG

VALIDATION = 1000
BATCH = 20
RATE = 1e-3
FEW = 300
CLASSES = 10
LONG = 128
SHORT = 96  # px, of scenes
SIDE = 64  # px, of what models get
TOKEN = 8  # px, of what a token shows
MAP = 18  # cells of a label map in a row
TOP_K = 3  # classes in each
NEAR = 4.0  # px in which a digit's weight around it falls to 1 / e
FLOOR = 0.02  # weight of what is not in the image
HALF = float(np.log((FLOOR + 0.5) / FLOOR))  # logit of a class whose digit has half the weight it has on itself
MEAN = 0.4  # of each channel
STD = 0.25


class Arm(NamedTuple):
    """A way to train."""

    labels: str  # the truth, or by the annotator, a small network trained on crops
    against: str = ""  # the arm that it is compared with
    compat: tuple[str, ...] = ()
    other: bool = False  # labels are read in the window of the next crop of the batch
    few: bool = False  # trains on FEW scenes without MixToken; the annotator has seen all


_WINDOW = ("label-crop", "label-scale")  # the published window: mirrored, scaled by the map's width
ARMS = {
    "true": Arm("truth"),
    "published": Arm("truth", "true", _WINDOW),
    "annotator": Arm("annotator"),
    "annotator-published": Arm("annotator", "annotator", _WINDOW),
    "class": Arm("", "true"),
    "other": Arm("truth", "true", other=True),
    "few": Arm("annotator", "few-class", few=True),
    "few-class": Arm("", few=True),
}


class Flags(BenchmarkSettings):
    """Runs"""

    directory: t.Dir = flag("output/ablation", "finished runs, and the scenes")
    arms: list[str] = flag([arm for arm in ARMS if not ARMS[arm].few], ", ".join(ARMS), tuple(ARMS), metavar="ARM")
    seeds: t.Positive = flag(5, "seeds of each arm, from 0")
    epochs: t.Positive = flag(10, "epochs of a run")
    images: int = flag(3000, "training scenes", t.Number(int, low=50))
    jobs: t.Positive = flag(2, "runs at a time, one thread each")
    output: t.File = taken(Measuring, "output")
    debug: bool = DEBUG()


def run(settings: Flags) -> None:
    """Train what is missing, then print the table."""
    arms = list(dict.fromkeys(settings.arms))
    runs = Path(settings.directory)
    data = runs / f"scenes-{settings.images}"
    file = runs / "runs.jsonl"
    prepare(data, settings.images, any(ARMS[arm].labels == "annotator" for arm in arms))
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    same: dict[str, Any] = {"epochs": settings.epochs, "images": settings.images}
    asked = [{"arm": arm, "seed": seed, **same} for arm in arms for seed in range(settings.seeds)]
    missing = [asked_run for asked_run in asked if not any(asked_run.items() <= row.items() for row in done)]
    with ProcessPoolExecutor(settings.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        started = {pool.submit(train, data, row["arm"], row["seed"], settings.epochs): row for row in missing}
        for future in as_completed(started):
            done.append(started[future] | future.result())
            with file.open("a") as log:
                log.write(json.dumps(done[-1]) + "\n")
            print(f"{done[-1]['arm']}, seed {done[-1]['seed']}: top-1 {done[-1]['top1'][-1]:.1f} %", flush=True)
    table = Rows(settings, ("arm", "figure", "seeds", "%", "against", "points (95 % interval)", "p"))
    for row in figures([row for asked_run in asked for row in done if asked_run.items() <= row.items()]):
        table.write(row)


def prepare(data: Path, images: int, annotate: bool) -> None:
    """Write the scenes and their labels, as far as they are not there."""
    if not (data / "validation.pt").exists():
        write_scenes(data, images, VALIDATION)
    if annotate and not (data / "annotated").exists():  # digits are as large in its crops as in what it labels
        model = "--model-kwargs output_stride=8 -b 50"
        network = data / "annotator" / "model_best.pth.tar"
        plain = "--hflip 0 --aa none --color-jitter 0 --reprob 0 --scale 0.3 1.0 --lr 4e-3"
        short = f"--experiment annotator --output {data} --epochs 12 --warmup-epochs 1 --cooldown-epochs 0"
        for line in (
            f"train {data} --model test_resnet --img-size {SHORT} --resume auto {model} {plain} {short}",
            f"label {data} {data}/train-annotator --checkpoint {network} --img-size {8 * MAP} --top-k {TOP_K} {model}",
        ):
            subprocess.run([sys.executable, "-m", "volo", *line.split()], check=True)
        (data / "annotated").touch()


class Digit(NamedTuple):
    """A digit in a scene: its class and its box in pixels."""

    number: int
    x: int
    y: int
    side: int


def write_scenes(root: Path, train: int, validation: int) -> None:
    """Write image folders `train` and `val`, label files of the truth, and `validation.pt`: the central squares of the
    latter, their classes, and the digit of each token, -1 where less than half of it is a digit's by the truth."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    held_out = np.arange(len(scans.target)) % 5 == 0
    validation_scenes: list[tuple[Tensor, int, Tensor]] = []
    for split, count, rows in (("train", train, ~held_out), ("val", validation, held_out)):
        for number in range(count):
            generator = np.random.default_rng([split == "val", number])
            digits, pixels = draw_scene(generator, scans.images[rows], scans.target[rows], number)
            height, width = pixels.shape[:2]
            image = Image.fromarray(pixels)
            maps = torch.from_numpy(truth(digits, (width, height)))
            folders = [root / folder / str(digits[0].number) for folder in (split, f"{split}-truth")]
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            image.save(folders[0] / f"{number:05}.png")
            torch.save(maps, folders[1] / f"{number:05}.pt")
            if split == "val":
                left = (width - SHORT) // 2
                top = (height - SHORT) // 2
                box = (left, top, left + SHORT, top + SHORT)
                seen = np.array(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box))
                centres = (torch.arange(SIDE // TOKEN) + 0.5) * TOKEN / SIDE * SHORT
                cells = [((s + centres) / n * MAP).long() for s, n in ((top, height), (left, width))]
                names = torch.where(maps[0, 0] > HALF, maps[1, 0].long(), -1)[cells[0][:, None], cells[1]]
                validation_scenes.append((torch.from_numpy(seen).permute(2, 0, 1), digits[0].number, names.flatten()))
    images, classes, tokens = zip(*validation_scenes, strict=True)
    torch.save([torch.stack(images), torch.tensor(classes), torch.stack(tokens)], root / "validation.pt")


def draw_scene(
    generator: np.random.Generator, scans: np.ndarray, numbers: np.ndarray, number: int
) -> tuple[list[Digit], np.ndarray]:
    """Return the digits of scene `number`, the large one first, and its pixels (height, width, 3)."""
    width, height = (SHORT, LONG) if number % 2 else (LONG, SHORT)
    coarse = generator.integers(20, 140, (height // 12 + 1, width // 12 + 1, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), float)
    pixels = smooth + generator.normal(0, 12, (height, width, 1))
    digits: list[Digit] = []
    others = generator.permutation(CLASSES - 1)[:2]
    own = number // 2 % CLASSES  # as many scenes of each class, as many of them landscapes
    for place, digit_class in enumerate([own, *(own + 1 + others) % CLASSES]):
        scan = scans[generator.choice(np.flatnonzero(numbers == digit_class))]
        for _ in range(50):
            digit = _place(generator, int(digit_class), (width, height), large=place == 0)
            if not any(_overlap(digit, other) for other in digits):
                break
        else:
            continue  # no room is left
        digits.append(digit)
        ink = np.asarray(Image.fromarray(np.uint8(scan * 255 / 16)).resize((digit.side,) * 2, Image.Resampling.BICUBIC))
        opacity = (ink / 255.0)[..., None]
        colour = generator.uniform(150, 255, 3)
        window = pixels[digit.y : digit.y + digit.side, digit.x : digit.x + digit.side]
        window[:] = window * (1 - opacity) + colour * opacity
    return digits, pixels.clip(0, 255).astype(np.uint8)


def _place(generator: np.random.Generator, number: int, size: tuple[int, int], large: bool) -> Digit:
    side = int(generator.integers(*((34, 48) if large else (20, 28))))
    # The large digit lies in the central square, which validation sees.
    free = [(SHORT if large else length, length) for length in size]
    x, y = (int(generator.integers(0, room - side + 1)) + (length - room) // 2 for room, length in free)
    return Digit(number, x, y, side)


def _overlap(one: Digit, two: Digit) -> bool:
    apart = (abs(a + one.side / 2 - b - two.side / 2) for a, b in ((one.x, two.x), (one.y, two.y)))
    return max(apart) < (one.side + two.side) / 2 - 2


def truth(digits: list[Digit], size: tuple[int, int]) -> np.ndarray:
    """Return the label map of a scene of `size` (width, height) as logits and class ids (2, TOP_K, MAP, MAP): in each
    cell the digits' classes by their distance, as an annotator with a receptive field sees them."""
    x, y = ((np.arange(MAP) + 0.5) * length / MAP for length in size)
    weights = np.full((CLASSES, MAP, MAP), FLOOR)
    for digit in digits:
        dx = np.maximum(0, np.abs(x - digit.x - digit.side / 2) - digit.side / 2)[None, :]
        dy = np.maximum(0, np.abs(y - digit.y - digit.side / 2) - digit.side / 2)[:, None]
        weights[digit.number] += np.exp(-np.hypot(dx, dy) / NEAR)
    ids = np.argsort(-weights, 0, kind="stable")[:TOP_K]
    # Classes that are not listed have logit 0, which is the floor's.
    return np.stack([np.log(np.take_along_axis(weights, ids, 0) / FLOOR), ids]).astype(np.float16)


def train(data: Path, arm: str, seed: int, epochs: int) -> dict[str, list[float]]:
    """Train one model and return what `evaluate` finds after each epoch."""
    how = ARMS[arm]
    torch.manual_seed(seed)
    model: Any = timm.create_model("volo_test", num_classes=CLASSES, img_size=SIDE, patch_size=TOKEN // 2)
    criterion = tlt.TokenLabelLoss.of(model, (SIDE, SIDE), dense_weight=0.5 if how.labels else 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.05)
    loader = open_loader(data, how, seed)
    validation = torch.load(data / "validation.pt")
    updates = len(loader)
    by_epoch: dict[str, list[float]] = {"top1": [], "tokens": []}
    for epoch in range(epochs):
        model.train()
        for update, batch in enumerate(loader.epoch(epoch), epoch * updates):
            if how.other:
                batch = replace(batch, affine=batch.affine.roll(1, 0), visible=batch.visible.roll(1, 0))
            optimizer.param_groups[0]["lr"] = rate(update, updates * epochs, updates)
            step = tlt.StepKey(seed, update)
            step.seed_torch()
            box = None if how.few else tlt.draw_box(step, criterion.grid)
            outputs = model(batch.images, dense=True, mix_box=box)
            loss = criterion(outputs, criterion.targets(batch), box)
            optimizer.zero_grad()
            loss.total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        for name, value in evaluate(model, validation, dense=bool(how.labels)).items():
            by_epoch[name].append(value)
    return by_epoch


def open_loader(data: Path, how: Arm, seed: int) -> tlt.Loader:
    """Return the training batches of an arm."""
    images = tlt.open_images(str(data), "train")
    labels = None
    if how.few:
        images = images.select([row for row, path in enumerate(images.paths) if int(Path(path).stem) < FEW])
    if how.labels:
        labels = tlt.open_labels(str(data / f"train-{how.labels}"), images.paths, num_classes=CLASSES)
    plain: dict[str, Any] = {"hflip": 0.0, "auto_augment": None, "color_jitter": None, "reprob": 0.0}
    config = tlt.AugmentConfig((SIDE, SIDE), mean=(MEAN,) * 3, **plain)
    options: dict[str, Any] = {"std": (STD,) * 3, "workers": 0, "label_view": label_view(how.compat)}
    return tlt.Loader(images, labels, config, BATCH, seed, **options)


def rate(update: int, updates: int, warmup: int) -> float:
    """Return the learning rate of an update: a linear warm-up, then a half cosine to zero."""
    if update < warmup:
        return RATE * (update + 1) / warmup
    return RATE * 0.5 * (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup)))


@torch.inference_mode()
def evaluate(model: Any, validation: Sequence[Tensor], dense: bool) -> dict[str, float]:
    """Return top-1 in percent, with half the maximum of a trained dense head as in every evaluation, and the percentage
    of the tokens with a digit that this head names."""
    model.eval()
    correct = []
    named = []
    for images, classes, truth in zip(*(each.split(200) for each in validation), strict=True):
        logits, token_logits = model((images / 255.0 - MEAN) / STD, dense=True)
        if dense:
            logits = logits + DENSE_SHARE * token_logits.amax(1)
        correct.append(logits.argmax(1) == classes)
        named.append((token_logits.argmax(2) == truth)[truth >= 0])
    shares = {"top1": correct, "tokens": named} if dense else {"top1": correct}
    return {name: 100 * float(torch.cat(each).double().mean()) for name, each in shares.items()}


def figures(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each arm's figures, and the differences by seed to the arm `against`: mean, 95 % interval and p-value of a
    paired t-test, not corrected for the number of arms."""
    from scipy import stats

    for name in ("top1", "tokens"):
        last = {(row["arm"], row["seed"]): row[name][-1] for row in rows if row[name]}
        for arm in dict.fromkeys(arm for arm, _ in last):
            of_arm = {seed: value for (other, seed), value in last.items() if other == arm}
            row_of_arm = {"arm": arm, "figure": name, "seeds": len(of_arm), "%": Range.of(list(of_arm.values()))}
            against = ARMS[arm].against
            pairs = [value - last[against, seed] for seed, value in of_arm.items() if (against, seed) in last]
            if len(set(pairs)) > 1:
                test = stats.ttest_1samp(pairs, 0.0)
                interval = Range(float(np.mean(pairs)), *map(float, test.confidence_interval(0.95)))
                row_of_arm |= {"against": against, "points (95 % interval)": interval, "p": float(test.pvalue)}
            yield row_of_arm
