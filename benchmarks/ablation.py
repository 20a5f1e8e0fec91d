"""Do labels of places make a better model? Small models, trained in several ways on made-up scenes.

    python benchmark.py ablation        # 45 minutes on two cores: labels at the right place, scans of digits
    # what labels and a teacher add, photographs of products, 300 and 3,000 scenes: an hour on two cores
    python benchmark.py ablation --scenes products --images 300 --epochs 70
    python benchmark.py ablation --scenes products --images 3000 --epochs 7

`benchmarks.scenes` draws the scenes. The arms differ in what is learned alone: weights, order, crops and boxes of a
seed are the same. Every finished run is a line of `runs.jsonl`; a further start trains what is missing.
docs/evidence.md has more.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from torch import Tensor

import tlt
import volo.models  # noqa: F401  registers them
from benchmarks.rounds import BenchmarkSettings, Measuring, Range, Rows
from benchmarks.scenes import CLASSES, MAP, PRODUCTS, SHORT, TOP_K, Digits, Products, Scenes
from tlt.errors import UserError, one_of
from tlt.io.jobs import available_cpus
from tlt.labels.features import FeatureStore
from tlt.models.token_labeling import DENSE_SHARE
from tlt.upstream.behaviour import label_view
from volo.cluster.distributed import choose_device
from volo.config import value_types as t
from volo.config.fields import flag, switch, taken
from volo.config.settings_shared import DEBUG, DEVICE

FEW = 300
MEAN = 0.4  # of each channel
STD = 0.25


class Arm(NamedTuple):
    """A way to train."""

    labels: str  # truth or masks, or annotator: a small network trained on crops of digits, or on single products
    against: str = ""  # the arm that it is compared with
    compat: tuple[str, ...] = ()
    other: bool = False  # labels are read in the window of the next crop of the batch
    few: bool = False  # trains on FEW scenes; the annotator has seen all
    mix: bool = True  # with MixToken
    features: bool = False  # tokens learn stored features of the annotator
    rate: float = 1e-3  # learning rate
    crop: float = 0.08  # share of the image's area that a crop keeps at least


_WINDOW = ("label-crop", "label-scale")  # the published window: mirrored, scaled by the map's width
_PLAIN = Arm("", mix=False, crop=0.6)
ARMS = {
    "digits": {
        "true": Arm("truth"),
        "published": Arm("truth", "true", _WINDOW),
        "annotator": Arm("annotator"),
        "annotator-published": Arm("annotator", "annotator", _WINDOW),
        "class": Arm("", "true"),
        "other": Arm("truth", "true", other=True),
        "few": Arm("annotator", "few-class", few=True, mix=False),
        "few-class": Arm("", few=True, mix=False),
    },
    "products": {
        "class": _PLAIN,
        "class-mix": _PLAIN._replace(against="class", mix=True),
        "masks": _PLAIN._replace(labels="masks", against="class"),
        "annotator": _PLAIN._replace(labels="annotator", against="class"),
        "published": _PLAIN._replace(labels="annotator", against="annotator", compat=_WINDOW),
        "features": _PLAIN._replace(features=True, against="class"),
    },
}


class Body(NamedTuple):
    """What is trained."""

    model: str
    options: dict[str, Any]
    side: int  # px, of what it gets
    token: int  # px, of what a token shows
    batch: int
    scale: int  # scenes are so many times as large


SMALL = Body("volo_test", {"patch_size": 4}, 64, 8, 20, 1)
GPU = Body("volo_d1", {}, 224, 16, 50, 3)


class Flags(BenchmarkSettings):
    """Runs"""

    directory: t.Dir = flag("output/ablation", "finished runs, and the scenes")
    scenes: str = flag("digits", "what the scenes show", tuple(ARMS))
    products: t.Dir = flag(PRODUCTS, "the files of Debian's dataset-fashion-mnist", metavar="FOLDER")
    arms: list[str] = flag(
        [], "digits: {}; products: {} (all, but for few ones)".format(*map(", ".join, ARMS.values())), metavar="ARM"
    )
    seeds: t.Positive = flag(5, "seeds of each arm, from 0")
    epochs: t.Positive = flag(10, "epochs of a run")
    images: int = flag(3000, "training scenes", t.Number(int, low=50))
    validation: int = flag(1000, "validation scenes", t.Number(int, low=20))
    single: int = flag(6000, "pictures of single products that the annotator learns", t.Number(int, low=50))
    gpu_size: bool = switch("VOLO-D1 at 224 px, on scenes three times as large")
    jobs: t.Positive = flag(2, "runs at a time, one thread each")
    device: t.Device | None = DEVICE()
    output: t.File = taken(Measuring, "output")
    debug: bool = DEBUG()


def run(settings: Flags) -> None:
    """Train what is missing, then print the table."""
    known = ARMS[settings.scenes]
    arms = list(dict.fromkeys(settings.arms)) or [arm for arm in known if not known[arm].few]
    for arm in arms:
        one_of(f"--arms with --scenes {settings.scenes}", arm, list(known))
    for flag_name in ("products", "single"):
        if flag_name in settings.sources and settings.scenes == "digits":
            raise UserError(f"--{flag_name} has no effect without --scenes products")
    body = GPU if settings.gpu_size else SMALL
    kinds = {"digits": Digits(body.scale, masks=False), "products": Products(body.scale, folder=settings.products)}
    runs = Path(settings.directory)
    counts = settings.images, settings.validation, settings.single
    usual = (settings.images, 1000, 6000)
    name = "scenes" if settings.scenes == "digits" else settings.scenes
    size = "-".join(map(str, counts[: 1 if counts == usual else 3]))
    data = runs / f"{name}-{size}{'-gpu' * settings.gpu_size}"
    file = runs / "runs.jsonl"
    sources = {known[arm].labels for arm in arms} | {"features" for arm in arms if known[arm].features}
    device = str(choose_device(settings.device, 0))
    prepare(kinds[settings.scenes], body, data, counts, sources, device)
    old: dict[str, Any] = {"scenes": "digits", "validation": 1000, "single": 6000, "gpu_size": False}
    done = [old | json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    same = {name: settings[name] for name in ("epochs", "images", *old)}
    asked = [{"arm": arm, "seed": seed, **same} for seed in range(settings.seeds) for arm in arms]
    missing = [asked_run for asked_run in asked if not any(asked_run.items() <= row.items() for row in done)]
    with ProcessPoolExecutor(settings.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        started = {
            pool.submit(train, data, known[row["arm"]], row["seed"], settings.epochs, body, device): row
            for row in missing
        }
        for future in as_completed(started):
            done.append(started[future] | future.result())
            with file.open("a") as log:
                log.write(json.dumps(done[-1]) + "\n")
            print(f"{done[-1]['arm']}, seed {done[-1]['seed']}: top-1 {done[-1]['top1'][-1]:.1f} %", flush=True)
    columns = ("arm", "figure", "seeds", "%", "against", "points (95 % interval)", "p", "CPU s")
    table = Rows(settings, columns)
    for row in figures([row for asked_run in asked for row in done if asked_run.items() <= row.items()], known):
        table.write(row)


def prepare(
    scenes: Scenes, body: Body, data: Path, counts: tuple[int, int, int], sources: set[str], device: str
) -> None:
    """Write the scenes, their labels and the features of their annotator, as far as they are not there. `counts` are of
    training and validation scenes, and of single things."""
    images, validation, single = counts
    tokens = body.side // body.token
    if not (data / "validation.pt").exists():
        scenes.write(data, images, validation, body.side, tokens)
    # Things are as large in what the annotator learns as in what it labels: crops of scenes, or single products.
    learned, seen = data, f"--img-size {SHORT} --scale 0.3 1.0"
    if isinstance(scenes, Products):
        learned, seen = data.parent / f"single-{single}-{validation}", "--img-size 64 --scale 0.35 1.0"
    model = f"--model-kwargs output_stride=8 -b 50 --device {device}"
    plain = "--hflip 0 --aa none --color-jitter 0 --reprob 0 --lr 4e-3 --epochs 12 --warmup-epochs 1"
    network = f"--checkpoint {{learned}}/annotator/model_best.pth.tar {model} --img-size {8 * MAP}"
    lines = {  # of programs, by what they write
        "network": f"volo train {{learned}} --model test_resnet {model} {seen} {plain} --cooldown-epochs 0 "
        "--output {learned} --experiment annotator --resume auto",
        "masks": "tlt pack-masks {data}/train-drawn {data}/train-masks --images {data} --workers 1 "
        f"--grid {MAP} {MAP}",
        "annotator": f"volo label {{data}} {{data}}/train-annotator {network} --top-k {TOP_K}",
        "features": f"volo features {{data}} {{data}}/features {network}",
    }
    missing = [source for source in lines if source in sources and not (data / f"{source}.done").exists()]
    if {"annotator", "features"} & {*missing} and not (learned / "network.done").exists():
        missing = ["network", *missing]
        if not (learned / "validation.pt").exists():
            replace(scenes, scale=1).write(learned, single, validation, SMALL.side, tokens, single=True)
    for source in missing:
        words = [word.format(data=data, learned=learned) for word in lines[source].split()]
        if code := subprocess.run([sys.executable, "-m", *words]).returncode:
            raise UserError(f"{words[0]} {words[1]} ended with code {code}: mend what it says above, and start again")
        ((learned if source == "network" else data) / f"{source}.done").touch()


def train(data: Path, how: Arm, seed: int, epochs: int, body: Body, device: str) -> dict[str, Any]:
    """Train one model and return what `evaluate` finds after ten of the epochs, the last among them, and seconds."""
    began = time.perf_counter(), time.process_time()
    choose_device(device, 0)  # this process rounds as programs on a GPU do
    torch.manual_seed(seed)
    size = (body.side, body.side)
    model: Any = timm.create_model(body.model, num_classes=CLASSES, img_size=body.side, **body.options)
    criterion = tlt.TokenLabelLoss.of(model, size, dense_weight=0.5 if how.labels else 0.0)
    loader, features = open_loader(data, how, seed, body, device)
    distil = None
    taught: dict[str, bool] = {}
    for store in features:
        teacher = tlt.StoredTeacher(store)
        model = tlt.with_projector(model, teacher, size)
        distil = tlt.DistillLoss.of(model, size, teacher)
        taught = {"taught": True}
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), how.rate, weight_decay=0.05)
    validation = torch.load(data / "validation.pt")
    updates = len(loader)
    by_epoch: dict[str, Any] = {"top1": [], "tokens": []}
    half = torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda"))
    for epoch in range(epochs):
        model.train()
        for update, batch in enumerate(loader.epoch(epoch), epoch * updates):
            if how.other:
                batch = replace(batch, affine=batch.affine.roll(1, 0), visible=batch.visible.roll(1, 0))
            optimizer.param_groups[0]["lr"] = rate(how.rate, update, updates * epochs, updates)
            step = tlt.StepKey(seed, update)
            step.seed_torch()
            box = tlt.draw_box(step, criterion.grid) if how.mix else None
            with half:
                outputs = model(batch.images, dense=True, mix_box=box, **taught)
            outputs, tokens = outputs if distil else (outputs, None)
            loss = criterion(outputs, criterion.targets(batch), box).total
            if distil is not None:
                loss = loss + distil(tokens, distil.lesson(batch))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if (epochs - 1 - epoch) % max(1, epochs // 10) == 0:
            for name, value in evaluate(model, validation, bool(how.labels), device).items():
                by_epoch[name].append(value)
    return by_epoch | {"wall_s": time.perf_counter() - began[0], "cpu_s": time.process_time() - began[1]}


def open_loader(data: Path, how: Arm, seed: int, body: Body, device: str) -> tuple[tlt.Loader, list[FeatureStore]]:
    """Return the training batches of an arm, and the stored features that they have."""
    images = tlt.open_images(str(data), "train")
    labels = None
    if how.few:
        images = images.select([row for row, path in enumerate(images.paths) if int(Path(path).stem) < FEW])
    if how.labels:
        labels = tlt.open_labels(str(data / f"train-{how.labels}"), images.paths, num_classes=CLASSES)
    plain: dict[str, Any] = {"hflip": 0.0, "auto_augment": None, "color_jitter": None, "reprob": 0.0}
    config = tlt.AugmentConfig((body.side, body.side), (how.crop, 1.0), mean=(MEAN,) * 3, **plain)
    options: dict[str, Any] = {"std": (STD,) * 3, "workers": 0, "label_view": label_view(how.compat)}
    if device != "cpu":
        options |= {"device": device, "workers": max(1, available_cpus() - 1), "persistent_workers": True}
    features = [tlt.open_features(data / "features", images.paths)] if how.features else []
    return tlt.Loader(images, labels, config, body.batch, seed, features=features, **options), features


def rate(highest: float, update: int, updates: int, warmup: int) -> float:
    """Return the learning rate of an update: a linear warm-up, then a half cosine to zero."""
    if update < warmup:
        return highest * (update + 1) / warmup
    return highest * 0.5 * (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup)))


@torch.inference_mode()
def evaluate(model: Any, validation: Sequence[Tensor], dense: bool, device: str) -> dict[str, float]:
    """Return top-1 in percent, with half the maximum of a trained dense head as in every evaluation, and the percentage
    of the tokens with a thing that this head names."""
    model.eval()
    correct = []
    named = []
    for parts in zip(*(each.split(200) for each in validation), strict=True):
        images, classes, truth = (part.to(device) for part in parts)
        logits, token_logits = model((images / 255.0 - MEAN) / STD, dense=True)
        if dense:
            logits = logits + DENSE_SHARE * token_logits.amax(1)
        correct.append(logits.argmax(1) == classes)
        named.append((token_logits.argmax(2) == truth)[truth >= 0])
    shares = {"top1": correct, "tokens": named} if dense else {"top1": correct}
    return {name: 100 * float(torch.cat(each).double().mean()) for name, each in shares.items()}


def figures(rows: Sequence[Mapping[str, Any]], arms: Mapping[str, Arm]) -> Iterator[dict[str, Any]]:
    """Yield each arm's figures, and the differences by seed to the arm `against`: mean, 95 % interval and p-value of a
    paired t-test, not corrected for the number of arms."""
    from scipy import stats

    for name in ("top1", "tokens"):
        last = {(row["arm"], row["seed"]): row[name][-1] for row in rows if row[name]}
        for arm in dict.fromkeys(arm for arm, _ in last):
            of_arm = {seed: value for (other, seed), value in last.items() if other == arm}
            row_of_arm = {"arm": arm, "figure": name, "seeds": len(of_arm), "%": Range.of(list(of_arm.values()))}
            against = arms[arm].against
            pairs = [value - last[against, seed] for seed, value in of_arm.items() if (against, seed) in last]
            if len(set(pairs)) > 1:
                test = stats.ttest_1samp(pairs, 0.0)
                interval = Range(float(np.mean(pairs)), *map(float, test.confidence_interval(0.95)))
                row_of_arm |= {"against": against, "points (95 % interval)": interval, "p": float(test.pvalue)}
            seconds = [row["cpu_s"] for row in rows if row["arm"] == arm and "cpu_s" in row]
            yield row_of_arm | ({"CPU s": Range.of(seconds)} if seconds else {})
