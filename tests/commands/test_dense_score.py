"""Dense top-1 of validation, where the right answer is known."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tests.commands.conftest import QUICK, Call, Make, TrainedRun
from tlt import with_dense_head

CLASSES = ("blue", "green", "red")
SIZES = ((96, 64), (68, 100), (84, 84))


def write_scenes(root: Path) -> None:
    """Images of 4 x 4 blocks of pure colours, in the folder of the colour that class 0 to 2 is, and maps of as many
    blocks of cells that say which colours these are."""
    for number, (width, height) in enumerate(SIZES):
        colours = np.random.default_rng(number).integers(0, 3, (4, 4))
        folder, labels = (root / name / CLASSES[number] for name in ("validation", "labels"))
        for each in (folder, labels):
            each.mkdir(parents=True)
        blocks = colours.repeat(height // 4, 0).repeat(width // 4, 1)
        Image.fromarray(np.eye(3, dtype=np.uint8)[2 - blocks] * 255).save(folder / f"{number}.png")  # red is first
        ids = colours.repeat(12, 0).repeat(12, 1)
        torch.save(torch.from_numpy(np.stack([np.full(ids.shape, 9.0), ids])[:, None]).half(), labels / f"{number}.pt")


def colour_model(path: Path, size: tuple[int, int], patch: int) -> Path:
    """A checkpoint of a vision transformer without blocks: a token is the mean colour of its patch, and its dense head
    says which of the three channels is largest."""
    kwargs = {"embed_dim": 3, "depth": 0, "num_heads": 1, "patch_size": patch}
    model = with_dense_head(timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=size, **kwargs), size)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    state["patch_embed.proj.weight"] += torch.eye(3)[:, :, None, None] / patch**2
    state["norm.weight"] += 1
    state["aux_head.weight"] += torch.eye(3).flip(0)
    config = {"name": "vit_tiny_patch16_224", "kwargs": kwargs, "num_classes": 3, "img_size": list(size)}
    config |= {"dense_head": True, "class_names": [*CLASSES], "in_chans": 3}
    head = {name: state.pop(name) for name in [*state] if name.startswith("aux_")}
    torch.save({"state_dict": state, "dense_head": head, "model_config": config}, path)
    return path


@pytest.mark.parametrize(
    ("size", "patch", "flags"),
    [
        ((64, 64), 4, "--crop-pct 0.6"),
        ((60, 44), 4, "--crop-pct 0.95"),
        ((64, 48), 4, "--crop-pct 1.3"),
        ((56, 56), 4, "--crop-mode squash --crop-pct 0.8"),
        ((48, 80), 4, "--crop-mode border --crop-pct 0.9"),
    ],
)
def test_tokens_agree_with_labels_of_their_colours(
    call: Call, tmp_path: Path, size: tuple[int, int], patch: int, flags: str
) -> None:
    write_scenes(tmp_path)
    checkpoint = colour_model(tmp_path / "colours.pth", size, patch)
    line = f"{tmp_path} --checkpoint {checkpoint} -j 0 -b 2 --token-label-data {tmp_path}/labels {flags}"
    row = (ended := call("validate", line).ok()).row
    assert row["dense_top1"] == 100.0
    assert f"dense top-1 100.000 % of {row['tokens']} tokens, {row['annotator_top1']:.3f} % of whose" in ended.out


def test_what_has_no_label_is_not_counted(call: Call, tmp_path: Path) -> None:
    """An image without a map, one whose map is damaged, and one that can't be read; and maps of the centre, at a size
    at which a quarter of the image is shown beside them."""
    write_scenes(tmp_path)
    checkpoint, labels = colour_model(tmp_path / "colours.pth", (64, 64), 4), tmp_path / "labels"
    line = f"{tmp_path} --checkpoint {checkpoint} -j 0 -b 2 --token-label-data {labels} --crop-mode squash"
    (tmp_path / "validation" / "blue" / "1.png").write_bytes(b"")
    shutil.copy(labels / "blue" / "0.pt", labels / "blue" / "1.pt")
    (labels / "green" / "1.pt").write_bytes(b"nothing")
    assert call("validate", line).refused("green/1.pt")
    ended = call("validate", f"{line} --crop-pct 1 --bad-label skip")
    assert "warning: left out green/1.png" in ended.out
    row = ended.row
    assert (row["tokens"], row["dense_top1"], row["images"]) == (2 * 16 * 16, 100.0, 3)
    (labels / "green" / "1.pt").unlink()
    assert call("validate", line).refused("1 of 4 images have no label")
    ended = call("validate", f"{line} --crop-pct 1 --bad-label uniform --token-label-area center")
    saved = torch.load(checkpoint, weights_only=True)
    torch.save({name: saved[name] for name in ("state_dict", "model_config")}, checkpoint)
    assert call("validate", f"{line} --bad-label skip").refused("this model has no trained dense head")
    # The centred square of 96 x 64 is 10.67 of the 16 columns: 12 columns see some of it.
    assert ended.row["tokens"] == 16 * 12 + 16 * 16


@pytest.mark.parametrize("program", ["train", "validate"])
def test_label_map_error_names_its_flag(
    call: Call, trained_run: TrainedRun, make_labels: Make, tmp_path: Path, program: str
) -> None:
    (data, run), labels = trained_run, make_labels(trained_run.data, k=5, classes=5)
    flag, flags = {
        "train": ("--val-label-data", f"{QUICK} --token-label --token-label-size 2 --output {tmp_path}"),
        "validate": ("--token-label-data", f"-j 0 --checkpoint {run}/last.pth.tar"),
    }[program]
    ended = call(program, f"{data} {flags} {flag} {labels}")
    assert ended.refused(f"error: {flag}: label {labels}/blue/blue0.pt: class id 4 is not in 0..3"), ended
