"""Train a timm model with token labels with Hugging Face Accelerate, on any number of processes.

    accelerate launch examples/accelerate_loop.py pictures labels

Arguments as of plain_pytorch.py, which trains to the same weights.
"""

import sys

import timm
import torch
from accelerate import Accelerator
from timm.optim import create_optimizer_v2

import tlt


def train(
    data: str,
    labels: str,
    name: str = "resnet26d",
    size: tuple[int, int] = (224, 224),
    epochs: int = 100,
    batch_size: int = 64,
    workers: int = 8,
    seed: int = 42,
) -> torch.nn.Module:
    accelerator = Accelerator()
    device, world_size, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    images = tlt.open_images(data, "train")
    classes = len(images.class_names)
    torch.manual_seed(seed)
    bare = tlt.with_dense_head(timm.create_model(name, num_classes=classes), size)
    colours = timm.data.resolve_model_data_config(bare)
    augment = tlt.AugmentConfig(size, mean=colours["mean"])
    maps = tlt.open_labels(labels, images.paths, num_classes=classes)
    # The loader deals the images to the processes itself: it does not go through `prepare`.
    feed = {"device": device, "workers": workers, "world_size": world_size, "rank": rank}
    loader = tlt.Loader(images, maps, augment, batch_size, seed, std=colours["std"], **feed)
    criterion = tlt.TokenLabelLoss.of(bare, size)
    optimizer = create_optimizer_v2(bare, "adamw", lr=1e-3, weight_decay=0.05)
    model, optimizer = accelerator.prepare(bare, optimizer)
    for update, batch in enumerate(batch for _ in range(epochs) for batch in loader):
        step = tlt.StepKey(seed, update, rank=rank)
        step.seed_torch()  # dropout and stochastic depth
        box = tlt.draw_box(step, criterion.grid)  # MixToken
        outputs = model(batch.images, dense=True, mix_box=box)
        loss = criterion(outputs, criterion.targets(batch), box)
        optimizer.zero_grad()
        accelerator.backward(loss.total)
        optimizer.step()
        if update % 50 == 0:
            accelerator.print(f"update {update}: loss {loss.total:.4f}")
    accelerator.end_training()  # a process that ends in its process group may be aborted
    return bare


if __name__ == "__main__":
    data, labels = sys.argv[1:]
    train(data, labels)
