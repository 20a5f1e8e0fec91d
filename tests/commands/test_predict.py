"""`volo predict` as a user runs it, against timm's own transform and forward pass."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from timm.data import create_transform, resolve_data_config
from timm.utils.misc import natural_key as timm_key
from torch import Tensor, nn

import volo  # noqa: F401  registers the models
from tlt.tools.drawing import drawable
from volo.commands import predict

NAMES = list("abcdef")
FLAGS = "--device cpu -j 0 -b 3"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five images in and below a folder, one that is none, and other files."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    (folder / "day2").mkdir(parents=True)
    (folder / "day10").mkdir()
    for name, size in (
        ("b10.png", (90, 70)), ("b9.jpg", (64, 100)), ("day2/x.webp", (80, 80)), ("day10/ä.JPEG", (50, 75)),
        ("day10/y.png", (120, 66)),
    ):  # fmt: skip
        pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(folder / name)
    (folder / "day2" / "broken.jpg").write_bytes(b"\xff\xd8 nothing")
    (folder / "notes.txt").write_text("no image")
    return folder


def readable(photos: Path) -> list[Path]:
    """The images in the order of timm's readers."""
    files = [path for path in photos.rglob("*.*") if path.name not in ("broken.jpg", "notes.txt")]
    return sorted(files, key=lambda path: timm_key(str(path)))


def timms_images(model: nn.Module, files: list[Path]) -> Tensor:
    """(B, 3, H, W) by timm's validation transform."""
    transform: Any = create_transform(**resolve_data_config({}, model=model))
    return torch.stack([transform(Image.open(file).convert("RGB")) for file in files])


@torch.no_grad()
def expected(model: nn.Module, files: list[Path]) -> np.ndarray:
    return model(timms_images(model, files)).softmax(-1).numpy()


READ = {"csv": pandas.read_csv, "json": pandas.read_json, "parquet": pandas.read_parquet}


@pytest.mark.parametrize(
    ("name", "backend", "ending"),
    [("volo_test", "pil", "csv"), ("test_resnet", "torchvision", "json"), ("volo_test", "torchvision", "parquet")],
)
def test_predictions_are_those_of_timms_transform_and_the_model(
    call, photos, described, tmp_path, name, backend, ending
):
    model, checkpoint = described(name)
    out = tmp_path / "new" / f"out.{ending}"
    ended = call(
        "predict", f"--checkpoint {checkpoint} {FLAGS} --topk 9 --data-backend {backend} -o {out}", photos
    ).ok()
    assert "5 images predicted, 1 could not be read" in ended.out and ended.out.count("broken.jpg: ") == 1
    rows, files = READ[ending](out), readable(photos)
    assert rows["path"].tolist() == [str(file) for file in files for _ in range(6)]
    assert rows["rank"].tolist() == [1, 2, 3, 4, 5, 6] * 5
    assert rows["class_name"].tolist() == [NAMES[class_id] for class_id in rows["class_id"]]
    ids, values = (rows[column].to_numpy().reshape(5, 6) for column in ("class_id", "probability"))
    got = np.zeros((5, 6))
    np.put_along_axis(got, ids, values, 1)
    assert (np.diff(values) <= 0).all()
    # torchvision's pixels are at most one level off Pillow's.
    np.testing.assert_allclose(got, expected(model, files), atol=1e-5 if backend == "pil" else 3e-5)
    # A short table is printed as well, with the path in the first row of an image.
    shown = [line for line in ended.out.splitlines() if line.endswith(" %")]
    assert shown[0].startswith(str(files[0])) and shown[1].startswith("   ")
    assert [line.split()[-4:-2] for line in shown] == [[str(i), NAMES[i]] for i in rows["class_id"]]


@pytest.mark.parametrize("name", ["volo_test", "test_resnet"])
def test_embeddings_are_features(call, photos, described, tmp_path, name):
    model, checkpoint = described(name)
    flags = f"--checkpoint {checkpoint} {FLAGS} --data-backend pil --embeddings {tmp_path}/e"
    assert call("predict", f"{flags}.safetensors", photos).code == 0
    assert call("predict", f"{flags}.npz --embeddings-pooled-only", photos).code == 0
    files = readable(photos)
    with torch.no_grad():
        last: Any = model.forward_features(timms_images(model, files))  # type: ignore[operator]
        pooled = model.forward_head(last, pre_logits=True)  # type: ignore[operator]
    tokens = last[:, 1:] if last.ndim == 3 else last.flatten(2).transpose(1, 2)  # one class token
    with safe_open(tmp_path / "e.safetensors", "pt") as file:
        assert json.loads(file.metadata()["paths"]) == list(map(str, files))
        got = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert set(got) == {"pooled", "tokens"}
    torch.testing.assert_close(got["pooled"], pooled, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got["tokens"], tokens, atol=1e-4, rtol=1e-4)
    with np.load(tmp_path / "e.npz") as arrays:
        assert sorted(arrays) == ["paths", "pooled"] and arrays["paths"].tolist() == list(map(str, files))
        np.testing.assert_array_equal(arrays["pooled"], got["pooled"].numpy())


def test_token_maps_show_what_the_dense_head_says(call, photos, described, tmp_path, monkeypatch):
    model, checkpoint = described("volo_test", img_size=(64, 96))
    model.aux_head.weight.data *= 20  # type: ignore[operator,union-attr]
    torch.save(torch.load(checkpoint) | {"state_dict": model.state_dict()}, checkpoint)
    seen: dict[str, Any] = {}
    page = predict.answers_page

    def keep(rows: int, image: np.ndarray, view: Any, names: list[str], title: str) -> Any:
        seen[title.split(":")[0]] = image, view
        return page(rows, image, view, names, title)

    monkeypatch.setattr(predict, "answers_page", keep)
    maps = tmp_path / "maps"
    call("predict", f"--checkpoint {checkpoint} {FLAGS} --data-backend pil --token-maps {maps}", photos).ok()
    files = readable(photos)
    assert {str(path.relative_to(maps)) for path in maps.rglob("*.png")} == {
        f"{file.relative_to(photos)}.png" for file in files
    }
    inputs = timms_images(model, files)
    with torch.no_grad():
        dense = model(inputs, dense=True)[1].softmax(-1)
    assert len(dense.argmax(-1).unique()) > 2
    for file, tokens, image in zip(files, dense, inputs, strict=True):
        pixels, view = seen[drawable(str(file.relative_to(photos)))]
        assert (view.tokens.ids == tokens.argmax(-1).view(4, 6).numpy()).all()
        np.testing.assert_allclose(view.tokens.probability, tokens.amax(-1).view(4, 6).numpy(), atol=1e-5)
        assert view.token_box == (-0.5, -0.5, 95.5, 63.5)  # the middle of a token's window lies half a pixel before it
        mean, std = (torch.tensor(model.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))  # type: ignore
        np.testing.assert_allclose(pixels, ((image * std + mean) * 255).permute(1, 2, 0).numpy(), atol=0.51)


def test_run_supplies_all_and_its_best_average(call, trained_run, tmp_path):
    data, run = trained_run
    checkpoint = torch.load(run / "model_best.pth.tar")
    files = sorted((data / "validation").rglob("*.jpg"), key=lambda path: timm_key(str(path)))
    flags = f"--checkpoint {run} {FLAGS} --data-backend pil -o {tmp_path}"
    for flag, entry in (("", "state_dict_ema"), ("--no-use-ema", "state_dict")):
        ended = call("predict", f"{flags}/{entry}.csv {flag}", data / "validation")
        assert ended.code == 0 and f"{run}: model_best.pth.tar" in ended.out, ended.err
        assert ("weights: EMA (training selected by it)" in ended.out) == (flag == "")
        model = timm.create_model("volo_test", num_classes=4, img_size=32).eval()
        model.load_state_dict(checkpoint[entry])
        first = pandas.read_csv(tmp_path / f"{entry}.csv").query("rank == 1")
        assert first["path"].tolist() == list(map(str, files))
        assert set(first["class_name"]) <= {"blue", "green", "grey", "red"}
        np.testing.assert_allclose(first["probability"], expected(model, files).max(1), atol=1e-5)


def test_class_names(call, photos, tmp_path):
    torch.save(timm.create_model("volo_test", num_classes=3).state_dict(), tmp_path / "v.pth")
    (tmp_path / "names.txt").write_text("küche\nflur\nbad\n", encoding="utf-8")
    (tmp_path / "two.txt").write_text("a\nb\n")
    flags = f"--model volo_test --num-classes 3 --checkpoint {tmp_path}/v.pth {FLAGS} {photos}/b9.jpg"
    plain = call("predict", flags)
    assert {line.split()[-3] for line in plain.out.splitlines() if line.endswith(" %")} == {"0", "1", "2"}
    ended = call("predict", f"{flags} --class-names {tmp_path}/names.txt")
    named = {tuple(line.split()[-4:-2]) for line in ended.out.splitlines() if line.endswith(" %")}
    assert named == {("0", "küche"), ("1", "flur"), ("2", "bad")}, ended.err
    ended = call("predict", f"{flags} --class-names {tmp_path}/two.txt")
    assert ended.code == 2 and "two.txt holds 2 lines: give a name for each of 3 classes" in ended.err
    record = {"state_dict": torch.load(tmp_path / "v.pth"), "model_config": {"class_names": ["flur", "küche", "bad"]}}
    torch.save(record, tmp_path / "v.pth")
    ended = call("predict", f"{flags} --class-names {tmp_path}/names.txt")
    assert ended.refused("--class-names: class 0 is küche, which is class 1 of the checkpoint")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("{photos}/none.jpg", "none.jpg: no such file or folder"),
        ("{photos}/day2/broken.jpg -o {photos}/out.csv", "not one of 1 images can be read, the first is "),
        ("{photos}/empty", "no images in "),
        ("{photos} {photos} --token-maps maps", "share the picture photos/"),
        ("{photos} --checkpoint {photos}", "no file in it ends in"),
        ("{photos}/b9.jpg --output {photos}/empty/x.csv", "x.csv exists already: remove it"),
        ("{photos}/b9.jpg --embeddings {photos}/empty/x.npz", "x.npz exists already: remove it"),
        ("{photos}/b9.jpg --token-maps {photos}/empty", "b9.jpg.png exists already: remove it"),
    ],
)
def test_mistakes_are_one_line(flags, message, call, photos, described):
    (photos / "empty").mkdir()
    kept = [photos / "empty" / name for name in ("x.csv", "x.npz", "b9.jpg.png")]
    if "exists" in message:
        for file in kept:
            file.write_text("kept")
    ended = call("predict", f"--checkpoint {described('volo_test')[1]} {flags.format(photos=photos)} --device cpu")
    assert ended.refused(message) and not (photos / "out.csv").exists(), ended.err
    assert not kept[0].exists() or {file.read_text() for file in kept} == {"kept"}
