"""Backends as a user chooses them: the same weights and label maps, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.commands.conftest import QUICK, Call

DALI = "--data-backend dali-cpu"


def test_weights_and_label_maps_are_the_same_whatever_decodes(call: Call, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali", reason="the extra dali")
    weights, told, archives = [], set(), []
    for number, how in enumerate(("-j 1", f"-j 2 {DALI}", f"-j 0 {DALI}")):
        flags = f"{data} {QUICK} --epochs 1 --lr 1e-3 --output {tmp_path} --experiment {number} {how}"
        assert (ended := call("train", flags)).code == 0, ended.err
        last = tmp_path / str(number) / "last.pth.tar"
        weights.append(torch.load(last, weights_only=True)["state_dict"])
        checked = call("validate", f"{data} --checkpoint {last} {how}")
        assert checked.code == 0 and "over 8 images" in checked.out, checked.err
        told.add(checked.out.split(" over 8 images")[0])
        made = call("label", f"{data} {tmp_path}/labels{number} --checkpoint {tmp_path}/0/last.pth.tar {how}")
        assert made.code == 0, made.err
        archives.append({path.name: path.read_bytes() for path in (tmp_path / f"labels{number}").glob("*.npy")})
    assert len(told) == 1 and len(archives[0]) == 7 and archives[0] == archives[1] == archives[2]
    assert all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in weights[0])
