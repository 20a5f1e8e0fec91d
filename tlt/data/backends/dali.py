"""The backend of NVIDIA DALI: one pipeline decodes the JPEGs of a batch, on the CPU or on the GPU.

The pipeline draws no random numbers: it is fed with bytes, windows, sizes and filters. The torchvision backend decodes
images that DALI decodes differently from Pillow (other formats, CMYK, 12 bits, unsound markers), and finds bad ones.

- dali-cpu: DALI decodes the rows that the window needs, and torch resizes them, which takes a third of DALI's time on a
  CPU. All pixels equal those of the torchvision backend.
- dali-gpu: DALI decodes and resizes on the training device, and the images stay there. nvJPEG rounds differently from
  libjpeg. At the edges of a window DALI repeats the last pixel; Pillow and torch do not.
"""

import functools
import io
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tlt.data.backends.decode import Backend, Decoded, Encoded, Request, Size, TorchvisionBackend, cut, resized_crop
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, JPEG_MAGIC, BadImage, pillow_errors
from tlt.errors import UserError, require

_FILTERS = {"bilinear": "INTERP_LINEAR", "bicubic": "INTERP_CUBIC"}
_JPEG_END = b"\xff\xd9"
_FAILURES = (RuntimeError, ValueError)  # a pipeline raises one of these for an image that it can't decode
_ONE_AT_A_TIME = threading.Lock()


class DaliBackend(Backend):
    """Decodes JPEGs with DALI, and other images with TorchvisionBackend on the CPU, with its `dct_scaling`. `threads`
    CPU threads decode and resize; with a CUDA `device`, this decodes, resizes and holds the images. Raises UserError if
    DALI is not installed, or `device` is no CUDA device."""

    has_threads = True  # a pipeline has threads and a device, which processes can't share

    def __init__(
        self,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        threads: int = 1,
        device: torch.device | None = None,
        dct_scaling: bool = False,
    ) -> None:
        super().__init__(max_pixels)
        self.name = "dali-cpu" if device is None else "dali-gpu"
        if device is not None:
            if device.type != "cuda":
                raise UserError(f"--data-backend dali-gpu needs a CUDA device, this is {device}: use dali-cpu")
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        _dali()
        self.device = device or torch.device("cpu")
        self.threads = max(1, threads)
        self.resizes = device is not None
        self._host = TorchvisionBackend(max_pixels, dct_scaling and device is None)
        self._pool = ThreadPoolExecutor(self.threads)
        self._stream = None if device is None else torch.cuda.Stream(self.device)

    def decode_batch(self, requests: Sequence[Request], size: Size, fill: Sequence[int] = (0, 0, 0)) -> Decoded:
        if self._stream is None:
            return self._decode_batch(requests, size, fill)
        with torch.cuda.stream(self._stream):  # a stream of its own, not that of training
            decoded = self._decode_batch(requests, size, fill)
        self._stream.synchronize()  # deliberate: this is the loading thread, not the training thread
        return decoded

    def _decode_batch(self, requests: Sequence[Request], size: Size, fill: Sequence[int]) -> Decoded:
        accelerated = [row for row, request in enumerate(requests) if self._accelerates(request)]
        images, failed = self._decode_accelerated([requests[row] for row in accelerated], size, fill)
        rows = [row for position, row in enumerate(accelerated) if position not in failed]
        if len(rows) == len(requests):
            return Decoded(images, {})
        host_rows = [row for row in range(len(requests)) if row not in set(rows)]
        host = self._host.decode_batch([requests[row] for row in host_rows], size, fill)
        bad = {host_rows[position]: error for position, error in host.bad.items()}
        if 1 < len(accelerated) == len(failed) and not bad.keys() >= set(accelerated):
            raise UserError(f"--data-backend {self.name}: DALI fails at images that are fine: {failed[0]}")
        whole = torch.empty(len(requests), 3, *size, dtype=torch.uint8, device=self.device)
        whole[rows] = images
        whole[host_rows] = host.images.to(self.device)
        return Decoded(whole, bad)

    def _decode_accelerated(
        self, requests: list[Request], size: Size, fill: Sequence[int]
    ) -> tuple[Tensor, dict[int, str]]:
        """Return the images (n, 3, H, W) that the pipeline can decode, and why the others failed, by row.

        One bad image fails a whole run. Then we decode each image alone, so that none depends on others of its batch.
        """
        if not requests:
            return torch.empty(0, 3, *size, dtype=torch.uint8, device=self.device), {}
        try:
            images = _run(requests, size, self.threads, self.device, tuple(fill) if self.resizes else None)
        except _FAILURES as error:
            if len(requests) == 1:
                return torch.empty(0, 3, *size, dtype=torch.uint8, device=self.device), {0: _reason(error)}
            alone = [self._decode_accelerated([request], size, fill) for request in requests]
            failed = {row: error for row, (_, errors) in enumerate(alone) for error in errors.values()}
            return torch.cat([image for image, _ in alone]), failed
        return (_to_torch(images, self.device) if self.resizes else self._resized(images, requests, size, fill)), {}

    def _resized(self, windows: Any, requests: list[Request], size: Size, fill: Sequence[int]) -> Tensor:
        def resize(row: int) -> Tensor:
            request = requests[row]
            pixels = torch.from_numpy(np.asarray(windows[row])).permute(2, 0, 1)
            pixels = resized_crop(pixels, None, request.size, request.interpolation)
            return cut(pixels, request.top, request.left, size, fill)

        return torch.stack([*self._pool.map(resize, range(len(requests)))])

    def _accelerates(self, request: Request) -> bool:
        stated = request.encoded.width * request.encoded.height
        if self._host.divisor(request) > 1 or max(math.prod(request.size), stated) > self.max_pixels:
            return False  # the host decodes it scaled down, resizes only the visible part, or refuses it
        return is_sound(request.encoded) and request.interpolation in _FILTERS


def is_sound(encoded: Encoded) -> bool:
    """Return whether DALI decodes like Pillow: a complete grey or RGB JPEG with the size that its header states."""
    if encoded.data[:3] != JPEG_MAGIC or encoded.data[-2:] != _JPEG_END:
        return False
    try:
        size = encoded.width, encoded.height
        with pillow_errors(math.prod(size)), Image.open(io.BytesIO(encoded.data), formats=("JPEG",)) as image:
            return image.mode in ("L", "RGB") and image.size == size
    except BadImage:
        return False


def _run(
    requests: Sequence[Request], size: Size, threads: int, device: torch.device, fill: tuple[int, ...] | None
) -> Any:
    """Return DALI's list of images: windows (h, w, 3), or (3, H, W) if it resizes. Raise one of `_FAILURES`. `fill` is
    the colour beyond the images if the pipeline also resizes; None if it only decodes."""
    geometry = np.array([_geometry(request, size) for request in requests], np.int32)
    encoded = [np.frombuffer(request.encoded.data, np.uint8) for request in requests]
    room = 1 << (len(requests) - 1).bit_length()
    with _ONE_AT_A_TIME:
        try:
            (images,) = _pipeline(room, threads, device, fill).run(encoded=encoded, geometry=geometry)
        except _FAILURES:
            _pipeline.cache_clear()  # a pipeline can't be used after a failure
            raise
    return images


def _to_torch(images: Any, device: torch.device) -> Tensor:
    tensor = torch.from_dlpack(images.as_tensor())
    if device.type == "cuda":
        # DALI does not know torch's streams, so we copy its memory and wait before DALI reuses it.
        tensor = tensor.clone()
        torch.cuda.current_stream(device).synchronize()
    return tensor


def _reason(error: Exception) -> str:
    """Return the line of DALI's long message that gives the reason."""
    return str(error).rpartition("encountered:")[2].strip().split("\n")[0]


def _geometry(request: Request, size: Size) -> tuple[int, ...]:
    """Return the pipeline's input for an image: window (y, x, h, w), resized size, filter, output window."""
    x, y, width, height = request.crop or (0, 0, request.encoded.width, request.encoded.height)
    kind = getattr(_dali().types, _FILTERS[request.interpolation])
    return (y, x, height, width, *request.size, int(kind), request.top, request.left, *size)


@functools.lru_cache(4)  # batches of image sizes differ
def _pipeline(room: int, threads: int, device: torch.device, fill: tuple[int, ...] | None) -> Any:
    """Return a pipeline for batches of up to `room` images, which training and validation share. Raise UserError if
    DALI can't start."""
    fn = _dali().fn
    types = _dali().types
    gpu = device.type == "cuda"
    # Threads stay on the cores to which the rank is bound. The GPU's hardware JPEG decoder is off, because which images
    # it gets would depend on the others of the batch.
    only_mixed = {"affine": False, "hw_decoder_load": 0.0} if gpu else {}
    settings = {"batch_size": room, "num_threads": threads, "device_id": device.index if gpu else None}
    pipeline = _dali().Pipeline(**settings, prefetch_queue_depth=1, exec_dynamic=True)
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
            **only_mixed,
        )
        pipeline.set_outputs(images if fill is None else _resized_in_dali(images, geometry, fill))
    try:
        pipeline.build()
    except _FAILURES as error:
        raise UserError(f"DALI can't start on {device}: {_reason(error)}") from error
    return pipeline


def _resized_in_dali(images: Any, geometry: Any, fill: tuple[int, ...]) -> Any:
    fn = _dali().fn
    types = _dali().types
    filters = fn.reinterpret(geometry[6], dtype=types.INTERP_TYPE)
    size = fn.cast(geometry[4:6], dtype=types.FLOAT)
    images = fn.resize(images, size=size, interp_type=filters, antialias=True)
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
