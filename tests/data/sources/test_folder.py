"""Class folders: order and classes as timm finds them, and what timm passes over in silence is told or refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.utils.misc import natural_key as timm_key

from tlt.data.sources.folder import (
    ImageFolder,
    check_num_classes,
    compare_classes,
    find_split,
    read_class_map,
    scan_folder,
)
from tlt.data.sources.folder_listing import list_folder
from tlt.data.sources.image_file import image_extensions
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.natural import natural_key
from tlt.io.progress import SearchProgress
from tlt.io.text import printable


def image(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3), (200, 10, 10)).save(path)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("n10/b10.jpg", "n10/b9.JPEG", "n2/B1.png", "N3/deep/x.jpg", "N3/deep/x.webp", "N3/deep/x2.tiff"):
        image(tmp_path / "train" / name)
    return tmp_path / "train"


def test_natural_key_orders_like_timm() -> None:
    rng = random.Random(0)
    names = ["".join(rng.choices("ab1290_./ZÄ", k=rng.randint(1, 9))) for _ in range(500)]
    assert sorted(names, key=natural_key) == sorted(names, key=timm_key)
    assert sorted(["1²3", "1²10", "1a"], key=natural_key) == ["1a", "1²3", "1²10"]  # int() can't read the superscript


def test_what_a_search_finds_is_told_after_three_seconds_and_then_every_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told, alive = [0.0], list[str](), list[int]()
    monkeypatch.setattr("tlt.io.progress.time.monotonic", lambda: now[0])
    found = SearchProgress(told.append, lambda: alive.append(1))
    for second in range(30):
        now[0] = second
        found("listing data", 100 * second)
    assert told == [f"listing data: {100 * second} found in {second} s" for second in (3, 13, 23)]
    assert len(alive) == 30


def test_scan_agrees_with_timm(tree: Path) -> None:
    for digits in (9, 46, 47, 48):  # the code of a slash is 47
        image(tree / "n2" / f"{'1' * digits}.png")
    ours = scan_folder(tree)
    theirs, class_to_idx = find_images_and_targets(str(tree), types=image_extensions())
    assert [(ours.path(i), int(c)) for i, c in enumerate(ours.classes)] == theirs
    assert {name: i for i, name in enumerate(ours.class_names)} == class_to_idx
    assert ours.class_names == ["deep", "n2", "n10"] and ours.warnings == []


def test_any_names_are_in_timms_order(tmp_path: Path) -> None:
    """Folders inside of folders that hold images too, and names that are not of ASCII."""
    rng = random.Random(0)
    small = ["n1", "N02", "n12", "a b", "a", "a-b", "a/b", "a/B2", "a/b10", "é", "x/y/z", "x"]
    for trial in range(6):
        root = tmp_path / str(trial)
        for folder in rng.sample(small, 6):
            for _ in range(rng.randrange(1, 30)):
                path = root / folder / ("".join(rng.choices("abB0129 ._-é٣", k=rng.randint(1, 6))) + "x.jpg")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        listing = list_folder(root)
        hidden = [path for path in root.rglob("*.jpg") if path.name.startswith(".")]
        paths = [str(path.relative_to(root)) for path in root.rglob("*.jpg") if path not in hidden]
        assert listing.names == sorted(paths, key=lambda path: (timm_key(path), path))
        assert [listing.leaves[leaf] for leaf in listing.leaf] == [os.path.dirname(path) for path in listing.names]
        outside = ["m9.jpg", "m10.jpg", "B.jpg", "n1.jpg", "01.jpg"]
        for name in outside:
            (root / name).touch()
        listing = list_folder(root, classes=False)
        assert listing.names == sorted([*paths, *outside], key=lambda path: (timm_key(path), path))
        assert [listing.leaves[leaf] for leaf in listing.leaf] == [os.path.dirname(path) for path in listing.names]
        assert list_folder(root).names == sorted(paths, key=lambda path: (timm_key(path), path))


def test_imposed_classes_number_the_images(tree: Path) -> None:
    names = ["n10", "deep", "absent", "n2"]
    ours = scan_folder(tree, names)
    index = {name: i for i, name in enumerate(names)}
    theirs, _ = find_images_and_targets(str(tree), types=image_extensions(), class_to_idx=index)
    assert [(ours.path(i), int(c)) for i, c in enumerate(ours.classes)] == theirs
    assert ours.class_names == names and "'absent' (class 2)" in ours.warnings[0]


def test_split_names_are_timms(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    assert find_split(tmp_path, "validation") == str(tmp_path / "val")
    (tmp_path / "validation").mkdir()
    assert find_split(tmp_path, "validation") == str(tmp_path / "validation")
    (tmp_path / "mine").mkdir()
    assert find_split(tmp_path, "mine") == str(tmp_path / "mine")


def test_fault_28_empty_dataset(tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "notes.txt").write_text("x")
    with pytest.raises(
        UserError, match=r"no images .*left out 1 files that are not images by their suffix: a/notes.txt"
    ) as caught:
        scan_folder(tmp_path / "train")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="does not exist"):
        scan_folder(tmp_path / "none")


def test_fault_29_empty_class_folder_keeps_its_number(tree: Path) -> None:
    (tree / "n5").mkdir()
    folder = scan_folder(tree)
    assert folder.class_names == ["deep", "n2", "n5", "n10"]
    assert folder.classes.tolist() == [1, 0, 0, 0, 3, 3]
    assert folder.warnings == [f"{tree}: 1 classes without images keep their number: 'n5' (class 2)"]

    val = shutil.copytree(tree, tree.parent / "val")
    (val / "n5").rmdir()
    compare_classes(folder, scan_folder(val, folder.class_names))


def test_fault_30_class_missing_in_one_split(tree: Path) -> None:
    val = tree.parent / "val"
    shutil.copytree(tree, val)
    train = scan_folder(tree)
    compare_classes(train, scan_folder(val, train.class_names))

    shutil.rmtree(val / "n2")
    with pytest.raises(UserError, match=r"1 in .*train only \(n2\)"):
        compare_classes(train, scan_folder(val, train.class_names))
    (val / "n2").mkdir()
    compare_classes(train, scan_folder(val, train.class_names))

    image(val / "extra" / "x.jpg")
    with pytest.raises(UserError, match="not in the class list .*extra"):
        scan_folder(val, train.class_names)
    with pytest.raises(UserError, match=r"1 in .*val only \(extra\)"):
        compare_classes(train, scan_folder(val))


def test_fault_31_formats_and_unknown_suffixes(tree: Path) -> None:
    image(tree / "a" / "1.webp")
    (tree / "a" / "2.heif2").write_bytes(b"x")
    (tree / "a" / "3.heif2").write_bytes(b"x")
    folder = scan_folder(tree)
    assert folder.class_names == ["a", "deep", "n2", "n10"] and folder.paths[0] == "a/1.webp"
    assert len(folder.warnings) == 1
    assert "2 files that are not images by their suffix: a/2.heif2, a/3.heif2" in folder.warnings[0]


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder seen by a user who is not root, to whom permissions do not apply."""
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    root.chmod(0o755)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield root
    finally:
        os.seteuid(user)
        shutil.rmtree(root)


def test_fault_32_unreadable_class_folder(unprivileged: Path) -> None:
    user = os.geteuid()
    if user == 65534:
        os.seteuid(0)
    image(unprivileged / "a" / "1.png")
    image(unprivileged / "b" / "1.png")
    (unprivileged / "a").chmod(0)
    os.seteuid(user)
    with pytest.raises(UserError, match=r"/a can't be read \(Permission denied\)"):
        scan_folder(unprivileged)


def test_fault_32_dangling_link_to_a_class_folder(tree: Path) -> None:
    (tree / "n4").symlink_to(tree / "gone")
    with pytest.raises(UserError, match=r"n4 can't be read \(No such file"):
        scan_folder(tree)


def test_fault_33_missing_validation_folder(tree: Path) -> None:
    with pytest.raises(UserError, match=r"no 'validation' folder in .*searched validation, val, valid, eval, eval"):
        find_split(tree.parent, "validation", allow_root=True)
    with pytest.raises(UserError, match="it holds deep"):
        find_split(tree / "N3", "train")
    assert find_split(tree, "validation", allow_root=True) == str(tree)
    with pytest.raises(UserError, match="does not exist"):
        find_split(tree / "none", "train")


def test_fault_34_more_folders_than_classes(tree: Path) -> None:
    with pytest.raises(UserError, match=r"--num-classes 2, but .* has 3 class folders: give 3"):
        check_num_classes(scan_folder(tree), 2)


def test_fault_35_more_classes_than_folders(tree: Path) -> None:
    folder = scan_folder(tree)
    assert check_num_classes(folder, 3) == []
    assert "--num-classes 4" in check_num_classes(folder, 4)[0]


def test_fault_36_link_loops_and_hidden_folders(tree: Path) -> None:
    before = scan_folder(tree)
    (tree / "n10" / "loop").symlink_to(tree)
    (tree / "a_first").symlink_to(tree / "n2")
    image(tree / ".ipynb_checkpoints" / "1.jpg")
    image(tree / "n2" / ".ipynb_checkpoints" / "1.jpg")
    after = scan_folder(tree)
    assert after.paths == before.paths and after.class_names == before.class_names
    assert any("2 hidden entries: .ipynb_checkpoints" in line for line in after.warnings)
    assert any("2 links to folders already read: a_first, n10/loop" in line for line in after.warnings)


def test_links_to_folders_elsewhere_are_classes(tree: Path, tmp_path: Path) -> None:
    """Whatever lies in them is found once; a folder with nothing but such a link is no class."""
    image(tmp_path / "elsewhere" / "n7" / "1.jpg")
    (tree / "a_link").symlink_to(tmp_path / "elsewhere" / "n7")
    (tree / "n8").mkdir()
    (tree / "n8" / "up").symlink_to(tmp_path / "elsewhere")
    folder = scan_folder(tree)
    assert folder.class_names == ["a_link", "deep", "n2", "n10", "up"] and folder.paths[0] == "a_link/1.jpg"
    assert any("1 links to folders already read: n8/up/n7" in line for line in folder.warnings)


def test_fault_36_folder_with_nothing_but_a_loop_is_an_empty_class(tree: Path) -> None:
    (tree / "n4").mkdir()
    (tree / "n4" / "loop").symlink_to(tree)
    assert scan_folder(tree).class_names == ["deep", "n2", "n4", "n10"]


def test_fault_37_same_leaf_name_twice(tree: Path) -> None:
    image(tree / "animals" / "crane" / "1.jpg")
    image(tree / "tools" / "crane" / "1.jpg")
    with pytest.raises(UserError, match="two class folders named 'crane' in .*animals/crane and tools/crane"):
        scan_folder(tree)


def test_fault_38_odd_names_are_found_and_printable(tree: Path) -> None:
    odd = ["ü日本.jpg", "new\nline.jpg", os.fsdecode(b"\xff\xfe.jpg")]
    for name in odd:
        shutil.copy(tree / "n10" / "b10.jpg", tree / "n2" / name)
    (tree / "n2" / "bad\n.txt").write_text("x")
    folder = scan_folder(tree)
    assert {os.path.basename(path) for path in folder.paths} >= set(odd)
    assert printable("new\nline\udcff ü") == "new\\nline\\udcff ü"
    assert all(line.isprintable() for line in folder.warnings)


def test_fault_23_pipe_among_the_images_is_left_out(tree: Path) -> None:
    os.mkfifo(tree / "n2" / "pipe.jpg")
    (tree / "n2" / "gone.jpg").symlink_to("nowhere.jpg")
    image(tree / "loose.jpg")
    folder = scan_folder(tree)
    assert len(folder) == 6
    assert "1 images outside of any class folder: loose.jpg" in folder.warnings[0]
    assert "2 pipes or dangling links: n2/gone.jpg, n2/pipe.jpg" in folder.warnings[1]


def test_class_map(tmp_path: Path) -> None:
    path = tmp_path / "map.txt"
    path.write_text("b\na\n\n")
    assert read_class_map(path) == ["b", "a"]
    path.write_text("b\na\nb\n")
    with pytest.raises(UserError, match="names b more than once"):
        read_class_map(path)
    path.write_text("")
    with pytest.raises(UserError, match="empty"):
        read_class_map(path)
    with pytest.raises(UserError, match="can't be read"):
        read_class_map(tmp_path / "none.txt")


def test_what_other_processes_read_of_a_list_of_images_is_equal() -> None:
    names = Names(["a/1.jpg", "a/2\udcff.jpg", "b/é.jpg"])
    images = ImageFolder("root\udcff", names, np.array([0, 0, 2]), ["a", "-", "b"], ["a", "b"], ["hm"])
    arrays, plain = images.packed()
    sent = json.loads(json.dumps(plain))
    other = pickle.loads(pickle.dumps(ImageFolder.unpacked(arrays, sent)))  # of a data worker
    for field in fields(images):
        one, two = getattr(images, field.name), getattr(other, field.name)
        assert type(one) is type(two) and np.array_equal(one, two), field.name
    some = pickle.loads(pickle.dumps(other.select([2, 0])))
    assert (
        list(some.paths) == [names[2], names[0]] and some.classes.tolist() == [2, 0] and some.path(0) == images.path(2)
    )
