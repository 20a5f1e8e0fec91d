"""Train a timm model with token labels with Lightning, on any number of processes.

    python examples/lightning_module.py pictures labels

Arguments as of plain_pytorch.py, which trains to the same weights.
"""

import sys
from typing import Any

import lightning
import timm
import torch
from timm.optim import create_optimizer_v2

import tlt


class TokenLabeling(lightning.LightningModule):
    """A timm model with a dense head, its data and its training step."""

    def __init__(
        self,
        data: str,
        labels: str,
        name: str = "resnet26d",
        size: tuple[int, int] = (224, 224),
        batch_size: int = 64,
        workers: int = 8,
        seed: int = 42,
    ) -> None:
        super().__init__()
        self.images = tlt.open_images(data, "train")
        classes = len(self.images.class_names)
        torch.manual_seed(seed)
        self.model = tlt.with_dense_head(timm.create_model(name, num_classes=classes), size)
        self.labels = tlt.open_labels(labels, self.images.paths, num_classes=classes)
        self.criterion = tlt.TokenLabelLoss.of(self.model, size)
        self.size, self.batch_size, self.workers, self.seed = size, batch_size, workers, seed

    def train_dataloader(self) -> tlt.Loader:
        colours = timm.data.resolve_model_data_config(self.model)
        augment = tlt.AugmentConfig(self.size, mean=colours["mean"])
        # The loader deals the images to the processes itself.
        ranks = {"world_size": self.trainer.world_size, "rank": self.trainer.global_rank}
        feed = {"std": colours["std"], "device": self.device, "workers": self.workers, **ranks}
        return tlt.Loader(self.images, self.labels, augment, self.batch_size, self.seed, **feed)

    def training_step(self, batch: tlt.Batch, _: int) -> torch.Tensor:
        step = tlt.StepKey(self.seed, self.global_step, rank=self.global_rank)
        step.seed_torch()  # dropout and stochastic depth
        box = tlt.draw_box(step, self.criterion.grid)  # MixToken
        outputs = self.model(batch.images, dense=True, mix_box=box)
        loss = self.criterion(outputs, self.criterion.targets(batch), box)
        self.log_dict({"loss": loss.total, "tokens": loss.dense}, prog_bar=True, batch_size=batch.size)
        return loss.total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return create_optimizer_v2(self.model, "adamw", lr=1e-3, weight_decay=0.05)


def train(data: str, labels: str, epochs: int = 100, trainer: dict[str, Any] | None = None, **rest: Any) -> Any:
    module = TokenLabeling(data, labels, **rest)
    lightning.Trainer(max_epochs=epochs, **(trainer or {})).fit(module)
    return module.model


if __name__ == "__main__":
    data, labels = sys.argv[1:]
    train(data, labels)
