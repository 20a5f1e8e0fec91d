"""Train a timm model with token labels in plain PyTorch.

    python examples/plain_pytorch.py pictures labels

`pictures/train` holds class folders, `labels` what `volo label` made of them.
"""

import sys

import timm
import torch
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = tlt.open_images(data, "train")
    classes = len(images.class_names)
    torch.manual_seed(seed)
    model = tlt.with_dense_head(timm.create_model(name, num_classes=classes), size).to(device)
    colours = timm.data.resolve_model_data_config(model)
    augment = tlt.AugmentConfig(size, mean=colours["mean"])
    maps = tlt.open_labels(labels, images.paths, num_classes=classes)
    loader = tlt.Loader(images, maps, augment, batch_size, seed, std=colours["std"], device=device, workers=workers)
    criterion = tlt.TokenLabelLoss.of(model, size)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    for update, batch in enumerate(batch for _ in range(epochs) for batch in loader):
        step = tlt.StepKey(seed, update)
        step.seed_torch()  # dropout and stochastic depth
        box = tlt.draw_box(step, criterion.grid)  # MixToken
        outputs = model(batch.images, dense=True, mix_box=box)
        loss = criterion(outputs, criterion.targets(batch), box)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        if update % 50 == 0:
            print(f"update {update}: loss {loss.total:.4f} (class {loss.cls:.4f}, tokens {loss.dense:.4f})")
    return model


if __name__ == "__main__":
    data, labels = sys.argv[1:]
    train(data, labels)
