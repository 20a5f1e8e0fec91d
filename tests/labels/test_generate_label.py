"""generate_label.py as its users call it, with real models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform

import volo  # noqa: F401  (registers the models)
from tlt.data.sources.folder import scan_folder
from tlt.io.progress import Progress
from tlt.labels.metadata import TreeMetadata
from tlt.labels.store import open_labels
from tlt.labels.tree import read_map
from volo import cli

SIZE = 64


@pytest.fixture
def annotator(tmp_path: Path) -> Callable[..., str]:
    """Return `weights(name, **kwargs)`: a model for four classes, saved as a plain state dict."""

    def weights(name: str, **kwargs: object) -> str:
        torch.manual_seed(0)
        path = tmp_path / f"{name}.pth"
        torch.save(timm.create_model(name, num_classes=4, **kwargs).state_dict(), path)
        return str(path)

    return weights


@pytest.fixture
def command(make_dataset: Callable[..., Path], annotator: Callable[..., str], tmp_path: Path) -> list[str]:
    """A command that labels 16 images with a small ConvNet."""
    data, weights = make_dataset(), annotator("resnet10t")
    return [str(data), str(tmp_path / "out"), "--model", "resnet10t", "--checkpoint", weights] + (
        f"--num-classes 4 --img-size {SIZE} -b 5 -j 0 --device cpu".split()
    )


def out_of(command: list[str]) -> Path:
    return Path(command[1])


def test_labels_are_those_of_the_squashed_whole_image(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path(command[0]).rglob("*.jpg"):  # much wider than high, darkest at the left edge
        ramp = np.linspace(0, 255, 150)[None, :, None] * np.ones((50, 1, 3))
        Image.fromarray(ramp.astype(np.uint8)).save(path)
    assert cli.run("label", command) == 0
    said = capsys.readouterr().out
    assert "16 label maps of 4 classes on 2 x 2 places" in said and "of 16 images" in said and "64 places" in said
    model = timm.create_model("resnet10t", num_classes=4, checkpoint_path=command[5]).eval()
    transform = create_transform((3, SIZE, SIZE), interpolation="bicubic", crop_pct=1.0, crop_mode="squash")
    folder = scan_folder(Path(command[0]) / "train")
    store = open_labels(out_of(command), folder.paths, num_classes=4, class_names=folder.class_names)
    for index in range(0, 16, 5):
        image = Image.open(folder.path(index))
        with torch.no_grad():
            features = model.forward_features(transform(image)[None])[0]
        expected = torch.einsum("chw,kc->khw", features, model.fc.weight) + model.fc.bias[:, None, None]
        label_map = store.read(index, *image.size)
        dense = np.zeros((4, 2, 2), np.float32)
        np.put_along_axis(dense, label_map.ids, label_map.values.astype(np.float32), axis=0)
        # The resize may be one grey level off; a centre crop is more than the whole deviation off.
        assert np.abs(dense - expected.detach().numpy()).max() < 0.05 * expected.std().item()
        assert (np.diff(label_map.values.astype(np.float32), axis=0) <= 0).all()


def test_the_tree_says_what_it_is(command: list[str]) -> None:
    assert cli.run("label", [*command, "--top-k", "3"]) == 0
    metadata = TreeMetadata.read(out_of(command) / "labels.json")
    assert metadata is not None and (metadata.k, metadata.grid, metadata.num_classes) == (3, (2, 2), 4)
    # resnet10t: the first token's centre is at 14.5 pixels of 64, where that of the image's upper half is at 16.
    assert metadata.area == (-1.5 / 64, -1.5 / 64, 62.5 / 64, 62.5 / 64)
    assert metadata.class_names == ["blue", "green", "grey", "red"]
    assert metadata.annotator["model"] == "resnet10t" and metadata.annotator["input_size"] == [3, SIZE, SIZE]
    assert not (out_of(command) / "labels.partial.json").exists()
    assert torch.load(out_of(command) / "blue" / "blue0.pt").shape == (2, 3, 2, 2)


def test_the_average_labels_where_training_selected_by_it(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = torch.load(command[5])
    average = {name: value + 0.1 if name == "fc.bias" else value for name, value in plain.items()}
    torch.save({"state_dict": plain, "state_dict_ema": average, "args": {"model_ema": True}}, command[5])
    top = {}
    for flag, said in (("--no-use-ema", ""), ("--use-ema", ""), (None, "weights: EMA (training selected by it)")):
        assert cli.run("label", [*command, "--overwrite", *([flag] if flag else [])]) == 0
        assert said in capsys.readouterr().out
        metadata = TreeMetadata.read(out_of(command) / "labels.json")
        assert metadata is not None and metadata.annotator["weights"].endswith(", EMA") == (flag != "--no-use-ema")
        top[flag] = read_map(out_of(command) / "red" / "red3.pt").values.astype(np.float32)
    np.testing.assert_allclose(top["--use-ema"], top["--no-use-ema"] + 0.1, atol=2e-3)
    assert (top[None] == top["--use-ema"]).all()


def test_it_goes_on_where_it_was_stopped(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("label", command) == 0
    whole = {path: path.read_bytes() for path in out_of(command).rglob("*.pt")}
    kept, damaged, gone = sorted(whole)[:3]
    stamp = kept.stat().st_mtime_ns
    damaged.write_bytes(whole[damaged][:50])
    gone.unlink()
    (out_of(command) / "labels.json").rename(out_of(command) / "labels.partial.json")
    capsys.readouterr()
    assert cli.run("label", command) == 0
    said = capsys.readouterr().out
    assert "14 of 16 images are labelled already" in said and "2 label maps" in said
    assert kept.stat().st_mtime_ns == stamp
    for path in (damaged, gone):
        assert torch.equal(torch.load(path), torch.load(kept.with_name(path.name)))
        assert path.read_bytes() == whole[path]
    assert (out_of(command) / "labels.json").exists()


def test_two_annotators_do_not_share_a_tree(
    command: list[str], annotator: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run("label", command) == 0
    other = [*command]
    other[3], other[5] = "resnet18", annotator("resnet18")
    before = read_map(out_of(command) / "red" / "red3.pt")
    assert cli.run("label", other) == 2
    assert "model resnet10t, this command says resnet18: choose another OUT, or --overwrite" in capsys.readouterr().err
    assert cli.run("label", [*other, "--overwrite"]) == 0
    assert (read_map(out_of(command) / "red" / "red3.pt").values != before.values).any()
    metadata = TreeMetadata.read(out_of(command) / "labels.json")
    assert metadata is not None and metadata.annotator["model"] == "resnet18"


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_no_file_that_is_no_label_is_replaced(
    command: list[str], capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    mine = out_of(command) / "red" / "red3.pt"
    mine.parent.mkdir(parents=True)
    torch.save({"weights": torch.ones(3)}, mine)
    before = mine.read_bytes()
    for _ in range(2):  # nor by the same command once more
        assert cli.run("label", [*command, *flags]) == 2
        assert (
            "OUT holds a file that is not replaced, label " in (said := capsys.readouterr().err) and "red3.pt" in said
        )
        assert [path for path in out_of(command).rglob("*") if path.is_file()] == [mine]
        assert mine.read_bytes() == before


def test_labels_of_unknown_origin_are_replaced_only_if_that_is_said(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    published = out_of(command) / "red" / "red3.pt"
    published.parent.mkdir(parents=True)
    torch.save(torch.ones(2, 5, 18, 18).half(), published)
    before = published.read_bytes()
    for _ in range(2):
        assert cli.run("label", command) == 2
        assert "of unknown origin and another shape" in capsys.readouterr().err
        assert published.read_bytes() == before
    assert cli.run("label", [*command, "--overwrite"]) == 0
    assert read_map(published).shape == (4, 2, 2)


def test_a_refused_annotator_leaves_nothing(
    command: list[str], annotator: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused = [*command]
    refused[3], refused[5] = "mobilenetv3_small_050", annotator("mobilenetv3_small_050")
    assert cli.run("label", refused) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --model mobilenetv3_small_050 can't annotate") and error.count("\n") == 1
    assert not out_of(command).exists()
    assert cli.run("label", command) == 0


@pytest.mark.parametrize("name,flags", [("volo_test", []), ("lvvit_test", ["--amp"]), ("resnet10t", ["--amp"])])
def test_our_models_and_mixed_precision(
    make_dataset: Callable[..., Path], annotator: Callable[..., str], tmp_path: Path, name: str, flags: list[str]
) -> None:
    weights = annotator(name, **({} if name == "resnet10t" else {"img_size": 32}))
    common = [
        "--model",
        name,
        "--checkpoint",
        weights,
        *["--num-classes", "4", "--img-size", "64", "-j", "0", "--device", "cpu"],
    ]
    data = make_dataset(train=4)
    assert cli.run("label", [str(data), str(tmp_path / "exact"), *common]) == 0
    assert cli.run("label", [str(data), str(tmp_path / "out"), *common, *flags]) == 0
    exact, found = (read_map(tmp_path / tree / "grey" / "grey2.pt") for tree in ("exact", "out"))
    assert exact.shape[0] == 4 and exact.shape == found.shape
    difference = np.abs(np.sort(exact.values, axis=0).astype(np.float32) - np.sort(found.values, axis=0)).max()
    assert (difference > 0) == bool(flags)  # bfloat16 is really used
    assert difference < 0.05


def test_a_folder_without_splits_and_images_of_one_stem(command: list[str], tmp_path: Path) -> None:
    data = Path(command[0]) / "train"
    Image.open(data / "red" / "red3.jpg").transpose(Image.Transpose.ROTATE_90).save(data / "red" / "red3.png")
    (data / "red" / "red3.jpg").rename(data / "red" / "red.v1.jpg")
    Image.open(data / "red" / "red.v1.jpg").save(data / "red" / "red.v1.png")
    assert cli.run("label", [str(data), *command[1:]]) == 0
    names = sorted(path.name for path in (out_of(command) / "red").iterdir())
    assert names == ["red.v1.jpg.pt", "red.v1.png.pt", "red11.pt", "red15.pt", "red3.pt", "red7.pt"]
    assert open_labels(out_of(command), scan_folder(data).paths).warnings == []


def test_broken_images_are_counted_and_the_tree_can_still_be_used(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Path(command[0]) / "train" / "red" / "red3.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    assert cli.run("label", [*command, "--max-bad-images", "0"]) == 2
    error = capsys.readouterr().err
    assert "red3.jpg" in error and "--max-bad-images 0" in error
    assert not (out_of(command) / "labels.json").exists()
    assert cli.run("label", command) == 0
    assert "left out" in (said := capsys.readouterr().out) and "red3.jpg" in said
    metadata = TreeMetadata.read(out_of(command) / "labels.json")
    assert metadata is not None and metadata.skipped == ["red/red3.jpg"]
    folder = scan_folder(Path(command[0]) / "train")
    store = open_labels(out_of(command), folder.paths)
    assert store.read(folder.paths.index("red/red3.jpg"), 40, 36).area == (0, 0, 0, 0)


def test_transfer_labels_another_data_set(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for path in (Path(command[0]) / "train" / "red").iterdir():
        path.unlink()
    (Path(command[0]) / "train" / "red").rmdir()
    assert cli.run("label", command) == 2
    assert "4 classes" in (error := capsys.readouterr().err) and "3 class folders" in error and "--transfer" in error
    assert cli.run("label", [*command, "--transfer"]) == 0
    assert "%" not in capsys.readouterr().out
    assert json.loads((out_of(command) / "labels.json").read_text())["class_names"] is None


def test_a_checkpoint_of_a_run_says_all_that_is_needed(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    model = timm.create_model("volo_test", num_classes=4, img_size=48)
    names = ["blue", "green", "grey", "red"]
    config = {"name": "volo_test", "kwargs": {}, "num_classes": 4, "img_size": [48, 48], "class_names": names}
    checkpoint, data = tmp_path / "model_best.pth.tar", str(make_dataset(train=4))
    torch.save({"state_dict": model.state_dict(), "model_config": config}, checkpoint)
    arguments = ["--checkpoint", str(checkpoint), "-j", "0", "--device", "cpu"]
    assert cli.run("label", [data, str(tmp_path / "out"), *arguments]) == 0
    assert read_map(tmp_path / "out" / "red" / "red3.pt").shape == (4, *model.token_grid((48, 48)))
    torch.save({"state_dict": model.state_dict(), "model_config": config | {"class_names": names[::-1]}}, checkpoint)
    assert cli.run("label", [data, str(tmp_path / "other"), *arguments]) == 2


@pytest.mark.parametrize(
    "extra,message",
    [
        (["--crop-pct", "0.9"], "--crop-pct 0.9: the whole image is labelled"),
        (["--checkpoint", "nothing.pth"], "nothing.pth"),
        (["--model", "resnet10x"], "timm knows no such model; did you mean"),
        (["--split", "test"], "no 'test' folder"),
        (["--device", "cuda:99"], "--device cuda:99"),
    ],
)
def test_mistakes_are_one_line(
    command: list[str], capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    assert cli.run("label", [*command, *extra]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_weights_with_nan_logits_are_told(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.load(command[5])
    state["fc.bias"] += 1e6  # finite, but beyond half precision
    torch.save(state, command[5])
    assert cli.run("label", command) == 2
    assert "beyond half precision" in capsys.readouterr().err


def test_progress_has_an_eta_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 5.0, 20.0, 20.0, 40.0])
    monkeypatch.setattr("tlt.io.progress.time.monotonic", lambda: next(clock))
    progress = Progress("labelling", 100)
    progress.step(10)
    progress.step(30)
    progress.done = 100
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "labelling: 40/100 images, 2.0 images/s, ETA 00:30",
        "labelling: 100/100 images, 2.5 images/s, in 00:40",
    ]
