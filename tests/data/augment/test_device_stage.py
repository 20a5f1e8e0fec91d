"""Colour operations and warps against timm's on PIL images; the device stage against PIL: sequences of operations,
normalisation and erasing."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data import auto_augment
from torchvision.transforms import functional as tvf

from tlt import geometry
from tlt.data.augment.counter import uniform
from tlt.data.augment.device_stage import DeviceStage, EvalStage
from tlt.data.augment.operations import DEGENERATES, TABLES, blend, fixed_tables, remap, warp
from tlt.data.augment.plan import BICUBIC, BILINEAR, AugmentConfig, Stream, make_plan
from tlt.data.augment.rand_augment import Kernel, sample_layers
from tlt.io import chunks

GEOMETRIC = {
    Kernel.ROTATE: auto_augment.rotate,
    Kernel.SHEAR_X: auto_augment.shear_x,
    Kernel.SHEAR_Y: auto_augment.shear_y,
    Kernel.TRANSLATE_X: auto_augment.translate_x_rel,
    Kernel.TRANSLATE_Y: auto_augment.translate_y_rel,
}
COLOURS = {
    Kernel.AUTO_CONTRAST: lambda image, _: auto_augment.auto_contrast(image),
    Kernel.EQUALIZE: lambda image, _: auto_augment.equalize(image),
    Kernel.INVERT: lambda image, _: auto_augment.invert(image),
    # timm 1.0.31 crashes at 0 bits with Pillow 13: what is left is black
    Kernel.POSTERIZE: lambda image, bits: (
        auto_augment.posterize(image, int(bits)) if bits > 0 else image.point(lambda _: 0)
    ),
    Kernel.SOLARIZE: lambda image, threshold: auto_augment.solarize(image, int(threshold)),
    Kernel.SOLARIZE_ADD: lambda image, add: auto_augment.solarize_add(image, int(add)),
    Kernel.COLOR: auto_augment.color,
    Kernel.CONTRAST: auto_augment.contrast,
    Kernel.BRIGHTNESS: auto_augment.brightness,
    Kernel.SHARPNESS: auto_augment.sharpness,
}


def run_timm(kernel: int, value: float, image: Image.Image, resample: int = BILINEAR, fill=0) -> Image.Image:
    if kernel in GEOMETRIC:
        return GEOMETRIC[kernel](image, value, resample=Image.Resampling(resample), fillcolor=fill)
    return COLOURS[kernel](image, value)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Blobs with some noise on them (H, W, 3) uint8."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    blobs = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return (blobs + rng.integers(-20, 20, blobs.shape)).clip(0, 255).astype(np.uint8)


def as_batch(images: np.ndarray) -> torch.Tensor:
    """(B, H, W, 3) -> (B, 3, H, W)."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


FACTORS = [0.0, 0.1, 0.19, 0.35, 0.5, 0.77, 1.0, 1.1, 1.37, 1.81, 1.9, 2.6]
ARGUMENTS = dict.fromkeys((Kernel.AUTO_CONTRAST, Kernel.EQUALIZE, Kernel.INVERT), [0.0])
ARGUMENTS |= {Kernel.POSTERIZE: [*range(-1, 10)], Kernel.SOLARIZE: [0, 1, 25, 100, 128, 200, 255, 256]}
ARGUMENTS |= {Kernel.SOLARIZE_ADD: [0, 5, 55, 99, 110, 128]}


def odd_pictures(height: int, width: int) -> np.ndarray:
    """Noise, ramps, low contrast, one colour, blobs and two colours: (6, H, W, 3) uint8."""
    rng = np.random.default_rng(height)
    y, x = np.mgrid[:height, :width]
    ramps = np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (height + width)], axis=-1)
    of_two = np.where((x + y)[..., None] % 3 == 0, [10, 20, 30], [200, 90, 255])
    noise, low, one = rng.integers(0, 256, ramps.shape), rng.integers(60, 180, ramps.shape), np.full(ramps.shape, 77)
    return np.stack([noise, ramps, low, one, picture(height, width), of_two]).astype(np.uint8)


@pytest.mark.parametrize("kernel", list(COLOURS))
@pytest.mark.parametrize("size", [(31, 45), (5, 9), (2, 1)])
def test_colours_are_within_one_grey_level_of_timms(kernel, size):
    images = odd_pictures(*size)
    for argument in ARGUMENTS.get(kernel, FACTORS):
        mine = recoloured(as_batch(images), np.full(6, kernel), np.full(6, float(argument)))
        theirs = np.stack([np.asarray(run_timm(kernel, argument, Image.fromarray(image))) for image in images])
        difference = abs(mine.permute(0, 2, 3, 1).numpy().astype(int) - theirs.astype(int))
        assert difference.max() <= 1, argument
        assert (difference > 0).mean() < 1e-3, argument
    assert [*TABLES, *DEGENERATES] == [k for k in Kernel if Kernel.NONE < k < Kernel.ROTATE] == [*COLOURS]


def recoloured(images: torch.Tensor, kernels: np.ndarray, arguments: np.ndarray) -> torch.Tensor:
    if kernels[0] in TABLES:
        return remap(images, kernels, torch.from_numpy(fixed_tables(kernels, arguments)))
    return blend(images, kernels, torch.from_numpy(arguments))


def maps_of(width: int, height: int) -> list[tuple[Kernel, float, geometry.Affine]]:
    """Geometric layers, with their arguments and their maps."""
    return [
        *[(Kernel.ROTATE, by, geometry.rotate(by, width, height)) for by in (-30.0, -7.0, 0.4, 27.0)],
        *[(Kernel.SHEAR_X, by, geometry.shear_x(by)) for by in (-0.3, 0.11)],
        *[(Kernel.SHEAR_Y, by, geometry.shear_y(by)) for by in (-0.3, 0.11)],
        *[(Kernel.TRANSLATE_X, by, geometry.translate(by * width, 0.0)) for by in (-0.45, 0.405, 0.25)],
        *[(Kernel.TRANSLATE_Y, by, geometry.translate(0.0, by * height)) for by in (-0.45, 0.405, 0.25)],
    ]


@pytest.mark.parametrize("resample", [BILINEAR, BICUBIC])
@pytest.mark.parametrize("size", [(24, 24), (31, 45), (5, 9)])
@pytest.mark.parametrize("how", ["plain", "mirrored", "without doubles"])
def test_warp_is_within_one_grey_level_of_pil(resample, size, how):
    (height, width), source = size, picture(*size)
    image = ImageOps.mirror(Image.fromarray(source)) if how == "mirrored" else Image.fromarray(source)
    for kernel, value, moves in maps_of(width, height):
        theirs = np.asarray(run_timm(kernel, value, image, resample, FILL)).astype(int)
        affine = torch.from_numpy(geometry.compose(moves, geometry.hflip([how == "mirrored"], width)))
        affine = affine.float() if how == "without doubles" else affine  # as on Apple's GPUs
        mine = warp(as_batch(source[None]), np.array([resample]), affine, FILL)[0].permute(1, 2, 0).numpy()
        # Elsewhere a sampling point on a pixel's exact edge may fall on its other side.
        allowed = {"plain": 1e-9, "mirrored": 1e-3, "without doubles": 0.02}[how]
        assert (abs(mine.astype(int) - theirs) > 1).mean() < allowed, (kernel, value)


FILL = (124, 116, 104)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pictures(count: int, size: tuple[int, int]) -> np.ndarray:
    return np.stack([picture(*size, seed) for seed in range(count)])


def planned(config: AugmentConfig, indices: int | list[int]):
    return make_plan(config, 3, 0, np.arange(indices) if isinstance(indices, int) else indices, 50, 40)


def run(config: AugmentConfig, images: np.ndarray) -> torch.Tensor:
    return DeviceStage(config, MEAN, STD)(as_batch(images), planned(config, len(images)))


def levels(images: torch.Tensor) -> np.ndarray:
    """Normalised images back to grey levels (B, H, W, 3)."""
    restored = images * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    return (restored * 255).round().int().permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("remode", ["const", "rand", "pixel"])
def test_sample_depends_neither_on_batch_nor_on_chunk(monkeypatch, remode):
    config = AugmentConfig((16, 20), auto_augment="rand-n3-m9-mstd0.5-inc1-p0.9", reprob=0.6, recount=2, remode=remode)
    images = pictures(40, (16, 20))
    together = run(config, images)
    stage, batch = DeviceStage(config, MEAN, STD), as_batch(images)
    for row in range(40):
        assert torch.equal(stage(batch[row : row + 1], planned(config, [row]))[0], together[row])
    assert torch.equal(batch, as_batch(images))
    monkeypatch.setattr(chunks, "_CPU_NUMBERS", 1)  # one image after the other
    assert torch.equal(run(config, images), together)


@pytest.mark.parametrize("text, size", [("rand-m9-mstd0.5-inc1-p0.9", (32, 32)), ("rand-m7-mstd101-p0.9", (28, 44))])
def test_whole_sequences_equal_pil_step_by_step(text, size):
    """Flip, then two layers, of which at most one is geometric: two are interpolated once, not twice."""
    config = AugmentConfig(size, auto_augment=text, color_jitter=None, vflip=0.3, reprob=0.0)
    plan, policy = planned(config, 300), config.policy
    kernels, values = sample_layers(policy, uniform(3, 0, np.arange(300), Stream.RAND_AUGMENT, policy.uniforms))
    flips = uniform(3, 0, np.arange(300), Stream.FLIP, 2) < np.array([config.hflip, config.vflip])
    sources, orders = pictures(300, size), set()
    mine = levels(run(config, sources))
    for row in np.flatnonzero(~(kernels >= Kernel.ROTATE).all(axis=1)):
        steps = [(int(k), float(v)) for k, v in zip(kernels[row], values[row], strict=True) if k]
        geometric = tuple(kernel >= Kernel.ROTATE for kernel, _ in steps)
        image = Image.fromarray(sources[row])
        image = ImageOps.mirror(image) if flips[row, 0] else image
        image = ImageOps.flip(image) if flips[row, 1] else image
        for kernel, value in steps:
            image = run_timm(kernel, value, image, int(plan.warp_interpolation[row]), FILL)
        difference = abs(mine[row] - np.asarray(image).astype(int))
        orders.add(geometric)
        # A level's difference in the warp can become more where a later operation stretches contrasts.
        assert (difference > 1).mean() < (5e-3 if geometric[:1] == (True,) else 1e-9), (row, steps)
    assert len(orders) == 6


def test_normalisation_is_torchvisions_and_wrong_images_refused():
    source = picture(8, 12)
    expected = tvf.normalize(tvf.to_tensor(Image.fromarray(source)), MEAN, STD)
    assert torch.allclose(EvalStage(MEAN, STD)(as_batch(source[None]))[0], expected, atol=1e-6)
    with pytest.raises(ValueError, match="2 planned images"):
        DeviceStage(AugmentConfig((32, 48)), MEAN, STD)(as_batch(source[None]), planned(AugmentConfig((32, 48)), 2))


@pytest.mark.parametrize("remode", ["const", "rand", "pixel"])
@pytest.mark.parametrize("recount", [1, 3])
def test_erasing_fills_the_planned_boxes_and_nothing_else(remode, recount):
    options = {"auto_augment": None, "color_jitter": None, "hflip": 0.0}
    config = AugmentConfig((32, 48), reprob=0.8, recount=recount, remode=remode, **options)
    sources = pictures(64, (32, 48))
    images, clean = run(config, sources), EvalStage(MEAN, STD)(as_batch(sources))
    box_of, colours = torch.full((64, 32, 48), -1), []
    for row, boxes in enumerate(planned(config, 64).erase.tolist()):
        for number, (top, left, h, w) in enumerate(boxes):  # later boxes win
            box_of[row, top : top + h, left : left + w] = number
        colours += [images[row][:, box_of[row] == number] for number in box_of[row].unique() if number >= 0]
    inside = (box_of >= 0)[:, None].expand(-1, 3, -1, -1)
    assert torch.equal(images[~inside], clean[~inside])
    erased = images[inside]
    if remode == "const":
        assert not erased.any()
        return
    tolerance = 0.02 if remode == "pixel" else 0.3
    assert abs(erased.mean()) < tolerance and abs(erased.std() - 1) < tolerance
    if remode == "rand":  # one colour a box
        assert all((colour == colour[:, :1]).all() for colour in colours)
        assert len(torch.stack([colour[:, 0] for colour in colours]).unique()) == 3 * len(colours) > 100
