"""Creates a backend, which decodes, crops and resizes, from its name."""

import torch

from tlt.data.backends.decode import Backend, PilBackend, TorchvisionBackend
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS
from tlt.errors import UserError


def create_backend(
    name: str,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    threads: int = 1,
    device: torch.device | str = "cpu",
    dct_scaling: bool = False,
) -> Backend:
    """Return the backend of a name of `--data-backend`. `threads` is for DALI, `device` is where dali-gpu decodes, and
    `dct_scaling` is for torchvision (see there) and dali-cpu. Raise UserError if the name is unknown, DALI is not
    installed, or dali-gpu can't use the device."""
    if name == "torchvision":
        return TorchvisionBackend(max_pixels, dct_scaling)
    if name == "pil":
        return PilBackend(max_pixels)
    if name in ("dali-cpu", "dali-gpu"):
        from tlt.data.backends.dali import DaliBackend

        return DaliBackend(max_pixels, threads, torch.device(device) if name == "dali-gpu" else None, dct_scaling)
    if name == "synthetic":
        from tlt.data.backends.synthetic import SyntheticBackend

        return SyntheticBackend()
    raise UserError(f"--data-backend {name}: there are torchvision, pil, dali-cpu, dali-gpu and synthetic")
