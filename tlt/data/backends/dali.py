"""NVIDIA DALI as a backend: one pipeline decodes the JPEGs of a batch, on the CPU or on the GPU.

Nothing is drawn in the pipeline: bytes, windows, sizes and filters are fed. What it would not decode exactly as Pillow
does (other formats, CMYK, 12 bits, unsound markers) the torchvision backend decodes, which also says what is bad.

- dali-cpu: DALI decodes the rows that the window needs, and torch resizes, which takes a third of DALI's time on a CPU.
  Every pixel is the torchvision backend's.
- dali-gpu: DALI decodes and resizes on the training device, and the images stay there. nvJPEG rounds otherwise than
  libjpeg, and at its edges a window counts as going on with its last pixel, where Pillow and torch go without.

Legend: B images, (H, W) output size.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt.data.backends.decode import (
    Backend,
    Crop,
    Decoded,
    Encoded,
    Request,
    Size,
    TorchvisionBackend,
    cut,
    resized_crop,
)
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, most_bytes
from tlt.data.sources.jpeg import whole_frame
from tlt.errors import UserError, require

_FILTERS = {"bilinear": "INTERP_LINEAR", "bicubic": "INTERP_CUBIC"}
_FAILURES = (RuntimeError, ValueError)  # what a pipeline raises for an image that it can't decode


class DaliBackend(Backend):
    """JPEGs by DALI, all else as TorchvisionBackend.

    Args:
        max_pixels: As for every backend.
        threads: CPU threads of the pipeline.
        device: The CUDA device that decodes and resizes, and where the images stay; None: the CPU does.
        dct_scaling: As for TorchvisionBackend, on the CPU alone.

    Raises:
        UserError: DALI is not installed, or `device` is no CUDA device.
    """

    in_threads = True  # a pipeline has threads and a device: it can't be shared with other processes

    def __init__(
        self,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        threads: int = 1,
        device: torch.device | None = None,
        dct_scaling: bool = False,
    ) -> None:
        super().__init__(max_pixels)
        self.name = "dali-cpu" if device is None else "dali-gpu"
        if device is not None and device.type != "cuda":
            raise UserError(f"--data-backend dali-gpu needs a CUDA device, this is {device}: use dali-cpu")
        _dali()
        self.device = torch.device("cpu") if device is None else _numbered(device)
        self.threads = max(1, threads)
        self.resizes = device is not None
        self._host = TorchvisionBackend(max_pixels, dct_scaling and device is None)

    def decode(self, encoded: Encoded, crop: Crop | None, size: Size, interpolation: str) -> Tensor:
        decoded = self.decode_batch([Request(encoded, crop, size, interpolation)], size)
        for error in decoded.bad.values():
            raise error
        return decoded.images[0]

    def decode_batch(self, requests: Sequence[Request], size: Size, fill: Sequence[int] = (0, 0, 0)) -> Decoded:
        accelerated = [row for row, request in enumerate(requests) if self._accelerates(request)]
        pipeline = _pipeline(self.device, self.threads, tuple(fill) if self.resizes else None)
        images, failed = _by_halves(pipeline, [requests[row] for row in accelerated], size, fill)
        rows = [row for place, row in enumerate(accelerated) if place not in failed]
        if len(rows) == len(requests):
            return Decoded(images, {})
        others = [row for row in range(len(requests)) if row not in set(rows)]
        host = self._host.decode_batch([requests[row] for row in others], size, fill)
        bad = {others[place]: error for place, error in host.bad.items()}
        if 1 < len(accelerated) == len(failed) and not bad.keys() >= set(accelerated):
            raise UserError(f"--data-backend {self.name}: DALI fails at images that are fine: {_reason(failed[0])}")
        whole = torch.empty(len(requests), 3, *size, dtype=torch.uint8, device=self.device)
        whole[rows], whole[others] = images, host.images.to(self.device)
        return Decoded(whole, bad)

    def _accelerates(self, request: Request) -> bool:
        stated = request.encoded.width * request.encoded.height
        if self._host.divisor(request) > 1 or max(math.prod(request.size), stated) > self.max_pixels:
            return False  # the host decodes it scaled down, resizes the shown part alone, or refuses it
        if len(request.encoded.data) > most_bytes(stated):  # to look through its markers may take 8 times as much
            return False
        return is_sound(request.encoded) and (not self.resizes or request.interpolation in _FILTERS)


def _numbered(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def is_sound(encoded: Encoded) -> bool:
    """Whether DALI decodes it as Pillow does: a sound 8-bit JPEG, gray or of three components, of its header's size."""
    frame = whole_frame(encoded.data)
    return (
        frame is not None
        and frame.precision == 8
        and frame.components in (1, 3)
        and (frame.width, frame.height) == (encoded.width, encoded.height)
    )


class _Pipeline:
    """A pipeline that is built for the largest batch so far, and anew after a failure.

    Args:
        device: Where it decodes.
        threads: On the CPU.
        fill: It also resizes, and shows this colour outside of the images; None: it decodes alone.
    """

    def __init__(self, device: torch.device, threads: int, fill: tuple[int, ...] | None) -> None:
        self.device, self.threads, self.fill = device, threads, fill
        self._lock = threading.Lock()
        self._built: Any = None
        self._room = 0

    def run(self, requests: Sequence[Request], size: Size) -> Any:
        """DALI's list of B images, which are the caller's: windows (h, w, 3), or (3, H, W) where it resizes.

        Raises:
            RuntimeError, ValueError: It fails at an image.
        """
        geometry = np.array([_geometry(request, size) for request in requests], np.int32)
        encoded = [np.frombuffer(request.encoded.data, np.uint8) for request in requests]
        with self._lock:
            if self._built is None or self._room < len(requests):
                self._room = max(self._room, len(requests))
                self._built = _build(self._room, self.threads, self.device, self.fill)
            try:
                (images,) = self._built.run(encoded=encoded, geometry=geometry)
            except _FAILURES:
                self._built = None  # it is of no more use
                raise
        return images


def _by_halves(
    pipeline: _Pipeline, requests: list[Request], size: Size, fill: Sequence[int]
) -> tuple[Tensor, dict[int, Exception]]:
    """The images (B, 3, H, W) that a pipeline makes of requests, and what it says of the others, by place.

    One image ends a whole run: it is found by halves, so that no image depends on the others of its batch.
    """
    if not requests:
        return torch.empty(0, 3, *size, dtype=torch.uint8, device=pipeline.device), {}
    try:
        images = pipeline.run(requests, size)
    except _FAILURES as error:
        if len(requests) == 1:
            return _by_halves(pipeline, [], size, fill)[0], {0: error}
        half = len(requests) // 2
        first, failed = _by_halves(pipeline, requests[:half], size, fill)
        second, also = _by_halves(pipeline, requests[half:], size, fill)
        return torch.cat([first, second]), failed | {half + place: reason for place, reason in also.items()}
    return (_resized(images, requests, size, fill) if pipeline.fill is None else _taken(images, pipeline.device)), {}


def _resized(windows: Any, requests: list[Request], size: Size, fill: Sequence[int]) -> Tensor:
    images = torch.empty(len(requests), 3, *size, dtype=torch.uint8)
    for row, request in enumerate(requests):
        pixels = torch.from_numpy(np.asarray(windows[row])).permute(2, 0, 1)
        pixels = resized_crop(pixels, None, request.size, request.interpolation)
        images[row] = cut(pixels, request.top, request.left, size, fill)
    return images


def _taken(images: Any, device: torch.device) -> Tensor:
    tensor = torch.from_dlpack(images.as_tensor())
    if device.type == "cuda":
        # DALI knows nothing of torch's streams: it gets its memory back once it has been read.
        tensor = tensor.clone()
        torch.cuda.current_stream(device).synchronize()
    return tensor


def _reason(error: Exception) -> str:
    """What of DALI's many lines says why."""
    return str(error).rpartition("encountered:")[2].strip().split("\n")[0]


@functools.cache
def _pipeline(device: torch.device, threads: int, fill: tuple[int, ...] | None) -> _Pipeline:
    """The pipeline of this process, which training and validation share."""
    return _Pipeline(device, threads, fill)


def _geometry(request: Request, size: Size) -> tuple[int, ...]:
    """What is fed for an image: window (row, column, height, width), resized size, filter, output window."""
    x, y, width, height = request.crop or (0, 0, request.encoded.width, request.encoded.height)
    kind = getattr(_dali().types, _FILTERS.get(request.interpolation, "INTERP_LINEAR"))
    return (y, x, height, width, *request.size, int(kind), request.top, request.left, *size)


def _build(room: int, threads: int, device: torch.device, fill: tuple[int, ...] | None) -> Any:
    """A DALI pipeline for batches of up to `room` images. Raises UserError: DALI can't start."""
    dali = _dali()
    fn, types, gpu = dali.fn, dali.types, device.type == "cuda"
    settings = {"batch_size": room, "num_threads": threads, "device_id": device.index if gpu else None}
    pipeline = dali.Pipeline(**settings, prefetch_queue_depth=1, exec_dynamic=True)
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)
        geometry = fn.external_source(name="geometry", dtype=types.INT32, ndim=1, no_copy=True)
        images = _decoded(encoded, geometry, gpu)
        pipeline.set_outputs(images if fill is None else _resized_in_dali(images, geometry, fill))
    try:
        pipeline.build()
    except _FAILURES as error:
        raise UserError(f"DALI can't start on {device}: {_reason(error)}") from error
    return pipeline


def _decoded(encoded: Any, geometry: Any, gpu: bool) -> Any:
    dali = _dali()
    # Threads stay on the cores that the rank is bound to. Which images the GPU's own JPEG decoder gets would depend on
    # the others of the batch.
    only_mixed = {"affine": False, "hw_decoder_load": 0.0} if gpu else {}
    return dali.fn.decoders.image_slice(
        encoded,
        device="mixed" if gpu else "cpu",
        start=geometry[0:2],
        shape=geometry[2:4],
        axis_names="HW",
        output_type=dali.types.RGB,
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,
        use_fast_idct=False,
        **only_mixed,
    )


def _resized_in_dali(images: Any, geometry: Any, fill: tuple[int, ...]) -> Any:
    fn, types = _dali().fn, _dali().types
    images = fn.resize(
        images,
        size=fn.cast(geometry[4:6], dtype=types.FLOAT),
        interp_type=fn.reinterpret(geometry[6], dtype=types.INTERP_TYPE),
        antialias=True,
    )
    images = fn.slice(
        images,
        start=geometry[7:9],
        shape=geometry[9:11],
        axis_names="HW",
        out_of_bounds_policy="pad",
        fill_values=[float(level) for level in fill],
    )
    return fn.transpose(images, perm=[2, 0, 1])


@functools.cache
def _dali() -> Any:
    extra = "dali-cuda12" if (torch.version.cuda or "").startswith("12.") else "dali"
    return require("nvidia.dali", extra)
