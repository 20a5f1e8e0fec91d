"""BatchNorm's running statistics, which differ from rank to rank within an epoch: gathered and given back.

They are shared once an epoch (`--dist-bn`); until then each rank's are of the images that it has seen.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def _statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that `timm.utils.distribute_bn` shares."""
    return [b for name, b in model.named_buffers() if "running_mean" in name or "running_var" in name]


def gather_statistics(models: dict[str, nn.Module], device: torch.device) -> dict[str, Tensor]:
    """Return the statistics (ranks, values) of each model that has any; nothing where there is one rank.

    Every rank has to call it. `device` is where the ranks exchange tensors.
    """
    if not dist.is_initialized():
        return {}
    gathered = {}
    for name, model in models.items():
        if statistics := _statistics(model):
            own = torch.cat([buffer.flatten().to(device) for buffer in statistics])
            rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, own)
            gathered[name] = torch.stack(rows)
    return gathered


def set_statistics(models: dict[str, nn.Module], gathered: dict[str, Tensor]) -> list[str]:
    """Give this rank its statistics, or the mean of all on another number of ranks; return what a user should know.

    Raises:
        ValueError: They are not of such models.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    messages: list[str] = []
    for name, model in models.items():
        if name not in gathered:
            continue
        rows, buffers = gathered[name], _statistics(model)
        counts = [buffer.numel() for buffer in buffers]
        if rows.ndim != 2 or rows.shape[1] != sum(counts) or not len(rows) or not torch.isfinite(rows).all():
            raise ValueError(f"its running statistics of {len(rows)} ranks are not of this model")
        own = rows[rank] if len(rows) == size else rows.mean(0)
        for buffer, part in zip(buffers, own.split(counts), strict=True):
            buffer.copy_(part.view_as(buffer))
        if len(rows) != size:
            messages = [f"BatchNorm's running statistics are the mean of {len(rows)} ranks', now on {size}"]
    return messages
