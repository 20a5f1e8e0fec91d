"""Faults that a whole run meets, on digits: each ends in the bits of a run that was spared, or in one line."""

from __future__ import annotations

import os
import resource
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults.kill_chain import digest
from tests.programs.conftest import Ended, Running, metrics, start
from volo import cli

FLAGS = (
    "--model volo_test --img-size 32 --num-classes 10 -b 8 -j 0 --warmup-epochs 0 --cooldown-epochs 0 --lr 1e-3 "
    "--log-interval 1 --drop-path 0.2 --model-ema"
)
Call = Callable[..., Ended]
linux = pytest.mark.skipif(sys.platform != "linux", reason="changes the limits of another process")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return `call("flags", *more)`: train.py in this process."""

    def call(flags: str, *more: str | Path) -> Ended:
        capsys.readouterr()
        return Ended(cli.train([*map(str, more), *flags.split()]), *capsys.readouterr())

    return call


def _flip_a_bit(file: Path) -> None:
    """In the largest tensor, under its own name alone: `last` and `checkpoint-N` are names of one file."""
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    content = bytearray(file.read_bytes())
    content[largest.header_offset + 1000] ^= 1
    file.unlink()
    file.write_bytes(content)


def _cut(file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("damage", [_cut, _flip_a_bit], ids=["04 cut", "05 bit flipped"])
def test_fault_04_05_a_damaged_newest_checkpoint_costs_one_epoch(
    call: Call, digits: Path, tmp_path: Path, fault: dict[str, str], damage: Callable[[Path], None]
) -> None:
    flags = f"{FLAGS} --output {tmp_path} --epochs"
    assert call(f"{flags} 3 --experiment whole", digits).code == 0
    assert call(f"{flags} 2 --sched step --decay-epochs 9 --experiment cut", digits).code == 0
