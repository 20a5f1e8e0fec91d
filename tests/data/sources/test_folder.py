"""Class folders: order and classes as timm finds them, and what timm passes over in silence is reported or refused.
`--dataset csv/FILE`: what a table may say, and one line for what it may not."""

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.utils.misc import natural_key as timm_key

from tests.data.conftest import refuses
from tlt.data.sources import folder as class_folders
from tlt.data.sources import open_images
from tlt.data.sources.folder import FolderListing, find_split, read_class_map, scan_folder
from tlt.data.sources.image_file import image_extensions
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.jobs import Progress, SearchProgress
from tlt.io.text import natural_sorted


def test_names_that_differ_in_a_number_are_in_timms_order():
    """With and without a key for each: leading zeros, another digit beside the number, and other letters need one."""
    draw = random.Random(0)
    for _ in range(2000):
        before, after = draw.choice(["", "n", "N", "a1_", "é"]), draw.choice([".jpg", "", "b", "2.png"])
        names = {f"{before}{'0' * (draw.random() < 0.03)}{draw.randint(0, 130)}{after}" for _ in range(5)}
        names |= {"N10.jpg", "n9.jpg"} if draw.random() < 0.1 else set()
        assert natural_sorted(names) == sorted(sorted(names), key=timm_key), names


def image(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3), (200, 10, 10)).save(path)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("n10/b10.jpg", "n10/b9.JPEG", "n2/B1.png", "N3/deep/x.jpg", "N3/deep/x.webp", "N3/deep/x2.tiff"):
        image(tmp_path / "train" / name)
    return tmp_path / "train"


def test_search_reports_after_3_seconds_and_every_10(monkeypatch):
    now, reported, alive = [0.0], list[str](), list[int]()
    monkeypatch.setattr("tlt.io.jobs.time.monotonic", lambda: now[0])
    progress = SearchProgress(reported.append, lambda: alive.append(1))
    for second in range(30):
        now[0] = second
        progress("listing data", 100 * second)
    assert reported == [f"listing data: {100 * second} found in {second} s" for second in (3, 13, 23)]
    assert len(alive) == 30


def test_progress_has_the_time_of_the_rest(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("tlt.io.jobs.time.monotonic", lambda: now[0])
    progress = Progress("labelling", 100)
    for now[0], count in ((9, 9), (20, 1), (60, 90)):
        progress.step(count)
    progress.close()
    assert capsys.readouterr().out.splitlines() == [
        "labelling: 10/100 images, 0.5 images/s, ETA 03:00",
        "labelling: 100/100 images, 1.7 images/s, ETA 00:00",
        "labelling: 100/100 images, 1.7 images/s, in 01:00",
    ]


@pytest.mark.parametrize("imposed", [None, ["n10", "deep", "absent", "n2"]])
def test_scan_agrees_with_timm(tree, imposed):
    for digits in (9, 46, 47, 48):  # the code of a slash is 47
        image(tree / "n2" / f"{'1' * digits}.png")
    ours = scan_folder(tree)
    if imposed:
        ours.number_by(imposed)
    index = imposed and {name: i for i, name in enumerate(imposed)}
    theirs, class_to_idx = find_images_and_targets(str(tree), types=image_extensions(), class_to_idx=index)
    assert [(ours.path(i), int(c)) for i, c in enumerate(ours.classes)] == theirs
    assert {name: i for i, name in enumerate(ours.class_names)} == class_to_idx
    assert ours.class_names == (imposed or ["deep", "n2", "n10"])


def test_any_names_are_in_timms_order(tmp_path):
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
        paths = [str(path.relative_to(root)) for path in root.rglob("*.jpg") if not path.name.startswith(".")]
        outside = ["m9.jpg", "m10.jpg", "B.jpg", "n1.jpg", "01.jpg"]
        for name in outside:
            (root / name).touch()
        for classes, expected in ((True, paths), (False, [*paths, *outside])):
            listing = FolderListing(root, classes=classes)
            assert listing.names == sorted(expected, key=lambda path: (timm_key(path), path))
            assert [listing.leaves[leaf] for leaf in listing.leaf] == [os.path.dirname(path) for path in listing.names]


def test_fault_29_30_empty_and_missing_class_folders(tree):
    (tree / "n5").mkdir()
    train = scan_folder(tree)
    assert train.class_names == ["deep", "n2", "n5", "n10"] and train.classes.tolist() == [1, 0, 0, 0, 3, 3]
    assert train.warnings == [f"{tree}: 1 classes without images keep their number: n5"]
    val = shutil.copytree(tree, tree.parent / "val")

    def validation() -> ImageSource:
        return open_images(str(tree.parent), "val", class_names=train.class_names)

    (val / "n5").rmdir()
    class_folders.compare_classes(train, validation())
    shutil.rmtree(val / "n2")
    with pytest.raises(UserError, match=r"1 in .*train only \(n2\)"):
        class_folders.compare_classes(train, validation())
    (val / "n2").mkdir()
    class_folders.compare_classes(train, validation())
    image(val / "extra" / "x.jpg")
    with pytest.raises(UserError, match="not in the class list .*extra; .*: remove them, or add"):
        validation()
    with pytest.raises(UserError, match=r"1 in .*val only \(extra\)"):
        class_folders.compare_classes(train, scan_folder(val))
    (val / "n10").rename(val / "N10")
    with pytest.raises(UserError, match=r"N10.*; names that look the same differ in .*, in case or in spaces"):
        validation()
    with pytest.raises(UserError, match=r"val only \(extra, N10\).*, in case or in spaces"):
        class_folders.compare_classes(train, scan_folder(val))


def test_fault_23_31_36_38_what_is_left_out_is_reported(tree):
    """Unknown suffixes, pipes, dangling links, hidden folders, loops, links to what is read elsewhere."""
    image(tree / "a" / "1.webp")
    before = scan_folder(tree)
    assert before.class_names == ["a", "deep", "n2", "n10"] and before.warnings == []
    (tree / "a" / "2.heif2").write_bytes(b"x")
    (tree / "a" / "3\n.heif2").write_bytes(b"x")
    os.mkfifo(tree / "n2" / "pipe.jpg")
    (tree / "n2" / "gone.jpg").symlink_to("nowhere.jpg")
    image(tree / "loose.jpg")
    (tree / "n10" / "loop").symlink_to(tree)
    (tree / "a_first").symlink_to(tree / "n2")
    image(tree / ".ipynb_checkpoints" / "1.jpg")
    image(tree / "n2" / ".ipynb_checkpoints" / "1.jpg")
    after = scan_folder(tree)
    assert after.paths == before.paths and after.class_names == before.class_names
    assert sorted(line.partition("left out ")[2] for line in after.warnings) == [
        "1 images outside of any class folder: loose.jpg",
        "2 files that are not images by their suffix: a/2.heif2, a/3\\n.heif2",
        "2 hidden entries: .ipynb_checkpoints, n2/.ipynb_checkpoints",
        "2 links to folders already read: a_first, n10/loop",
        "2 pipes or dangling links: n2/gone.jpg, n2/pipe.jpg",
    ]


@pytest.mark.parametrize("classes", [True, False])
def test_no_image_is_read_twice_through_links(tree, tmp_path, classes):
    """Links to what holds the split, or the link, to parts of what is read through another link, to hidden folders."""
    pool = tmp_path / "pool"
    image(pool / "n7" / "part" / "1.jpg")
    before = FolderListing(tree, classes=classes).names
    image(tree / ".store" / "1.jpg")
    (tree / "n1").mkdir()  # an empty class, which has nothing but a loop
    links = {"n10/data": tree.parent, "n10/root": tree.parent.parent, "n2/self": tree / "n2", "n2/class": tree / "n10"}
    links |= {"n4": pool / "n7", "n5": pool / "n7" / "part", "n6": pool / "n7", "n1/loop": tree, "n3": tree / ".store"}
    for link, target in links.items():
        (tree / link).symlink_to(target)
    (pool / "n7" / "up").symlink_to(pool)
    (pool / "n7" / "split").symlink_to(tree)
    listing = FolderListing(tree, classes=classes)
    assert sorted(listing.names) == sorted([*before, "n3/1.jpg", "n4/part/1.jpg"])
    assert any("9 links to folders already read" in line for line in listing.warnings)
    assert not classes or scan_folder(tree).class_names == ["deep", "n1", "n2", "n3", "n10", "part"]


def test_fault_33_missing_validation_folder(tree):
    with pytest.raises(UserError, match=r"no 'validation' folder in .*searched validation, val, valid, eval, eval"):
        find_split(tree.parent, "validation", allow_root=True)
    with pytest.raises(UserError, match="it holds deep"):
        find_split(tree / "N3", "train")
    image(tree.parent / "test_set" / "a" / "x.jpg")
    with refuses(r"name another split \(--val-split test_set\); --val-fraction 0.1 makes a split"):
        open_images(tree.parent, "validation", split_flag="--val-split")
    image(tree / "Train data" / "a" / "x.jpg")
    with refuses(r"\(--train-split 'Train data'\)"):
        open_images(tree, "train", split_flag="--train-split")
    assert find_split(tree, "validation", allow_root=True) == str(tree)
    for name in ("val", "validation", "mine"):  # from here on a split of its own name goes first
        image(tree / name / "x.jpg")
        asked = "mine" if name == "mine" else "validation"
        assert find_split(tree, asked) == str(tree / name)
    with pytest.raises(UserError, match="does not exist"):
        find_split(tree / "none", "train")


@pytest.mark.parametrize("program", ["train", "validate"])
@pytest.mark.parametrize("name", ["train.zip", "labels.csv", "train/a.tar.gz", "a.parquet", "train-00000-of-00002", ""])
def test_files_of_other_kinds_are_told_the_flag_that_reads_them(tmp_path, program, name):
    file = tmp_path / "data" / (name or "train/notes")
    file.parent.mkdir(parents=True)
    file.touch() if name else file.mkdir()
    for data in (tmp_path / "data", *([file] if name else [])):
        with pytest.raises(UserError) as caught:
            open_images(str(data), "train", allow_root=program == "validate")
        hint_given = "unpack archives first, and name another kind of data set by --dataset" in str(caught.value)
        assert hint_given == (name != "")


def test_fault_34_35_class_map_and_numbers_of_classes(tree, tmp_path):
    path = tmp_path / "map.txt"
    path.write_text("b\na\n\n")
    assert read_class_map(path) == ["b", "a"]
    for content, message in (("a\nb\na\n", "names a more than once"), ("", "is empty"), (None, "can't be read")):
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(UserError, match=message):
            read_class_map(path)
    folder = scan_folder(tree)
    with pytest.raises(UserError, match=r"--num-classes 2, but .* has 3 class folders: give 3"):
        class_folders.check_num_classes(folder, 2)
    (warning,) = [*class_folders.check_num_classes(folder, 3), *class_folders.check_num_classes(folder, 4)]
    assert "--num-classes 4" in warning


def test_fault_28_37_bad_trees_are_one_line(tree):
    (tree / "n4").symlink_to(tree / "gone")
    with refuses(r"n4 can't be read \(No such file"):
        scan_folder(tree)
    (tree / "n4").unlink()
    for folder in ("animals", "tools"):
        image(tree / folder / "crane" / "1.jpg")
    with refuses("two class folders named 'crane' in .*animals/crane and tools/crane"):
        scan_folder(tree)
    shutil.rmtree(tree / "animals")
    for path in tree.rglob("*.*"):
        path.unlink()
    (tree / "n2" / "notes.txt").write_text("x")
    with refuses(r"no images .*left out 1 files .* by their suffix: n2/notes.txt"):
        scan_folder(tree)
    shutil.rmtree(tree)
    with refuses("does not exist"):
        scan_folder(tree)


def test_fault_32_unreadable_class_folder(tree, monkeypatch):
    """As for a user who is not root, to whom permissions do not apply."""
    scandir = os.scandir

    def refusing(path: str) -> Iterator[os.DirEntry[str]]:
        if path.endswith("n2"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match=r"/n2 can't be read \(Permission denied\)"):
        scan_folder(tree)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """Three images in DATA, and one beside it."""
    for name in ("data/a.png", "data/b.png", "data/deep/c.png", "d.png"):
        image(tmp_path / name)
    return tmp_path / "data"


def opened(listed: Path, text: str, split: str = "train") -> list[tuple[str, str]]:
    """Path and class of the images of a table."""
    (listed / "table.csv").write_text(text)
    images = open_images(str(listed), split, "csv/table.csv")
    return [(path, images.class_names[number]) for path, number in zip(images.paths, images.classes, strict=True)]


def test_paths_take_their_usual_form_and_rows_their_split(listed):
    text = "path,class\n./a.png,x\ndeep/../b.png,y\ndeep//c.png,x\n"
    assert opened(listed, text) == [("a.png", "x"), ("b.png", "y"), ("deep/c.png", "x")]
    text = "path,split,class\na.png,train,x\nb.png,val,y\n"
    assert opened(listed, text) == [("a.png", "x")] and opened(listed, text, "validation") == [("b.png", "y")]
    assert open_images(str(listed), "validation", "csv/table.csv").class_names == ["x", "y"]  # of the whole table
    text = 'path, class ,split\na.png, x,train\nb.png,x , val\ndeep/c.png, "x, y" ,train\n'
    assert opened(listed, text) == [("a.png", "x"), ("deep/c.png", "x, y")]
    assert opened(listed, text, "validation") == [("b.png", "x")]


ROW = "a row needs a path and a class, and a field for each column"


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("path,class\na.png,x\n../d.png,x\n", r"line 3: \.\./d.png is not below DATA: paths count from there"),
        ("path,class\ndeep/../../d.png,x\n", "line 2: .* is not below DATA"),
        ("path,class,split\na.png,x,train\nb.png,x\n", f"line 3: {ROW}"),
        ("path,class\na.png,x\n,x\n", f"line 3: {ROW}"),
        ("path,class\na.png,x, large\n", 'line 2: .*and no more; write "a, b"'),
        ("image,label\na.png,x\n", "is no table, with commas, of columns 'path' and 'class'"),
        ("path,class\n./a.png,x\na.png,x\n", "names an image more than once"),
        ("path,class\na.png,x\nb.png, \n", f"line 3: {ROW}"),
        ("path,class\ngone.png,x\n", r"names 1 images that are not there \(gone.png\)"),
        ("path,class,split\na.png,x,test\n", r"no row whose column 'split' says train: it has test \(--split\)"),
    ],
)
def test_what_a_table_may_not_say_is_one_line(listed, text, reported):
    with refuses(rf"table\.csv.* ?{reported}"):
        opened(listed, text)
