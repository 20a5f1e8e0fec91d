"""The backend of a name."""

from __future__ import annotations

import torch

from tlt.data.backends.decode import BACKENDS, Backend, PilBackend, TorchvisionBackend
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS
from tlt.errors import UserError

DALI_BACKENDS = ("dali-cpu", "dali-gpu")  # `tlt.data.backends.dali`, an optional package


def create_backend(
    name: str,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    threads: int = 1,
    device: torch.device | str = "cpu",
    dct_scaling: bool = False,
) -> Backend:
    """The file backend of a name of `BACKENDS` or `DALI_BACKENDS`.

    Args:
        threads: CPU threads of DALI.
        device: Where dali-gpu decodes.
        dct_scaling: See `TorchvisionBackend`; dali-cpu does the same, dali-gpu never.

    Raises:
        UserError: Unknown name, DALI is not installed, or a device that dali-gpu can't use.
    """
    if name in DALI_BACKENDS:
        from tlt.data.backends.dali import DaliBackend

        return DaliBackend(max_pixels, threads, torch.device(device) if name == "dali-gpu" else None, dct_scaling)
    if name not in BACKENDS:
        known = ", ".join((*BACKENDS, *DALI_BACKENDS))
        raise UserError(f"--data-backend {name}: known ones for image files are {known}")
    return PilBackend(max_pixels) if name == PilBackend.name else TorchvisionBackend(max_pixels, dct_scaling)
