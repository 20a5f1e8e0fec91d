"""What timm's train.py does up to its first update, for `benchmark.py startup`: python timm_first_update.py DATA

Model, data sets of both splits, loaders, optimizer, schedule, one step; in the order of timm 1.0's program, without its
command line and its log.
"""

from __future__ import annotations

import sys

import torch
from timm.data import create_dataset, create_loader
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

BATCH, WORKERS, THREADS = 4, 2, 1


def main(root: str) -> None:
    """Train on one batch and print its loss."""
    torch.set_num_threads(THREADS)
    model = create_model("volo_d1_224")
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3)
    train, val = (
        create_dataset("", root=root, split=split, is_training=split == "train", batch_size=BATCH)
        for split in ("train", "val")
    )
    options = {"num_workers": WORKERS, "device": torch.device("cpu"), "pin_memory": False}
    loader = create_loader(
        train, (3, 224, 224), BATCH, is_training=True, re_prob=0.25, re_mode="pixel",
        auto_augment="rand-m9-mstd0.5-inc1", **options,
    )  # fmt: skip
    create_loader(val, (3, 224, 224), BATCH, **options)
    create_scheduler_v2(optimizer, "cosine", num_epochs=1, updates_per_epoch=len(loader))
    loss_of = LabelSmoothingCrossEntropy(0.1)
    model.train()
    for images, classes in loader:
        loss = loss_of(model(images), classes)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}", flush=True)
        return


if __name__ == "__main__":
    main(sys.argv[1])
