"""Dense top-1 of validation, and `validate --probe seg`: a linear layer on frozen tokens. The right answer is known."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from tests.commands.conftest import QUICK
from tlt import with_dense_head
from tlt.label_map import FULL_AREA
from volo.commands.segment import _at_pixels, mean_iou

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
def test_tokens_agree_with_labels_of_their_colours(call, tmp_path, size, patch, flags):
    write_scenes(tmp_path)
    checkpoint = colour_model(tmp_path / "colours.pth", size, patch)
    line = f"{tmp_path} --checkpoint {checkpoint} -j 0 -b 2 --token-label-data {tmp_path}/labels {flags}"
    row = (ended := call("validate", line).ok()).row
    assert row["dense_top1"] == 100.0
    assert f"dense top-1 100.000 % of {row['tokens']} tokens, {row['annotator_top1']:.3f} % of whose" in ended.out


def test_what_has_no_label_is_not_counted(call, tmp_path):
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
def test_label_map_error_names_its_flag(call, trained_run, make_labels, tmp_path, program):
    (data, run), labels = trained_run, make_labels(trained_run.data, k=5, classes=5)
    flag, flags = {
        "train": ("--val-label-data", f"{QUICK} --token-label --token-label-size 2 --output {tmp_path}"),
        "validate": ("--token-label-data", f"-j 0 --checkpoint {run}/last.pth.tar"),
    }[program]
    ended = call(program, f"{data} {flags} {flag} {labels}")
    assert ended.refused(f"error: {flag}: label {labels}/blue/blue0.pt: class id 4 is not in 0..3"), ended


def write_images(root: Path) -> Path:
    """Images of 4 x 4 blocks of pure colours; blue is of class 0, green left out, red of class 7. Some masks have a
    palette."""
    for split, count in (("train", 6), ("val", 3)):
        for name in ("images", "masks"):
            (root / split / name / "deep").mkdir(parents=True)
        for number in range(count):
            colours = np.random.default_rng(number).integers(0, 3, (4, 4))
            blocks = colours.repeat(8 + number, 0).repeat(12, 1)
            Image.fromarray(np.eye(3, dtype=np.uint8)[2 - blocks] * 255).save(
                root / split / "images/deep" / f"{number}.bmp"
            )
            classes = np.array([0, 255, 7], np.uint8)[blocks]
            mask = Image.fromarray(classes)
            if number % 3 == 1:
                mask.putpalette([*range(255, -1, -1)] * 3)
            mask.save(root / split / "masks/deep" / f"{number}.png")
    return root


@pytest.fixture
def line(tmp_path: Path) -> str:
    checkpoint = colour_model(tmp_path / "colours.pth", (64, 48), 4)
    return f"{write_images(tmp_path)} --checkpoint {checkpoint} -j 0 -b 4 --probe seg"


def test_tokens_that_show_their_colour_tell_the_classes(call, line, tmp_path):
    """Whatever the order of magnitude of the rate, and twice the same; a bad pair is left out, and said to be."""
    row = (ended := call("validate", f"{line} --epochs 20").ok()).row
    assert (row["images"], row["train_images"], row["classes"]) == (3, 6, 2) and row["miou"] > 99
    assert f"mIoU {row['miou']:.2f} %" in ended.out.splitlines()
    assert call("validate", f"{line} --epochs 20").out == ended.out
    (tmp_path / "train/masks/deep/2.png").write_bytes(b"nothing")
    (tmp_path / "val/images/deep/0.bmp").write_bytes(b"nothing")
    ended = call("validate", f"{line} --epochs 20 --lr 1e-2")
    assert "warning: left out" in ended.out and "train/masks/deep/2.png" in ended.out
    row = ended.row
    assert (row["images"], row["train_images"]) == (2, 5) and row["miou"] > 99 and "no training mask" not in ended.out
    for path in (tmp_path / "val/masks/deep").iterdir():
        Image.new("L", Image.open(path).size, 9).save(path)
    ended = call("validate", f"{line} --epochs 1")
    assert "no training mask has the classes [9] of validation masks: IoU 0" in ended.out and ended.row["miou"] == 0


def _saved(pixels: np.ndarray) -> Callable[[Path], None]:
    return lambda root: Image.fromarray(pixels).save(root / "train/masks/deep/3.png")


def _only(split: str, content: int | bytes) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for path in (root / split / "masks/deep").iterdir():
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                Image.new("L", Image.open(path).size, content).save(path)

    return change


@pytest.mark.parametrize(
    ("change", "flags", "named"),
    [
        (lambda root: (root / "val/masks/deep/1.png").unlink(), "", "1 of 3 images have no mask, the first is"),
        (lambda root: shutil.rmtree(root / "train/masks"), "", "6 of 6 images have no mask"),
        (lambda root: shutil.rmtree(root / "train/images"), "", "no 'images' folder"),
        (lambda root: shutil.rmtree(root / "val"), "", "no 'validation' folder"),
        (_saved(np.zeros((44, 49), np.uint8)), "", "3.png has 49 x 44 pixels, but its image deep/3.bmp 48 x 44"),
        (_saved(np.full((44, 48), 300, np.uint16)), "", "3.png has number 300: classes are up to 254"),
        (_saved(np.zeros((44, 48, 3), np.uint8)), "", "3.png holds colours (RGB), not class numbers"),
        (_only("train", b"nothing"), "--max-bad-images 9", "not one of 6 masks"),
        (_only("train", b"nothing"), "--max-bad-images 2", "more than --max-bad-images 2"),
        (_only("train", 255), "", "no pixel of the training masks"),
        (_only("val", 255), "", "no pixel of the validation masks"),
        (str, "--crop-pct 0.9", "leave --crop-pct out"),
        (str, "--num-samples 3", "no effect without classes of images"),
        (str, "--knn x", "keep one of them"),
    ],
)
def test_what_cannot_be_learned_is_one_line(call, line, tmp_path, change, flags, named):
    change(tmp_path)
    assert (ended := call("validate", f"{line} --epochs 1 {flags}")).refused(named), ended


def test_logits_lie_where_the_tokens_do():
    """As torch interpolates where the tokens cover the image; elsewhere a function of the place is found again."""
    logits = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(logits.permute(2, 0, 1)[None], size=(23, 16), mode="bilinear")[0]
    torch.testing.assert_close(_at_pixels(logits, (23, 16), FULL_AREA), expected)
    window = (-0.2, 0.1, 0.7, 1.3)
    y, x = (low + (torch.arange(n) + 0.5) / n * (high - low) for low, high, n in ((0.1, 1.3, 6), (-0.2, 0.7, 9)))
    down, across = _at_pixels(torch.stack(torch.meshgrid(y, x, indexing="ij"), -1), (10, 20), window)
    torch.testing.assert_close(down[:, 0], ((torch.arange(10) + 0.5) / 10).clamp(float(y[0]), float(y[-1])))
    torch.testing.assert_close(across[0], ((torch.arange(20) + 0.5) / 20).clamp(float(x[0]), float(x[-1])))


def test_the_mean_is_over_the_classes_that_there_are():
    confusion = torch.from_numpy(np.random.default_rng(0).integers(0, 50, (5, 5)))
    confusion[3] = 0
    counts = confusion.numpy()
    each = [100 * counts[k, k] / (counts[k].sum() + counts[:, k].sum() - counts[k, k]) for k in (0, 1, 2, 4)]
    assert mean_iou(confusion) == (pytest.approx(sum(each) / 4), 4)
