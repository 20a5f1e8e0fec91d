"""Train a timm model with token labels with Ray Train, on any number of workers.

    python examples/ray_loop.py pictures labels

Arguments as of plain_pytorch.py, which trains to the same weights; each of `processes` sees `batch_size` images a step.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import timm
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from timm.optim import create_optimizer_v2

import tlt


def train_worker(config: dict[str, Any]) -> None:
    """What each worker runs; Ray has joined the workers in torch's process group."""
    size, seed, batch_size = config["size"], config["seed"], config["batch_size"]
    context, device = ray.train.get_context(), ray.train.torch.get_device()
    world_size, rank = context.get_world_size(), context.get_world_rank()
    images = tlt.open_images(config["data"], "train")
    classes = len(images.class_names)
    torch.manual_seed(seed)
    bare = tlt.with_dense_head(timm.create_model(config["name"], num_classes=classes), size)
    colours = timm.data.resolve_model_data_config(bare)
    augment = tlt.AugmentConfig(size, mean=colours["mean"])
    maps = tlt.open_labels(config["labels"], images.paths, num_classes=classes)
    # The loader deals the images to the workers itself: it does not go through `prepare_data_loader`.
    feed = {"device": device, "workers": config["workers"], "world_size": world_size, "rank": rank}
    loader = tlt.Loader(images, maps, augment, batch_size, seed, std=colours["std"], **feed)
    criterion = tlt.TokenLabelLoss.of(bare, size)
    model = ray.train.torch.prepare_model(bare)
    optimizer = create_optimizer_v2(bare, "adamw", lr=1e-3, weight_decay=0.05)
    update = 0
    for epoch in range(config["epochs"]):
        for batch in loader:
            step = tlt.StepKey(seed, update, rank=rank)
            step.seed_torch()  # dropout and stochastic depth
            box = tlt.draw_box(step, criterion.grid)  # MixToken
            outputs = model(batch.images, dense=True, mix_box=box)
            loss = criterion(outputs, criterion.targets(batch), box)
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
            update += 1
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                torch.save(bare.state_dict(), Path(folder, "weights.pth"))
            kept = Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report({"epoch": epoch, "loss": loss.total.item()}, checkpoint=kept)


def train(
    data: str,
    labels: str,
    name: str = "resnet26d",
    size: tuple[int, int] = (224, 224),
    epochs: int = 100,
    batch_size: int = 64,
    workers: int = 8,
    seed: int = 42,
    processes: int = 1,
    storage: str | None = None,
) -> dict[str, torch.Tensor]:
    """Return the weights. `storage` is where Ray keeps its results (~/ray_results)."""
    config = {"data": data, "labels": labels, "name": name, "size": size, "epochs": epochs}
    config |= {"batch_size": batch_size, "workers": workers, "seed": seed}
    scaling = ScalingConfig(num_workers=processes, use_gpu=torch.cuda.is_available())
    result = TorchTrainer(
        train_worker, train_loop_config=config, scaling_config=scaling, run_config=RunConfig(storage_path=storage)
    ).fit()
    with result.checkpoint.as_directory() as folder:
        return torch.load(Path(folder, "weights.pth"), weights_only=True)


if __name__ == "__main__":
    data, labels = sys.argv[1:]
    train(data, labels, processes=max(1, torch.cuda.device_count()))
