"""DistributedDataParallel as `train.py` uses it.

torch's defaults are kept where others don't measurably matter (docs/performance.md). `static_graph` is off: with
gradient accumulation (`no_sync`) torch then fails in the first backward pass, or no longer sums gradients.
"""

# Without `from __future__ import annotations`: DDP checks the annotations of the hook, which must not be strings.
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def distribute(
    model: nn.Module,
    device: torch.device,
    compression: str = "none",
    find_unused: bool = False,
    bucket_mb: float = 25.0,
) -> DistributedDataParallel:
    """Return `model` with its gradients averaged over all ranks.

    Args:
        compression: `"bf16"` sends and sums gradients in bfloat16, which halves the bytes.
        find_unused: Whether some parameters get no gradient.
        bucket_mb: MiB of gradients that are sent in one piece.
    """
    # Running statistics are shared once an epoch (--dist-bn), not at every step. Newer torch renamed the switch.
    known = inspect.signature(DistributedDataParallel).parameters
    sync: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,  # saves a copy in time and memory
        bucket_cap_mb=bucket_mb,
        **sync,
    )
    if compression == "bf16":
        wrapped.register_comm_hook(None, send_bf16)
    _fill_buckets(wrapped)
    return wrapped


def _fill_buckets(wrapped: DistributedDataParallel) -> None:
    """Do a backward pass of zeros, from the last parameter to the first.

    torch rebuilds its buckets after the first backward pass, and the place of a gradient in them decides in which order
    more than two ranks sum it. Without this, the first step after a resume would differ in its last bits.
    """
    module = wrapped.module
    trained = [p for p in module.parameters() if p.requires_grad]
    module.forward = lambda zero: sum(p.float().sum() for p in trained) * zero
    try:
        wrapped(torch.zeros((), device=trained[0].device)).backward()
    finally:
        del module.forward
    module.zero_grad(set_to_none=True)


def send_bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's bf16_compress_hook. DDP accepts it under its own name only for NCCL; gloo sums bfloat16, too."""
    return bf16_compress_hook(group, bucket)  # type: ignore[arg-type]  # None is the default group
