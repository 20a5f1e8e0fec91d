"""The device stage against PIL: warps, sequences of operations, normalisation and erasing."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data import auto_augment
from torchvision.transforms import functional as tvf

from tlt import geometry
from tlt.data.augment import on_device
from tlt.data.augment.counter import keys, uniform
from tlt.data.augment.device_stage import DeviceStage, EvalStage, line_axes
from tlt.data.augment.erase import hash_words, normal_noise
from tlt.data.augment.plan import BICUBIC, BILINEAR, AugmentConfig, Stream, make_plan
from tlt.data.augment.rand_augment import Kernel, sample_layers
from tlt.data.augment.warp import LineAxis, warp

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FILL = (124, 116, 104)
SIZES = [(24, 24), (40, 28), (31, 45), (5, 9)]


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Blobs with some noise on them (H, W, 3) uint8."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    blobs = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return (blobs + rng.integers(-20, 20, blobs.shape)).clip(0, 255).astype(np.uint8)


def as_batch(*images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def levels(images: torch.Tensor) -> np.ndarray:
    """Normalised images back to grey levels (B, H, W, 3)."""
    restored = images * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    return (restored * 255).round().int().permute(0, 2, 3, 1).numpy()


def run_pil(kernel: int, value: float, image: Image.Image, resample: int) -> Image.Image:
    """One layer as timm runs it."""
    options = {"resample": resample, "fillcolor": FILL}
    functions = {
        Kernel.AUTO_CONTRAST: lambda: auto_augment.auto_contrast(image),
        Kernel.EQUALIZE: lambda: auto_augment.equalize(image),
        Kernel.INVERT: lambda: auto_augment.invert(image),
        Kernel.POSTERIZE: lambda: auto_augment.posterize(image, int(value)) if value else image.point(lambda _: 0),
        Kernel.SOLARIZE: lambda: auto_augment.solarize(image, int(value)),
        Kernel.SOLARIZE_ADD: lambda: auto_augment.solarize_add(image, int(value)),
        Kernel.COLOR: lambda: auto_augment.color(image, value),
        Kernel.CONTRAST: lambda: auto_augment.contrast(image, value),
        Kernel.BRIGHTNESS: lambda: auto_augment.brightness(image, value),
        Kernel.SHARPNESS: lambda: auto_augment.sharpness(image, value),
        Kernel.ROTATE: lambda: auto_augment.rotate(image, value, **options),
        Kernel.SHEAR_X: lambda: auto_augment.shear_x(image, value, **options),
        Kernel.SHEAR_Y: lambda: auto_augment.shear_y(image, value, **options),
        Kernel.TRANSLATE_X: lambda: auto_augment.translate_x_rel(image, value, **options),
        Kernel.TRANSLATE_Y: lambda: auto_augment.translate_y_rel(image, value, **options),
    }
    return functions[Kernel(kernel)]()


GEOMETRY = {
    Kernel.ROTATE: [-30.0, -7.0, 0.4, 27.0],
    Kernel.SHEAR_X: [-0.3, 0.11],
    Kernel.SHEAR_Y: [0.3, -0.11],
    Kernel.TRANSLATE_X: [-0.45, 0.405, 0.25],
    Kernel.TRANSLATE_Y: [0.45, -0.405, 0.25],
}


def a_map(kernel: int, value: float, width: int, height: int) -> geometry.Affine:
    maps = {
        Kernel.ROTATE: lambda: geometry.rotate(value, width, height),
        Kernel.SHEAR_X: lambda: geometry.shear_x(value),
        Kernel.SHEAR_Y: lambda: geometry.shear_y(value),
        Kernel.TRANSLATE_X: lambda: geometry.translate(value * width, 0.0),
        Kernel.TRANSLATE_Y: lambda: geometry.translate(0.0, value * height),
    }
    return maps[Kernel(kernel)]()


@pytest.mark.parametrize("resample", [BILINEAR, BICUBIC])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mirrored", [False, True])
def test_warp_is_within_one_grey_level_of_pil(resample, size, mirrored):
    height, width = size
    source = picture(height, width)
    for kernel, values in GEOMETRY.items():
        for value in values:
            image = Image.fromarray(source)
            theirs = np.asarray(run_pil(kernel, value, ImageOps.mirror(image) if mirrored else image, resample))
            affine = geometry.compose(a_map(kernel, value, width, height), geometry.hflip([mirrored], width))
            mine = warp(as_batch(source), torch.from_numpy(affine), FILL, cubic=resample == BICUBIC)
            difference = abs(mine[0].permute(1, 2, 0).numpy().astype(int) - theirs.astype(int))
            # A mirrored sampling point on a pixel's exact edge may fall on its other side.
            assert (difference > 1).mean() < (1e-3 if mirrored else 1e-9), (kernel, value)


def test_devices_without_doubles_warp_nearly_as_pil():
    source = picture(40, 28)
    for value in (-30.0, 0.4, 27.0):
        theirs = np.asarray(run_pil(Kernel.ROTATE, value, Image.fromarray(source), BICUBIC))
        single = torch.from_numpy(a_map(Kernel.ROTATE, value, 28, 40)).float()
        mine = warp(as_batch(source), single, FILL, cubic=True)[0].permute(1, 2, 0).numpy()
        assert (abs(mine.astype(int) - theirs.astype(int)) > 1).mean() < 1e-3


@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize("size", [(31, 45), (3, 2)])
def test_naming_the_axis_of_moved_lines_changes_no_result(cubic, size):
    plan, _, _ = planned(AugmentConfig(size, auto_augment="rand-m9-mstd0.5-p1.0", hflip=0.0, reprob=0.0), 60)
    images, axes = as_batch(*[picture(*size, seed) for seed in range(60)]), line_axes(plan.warp)
    for axis in LineAxis:
        rows = torch.from_numpy(axes == axis)
        assert rows.any()
        maps = torch.from_numpy(plan.warp)[rows]
        assert torch.equal(
            warp(images[rows], maps, FILL, cubic=cubic, axis=axis), warp(images[rows], maps, FILL, cubic=cubic)
        )


@pytest.mark.parametrize("remode", ["const", "rand", "pixel"])
def test_how_many_images_are_worked_on_at_once_changes_nothing(monkeypatch, remode):
    config = AugmentConfig((16, 20), auto_augment="rand-n3-m9-mstd0.5-inc1-p0.9", reprob=0.6, recount=2, remode=remode)
    plan, _, _ = planned(config, 40)
    batch = as_batch(*[picture(16, 20, seed) for seed in range(40)])
    results = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for pixels, at_once in ((1, 1), (3 * 16 * 20, 6), (40 * 16 * 20, 80)):
        monkeypatch.setattr(on_device, "_CACHED_PIXELS", pixels)
        assert on_device.portion(batch) == at_once
        results.append(DeviceStage(config, MEAN, STD)(batch, plan))
    monkeypatch.setattr(on_device, "in_small_pieces", lambda device: False)  # as on a GPU
    results.append(DeviceStage(config, MEAN, STD)(batch, plan))
    assert all(torch.equal(results[0], other) for other in results[1:])


def planned(config: AugmentConfig, count: int, seed: int = 3):
    """A plan of `count` images and the layers and flips behind it, drawn apart."""
    indices = np.arange(count)
    plan = make_plan(config, seed, 0, indices, 50, 40)
    policy = config.policy
    layers = ((), ())
    if policy is not None:
        layers = sample_layers(policy, uniform(seed, 0, indices, Stream.RAND_AUGMENT, policy.uniforms))
    return plan, layers, uniform(seed, 0, indices, Stream.FLIP, 2) < np.array([config.hflip, config.vflip])


@pytest.mark.parametrize("text", ["rand-m9-mstd0.5-inc1-p0.9", "rand-m7-mstd101-p0.9"])
@pytest.mark.parametrize("size", [(32, 32), (28, 44)])
def test_whole_sequences_equal_pil_step_by_step(text, size):
    """Flip, then two layers, for plans with at most one geometric operation (two are interpolated once, not twice)."""
    config = AugmentConfig(size, auto_augment=text, color_jitter=None, vflip=0.3, reprob=0.0)
    count = 300
    plan, (kernels, values), flips = planned(config, count)
    sources = [picture(*size, seed) for seed in range(count)]
    mine = levels(DeviceStage(config, MEAN, STD)(as_batch(*sources), plan))
    compared, orders = 0, set()
    for row in range(count):
        steps = [(int(k), float(v)) for k, v in zip(kernels[row], values[row], strict=True) if k]
        geometric = [kernel >= Kernel.ROTATE for kernel, _ in steps]
        if sum(geometric) > 1:
            continue
        image = Image.fromarray(sources[row])
        image = ImageOps.mirror(image) if flips[row, 0] else image
        image = ImageOps.flip(image) if flips[row, 1] else image
        for kernel, value in steps:
            image = run_pil(kernel, value, image, int(plan.warp_interpolation[row]))
        difference = abs(mine[row] - np.asarray(image).astype(int))
        # A level's difference in the warp can become more where a later operation stretches contrasts.
        assert (difference > 1).mean() < (5e-3 if geometric[:1] == [True] else 1e-9), (row, steps)
        compared, orders = compared + 1, orders | {tuple(geometric)}
    assert compared > 150 and orders == {(), (True,), (False,), (True, False), (False, True), (False, False)}


def test_two_geometric_operations_show_what_the_composed_map_says():
    """A smooth image warped twice by PIL differs by the second interpolation only, away from filled regions."""
    y, x = np.mgrid[:64, :64]
    source = np.stack([x * 3 + 20, y * 3 + 20, x + y + 40], axis=-1).astype(np.uint8)
    config = AugmentConfig((64, 64), auto_augment="rand-m2-p1.0", hflip=0.5, reprob=0.0, interpolation="bilinear")
    plan, (kernels, values), flips = planned(config, 400)
    mine = levels(DeviceStage(config, MEAN, STD)(as_batch(*[source] * 400), plan))
    both = np.flatnonzero((kernels >= Kernel.ROTATE).all(axis=1))
    assert len(both) > 20
    for row in both:
        image = Image.fromarray(source)
        image = ImageOps.mirror(image) if flips[row, 0] else image
        for kernel, value in zip(kernels[row], values[row], strict=True):
            image = run_pil(kernel, float(value), image, BILINEAR)
        centre = (slice(22, 42), slice(22, 42))
        assert abs(mine[row] - np.asarray(image).astype(int))[centre].max() <= 2, row


@pytest.mark.parametrize("remode", ["const", "rand", "pixel"])
def test_a_sample_does_not_depend_on_its_batch(remode):
    config = AugmentConfig((24, 36), auto_augment="rand-n3-m9-mstd0.5-inc1", reprob=0.7, recount=2, remode=remode)
    plan, _, _ = planned(config, 12)
    batch = as_batch(*[picture(24, 36, seed) for seed in range(12)])
    kept = batch.clone()
    stage = DeviceStage(config, MEAN, STD)
    together = stage(batch, plan)
    assert torch.equal(batch, kept)
    for row in range(12):
        assert torch.equal(stage(batch[row : row + 1], plan.select([row])), together[row : row + 1])
    order = np.random.default_rng(0).permutation(12)
    assert torch.equal(stage(batch[torch.from_numpy(order)], plan.select(order)), together[torch.from_numpy(order)])


def test_colour_jitter_equals_torchvisions_on_pil():
    config = AugmentConfig((20, 30), auto_augment=None, color_jitter=0.4, hflip=0.0, reprob=0.0)
    plan, _, _ = planned(config, 20)
    sources = [picture(20, 30, seed) for seed in range(20)]
    mine = levels(DeviceStage(config, MEAN, STD)(as_batch(*sources), plan))
    adjust = {
        Kernel.BRIGHTNESS: tvf.adjust_brightness,
        Kernel.CONTRAST: tvf.adjust_contrast,
        Kernel.COLOR: tvf.adjust_saturation,
    }
    for row, source in enumerate(sources):
        image = Image.fromarray(source)
        for kernel, factor in zip(plan.op[row], plan.argument[row], strict=True):
            image = adjust[Kernel(kernel)](image, factor)
        assert abs(mine[row] - np.asarray(image).astype(int)).max() <= 1


def test_normalisation_is_torchvisions():
    source = picture(8, 12)
    expected = tvf.normalize(tvf.to_tensor(Image.fromarray(source)), MEAN, STD)
    assert torch.allclose(EvalStage(MEAN, STD)(as_batch(source))[0], expected, atol=1e-6)


def erasing_config(remode: str, recount: int = 1) -> AugmentConfig:
    return AugmentConfig(
        (32, 48), auto_augment=None, color_jitter=None, hflip=0.0, reprob=0.8, recount=recount, remode=remode
    )


@pytest.mark.parametrize("remode", ["const", "rand", "pixel"])
@pytest.mark.parametrize("recount", [1, 3])
def test_erasing_fills_the_planned_boxes_and_nothing_else(remode, recount):
    config = erasing_config(remode, recount)
    plan, _, _ = planned(config, 64)
    batch = as_batch(*[picture(32, 48, seed) for seed in range(64)])
    images, clean = DeviceStage(config, MEAN, STD)(batch, plan), EvalStage(MEAN, STD)(batch)
    inside = torch.zeros(64, 1, 32, 48, dtype=torch.bool)
    for row, boxes in enumerate(plan.erase.tolist()):
        for top, left, h, w in boxes:
            inside[row, :, top : top + h, left : left + w] = True
    inside = inside.expand(-1, 3, -1, -1)
    assert torch.equal(images[~inside], clean[~inside])
    erased = images[inside]
    if remode == "const":
        assert not erased.any()
    else:
        assert (erased != clean[inside]).float().mean() > 0.999
        tolerance = 0.02 if remode == "pixel" else 0.3
        assert abs(erased.mean()) < tolerance and abs(erased.std() - 1) < tolerance


def test_rand_mode_has_one_colour_per_box_and_later_boxes_win():
    config = erasing_config("rand", recount=2)
    plan, _, _ = planned(config, 64)
    images = DeviceStage(config, MEAN, STD)(torch.zeros(64, 3, 32, 48, dtype=torch.uint8), plan)
    colours = []
    for row, boxes in enumerate(plan.erase.tolist()):
        last = torch.zeros(32, 48, dtype=torch.bool)
        for top, left, h, w in reversed(boxes):
            here = torch.zeros_like(last)
            here[top : top + h, left : left + w] = True
            seen = images[row][:, here & ~last]
            if seen.numel():
                assert (seen == seen[:, :1]).all()
                colours.append(seen[:, 0])
            last |= here
    assert len(torch.stack(colours).unique()) == 3 * len(colours) > 180


def test_pixel_noise_is_normal_and_hashes_as_the_host_does():
    from scipy import stats

    host = keys(5, 6, np.arange(4), 7)
    words = np.arange(20000)
    on_device = hash_words(torch.from_numpy(host.view(np.int64))[:, None], torch.from_numpy(words))
    assert np.array_equal(on_device.numpy().view(np.uint64)[2], keys(5, 6, 2, 7, words))
    noise = normal_noise(torch.from_numpy(host.view(np.int64))[:, None], torch.from_numpy(words)).numpy()
    assert stats.kstest(noise[0], "norm").pvalue > 1e-3
    assert stats.pearsonr(noise[0], noise[1]).pvalue > 1e-3
    assert stats.pearsonr(noise[0, 1:], noise[0, :-1]).pvalue > 1e-3


def test_images_that_are_not_the_plans_are_refused():
    config = erasing_config("pixel")
    plan, _, _ = planned(config, 2)
    for wrong in (torch.zeros(3, 3, 32, 48), torch.zeros(2, 3, 48, 32), torch.zeros(2, 1, 32, 48)):
        with pytest.raises(ValueError, match="2 planned images"):
            DeviceStage(config, MEAN, STD)(wrong.to(torch.uint8), plan)
    with pytest.raises(ValueError, match="float32"):
        DeviceStage(config, MEAN, STD)(torch.zeros(2, 3, 32, 48), plan)


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["rand-n3-m9-mstd0.5-inc1-p0.9", "rand-n2-m9-tweights-p1.0"])
@pytest.mark.parametrize("choice", ["torch", "triton"])
def test_cuda_gives_the_cpus_images_without_waiting_for_the_host(monkeypatch, choice, text):
    config = AugmentConfig((64, 96), auto_augment=text, reprob=0.6)
    plan, _, _ = planned(config, 64)
    batch = as_batch(*[picture(64, 96, seed) for seed in range(64)])
    expected = DeviceStage(config, MEAN, STD)(batch, plan)
    monkeypatch.setenv("TLT_WARP", choice)
    stage, on_device = DeviceStage(config, MEAN, STD).cuda(), batch.cuda()
    stage(on_device, plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        images = stage(on_device, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    difference = abs(images.cpu() - expected) * 255 * min(STD)
    assert (difference > 1.01).float().mean() < 2e-3
