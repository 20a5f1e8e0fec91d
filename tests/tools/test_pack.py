"""The `tlt` command: packing trees, and unpacking, to the same maps, whatever they come from; checking images whose
labels are known; help without torch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tests.data.conftest import flip
from tests.labels.packed import SHAPE, label_map, make_tree, write_images
from tlt.data.sources.folder import scan_folder
from tlt.errors import UserError
from tlt.io.output_folder import META_NAME, marker_crc
from tlt.io.text import printable
from tlt.label_map import LabelMap, centre_square
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.features import FeatureInfo, FeatureWriter
from tlt.labels.label_info import Agreement, LabelInfo
from tlt.labels.store import LabelStore, open_labels
from tlt.labels.tree import label_names
from tlt.teacher import FeatureTeacher
from tlt.tools.cli import main
from tlt.tools.pack import pack, unpack

INFO = LabelInfo(SHAPE[0], SHAPE[1:], 5, (0.0, 0.1, 1.0, 0.9), {"model": "r"})


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "data") / "train"


@pytest.fixture
def names(images: Path) -> list[str]:
    return list(scan_folder(images).paths)


@pytest.fixture
def tree(images: Path, tmp_path: Path) -> Path:
    """The label of every image, saved in the ways that labels are saved."""
    root = make_tree(tmp_path / "tree", scan_folder(images))
    for number, path in enumerate(sorted(root.rglob("*.pt"))[:3]):
        entry = torch.load(path)
        torch.save((entry[None], entry.float(), entry)[number], path, _use_new_zipfile_serialization=number != 2)
    return root


def check_same(one: LabelStore, other: LabelStore) -> None:
    """Maps, bit for bit."""
    assert one.shape == other.shape
    for index in range(len(one)):
        first, second = (store.read(index, 8, 4) for store in (one, other))
        np.testing.assert_array_equal(first.values, second.values)
        np.testing.assert_array_equal(first.ids, second.ids)
        assert (first.values.dtype, first.ids.dtype, first.area) == (np.float16, np.int32, second.area)


@pytest.mark.parametrize(("known", "area"), [(True, "full"), (False, "center")], ids=["images", "labels"])
def test_archive_has_its_trees_maps(tree, images, names, tmp_path, known, area):
    said = pack(str(tree), str(tmp_path / "out"), str(images) if known else None, area=area)
    assert "9 labels packed" in said[0] and ("% by chance" in said[-1]) == known
    for some in (names, [names[row] for row in (4, 0, 6, 2, 5, 1, 3)]):
        check_same(open_labels(tmp_path / "out", some), open_labels(tree, some, area=area))
    expected = (0, 0, 1, 1) if area == "full" else centre_square(80, 40)
    assert open_labels(tmp_path / "out", names).read(0, 80, 40).area == expected


def test_unpacking_gives_files_with_the_same_maps(tree, images, names, tmp_path):
    INFO.write(tree / "labels.json")
    for out, folder in (("known", str(images)), ("unknown", None)):
        pack(str(tree), str(tmp_path / f"{out}.tlt"), folder)
        assert unpack(str(tmp_path / f"{out}.tlt"), str(tmp_path / out))[0].startswith("9 label files in")
        files = sorted(path.relative_to(tree) for path in tree.rglob("*") if path.is_file())
        assert files == sorted(p.relative_to(tmp_path / out) for p in (tmp_path / out).rglob("*") if p.is_file())
        check_same(open_labels(tmp_path / out, names), open_labels(tree, names))
        info = LabelInfo.read(tmp_path / out / "labels.json")
        assert info is not None and (info.area, info.annotator, info.num_classes) == (INFO.area, {"model": "r"}, 5)
    loaded = torch.load(tmp_path / "known" / label_names(names)[5], weights_only=True)  # as published
    assert (loaded.dtype, loaded.shape) == (torch.float16, (2, *SHAPE))
    np.testing.assert_array_equal(loaded[0], label_map(5).values)
    (tmp_path / "known" / "notes.txt").write_text("kept")
    archive, before = str(tmp_path / "known.tlt"), {path: path.read_bytes() for path in tree.rglob("*.pt")}
    with pytest.raises(UserError, match="is not empty: choose another folder, or --overwrite"):
        unpack(archive, str(tmp_path / "known"))
    (stale := tmp_path / "known" / "b" / "old.pt").write_bytes(b"")
    unpack(archive, str(tmp_path / "known"), overwrite=True)
    assert not stale.exists()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "kept.pt").write_bytes(b"")
    (tmp_path / "known" / "link").symlink_to(elsewhere)
    with pytest.raises(UserError, match="holds a link to a folder elsewhere"):
        unpack(archive, str(tmp_path / "known"), overwrite=True)
    assert (elsewhere / "kept.pt").exists()
    (tree / "labels.json").unlink()
    with pytest.raises(UserError, match="holds other things than a label tree"):
        unpack(archive, str(tree), overwrite=True)
    assert (tmp_path / "known" / "notes.txt").exists()
    assert before == {path: path.read_bytes() for path in tree.rglob("*.pt")}


def test_names_that_lead_out_are_not_unpacked(tmp_path):
    writer = ArchiveWriter(tmp_path / "a.tlt", INFO, ["../x.jpg"])
    writer.write(0, label_map(0))
    writer.finish()
    with pytest.raises(UserError, match=r"\.\./x\.pt, outside of its tree: it is not unpacked"):
        unpack(str(tmp_path / "a.tlt"), str(tmp_path / "deep" / "back"))
    assert not (tmp_path / "deep").exists()


def test_what_has_no_partner_is_told(tree, images, names, tmp_path):
    label = tree / label_names(names)[4]
    label.rename(tree / "other.pt")
    said = pack(str(tree), str(tmp_path / "out"), images=str(images))
    assert f"1 of 9 images have no label, such as {names[4]}" in said[0]
    assert "1 labels belong to no image, such as other.pt" in said[1] and "% of 8 images" in said[-1]  # of known class
    store = open_labels(tmp_path / "out", names, bad_label="skip")
    assert store.reader.missing == {4} and store.reader.extra() == ["other.pt"]
    np.testing.assert_array_equal(store.read(8).values, label_map(8).values)


def test_transposed_trees_are_turned(tree, names, tmp_path):
    pack(str(tree), str(tmp_path / "out"), transposed=True)
    result = open_labels(tmp_path / "out", names).read(7)
    np.testing.assert_array_equal(result.values, label_map(7).values.transpose(0, 2, 1))
    np.testing.assert_array_equal(result.ids, label_map(7).ids.transpose(0, 2, 1))


def test_labels_of_another_tree_do_not_go_on(tree, names, tmp_path):
    broken = tree / label_names(names)[5]
    content = broken.read_bytes()
    broken.write_bytes(b"")
    with pytest.raises(UserError):
        pack(str(tree), str(tmp_path / "out"))
    broken.write_bytes(content)
    other = shutil.copytree(tree, tmp_path / "other")
    for path in other.rglob("*.pt"):
        torch.save(torch.load(path) * 0, path)
    with pytest.raises(UserError, match="holds labels of another tree: choose another OUT, or --overwrite"):
        pack(str(other), str(tmp_path / "out"))
    older = json.loads((marker := tmp_path / "out" / META_NAME).read_text())  # of a version that recorded less
    del older["--transposed"], older["crc32"]
    marker.write_text(json.dumps(older | {"crc32": marker_crc(older)}))
    pack(str(tree), str(tmp_path / "out"))


def test_labels_that_cannot_be_trained_on_are_not_packed(tree, names, tmp_path):
    path, out = tree / label_names(names)[5], str(tmp_path / "out")
    good = torch.load(path)
    for content, message in (
        (torch.where(good > 1, torch.inf, good), "x.png.pt: "),
        (good[..., :2], r"x\.png\.pt: shape \(k, h, w\) = \(2, 3, 2\), but the archive's is"),
    ):
        torch.save(content, path)
        with pytest.raises(UserError, match=message):
            pack(str(tree), out)
    with pytest.raises(UserError, match="was made with --transposed False, this command says True: choose another"):
        pack(str(tree), out, transposed=True)
    torch.save(good, path)
    pack(str(shutil.copytree(tree, tmp_path / "moved")), out)  # the same command goes on
    with pytest.raises(UserError, match="--split val has no effect without --images"):
        pack(str(tree), out, split="val")
    with pytest.raises(UserError, match="complete label archive: choose another folder, or --overwrite"):
        pack(str(tree), out)


ROOT = Path(__file__).resolve().parents[2]
GRID = 8


@pytest.fixture
def scenes(tmp_path: Path) -> tuple[Path, Path]:
    """Images of two classes, and label maps of three: class 0 or 1 within a box somewhere, class 2 around it."""
    generator = np.random.default_rng(3)
    for number in range(40):
        name = f"c{number % 2}"
        for folder in ("data", "tree"):
            (tmp_path / folder / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (36, 24)).save(tmp_path / "data" / name / f"{number}.png")
        ids = np.full((GRID, GRID), 2)
        row, col, side = generator.integers(0, 5, 3)
        ids[row : row + side + 1, col : col + side + 1] = generator.integers(0, 2)
        both = np.stack([np.stack([np.full(ids.shape, 6.0), np.zeros(ids.shape)]), np.stack([ids, (ids + 1) % 3])])
        torch.save(torch.from_numpy(both).half(), tmp_path / "tree" / name / f"{number}.pt")
    return tmp_path / "data", tmp_path / "tree"


def test_check_counts(scenes, capsys):
    data, tree = scenes
    (data / "c1" / "1.png").write_bytes(b"cut")  # no fault of a label: no byte of an image is read
    for area in ("full", "center"):
        LabelInfo(2, (GRID, GRID), 3, area).write(tree / "labels.json")
        assert main(["check", str(data), str(tree)]) == 0
        said = capsys.readouterr().out
        assert "40 images, 40 labels read, (k, h, w) = (2, 8, 8)" in said and "images without label: 0" in said
    assert main(["check", str(data), str(tree), "--num-classes", "0"]) == 2
    assert "--num-classes: '0' is not a whole number of 1 or more" in capsys.readouterr().err
    (tree / "labels.json").unlink()
    first = torch.load(tree / "c0" / "0.pt")
    torch.save(first[..., :4], tree / "c0" / "0.pt")
    (tree / "c0" / "2.pt").unlink()
    (tree / "c0" / "4.pt").write_bytes(b"cut")
    torch.save(first, tree / "c0" / "old.pt")
    assert main(["check", str(data), str(tree)]) == 2
    said = capsys.readouterr().out
    for line in (
        "40 images, 38 labels read",
        "images without label: 1\n  c0/2.png",
        "labels without image: 1\n  c0/old.pt",
        "labels of another shape: 1\n  c0/0.png: (2, 8, 4)",
        "labels that can't be used: 1\n  c0/4.png: label",
    ):
        assert line in said


def test_check_measures_agreement(scenes, capsys):
    data, tree = scenes
    tops = {path: torch.load(path)[1, 0] for path in tree.rglob("*.pt")}
    agreeing = sum(int((top == int(path.parent.name[1])).sum()) for path, top in tops.items())
    chance = sum(int((top == c).sum()) for top in tops.values() for c in (0, 1)) / 2
    cells = 40 * GRID * GRID
    expected = f"{100 * agreeing / cells:.2f} % of {cells} cells ({100 * chance / cells:.2f} % by chance)"
    assert main(["check", str(data), str(tree)]) == 0
    assert expected in capsys.readouterr().out
    out, whole = data.with_name("out.tlt"), data.with_name("whole")
    whole.mkdir()
    (whole / "other").symlink_to(data)
    assert main(["check", str(whole), str(tree), "--split", "other"]) == 0
    assert expected in capsys.readouterr().out
    assert main(["pack", str(tree), str(out), "--images", str(whole), "--split", "other"]) == 0
    assert expected in capsys.readouterr().out
    assert main(["check", str(data), str(out)]) == 0
    assert expected in capsys.readouterr().out
    with open(out / "values.npy", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x07")
    assert main(["check", str(data), str(out)]) == 2
    said = capsys.readouterr().out
    assert "labels that can't be used: 1\n  c1/39.png: label of c1/39.png in" in said and "crc32 is wrong" in said


@pytest.mark.parametrize(
    ("last", "after", "code", "said"),
    [
        (0, "", 0, ["9 images, 9 maps read, 2 x 3 tokens of 4 channels in float16, 0.1 KB an image"]),
        (0, "flip", 2, ["9 images, 8 maps read", "can't be used: 1\n  NAME: features of NAME in", "crc32 is wrong"]),
        (0, "rename", 2, ["images without features: 1\n  b/new.jpg\n", "features without image: 1\n  NAME\n"]),
        (np.inf, "", 2, ["features that can't be used: 1\n  NAME: they are not finite\n"]),
        (1, "", 2, ["features that can't be used: 1\n  NAME: all tokens are equal\n"]),
        (None, "", 0, ["1 images could not be read when the features were made", "images without features: 0"]),
    ],
)
def test_check_counts_features(images, names, tmp_path, capsys, last, after, code, said):
    row = len(names) - 1
    writer = FeatureWriter(tmp_path / "out", FeatureInfo((2, 3), 4, "float16"), names)
    for number in range(row):
        writer.write(number, torch.rand(2, 3, 4))
    if last is None:
        writer.write_absent(row)
    else:
        writer.write_row(row, {"features": np.full((2, 3, 4), last) if last else np.arange(24).reshape(2, 3, 4)})
    writer.finish([names[row]] if last is None else [])
    if after == "rename":
        (images / names[row]).rename(images / "b" / "new.jpg")
    elif after:
        flip(tmp_path / "out" / "features.npy", -1)
    assert main(["check", str(images), str(tmp_path / "out")]) == code
    out = capsys.readouterr().out
    for line in [*said, "images are too few to tell"]:
        assert line.replace("NAME", printable(names[row])) in out
    assert main(["check", str(images), str(tmp_path / "out"), "--num-classes", "3"]) == 2
    assert "--num-classes is for labels, and" in capsys.readouterr().err


NETWORKS = {"vit_tiny_patch16_224": {"img_size": 64, "patch_size": 8, "depth": 2, "embed_dim": 96}, "resnet10t": {}}
MISTAKES = {
    "as they lie": lambda maps: maps,
    "mirrored": lambda maps: maps.flip(2),
    "upside down": lambda maps: maps.flip(1),
    "turned by 180 degrees": lambda maps: maps.flip(1, 2),
    "transposed": lambda maps: maps.transpose(1, 2),
    "of other images": lambda maps: maps.roll(30, 0),
    "noise": torch.rand_like,
    "of one image": lambda maps: maps[:1].expand_as(maps),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_check_tells_where_features_of_a_random_network_lie(tmp_path, capsys, name):
    (data := tmp_path / "data").mkdir()
    generator = np.random.default_rng(0)
    images = np.empty((60, 64, 64, 3), np.float32)
    for number in range(60):
        coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), np.uint8))
        coarse.resize((80, 60), Image.Resampling.BICUBIC).save(data / f"{number:02}.png")
        images[number] = coarse.resize((64, 64), Image.Resampling.BICUBIC)
    torch.manual_seed(0)
    teacher = FeatureTeacher(timm.create_model(name, **NETWORKS[name]), (64, 64))
    maps = teacher(torch.from_numpy(images).permute(0, 3, 1, 2) / 64 - 2).unflatten(1, teacher.tokens[0])
    for mistake, move in MISTAKES.items():
        info = FeatureInfo(teacher.tokens[0], teacher.tokens[2], area=teacher.tokens[1])
        writer = FeatureWriter(tmp_path / "out", info, scan_folder(data, classes=False).paths, overwrite=True)
        for row, features in enumerate(move(maps)):
            writer.write(row, features)
        writer.finish()
        writer.close()
        capsys.readouterr()
        code = main(["check", str(data), str(tmp_path / "out")])
        said = capsys.readouterr().out.splitlines()[-1]
        told = {"as they lie": " %", "noise": ": too little to tell", "of one image": ": too little to tell"}
        assert said.endswith(told.get(mistake, f": they seem to be {mistake}")), said
        assert code == (0 if mistake in told else 2)


def test_an_image_is_named_by_the_mean_of_its_cells_shares():
    """One cell is sure of class 0; each class of the two others has a third of a cell."""
    values = np.array([[[9, 0, 0]], [[0, 0, 0]], [[0, 0, 0]]], np.float16)  # (k, h, w)
    ids = np.array([[[0, 1, 1]], [[2, 2, 2]], [[3, 4, 5]]], np.int32)
    agreement = Agreement()
    for folder in (0, 0, 1):
        agreement.add(folder, LabelMap(values, ids))
    assert agreement.summary()["images_naming_their_class"] == 2 / 3


def test_help_imports_nothing_heavy():
    code = (
        "import sys; __file__ = '/usr/bin/tlt'\n"  # the program
        "from tlt.tools.cli import _COMMANDS, main\n"
        "for command in ([], *map(lambda name: [name], _COMMANDS)):\n"
        "  try: main([*command, '--help'])\n"
        "  except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'PIL'} & set(sys.modules), 'imported'\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0 and "usage: tlt" in ended.stdout, ended.stderr
