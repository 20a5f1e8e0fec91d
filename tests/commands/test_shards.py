"""All programs on tar shards: they give what they give on the folder that was packed."""

from __future__ import annotations

import filecmp
from pathlib import Path

import timm
import torch

from tlt.tools.cli import main
from volo import cli


def test_annotator_labels_shards(data: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    assert main(["pack-images", str(data), str(packed), "--workers", "1"]) == 0
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), tmp_path / "weights.pth")
    flags = f"--model resnet10t --checkpoint {tmp_path / 'weights.pth'} --num-classes 4 --img-size 64 -b 3 -j 0"
    for images, out in ((data, "one"), (packed, "other")):
        command = f"{images} {tmp_path / out} {flags} --device cpu --top-k 3"
        assert cli.run("label", command.split()) == 0
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "other", names, shallow=False)[0] == names
