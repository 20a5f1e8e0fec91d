"""DALI on the CPU: the torchvision backend's pixels and bad images. What dali-gpu runs in DALI is also run on the CPU
here (`graph`): its windows are Pillow's, and what it resizes is close to torchvision's."""

import functools
from collections.abc import Sequence
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.conftest import SOUND_JPEGS, picture
from tests.data.conftest import encoded as file_of
from tlt.data.backends import create_backend, dali
from tlt.data.backends.dali import DaliBackend, is_sound
from tlt.data.backends.decode import Backend, Encoded, PilBackend, Request, TorchvisionBackend
from tlt.errors import UserError

pytestmark = pytest.mark.skipif(find_spec("nvidia.dali") is None, reason="the extra dali")

CROPS = [(0, 0, 96, 72), (31, 21, 50, 41), (5, 3, 7, 60), (40, 30, 1, 1), (0, 0, 96, 1), (95, 71, 1, 1)]


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> Encoded:
    return Encoded("x", bytearray(file_of(image, kind, **options)), *image.size)


def decoded_images(
    backend: Backend, requests: Sequence[Request], size: tuple[int, int], fill: Sequence[int] = (0, 0, 0)
) -> torch.Tensor:
    decoded = backend.decode_batch(requests, size, fill)
    assert not decoded.bad and decoded.images.dtype == torch.uint8 and decoded.images.shape == (len(requests), 3, *size)
    assert decoded.images.is_contiguous()
    return decoded.images.int()


def graph() -> DaliBackend:
    """What dali-gpu runs, on the CPU."""
    backend = DaliBackend()
    backend.resizes = True
    return backend


MAKERS = pytest.mark.parametrize("make", [DaliBackend, graph])


@MAKERS
def test_decoded_windows_are_pillows(make):
    for content in SOUND_JPEGS.values():
        image = Encoded("x", bytearray(content), 96, 72)
        assert is_sound(image)
        for x, y, width, height in CROPS:
            request = Request(image, (x, y, width, height), (height, width), "bilinear")
            theirs = decoded_images(PilBackend(), [request], request.size)
            assert torch.equal(decoded_images(make(), [request], request.size), theirs)


@MAKERS
def test_a_batch_of_everything_in_its_order(make):
    """Own filters, sizes and windows; what DALI would not decode exactly comes from the host."""
    base = picture()
    files = [encoded(base), encoded(base, "PNG"), encoded(picture(33, 120), subsampling=2)]
    files += [encoded(base.convert("CMYK")), encoded(base.convert("L")), encoded(picture(1, 90)), encoded(base, "WEBP")]
    requests = []
    for row, image in enumerate(files):
        kind = ("bilinear", "bicubic", "lanczos")[row % 3]
        requests.append(Request(image, None, (30 + 3 * row, 50 - 4 * row), kind, -5 + 3 * row, row))
    assert [is_sound(request.encoded) for request in requests] == [True, False, True, False, True, True, False]
    ours = decoded_images(make(), requests, (40, 36), (9, 80, 200))
    theirs = decoded_images(TorchvisionBackend(), requests, (40, 36), (9, 80, 200))
    if make is DaliBackend:
        assert torch.equal(ours, theirs)
    assert ((ours - theirs).abs() > 1).float().mean() < 0.03 and (ours - theirs).abs().max() < 25
    fill = torch.tensor([9, 80, 200])[:, None, None]
    outside = (theirs == fill).all(1, keepdim=True)
    assert outside[0].any() and torch.equal(ours * outside, theirs * outside)
    for row, request in enumerate(requests):
        assert torch.equal(decoded_images(make(), [request], (40, 36), (9, 80, 200))[0], ours[row])


def named(count: int) -> list[Request]:
    """Images with their number in a comment at their end."""
    data = encoded(picture()).data[:-2]
    ends = [b"\xff\xfe\0\6%04d\xff\xd9" % number for number in range(count)]
    images = [Encoded(f"{number:04d}", data + end, 96, 72) for number, end in enumerate(ends)]
    return [Request(image, (number, 0, 50, 60), (20, 24), "bilinear") for number, image in enumerate(images)]


def test_an_image_that_only_the_host_decodes_costs_no_other(monkeypatch):
    names, runs, build = {b"0005"}, list[int](), dali._pipeline.__wrapped__

    def failing(*args: object) -> object:
        """A pipeline that fails at images of some names, and can't be run from then on."""
        pipeline, used_up = build(*args), list[bool]()

        def run(encoded: list[np.ndarray], geometry: np.ndarray) -> object:
            assert not used_up, "a pipeline that has failed was run"
            runs.append(len(encoded))
            if any(bytes(data[-6:-2]) in names for data in encoded):
                used_up.append(True)
                raise RuntimeError("Critical error in pipeline:\nencountered:\n\nfailed here\nmore")
            return pipeline.run(encoded=encoded, geometry=geometry)

        return SimpleNamespace(run=run)

    requests = named(8)
    whole = decoded_images(DaliBackend(), requests, (20, 24))
    monkeypatch.setattr(dali, "_pipeline", functools.lru_cache(2)(failing))
    ours = decoded_images(DaliBackend(), requests, (20, 24))
    assert runs == [8] + 8 * [1]
    assert torch.equal(ours[5], decoded_images(TorchvisionBackend(), requests[5:6], (20, 24))[0])
    others = [row for row in range(8) if row != 5]
    assert torch.equal(ours[others], whole[others])
    names |= {b"%04d" % number for number in range(8)}
    dali._pipeline.cache_clear()
    with pytest.raises(UserError, match="--data-backend dali-cpu: DALI fails at images that are fine: failed here$"):
        DaliBackend().decode_batch(requests, (20, 24))


def test_missing_dali_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nvidia.dali", None)
    dali._dali.cache_clear()
    with pytest.raises(UserError, match="dali-gpu needs a CUDA device, this is cpu: use dali-cpu"):
        create_backend("dali-gpu", device="cpu")
    for cuda, extra in (("13.0", "dali"), ("12.8", "dali-cuda12")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        dali._dali.cache_clear()
        with pytest.raises(UserError, match=rf"nvidia.dali is not installed: pip install '.*\[{extra}\]'"):
            create_backend("dali-cpu")
    dali._dali.cache_clear()


@pytest.mark.gpu(stand_in=False)
def test_on_a_gpu_images_stay_there():
    device = torch.device("cuda", torch.cuda.current_device())
    requests = named(8)
    ours, theirs = (
        create_backend(name, threads=2, device=device).decode_batch(requests, (20, 24)).images
        for name in ("dali-gpu", "dali-cpu")
    )
    assert ours.device == device and (ours.cpu().float() - theirs.float()).abs().mean() < 2  # nvJPEG rounds otherwise
