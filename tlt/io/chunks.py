"""Splits a batch into groups of images, so that temporary memory does not grow with the batch."""

import torch

_CPU_NUMBERS = 2**18  # temporary numbers per group; they fit into a CPU's caches


def image_chunks(images: int, numbers_per_image: int, device: torch.device, gpu_numbers: int = 2**23) -> list[slice]:
    """Return slices that together cover `images` images. Each needs about as many temporary numbers as suit the device:
    `gpu_numbers` (32 MiB of float32) fill a GPU.

    Under `torch.compile` there is one slice: the compiler fuses the operations whose results the groups keep small.
    """
    if torch.compiler.is_compiling():
        return [slice(0, images)]
    numbers = _CPU_NUMBERS if device.type == "cpu" else gpu_numbers
    step = max(1, numbers // max(1, numbers_per_image))
    return [slice(start, start + step) for start in range(0, images, step)]
