"""Process a batch in groups of images, so that scratch memory does not grow with the batch."""

from __future__ import annotations

import torch

# Numbers of scratch per group: on a CPU what its caches hold, elsewhere enough to fill the device (32 MiB of float32).
_CPU_NUMBERS, _DEVICE_NUMBERS = 2**18, 2**23


def image_chunks(
    images: int, numbers_per_image: int, device: torch.device, device_numbers: int = _DEVICE_NUMBERS
) -> list[slice]:
    """Slices that together cover `images` images, each with about as many numbers of scratch as suits the device.

    Under `torch.compile` there is one slice: the compiler fuses what the groups are there to keep small.
    """
    if torch.compiler.is_compiling():
        return [slice(0, images)]
    numbers = _CPU_NUMBERS if device.type == "cpu" else device_numbers
    step = max(1, numbers // max(1, numbers_per_image))
    return [slice(start, start + step) for start in range(0, images, step)]
