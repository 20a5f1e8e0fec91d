"""Train a timm model with token labels with DeepSpeed's ZeRO, on any number of GPUs.

    deepspeed examples/deepspeed_loop.py pictures labels

Arguments as of plain_pytorch.py, which trains to the same weights. `stage` of ZeRO: 1 divides the optimizer's state
among the processes, 2 the gradients as well, 3 the weights as well.
"""

import os
import sys

import deepspeed
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
    stage: int = 2,
) -> dict[str, torch.Tensor]:
    """Return the whole weights, on rank 0 alone with stage 3."""
    deepspeed.init_distributed()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    images = tlt.open_images(data, "train")
    classes = len(images.class_names)
    torch.manual_seed(seed)
    bare = tlt.with_dense_head(timm.create_model(name, num_classes=classes), size)
    colours = timm.data.resolve_model_data_config(bare)
    augment = tlt.AugmentConfig(size, mean=colours["mean"])
    maps = tlt.open_labels(labels, images.paths, num_classes=classes)
    criterion = tlt.TokenLabelLoss.of(bare, size)
    settings = {
        "train_micro_batch_size_per_gpu": batch_size,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # DeepSpeed clips to 1 where nothing is said
        "steps_per_print": 50,
    }
    optimizer = create_optimizer_v2(bare, "adamw", lr=1e-3, weight_decay=0.05, foreach=False)
    engine, *_ = deepspeed.initialize(model=bare, optimizer=optimizer, config=settings)
    feed = {"device": engine.device, "workers": workers, "world_size": world_size, "rank": rank}
    loader = tlt.Loader(images, maps, augment, batch_size, seed, std=colours["std"], **feed)
    for update, batch in enumerate(batch for _ in range(epochs) for batch in loader):
        step = tlt.StepKey(seed, update, rank=rank)
        step.seed_torch()  # dropout and stochastic depth
        box = tlt.draw_box(step, criterion.grid)  # MixToken
        outputs = engine(batch.images, dense=True, mix_box=box)
        loss = criterion(outputs, criterion.targets(batch), box)
        engine.backward(loss.total)
        engine.step()
        if update % 50 == 0 and rank == 0:
            print(f"update {update}: loss {loss.total:.4f}")
    with deepspeed.zero.GatheredParameters(list(bare.parameters())):
        return {name: value.detach().clone() for name, value in bare.state_dict().items()}


if __name__ == "__main__":
    data, labels = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    weights = train(data, labels)
    if os.environ.get("RANK", "0") == "0":
        torch.save(weights, "weights.pth")
    torch.distributed.destroy_process_group()  # a process that ends in its process group may be aborted
