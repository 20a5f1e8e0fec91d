"""Write photographs of solar cells into a folder for each grade, and of products, from which a network starts.

    pip install elpv-dataset                    # CC BY-NC-SA 4.0: not for commercial use
    sudo apt-get install dataset-fashion-mnist
    python examples/solar_cells.py              # {solar,products}/{train,val}/CLASS/NAME.png

A quarter of each grade validates. docs/evidence.md tells what was trained on them.
"""

import csv
import gzip
import shutil
from pathlib import Path

import elpv_dataset
import numpy as np
from PIL import Image

PRODUCTS = Path("/usr/share/datasets/fashion-mnist")

data = Path(elpv_dataset.__path__[0], "data")
with (data / "labels.csv").open() as file:
    rows = [
        (name, round(3 * float(probability)))
        for name, probability, _ in csv.reader(file, delimiter=" ", skipinitialspace=True)
    ]
generator = np.random.default_rng(0)
for grade in range(4):
    names = [name for name, other in rows if other == grade]
    for place, row in enumerate(generator.permutation(len(names))):
        split = "val" if place < round(len(names) / 4) else "train"
        folder = Path("solar", split, f"grade{grade}")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(data / names[row], folder)

for split, source, count in (("train", "train", 20_000), ("val", "t10k", 1_000)):
    pixels, classes = (
        np.frombuffer(gzip.decompress((PRODUCTS / f"{source}-{what}.gz").read_bytes()), np.uint8, offset=start)
        for what, start in (("images-idx3-ubyte", 16), ("labels-idx1-ubyte", 8))
    )
    for number, (image, label) in enumerate(zip(pixels.reshape(-1, 28, 28)[:count], classes, strict=False)):
        folder = Path("products", split, str(label))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:05}.png")
