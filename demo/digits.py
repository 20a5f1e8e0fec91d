#!/usr/bin/env python3
"""From real images to a trained VOLO with token labels, on a laptop: `make demo`, or `python demo/digits.py`.

Writes scikit-learn's scans of handwritten digits (UCI, 1,797 images) as an image folder, trains a small ConvNet on
them, lets it label every image place by place, trains VOLO-D0 with these token labels and MixToken on two processes
(on one where there is one GPU), validates it, and lets it name ten held-out scans. Every command is printed, so that it
can be copied. What is done already is not repeated, what was interrupted goes on; `--fresh` starts again.

`--data-backend NAME` decodes with another backend. `--shards` packs images and label maps into tar shards once the
maps are made, and trains VOLO-D0 from these alone. Both have their own output folders; `--shards` and `dali-cpu` end in
the weights of the plain demo, bit for bit.
"""

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

from volo.commands.sample import write_digits
from volo.config.settings_shared import FILE_BACKENDS as BACKENDS
from volo.record.metrics import wilson_interval

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = "demo_output"
SIZE = 32  # px
GRID = SIZE // 8  # tokens of VOLO-D0 in a row

# Digits keep their meaning under small shifts, shears and rotations, not under flips or large crops.
AUGMENTATION = "--hflip 0 --scale 0.7 1.0 --reprob 0 --aa rand-m5-n2-mstd0.5-inc1-tweights"
COMMON = (
    f"--num-classes 10 --crop-pct 1.0 {AUGMENTATION} --ratio 0.85 1.18 --cooldown-epochs 0 "
    "-vb 8 --log-interval 15 --resume auto"
)
TWO_PROCESSES = "./distributed_train.sh 2"
TRAINING = {  # experiment: (launcher, flags, epochs)
    "annotator": (
        "python train.py",
        f"--model test_resnet --model-kwargs output_stride=8 --img-size {SIZE} -b 64 --lr 4e-3 --warmup-epochs 1",
        12,
    ),
    "volo_d0": (
        TWO_PROCESSES,
        f"--model volo_d0 --img-size {SIZE} -b 16 --lr 5e-4 --warmup-epochs 2 --drop-path 0.05",
        18,
    ),
}


def main() -> None:
    """Run the demo from start to end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="remove its output and start again")
    parser.add_argument("--data-backend", default="", choices=BACKENDS, help="who decodes and resizes (torchvision)")
    parser.add_argument("--shards", action="store_true", help="train VOLO-D0 from tar shards with images and labels")
    parser.add_argument("--output", default=OUTPUT, help="folder of everything that is written")
    args = parser.parse_args()
    demo = Demo(args.data_backend, args.shards, args.output)
    if args.fresh:
        for name in (demo.digits, demo.labels, demo.packed, *(f"{demo.output}/{name}" for name in TRAINING)):
            shutil.rmtree(ROOT / name, ignore_errors=True)
        (ROOT / demo.picture).unlink(missing_ok=True)
    print(f"python is {sys.executable}: to copy the commands below, activate its environment first")
    began = time.perf_counter()
    write_digits(ROOT / demo.digits)
    demo.train("annotator")
    demo.annotate()
    if demo.shards:
        demo.pack()
    demo.train("volo_d0")
    result = demo.validate("volo_d0")
    demo.predict("volo_d0")
    print()
    for name, value in result.items():
        print(f"{name:<15}{value}")
    seconds = time.perf_counter() - began
    print(f"\n{seconds:.0f} s; images in {demo.digits}, a picture of the token labels in {demo.picture}")


class Demo:
    """The commands, with paths from the repository's root.

    Args:
        backend: A value of `--data-backend`, "" for the default of the programs.
    """

    def __init__(self, backend: str, shards: bool, folder: str) -> None:
        variant = "_".join(filter(None, [backend, "shards" * shards]))
        self.shards = shards
        self.output = f"{folder}/{variant}" if variant else folder
        self.digits, self.packed = f"{self.output}/digits", f"{self.output}/packed"
        self.labels, self.picture = f"{self.output}/labels.tlt", f"{self.output}/labels.png"
        # Flags of every program that decodes images.
        self.decoding = "-j 0" + (f" --data-backend {backend}" if backend else "")

    def train(self, name: str) -> None:
        """Train an experiment, unless it is finished."""
        launcher, flags, epochs = TRAINING[name]
        if launcher == TWO_PROCESSES and one_gpu():
            launcher = launcher.replace("2", "1")
            flags = flags.replace("-b 16", "-b 32")
        images = self.digits
        if name != "annotator":
            images, labels = (self.packed, self.packed) if self.shards else (self.digits, self.labels)
            flags += f" --token-label --token-label-data {labels}"
        flags += f" {COMMON} {self.decoding} --epochs {epochs}"
        command = f"{launcher} {images} --output {self.output} --experiment {name} {flags}"
        run(command, done=len(self.summary(name)) == epochs)

    def annotate(self) -> None:
        """Make the token labels, look whether they belong to the images, and draw some."""
        weights = f"{self.output}/annotator/model_best.pth.tar"
        meta = ROOT / self.labels / "meta.json"
        done = meta.is_file() and json.loads(meta.read_text())["complete"]
        flags = f"--checkpoint {weights} {self.decoding}"
        run(f"python generate_label.py {self.digits} {self.labels} {flags}", done)
        run(f"python -m tlt check {self.digits} {self.labels}")
        sizes = f"--size {SIZE} {SIZE} --grid {GRID} {GRID}"
        done = (ROOT / self.picture).is_file()
        run(f"python -m tlt show {self.digits} {self.labels} -o {self.picture} {sizes} {AUGMENTATION}", done)

    def pack(self) -> None:
        """Write images and label maps as tar shards."""
        run(f"python -m tlt pack-images {self.digits} {self.packed} --labels {self.labels}")

    def validate(self, name: str) -> dict[str, str]:
        """Validate an experiment's best checkpoint; return what came out, by name."""
        run_folder = f"{self.output}/{name}"
        file = f"{run_folder}/validation.json"
        images = self.packed if self.shards else self.digits
        flags = f"--checkpoint {run_folder}/model_best.pth.tar -b 128 {self.decoding}"
        done = (ROOT / file).is_file()
        run(f"python validate.py {images} {flags} --results-file {file} --results-format json", done)
        row = json.loads((ROOT / file).read_text())[0]
        speed = float(self.summary(name)[-1]["images_per_second"])
        low, high = wilson_interval(row["top1"] / 100, row["images"])
        return {
            "experiment": name,
            "image": row["img_size"],
            "top-1": f"{row['top1']:.2f} % of {row['images']}",
            "95 % interval": f"{100 * low:.1f} to {100 * high:.1f}",
            "training": f"{speed:.0f} images/s",
            "curves": f"{run_folder}/curve.png",
        }

    def predict(self, name: str) -> None:
        """Name one held-out scan of each digit."""
        folders = sorted((ROOT / self.digits / "validation").iterdir())
        scans = " ".join(
            f"{self.digits}/validation/{it.name}/{min(file.name for file in it.iterdir())}" for it in folders
        )
        run(f"python -m volo predict {scans} --checkpoint {self.output}/{name} {self.decoding}")

    def summary(self, name: str) -> list[dict[str, str]]:
        """The rows of an experiment's summary.csv."""
        file = ROOT / self.output / name / "summary.csv"
        return list(csv.DictReader(file.open())) if file.is_file() else []


def one_gpu() -> bool:
    """Whether this machine has a single GPU: two processes can't share it."""
    import torch

    return torch.cuda.device_count() == 1


def run(command: str, done: bool = False) -> None:
    """Print a command and run it from the repository's root, unless it is done; a failure ends the demo."""
    print(f"\n$ {command}" + ("   # done before" if done else ""), flush=True)
    if done:
        return
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    code = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}).returncode
    if code:
        sys.exit(f"the command above failed with exit code {code}")


if __name__ == "__main__":
    main()
