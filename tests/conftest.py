"""Shared fixtures: small real image folders and token-label trees, made from a fixed seed."""

from __future__ import annotations

import gc
import importlib.util
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from tlt.io.jobs import available_cpus

if TYPE_CHECKING:
    from tests.stand_in_cuda import StandIn

torch.set_num_threads(1)
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # a GPU's float32 is compared with a CPU's, in programs too
T = TypeVar("T")
LIMIT = 600.0  # seconds for what takes a few: reached where it never comes, not where a machine is slow


def wait_until(happened: Callable[[], T], what: Callable[[], str] = str) -> T:
    """Return what `happened()` returns as soon as that is true. `what` says what did not come within LIMIT."""
    until, pause = time.monotonic() + LIMIT, 0.01
    while not (result := happened()):
        if time.monotonic() > until:
            missing = what()
            missing = missing if len(missing) < 5000 else f"{missing[:4000]}\n[...]\n{missing[-1000:]}"
            # The last line, which the end of a long log still shows.
            pytest.fail(f"{missing}\nnot within {LIMIT:g} s in {os.environ['PYTEST_CURRENT_TEST']}")
        time.sleep(pause)
        pause = min(1.2 * pause, 0.3)
    return result


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A program that was told to end in this process ignores what tells it so from then on, and so would all that is
    started by later tests: a shell can't even trap a signal that was ignored when it began. And torch's handler of
    SIGCHLD, which other libraries' loaders leave behind, raises for the workers that a test has killed, in a later one.
    """
    changed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in changed}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    torch.set_num_threads(1)  # a program sets more; in bfloat16 sums then round otherwise


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are CPUs: many tests wait for processes and signals."""
    return available_cpus() + 1


def python_path(*folders: str | Path) -> str:
    """PYTHONPATH of a process: these folders, then those of this one, in which the processor may be a wrong one."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def module_of(file: Path) -> ModuleType:
    """A program or example that is in no package, imported."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # a dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    """A port to listen on that no connection is given meanwhile: below those that Linux hands out."""
    for port in (10000 + secrets.randbelow(20000) for _ in range(1000)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    pytest.fail("no port can be bound")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu(stand_in=False)` where there is none; what else is marked `gpu` runs on a stand-in."""
    for item in items:
        gpu = item.get_closest_marker("gpu")
        if gpu and not gpu.kwargs.get("stand_in", True) and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """The garbage collector never looks again at what was imported: programs call it often."""
    gc.freeze()


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A CUDA device that is not there. Raises at the end if its streams raced."""
    from tests.stand_in_cuda import stand_in_cuda

    with stand_in_cuda() as device:
        yield device
    assert not device.races, "\n".join(device.races)


@pytest.fixture(autouse=True)
def gpu_or_its_stand_in(request: pytest.FixtureRequest) -> None:
    """What is marked `gpu` runs on every machine."""
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        request.getfixturevalue("stand_in")


@pytest.fixture(autouse=True)
def float32_as_on_the_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is marked `gpu` computes without TF32, which rounds convolutions to 10 bits unless told not to, and with
    convolutions that add in the same order each time."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


COLOURS = {"blue": (40, 60, 200), "green": (50, 180, 60), "grey": (128, 128, 128), "red": (210, 50, 40)}


def write_dataset(
    root: Path, train: int = 16, validation: int = 8, size: tuple[int, int] = (40, 36), classes: int = 4
) -> Path:
    """Write class folders with one colour per class to `root`, and return it."""
    generator = np.random.default_rng(0)
    names = list(COLOURS)[:classes]
    for split, count in (("train", train), ("validation", validation)):
        for number in range(count):
            name = names[number % classes]
            folder = root / split / name
            folder.mkdir(parents=True, exist_ok=True)
            noise = generator.integers(-30, 31, (size[1], size[0], 3))
            pixels = np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{name}{number}.jpg", quality=92)
    return root


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., Path]:
    """Return `make(train=16, validation=8, size=(40, 36), classes=4)` -> dataset root with one colour per class."""
    return partial(write_dataset, tmp_path / "data")


@pytest.fixture
def make_labels(tmp_path: Path) -> Callable[..., Path]:
    """Return `make(dataset, grid=(6, 6), k=3, classes=4)` -> published label tree whose top class is the folder's."""

    def make(dataset: Path, grid: tuple[int, int] = (6, 6), k: int = 3, classes: int = 4) -> Path:
        root = tmp_path / "labels"
        folders = sorted(p for p in (dataset / "train").iterdir() if p.is_dir())
        for number, folder in enumerate(folders):
            (root / folder.name).mkdir(parents=True, exist_ok=True)
            ids = torch.tensor([(number + step) % classes for step in range(k)]).half()
            values = torch.tensor([8.0 - 3.0 * step for step in range(k)]).half()
            entry = torch.stack([values, ids])[:, :, None, None].expand(2, k, *grid).contiguous()
            for image in folder.iterdir():
                torch.save(entry, root / folder.name / f"{image.stem}.pt")
        return root

    return make
