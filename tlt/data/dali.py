"""NVIDIA DALI as a backend: JPEGs of a batch decoded, cropped and resized by one pipeline, on the CPU or on the GPU.

Nothing is drawn in the pipeline: bytes, windows, sizes and filters are fed. On the CPU its pixels are libjpeg-turbo's,
those of Pillow, and its resizing differs from Pillow's by one grey level at most, but for 1 in 10,000 values. What it
would not decode exactly so (other formats, CMYK, 12 bits, a file without an end) the torchvision backend decodes, which
also says of a file whether it is bad.

Legend: B images, (H, W) output size.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt.data.decode import DEFAULT_MAX_PIXELS, Backend, Crop, Decoded, Encoded, Request, Size, TorchvisionBackend
from tlt.data.jpeg import whole_frame
from tlt.errors import UserError, require

_FILTERS = {"bilinear": "INTERP_LINEAR", "bicubic": "INTERP_CUBIC"}
_FAILURES = (RuntimeError, ValueError)  # what a pipeline raises for an image that it can't decode


class DaliBackend(Backend):
    """JPEGs by DALI, all else as TorchvisionBackend.

    Args:
        max_pixels: As for every backend.
        threads: CPU threads of the pipeline.
        device: The CUDA device that decodes and resizes, and where the images stay; None: the CPU does.

    Raises:
        UserError: DALI is not installed, or `device` is no CUDA device.
    """

    in_threads = True  # a pipeline has threads and a device: it can't be shared with other processes

    def __init__(
        self, max_pixels: int = DEFAULT_MAX_PIXELS, threads: int = 1, device: torch.device | None = None
    ) -> None:
        super().__init__(max_pixels)
        self.name = "dali-cpu" if device is None else "dali-gpu"
        if device is not None and device.type != "cuda":
            raise UserError(f"--data-backend dali-gpu needs a CUDA device, this is {device}: use dali-cpu")
        _dali()
        self.device = torch.device("cpu") if device is None else device
        self.threads = max(1, threads)
        self._host = TorchvisionBackend(max_pixels)

    def decode(self, encoded: Encoded, crop: Crop | None, size: Size, interpolation: str) -> Tensor:
        decoded = self.decode_batch([Request(encoded, crop, size, interpolation)], size)
        for error in decoded.bad.values():
            raise error
        return decoded.images[0]

    def decode_batch(self, requests: Sequence[Request], size: Size, fill: Sequence[int] = (0, 0, 0)) -> Decoded:
        accelerated = [row for row, request in enumerate(requests) if is_accelerated(request)]
        pipeline = _pipeline(self.device, self.threads, tuple(fill))
        images, failed = _by_halves(pipeline, [requests[row] for row in accelerated], size)
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


def is_accelerated(request: Request) -> bool:
    """Whether DALI gives Pillow's pixels: a sound 8-bit JPEG, gray or of three components, of its header's size."""
    encoded = request.encoded
    frame = whole_frame(encoded.data)
    return (
        frame is not None
        and frame.precision == 8
        and frame.components in (1, 3)
        and (frame.width, frame.height) == (encoded.width, encoded.height)
        and request.interpolation in _FILTERS
    )


class _Pipeline:
    """A pipeline that is built for the largest batch so far, and anew after a failure."""

    def __init__(self, device: torch.device, threads: int, fill: tuple[int, ...]) -> None:
        self._device, self._threads, self._fill = device, threads, fill
        self._lock = threading.Lock()
        self._built: Any = None
        self._room = 0

    def run(self, requests: Sequence[Request], size: Size) -> Tensor:
        """(B, 3, H, W) uint8 on the device. Raises one of `_FAILURES`."""
        if not requests:
            return self.nothing(size)
        geometry = np.array([_geometry(request, size) for request in requests], np.int32)
        encoded = [np.frombuffer(request.encoded.data, np.uint8) for request in requests]
        with self._lock:
            if self._built is None or self._room < len(requests):
                self._room = max(self._room, len(requests))
                self._built = _build(self._room, self._threads, self._device, self._fill)
            try:
                (images,) = self._built.run(encoded=encoded, geometry=geometry)
            except _FAILURES:
                self._built = None  # it is of no more use
                raise
            return self._taken(images)

    def nothing(self, size: Size) -> Tensor:
        """(0, 3, H, W)."""
        return torch.empty(0, 3, *size, dtype=torch.uint8, device=self._device)

    def _taken(self, images: Any) -> Tensor:
        tensor = torch.from_dlpack(images.as_tensor())
        if self._device.type == "cuda":
            # DALI knows nothing of torch's streams: it gets its memory back once it has been read.
            tensor = tensor.clone()
            torch.cuda.current_stream(self._device).synchronize()
        return tensor


def _by_halves(pipeline: _Pipeline, requests: list[Request], size: Size) -> tuple[Tensor, dict[int, Exception]]:
    """The images that a pipeline makes of requests, and what it says of the others, by place.

    One image ends a whole run: it is found by halves, so that no image depends on the others of its batch.
    """
    try:
        return pipeline.run(requests, size), {}
    except _FAILURES as error:
        if len(requests) == 1:
            return pipeline.nothing(size), {0: error}
    half = len(requests) // 2
    first, failed = _by_halves(pipeline, requests[:half], size)
    second, also = _by_halves(pipeline, requests[half:], size)
    return torch.cat([first, second]), failed | {half + place: error for place, error in also.items()}


def _reason(error: Exception) -> str:
    """What of DALI's many lines says why."""
    return str(error).rpartition("encountered:")[2].strip().split("\n")[0]


@functools.cache
def _pipeline(device: torch.device, threads: int, fill: tuple[int, ...]) -> _Pipeline:
    """The pipeline of this process, which training and validation share."""
    return _Pipeline(device, threads, fill)


def _geometry(request: Request, size: Size) -> tuple[int, ...]:
    """What is fed for an image: window (row, column, height, width), resized size, filter, output window."""
    x, y, width, height = request.crop or (0, 0, request.encoded.width, request.encoded.height)
    kind = int(getattr(_dali().types, _FILTERS[request.interpolation]))
    return (y, x, height, width, *request.size, kind, request.top, request.left, *size)


def _build(room: int, threads: int, device: torch.device, fill: tuple[int, ...]) -> Any:
    dali = _dali()
    fn, types, gpu = dali.fn, dali.types, device.type == "cuda"
    pipeline = dali.Pipeline(
        batch_size=room,
        num_threads=threads,
        device_id=device.index if gpu else None,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)
        geometry = fn.external_source(name="geometry", dtype=types.INT32, ndim=1, no_copy=True)
        images = fn.decoders.image_slice(
            encoded,
            device="mixed" if gpu else "cpu",
            start=geometry[0:2],
            shape=geometry[2:4],
            axis_names="HW",
            output_type=types.RGB,
            adjust_orientation=False,
            jpeg_fancy_upsampling=True,
            use_fast_idct=False,
        )
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
        pipeline.set_outputs(fn.transpose(images, perm=[2, 0, 1]))
    try:
        pipeline.build()
    except _FAILURES as error:
        raise UserError(f"DALI can't start on {device}: {_reason(error)}") from error
    return pipeline


@functools.cache
def _dali() -> Any:
    extra = "dali-cuda12" if (torch.version.cuda or "").startswith("12.") else "dali"
    return require("nvidia.dali", extra)
