"""All programs on tar shards: they give what they give on the folder that was packed."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

from tlt.tools.cli import main
from volo import cli


def test_annotator_labels_shards(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    data, packed = make_dataset(), tmp_path / "packed"
    assert main(["pack-images", str(data), str(packed), "--workers", "1"]) == 0
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), tmp_path / "weights.pth")
    flags = f"--model resnet10t --checkpoint {tmp_path / 'weights.pth'} --num-classes 4 --img-size 64 -b 3 -j 0"
    for images, out in ((data, "one"), (packed, "other")):
        command = f"{images} {tmp_path / out} {flags} --device cpu --top-k 3"
        assert cli.run("label", command.split()) == 0
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "other", names, shallow=False)[0] == names


@pytest.mark.parametrize("command", ["check", "show"])
def test_label_commands_read_shards(
    command: str,
    make_dataset: Callable[..., Path],
    make_labels: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, packed = make_dataset(), str(tmp_path / "packed")
    labels = str(make_labels(data))
    for number, file in enumerate(sorted(Path(labels).rglob("*.pt"))):  # not the same all over
        generator = torch.Generator().manual_seed(number)
        torch.save(torch.randint(0, 4, (2, 3, 6, 6), generator=generator).half(), file)
    assert main(["pack-images", str(data), packed, "--labels", labels, "--workers", "1"]) == 0
    capsys.readouterr()
    said = []
    for name, pair in (("one", [str(data), packed if command == "show" else labels]), ("other", [packed, packed])):
        more = ["-o", str(tmp_path / f"{name}.png"), "-n", "1"] if command == "show" else []
        assert main([command, *pair, *more]) == 0
        said.append([line for line in capsys.readouterr().out.splitlines() if " in 0" not in line])
    if command == "show":
        assert filecmp.cmp(tmp_path / "one.png", tmp_path / "other.png", shallow=False)
    else:
        assert said[0] == said[1] and said[0]
