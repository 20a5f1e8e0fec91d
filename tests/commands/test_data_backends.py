"""Backends as a user chooses them: the same weights and label maps, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.commands.conftest import QUICK, Ended

DALI = "--data-backend dali-cpu"


def test_a_run_ends_in_the_same_bits_with_any_workers_and_with_dali(
    call: Callable[..., Ended], make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("nvidia.dali", reason="the extra dali")
    data = make_dataset()
    weights, told = [], set()
    for number, how in enumerate(("-j 1", f"-j 2 {DALI}", f"-j 0 {DALI}")):
        flags = f"{data} {QUICK} --epochs 1 --lr 1e-3 --output {tmp_path} --experiment {number} {how}"
        assert (ended := call("train", flags)).code == 0, ended.err
        last = tmp_path / str(number) / "last.pth.tar"
        weights.append(torch.load(last, weights_only=True)["state_dict"])
        checked = call("validate", f"{data} --checkpoint {last} {how}")
        assert checked.code == 0 and "over 8 images" in checked.out, checked.err
        told.add(checked.out.split(" over 8 images")[0])
    assert len(told) == 1
    assert all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in weights[0])


def test_label_maps_are_the_same(call: Callable[..., Ended], make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali", reason="the extra dali")
    data, archives = make_dataset(), []
    run = f"{data} {QUICK} --epochs 1 --output {tmp_path} --experiment run"
    assert call("train", run).code == 0
    for name, how in (("a", "-j 0"), ("b", f"-j 2 {DALI}")):
        made = call("label", f"{data} {tmp_path / name} --checkpoint {tmp_path}/run/last.pth.tar {how}")
        assert made.code == 0, made.err
        archives.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.npy")})
    assert len(archives[0]) == 7 and archives[0] == archives[1]
