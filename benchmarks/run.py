"""Images/s of whole programs, from image files: `volo train` with and without token labels, and timm's train.py.

    python benchmark.py run --timm pytorch-image-models             # made images of 500 x 375 px
    python benchmark.py run --timm pytorch-image-models --model vit_small_patch16_224 --data-dir DATA --workers 15

All train from the same files in the page cache, with the same augmentation and optimizer; on a GPU in bfloat16 and
compiled, which timm does by autocast, ours by `--model-dtype`. A round starts each program once; its last epoch counts,
by the program's own clock.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import tlt
from benchmarks.data import CLASSES, IMAGE_SIZE, IMG_SIZE, make_images, make_labels
from benchmarks.rounds import BenchmarkSettings, Measuring, Rows
from tlt.errors import UserError
from tlt.io.jobs import default_workers
from volo.cluster.distributed import choose_device
from volo.config import value_types as t
from volo.config.fields import Group, flag, group

TIMM = "timm"
OURS = "ours"
LABELLED = "ours, token labels"
_WITH_TOKENS = ("volo_", "lvvit_")
# RandAugment without `mstd`: timm's Posterize then asks for 0 bits now and then, which Pillow 13 refuses.
_RECIPE = "--opt adamw --drop-path 0.1 --reprob 0.25 --warmup-epochs 0 --cooldown-epochs 0 --aa rand-m9-inc1"
_ON_GPU = "--channels-last --torchcompile inductor"
_BFLOAT16 = "--model-dtype bfloat16"
_BFLOAT16_OF_TIMM = "--amp --amp-dtype bfloat16"


class Programs(Group):
    """Programs"""

    timm: t.Dir = flag("", "checkout of timm whose train.py is timed, too")
    model: t.Name = flag("volo_d1", "VOLO, LV-ViT or any of timm's, which get no token labels")
    img_size: t.Positive = IMG_SIZE()
    batch_size: t.Positive = flag(256, "images per batch", also="-b")
    workers: t.Count = flag(default_workers(), "processes that decode")
    epochs: t.Positive = flag(2, "of each program; the last one counts")


class Images(Group):
    """Images"""

    data_dir: t.Dir = flag("", "image folders with splits train and val (else some are made)")
    token_label_data: t.Path = flag("", "label maps of --data-dir")
    images: t.Positive = flag(1024, "how many are made")
    copies: t.Positive = flag(32, "links to each, which are images of their own for the programs")
    image_size: list[t.Positive] = IMAGE_SIZE()


class Flags(BenchmarkSettings):
    """The settings of `benchmark.py run`."""

    programs: Programs = group(Programs)
    images: Images = group(Images)
    measuring: Measuring = group(Measuring, rounds=1)


def run(settings: Flags) -> None:
    """Time the programs in turns, timm's first, and write a row of each."""
    asked = settings.programs
    images = settings.images
    measuring = settings.measuring
    on_gpu = choose_device(measuring.device, 0).type == "cuda"
    facts = {"model": asked.model, "images": asked.batch_size, "px": asked.img_size}
    rows = Rows(settings, ("model", "round", "arm", "images/s", "x timm", "data wait, %", "note"))
    with tempfile.TemporaryDirectory(prefix="benchmark-run-") as folder:
        data, labels = images.data_dir, images.token_label_data
        if not data:
            data, labels = _made(images, asked.model.startswith(_WITH_TOKENS), Path(folder))
        programs = commands(asked, data, labels, on_gpu)
        timms_speed = dict[int, float]()  # by round
        for number, name in product(range(measuring.rounds), programs):
            row = facts | {"round": number + 1, "arm": name}
            output = Path(folder, f"{number}-{name}")
            with rows.measuring(row):
                log = _log_of([*programs[name], "--output", str(output)])
                speed, wait = of_timm(log) if name == TIMM else of_ours(output)
                if name == TIMM:
                    timms_speed[number] = speed
                ratio = {"x timm": speed / timms_speed[number]} if number in timms_speed else {}
                rows.write(row | {"images/s": speed, "data wait, %": 100 * wait} | ratio)


def commands(asked: Programs, data: str, labels: str, on_gpu: bool) -> dict[str, list[str]]:
    """Return each program's command line, but for `--output`."""
    same = f"-b {asked.batch_size} --workers {asked.workers} --epochs {asked.epochs} --img-size {asked.img_size}"
    same += f" {_RECIPE} --num-classes {CLASSES} {_ON_GPU if on_gpu else '--device cpu'}"
    programs = {OURS: f"--model {asked.model}"}
    if labels and asked.model.startswith(_WITH_TOKENS):
        programs[LABELLED] = f"--model {asked.model} --token-label --token-label-data {labels}"
    if asked.timm:
        size = f"_224 --model-kwargs img_size={asked.img_size}" if asked.model.startswith("volo_") else ""
        programs = {TIMM: f"--model {asked.model}{size}"} | programs
    command_lines = {}
    for name, model_flags in programs.items():
        script = Path(asked.timm) if name == TIMM else Path(__file__).resolve().parents[1]
        bfloat16 = _BFLOAT16_OF_TIMM if name == TIMM else _BFLOAT16
        flags = f"{model_flags} {same} {bfloat16 if on_gpu else ''}"
        command_lines[name] = [sys.executable, str(script / "train.py"), data, *flags.split()]
    return command_lines


def _made(asked: Images, labelled: bool, folder: Path) -> tuple[str, str]:
    """Make images, and label maps if they are to be labelled; return the folder of the former, and the archive of the
    latter."""
    for split, count in (("train", asked.images), ("val", min(10, asked.images))):
        make_images(folder / split, count, asked.image_size)
    for path in [*(folder / "train").rglob("*.jpg")]:
        for number in range(1, asked.copies):
            os.link(path, path.with_stem(f"{path.stem}-{number}"))
    if labelled:
        make_labels(folder, tlt.open_images(str(folder), "train").paths)
    return str(folder), str(folder / "labels")


def _log_of(words: Sequence[str]) -> str:
    """Run a program and return what it prints. Raises UserError: it fails."""
    ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        print(ended.stdout[-3000:], file=sys.stderr)
        raise UserError(f"exit code {ended.returncode}: {(ended.stdout.strip().splitlines() or [''])[-1][:160]}")
    return ended.stdout


def of_ours(output: Path) -> tuple[float, float]:
    """Return the images/s of the last epoch of the one run in a folder, and the share of its time that it waited.
    Raises UserError: there are no metrics."""
    lines = [line for file in output.glob("*/metrics.jsonl") for line in file.read_text().splitlines()]
    intervals = [row for row in map(json.loads, lines) if row["event"] == "train"]
    if not intervals:
        raise UserError("it has written no metrics")
    last = [row for row in intervals if row["epoch"] == intervals[-1]["epoch"]]
    images, seconds, waited = (sum(row[name] for row in last) for name in ("images", "seconds", "wait_seconds"))
    return images / seconds, waited / seconds


def of_timm(log: str) -> tuple[float, float]:
    """Return the same from the last line of timm's log, which has the means of its epoch. Raises UserError: there is
    none."""
    matches = re.findall(r"Train: .*Time: .*\(([\d.]+)s, +([\d.]+)/s\) .*Data: [\d.]+ \(([\d.]+)\)", log)
    if not matches:
        raise UserError("it has printed no line of training")
    seconds, images_per_second, waited = map(float, matches[-1])
    return images_per_second, waited / max(seconds, 1e-9)
