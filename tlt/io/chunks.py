"""Process a batch in groups of images, so that scratch memory does not grow with the batch."""

from __future__ import annotations

import torch

_CPU_NUMBERS = 2**18  # of scratch per group: what a CPU's caches hold


def image_chunks(images: int, numbers_per_image: int, device: torch.device, gpu_numbers: int = 2**23) -> list[slice]:
    """Slices that together cover `images` images, each with about as many numbers of scratch as suits the device:
    `gpu_numbers` fill a GPU (32 MiB of float32).

    Under `torch.compile` there is one slice: the compiler fuses what the groups are there to keep small.
    """
    if torch.compiler.is_compiling():
        return [slice(0, images)]
    numbers = _CPU_NUMBERS if device.type == "cpu" else gpu_numbers
    step = max(1, numbers // max(1, numbers_per_image))
    return [slice(start, start + step) for start in range(0, images, step)]
