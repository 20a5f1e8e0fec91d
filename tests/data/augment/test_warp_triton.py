"""The Triton program of the warp: on a GPU where there is one, and in Triton's interpreter on any machine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.plan import AugmentConfig, make_plan
from tlt.data.augment.warp import CHOICE, chosen_warp, warp
from tlt.errors import UserError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # set before Triton is imported: in a process of its own
on_each = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="test_in_the_interpreter runs it")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
FILL = (9, 130, 255)


def maps(height: int, width: int) -> torch.Tensor:
    """A rotation, shears, a shift, mirrored ones, and two that show little or nothing of the image."""
    turned = (math.cos(0.3), math.sin(0.3), -2.3, -math.sin(0.3), math.cos(0.3), 3.1)
    mirrored = (-0.9, 0.2, width + 2.0, 0.1, -0.9, height - 0.5)
    far = (1.0, 0.0, 1e6, 0.0, 1.0, -1e6)
    others = [(1, 0.3, 0, 0, 1, 0), (1, 0, 0, -0.2, 1, 0), (1, 0, 0.45 * width, 0, 1, 0), (3, 0, -width, 0, 3, -height)]
    return torch.tensor([turned, mirrored, far, *others], dtype=torch.float64).view(-1, 2, 3)


@on_each
@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize("size", [(17, 21), (3, 2), (1, 300)])
def test_levels_are_those_of_torchs_operations_and_of_pil(size: tuple[int, int], cubic: bool, device: str) -> None:
    from tlt.data.augment import warp_triton

    affine = maps(*size)
    images = torch.randint(0, 256, (len(affine), 3, *size), dtype=torch.uint8, generator=torch.manual_seed(0))
    images[-1] = 200  # what is the same everywhere stays so
    ours = warp_triton.warp(images.to(device), affine.to(device), FILL, cubic=cubic).cpu()
    apart = (ours.int() - warp(images, affine, FILL, cubic=cubic).int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() <= (1e-3 if cubic else 0)
    for image, found, one in zip(images, ours, affine.flatten(1).tolist(), strict=True):
        filters = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
        source = Image.fromarray(image.permute(1, 2, 0).numpy())
        theirs = np.asarray(source.transform(source.size, Image.Transform.AFFINE, one, filters, fillcolor=FILL))
        assert abs(found.permute(1, 2, 0).numpy().astype(int) - theirs.astype(int)).max() <= 1
    assert {tuple(colour) for colour in ours[-1].flatten(1).T.tolist()} <= {(200,) * 3, FILL}


@on_each
def test_images_need_not_be_contiguous_and_none_may_be_there(device: str) -> None:
    from tlt.data.augment import warp_triton

    images = torch.randint(0, 256, (7, 5, 6, 3), dtype=torch.uint8, generator=torch.manual_seed(0)).permute(0, 3, 1, 2)
    affine = maps(5, 6)
    ours = warp_triton.warp(images.to(device), affine.to(device), FILL, cubic=False).cpu()
    assert torch.equal(ours, warp(images, affine, FILL, cubic=False))
    none = warp_triton.warp(images[:0].to(device), affine[:0].to(device), FILL, cubic=True)
    assert none.shape == (0, 3, 5, 6)


@pytest.mark.skipif(INTERPRETED, reason="this is it")
def test_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("cubic", [False, True])
def test_offline_compilation_without_spills(cubic: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offline = pytest.importorskip("volo.kernels.triton_offline", exc_type=ImportError)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for architecture in offline.ARCHITECTURES:
        compiled = offline.compile_warp(architecture, cubic)
        assert compiled.stack == 0 < compiled.registers < 128, compiled


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is for CPUs")
def test_without_a_gpu_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, "triton")
    config = AugmentConfig((8, 8), auto_augment="rand-n2-m9-p1.0")
    plan = make_plan(config, 0, 0, list(range(16)), [9] * 16, [9] * 16)
    stage = DeviceStage(config, (0, 0, 0), (1, 1, 1))
    with pytest.raises(UserError, match="TLT_WARP=triton needs a CUDA device, not cpu: leave the var"):
        stage(torch.zeros(16, 3, 8, 8, dtype=torch.uint8), plan)


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHOICE, raising=False)
    assert chosen_warp() is warp
    monkeypatch.setenv(CHOICE, "cuda")
    with pytest.raises(UserError, match="TLT_WARP=cuda: choose torch or triton"):
        chosen_warp()
    monkeypatch.setenv(CHOICE, "triton")
    monkeypatch.delattr("tlt.data.augment.warp_triton", raising=False)
    monkeypatch.setitem(sys.modules, "tlt.data.augment.warp_triton", None)
    with pytest.raises(UserError, match="Triton is not installed"):
        chosen_warp()
