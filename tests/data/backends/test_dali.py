"""DALI on the CPU: the torchvision backend's pixels and bad images. What dali-gpu runs in DALI is also run on the CPU
here (`graph`): its windows against Pillow's, its filter against a float64 one."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.backends.test_decode import picture
from tlt.data.augment.index_stream import IndexStream
from tlt.data.augment.plan import AugmentConfig
from tlt.data.backends import dali
from tlt.data.backends.choice import create_backend
from tlt.data.backends.dali import DaliBackend, is_sound
from tlt.data.backends.decode import Backend, Encoded, PilBackend, Request, TorchvisionBackend
from tlt.data.batch import Batch
from tlt.data.dataset import EvalDataset, TrainDataset
from tlt.data.loader import EvalLoader, SkipCounter, TrainLoader
from tlt.data.sources.folder import ImageFolder, scan_folder
from tlt.data.sources.image_file import BadImage
from tlt.errors import UserError

pytest.importorskip("nvidia.dali", reason="the extra dali")

CROPS = [(0, 0, 96, 72), (31, 21, 50, 41), (5, 3, 7, 60), (40, 30, 1, 1), (0, 0, 96, 1), (95, 71, 1, 1)]
JPEGS: dict[str, dict[str, object]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 3},
    "rgb": {"keep_rgb": True, "subsampling": 0},
    "exif": {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"},  # a quarter turn
}


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> Encoded:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return Encoded("x", bytearray(buffer.getvalue()), *image.size)


def shown(
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
@pytest.mark.parametrize("kind", [*JPEGS, "gray"])
def test_decoded_windows_are_pillows(kind: str, make: Callable[[], DaliBackend]) -> None:
    image = encoded(picture().convert("L") if kind == "gray" else picture(), **JPEGS.get(kind, {}))
    for x, y, width, height in CROPS:
        request = Request(image, (x, y, width, height), (height, width), "bilinear")
        assert is_sound(image)
        theirs = shown(PilBackend(), [request], request.size)
        assert torch.equal(shown(make(), [request], request.size), theirs)


def weights(source: int, target: int, cubic: bool) -> np.ndarray:
    """(target, source) antialiased: what lies beyond an edge counts as the edge's pixel."""
    scale = max(source / target, 1)
    reach = np.arange(-4 * int(scale + 1), source + 4 * int(scale + 1))
    x = np.abs((reach + 0.5 - ((np.arange(target) + 0.5) * source / target)[:, None]) / scale)
    a = -0.5
    inner, outer = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
    kernel = np.where(x < 1, inner, np.where(x < 2, outer, 0)) if cubic else np.maximum(0, 1 - x)
    kernel /= kernel.sum(1, keepdims=True)
    return np.stack([kernel[:, reach.clip(0, source - 1) == pixel].sum(1) for pixel in range(source)], axis=1)


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_the_graphs_resizing_is_the_antialiased_filter(name: str) -> None:
    image = encoded(picture())
    pixels = np.asarray(Image.open(io.BytesIO(image.data)), np.float64)
    for crop, size in itertools.product(CROPS, ((32, 32), (50, 41), (17, 90), (120, 160))):
        x, y, width, height = crop
        window = pixels[y : y + height, x : x + width]
        rows, columns = weights(height, size[0], name == "bicubic"), weights(width, size[1], name == "bicubic")
        exact = (rows @ window.transpose(2, 0, 1) @ columns.T).clip(0, 255)
        ours = shown(graph(), [Request(image, crop, size, name)], size)[0].numpy()
        assert abs(ours - exact).max() < 0.55


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_the_graphs_resizing_is_within_a_grey_level_of_pillow_but_at_the_edges(name: str) -> None:
    """There DALI repeats the edge's pixel, and Pillow goes without what lies beyond."""
    image = encoded(picture(500, 375), quality=90)
    crops = [(0, 0, 500, 375), (13, 21, 200, 150), (100, 50, 301, 250)]
    requests = [Request(image, crop, (64, 96), name) for crop in crops]
    apart = (shown(graph(), requests, (64, 96)) - shown(PilBackend(), requests, (64, 96))).abs()
    inner = apart[:, :, 2:-2, 2:-2]
    assert (inner > 1).float().mean() < 1e-4 and inner.max() <= 2
    assert apart.max() <= 12 and (apart > 1).float().mean() < 0.02


@MAKERS
def test_a_batch_of_everything_in_its_order(make: Callable[[], DaliBackend]) -> None:
    """Own filters, sizes and windows; what DALI would not decode exactly comes from the host."""
    base = picture()
    files = [
        encoded(base),
        encoded(base, "PNG"),
        encoded(picture(33, 120), subsampling=2),
        encoded(base.convert("CMYK")),
        encoded(base.convert("L")),
        encoded(picture(1, 90)),
        encoded(base, "WEBP"),
    ]
    requests = [
        Request(
            image, None, (30 + 3 * row, 50 - 4 * row), ("bilinear", "bicubic", "lanczos")[row % 3], -5 + 3 * row, row
        )
        for row, image in enumerate(files)
    ]
    assert [is_sound(request.encoded) for request in requests] == [True, False, True, False, True, True, False]
    ours = shown(make(), requests, (40, 36), (9, 80, 200))
    theirs = shown(TorchvisionBackend(), requests, (40, 36), (9, 80, 200))
    if make is DaliBackend:
        assert torch.equal(ours, theirs)
    assert ((ours - theirs).abs() > 1).float().mean() < 0.03 and (ours - theirs).abs().max() < 25
    fill = torch.tensor([9, 80, 200])[:, None, None]
    outside = (theirs == fill).all(1, keepdim=True)
    assert outside[0].any() and torch.equal(ours * outside, theirs * outside)
    for row, request in enumerate(requests):
        assert torch.equal(shown(make(), [request], (40, 36), (9, 80, 200))[0], ours[row])


def damaged() -> dict[str, bytearray]:
    """Images that are bad, and some that only look so, by what was done to them."""
    whole = encoded(picture(), quality=90).data
    several = encoded(picture(), progressive=True).data
    scan = whole.index(b"\xff\xda")
    table = whole.index(b"\xff\xc4")
    middle = (scan + len(whole)) // 2
    return {
        "cut": whole[:middle],
        "cut, end marker": whole[:middle] + b"\xff\xd9",
        "no end marker": whole[:-2],
        "more behind its end": whole + b"more",
        "another marker in the scan": whole[:middle] + b"\xff\x4a" + whole[middle:],
        "another scan's end": several[: len(several) // 2] + b"\xff\xd9",
        "no tables": whole[:table] + whole[scan:],
        "huge table": whole[: table + 5] + b"\xff\xff\xff" + whole[table + 8 :],
        "scan of other components": whole[: scan + 4] + b"\x02" + whole[scan + 5 :],
        "noise in the scan": whole[:middle] + b"\x12\x34\x56\x78" + whole[middle + 4 :],
        "no scan": whole[:scan] + b"\xff\xd9",
    }


@MAKERS
def test_fault_24_bad_images_are_torchvisions(make: Callable[[], DaliBackend]) -> None:
    good = encoded(picture())
    files = [good, *(Encoded(name, data, 96, 72) for name, data in damaged().items()), good]
    requests = [Request(image, None, (72, 96), "bilinear") for image in files]
    ours, theirs = (backend.decode_batch(requests, (72, 96)) for backend in (make(), TorchvisionBackend()))
    assert {row: str(error) for row, error in ours.bad.items()} == {
        row: str(error) for row, error in theirs.bad.items()
    }
    assert 3 <= len(theirs.bad) < len(files) - 3
    for row in set(range(len(files))) - set(theirs.bad):
        assert torch.equal(ours.images[row], theirs.images[row]), files[row].path


def randomly_damaged(count: int) -> list[Encoded]:
    """Bytes changed, left out or put in, the end marker kept, of what can still be opened."""
    rng = np.random.default_rng(0)
    kinds = [{"subsampling": 2}, {"progressive": True}, {"restart_marker_blocks": 2}, {"optimize": True}]
    whole, found = [encoded(picture(), **options).data for options in kinds], []
    while len(found) < count:
        data = bytearray(whole[len(found) % len(whole)])
        at, some = int(rng.integers(2, len(data) - 2)), bytes(rng.integers(0, 256, rng.integers(1, 30), np.uint8))
        damage = int(rng.integers(4))
        if damage < 2:
            data[at : min(at + (len(some), 1)[damage], len(data) - 2)] = some[: (len(some), 1)[damage]]
        elif damage == 2:
            del data[at : min(at + 9 * len(some), len(data) - 2)]
        else:
            data[at:at] = b"\xff" + some
        with contextlib.suppress(BadImage):
            found.append(PilBackend(1_000_000).open("x", data))
    return found


def test_fault_26_damage_at_random_is_judged_as_torchvision_does() -> None:
    images = randomly_damaged(300)
    requests = [Request(image, None, (16, 16), "bilinear") for image in images]
    ours, theirs = (backend.decode_batch(requests, (16, 16)) for backend in (DaliBackend(), TorchvisionBackend()))
    assert ours.bad.keys() == theirs.bad.keys() and 30 < len(ours.bad) < 270
    assert 100 < sum(map(is_sound, images)) < 290


def test_fault_24_a_size_that_is_not_the_headers_is_bad() -> None:
    image = encoded(picture())
    other = Encoded("x", image.data, 95, 72)
    with pytest.raises(BadImage, match="differs from the header"):
        DaliBackend().decode(other, None, (8, 8), "bilinear")


@pytest.fixture
def fails_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[str]], list[int]]:
    """Let pipelines fail at images of some names; returns the sizes of the runs."""

    def fail(names: set[str]) -> list[int]:
        runs: list[int] = []
        build = dali._build

        class Failing:
            def __init__(self, *args: object) -> None:
                self.pipeline = build(*args)  # type: ignore[arg-type]
                self.used_up = False

            def run(self, encoded: list[np.ndarray], geometry: np.ndarray) -> object:
                assert not self.used_up, "a pipeline that has failed was run"
                runs.append(len(encoded))
                if any(bytes(data[-4:]) == name.encode() for data in encoded for name in names):
                    self.used_up = True
                    raise RuntimeError("Critical error in pipeline:\nencountered:\n\nfailed here\nmore")
                return self.pipeline.run(encoded=encoded, geometry=geometry)

        monkeypatch.setattr(dali, "_build", Failing)
        dali._pipeline.cache_clear()
        return runs

    yield fail
    dali._pipeline.cache_clear()


def named(count: int) -> list[Request]:
    """Images with their number behind their end."""
    data = encoded(picture()).data
    images = [Encoded(f"{number:04d}", data + f"{number:04d}".encode(), 96, 72) for number in range(count)]
    return [Request(image, (number, 0, 50, 60), (20, 24), "bilinear") for number, image in enumerate(images)]


def test_an_image_that_only_the_host_decodes_costs_no_other(fails_at: Callable[[set[str]], list[int]]) -> None:
    requests = named(8)
    whole = shown(DaliBackend(), requests, (20, 24))
    runs = fails_at({"0005"})
    ours = shown(DaliBackend(), requests, (20, 24))
    assert runs == [8] + 8 * [1]
    assert torch.equal(ours[5], shown(TorchvisionBackend(), requests[5:6], (20, 24))[0])
    others = [row for row in range(8) if row != 5]
    assert torch.equal(ours[others], whole[others])


@MAKERS
def test_batches_grow_and_shrink(make: Callable[[], DaliBackend], fails_at: Callable[[set[str]], list[int]]) -> None:
    backend, runs = make(), fails_at(set())
    requests = named(9)
    alone = torch.cat([shown(backend, [request], (20, 24)) for request in requests])
    for count in (3, 1, 9, 0, 2):
        assert torch.equal(shown(backend, requests[:count], (20, 24)), alone[:count])
    assert runs == [1] * 9 + [3, 1, 9, 2]


def test_a_pipeline_that_can_do_nothing_is_told(fails_at: Callable[[set[str]], list[int]]) -> None:
    fails_at({f"{number:04d}" for number in range(4)})
    with pytest.raises(UserError, match="--data-backend dali-cpu: DALI fails at images that are fine: failed here$"):
        DaliBackend().decode_batch(named(4), (20, 24))


@pytest.fixture
def folder(tmp_path: Path) -> ImageFolder:
    for number in range(20):
        path = tmp_path / "train" / f"c{number % 2}" / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(60 + number, 50).save(path)
        if number in (6, 7):
            path.write_bytes(path.read_bytes()[:600])
        if number == 9:
            picture(40, 40).save(path, "PNG")
    return scan_folder(tmp_path / "train")


@pytest.mark.parametrize("workers", [0, 3])
def test_training_batches_are_those_of_other_backends(folder: ImageFolder, workers: int) -> None:
    config = AugmentConfig(size=(24, 24), auto_augment="rand-m9-mstd0.5-inc1")

    def epochs(backend: Backend, workers: int) -> list[tuple[torch.Tensor, ...]]:
        skips = SkipCounter(20)
        training = TrainLoader(
            TrainDataset(folder, config, 3, backend=backend),
            IndexStream(20, 5, 3),
            lambda images, plan: images,
            workers=workers,
            skips=skips,
        )
        found = [batch for epoch in (0, 1) for _, _, batch in training.epoch(epoch)]
        assert skips.total == 2
        return [(batch.indices, batch.affine, batch.visible, batch.images) for batch in found]

    for ours, theirs in zip(epochs(DaliBackend(threads=2), workers), epochs(TorchvisionBackend(), 0), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_evaluation_shows_what_other_backends_do(folder: ImageFolder) -> None:
    def batches(backend: Backend, crop_pct: float, crop_mode: str) -> list[Batch]:
        dataset = EvalDataset(folder, (24, 24), crop_pct, crop_mode, backend=backend)
        workers = 2 if backend.has_threads else 0
        return list(EvalLoader(dataset, 7, lambda images: images, workers=workers, skips=SkipCounter(20)))

    for crop_pct, crop_mode in ((0.9, "center"), (1.15, "center"), (1.0, "squash"), (0.95, "border")):
        ours, theirs = (batches(backend, crop_pct, crop_mode) for backend in (DaliBackend(), TorchvisionBackend()))
        assert sum(batch.size for batch in ours) == 18
        for batch, wanted in zip(ours, theirs, strict=True):
            assert torch.equal(batch.indices, wanted.indices) and torch.equal(batch.images, wanted.images)


def test_missing_dali_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvidia.dali", None)
    dali._dali.cache_clear()
    for cuda, extra in (("13.0", "dali"), ("12.8", "dali-cuda12"), (None, "dali")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        dali._dali.cache_clear()
        with pytest.raises(UserError, match=rf"nvidia.dali is not installed: pip install 'volo-tlt\[{extra}\]'"):
            create_backend("dali-cpu")
    dali._dali.cache_clear()


def test_dali_gpu_needs_a_gpu() -> None:
    with pytest.raises(UserError, match="dali-gpu needs a CUDA device, this is cpu: use dali-cpu"):
        create_backend("dali-gpu", device="cpu")


@pytest.mark.gpu
def test_on_a_gpu_images_stay_there(folder: ImageFolder) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = create_backend("dali-gpu", threads=2, device=device)

    def epoch(backend: Backend, workers: int, ahead: bool) -> list[Batch]:
        training = TrainLoader(
            TrainDataset(folder, AugmentConfig(size=(24, 24)), 3, backend=backend),
            IndexStream(20, 5, 3),
            lambda images, plan: images,
            device,
            workers,
            pin_memory=True,
            prefetch=ahead,
        )
        return [batch for _, _, batch in training.epoch(0)]

    for workers, ahead in itertools.product((0, 3), (False, True)):
        for ours, theirs in zip(epoch(gpu, workers, ahead), epoch(DaliBackend(), workers, ahead), strict=True):
            assert ours.images.device == theirs.images.device == device and torch.equal(ours.indices, theirs.indices)
            # nvJPEG rounds otherwise, and spreads colours otherwise.
            assert (ours.images.float() - theirs.images.float()).abs().mean() < 2
