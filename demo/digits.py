#!/usr/bin/env python3
"""From real images to a trained VOLO with token labels, on a laptop: `make demo`, or `python demo/digits.py`.

Writes scikit-learn's scans of handwritten digits (UCI, 1,797 images) as an image folder, trains a small ConvNet on
them, lets it label every image place by place, trains VOLO-D0 with these token labels and MixToken on two processes,
fine-tunes it at a higher resolution, and validates both. Every command is printed, so that it can be copied. What is
done already is not repeated, what was interrupted goes on; `--fresh` starts again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = "demo_output"
SIZE, FINE_SIZE = 32, 48  # px
GRID = SIZE // 8  # tokens of VOLO-D0 in a row
HELD_OUT_EVERY = 5  # each fifth scan is held out

# Digits keep their meaning under small shifts, shears and rotations, not under flips or large crops.
AUGMENTATION = "--hflip 0 --scale 0.7 1.0 --reprob 0 --aa rand-m5-n2-mstd0.5-inc1-tweights"
COMMON = (
    f"{OUTPUT}/digits --num-classes 10 --crop-pct 1.0 {AUGMENTATION} --ratio 0.85 1.18 --cooldown-epochs 0 "
    f"-j 0 -vb 8 --log-interval 15 --output {OUTPUT} --resume auto"
)
LABELS = f"{OUTPUT}/labels.tlt"
TOKEN_LABELS = f"--token-label --token-label-data {LABELS}"
TRAINING = {  # experiment: (launcher, flags, epochs)
    "annotator": (
        "python train.py",
        f"--model test_resnet --model-kwargs output_stride=8 --img-size {SIZE} -b 64 --lr 4e-3 --warmup-epochs 1",
        12,
    ),
    "volo_d0": (
        "./distributed_train.sh 2",
        f"--model volo_d0 --img-size {SIZE} -b 16 --lr 5e-4 --warmup-epochs 2 --drop-path 0.05 {TOKEN_LABELS}",
        24,
    ),
    "volo_d0_fine": (
        "./distributed_train.sh 2",
        f"--model volo_d0 --img-size {FINE_SIZE} -b 16 --lr 2e-4 --warmup-epochs 0 --drop-path 0.05 {TOKEN_LABELS} "
        f"--finetune {OUTPUT}/volo_d0/model_best.pth.tar",
        6,
    ),
}


def main() -> None:
    """Run the demo from start to end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help=f"remove {OUTPUT}/ and start again")
    if parser.parse_args().fresh:
        shutil.rmtree(ROOT / OUTPUT, ignore_errors=True)
    print(f"python is {sys.executable}: to copy the commands below, activate its environment first")
    began = time.perf_counter()
    write_digits(ROOT / OUTPUT / "digits")
    train("annotator")
    annotate()
    train("volo_d0")
    train("volo_d0_fine")
    results = [validate(name) for name in ("volo_d0", "volo_d0_fine")]
    print_table(results, time.perf_counter() - began)


def write_digits(folder: Path) -> None:
    """Write train/ and validation/ with one folder per digit."""
    if folder.is_dir():
        return
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    staged = folder.with_name("digits.tmp")
    shutil.rmtree(staged, ignore_errors=True)
    for number, (scan, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        # Scans are 8 x 8 pixels of 0 (paper) to 16 (ink); enlarged so that an augmentation has pixels to work on.
        image = Image.fromarray((255 - scan * 255 / 16).astype("uint8")).resize((64, 64), Image.Resampling.BICUBIC)
        split = "train" if number % HELD_OUT_EVERY else "validation"
        file = staged / split / str(digit) / f"{number:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
    staged.rename(folder)
    print(f"wrote {len(digits.images)} scans to {folder.relative_to(ROOT)}")


def train(name: str) -> None:
    """Train an experiment, unless it is finished."""
    launcher, flags, epochs = TRAINING[name]
    run(f"{launcher} {COMMON} --experiment {name} {flags} --epochs {epochs}", done=len(summary(name)) == epochs)


def annotate() -> None:
    """Make the token labels, look whether they belong to the images, and draw some."""
    weights = f"{OUTPUT}/annotator/model_best.pth.tar"
    done = (ROOT / LABELS / "manifest.json").is_file()
    run(f"python generate_label.py {OUTPUT}/digits {LABELS} --checkpoint {weights} --format archive -j 0", done)
    run(f"python -m tlt check {OUTPUT}/digits {LABELS}")
    done = (ROOT / OUTPUT / "labels.png").is_file()
    sizes = f"--size {SIZE} {SIZE} --grid {GRID} {GRID}"
    run(f"python -m tlt show {OUTPUT}/digits {LABELS} -o {OUTPUT}/labels.png {sizes} {AUGMENTATION}", done)


def validate(name: str) -> dict[str, str]:
    """Validate an experiment's best checkpoint; return its line of the table."""
    file = f"{OUTPUT}/{name}/validation.json"
    run(
        f"python validate.py {OUTPUT}/digits --checkpoint {OUTPUT}/{name}/model_best.pth.tar -b 128 -j 0 "
        f"--results-file {file} --results-format json"
    )
    row = json.loads((ROOT / file).read_text())[0]
    speed = float(summary(name)[-1]["images_per_second"])
    return {
        "experiment": name,
        "image": row["img_size"],
        "top-1": f"{row['top1']:.2f} % of {row['images']}",
        "training": f"{speed:.0f} images/s",
        "curves": f"{OUTPUT}/{name}/curve.png",
    }


def run(command: str, done: bool = False) -> None:
    """Print a command and run it from the repository's root, unless it is done; a failure ends the demo."""
    print(f"\n$ {command}" + ("   # done before" if done else ""), flush=True)
    if done:
        return
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    code = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}).returncode
    if code:
        sys.exit(f"the command above failed with exit code {code}")


def summary(name: str) -> list[dict[str, str]]:
    """The rows of an experiment's summary.csv."""
    file = ROOT / OUTPUT / name / "summary.csv"
    return list(csv.DictReader(file.open())) if file.is_file() else []


def print_table(rows: list[dict[str, str]], seconds: float) -> None:
    """Print the results, and where to look."""
    columns = list(rows[0])
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in columns]
    print()
    for cells in (columns, *([row[column] for column in columns] for row in rows)):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    print(f"\n{seconds:.0f} s; images in {OUTPUT}/digits, a picture of the token labels in {OUTPUT}/labels.png")


if __name__ == "__main__":
    main()
