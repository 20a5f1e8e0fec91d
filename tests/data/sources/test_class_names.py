"""Which class of an imposed list a class is: by its name, whatever that looks like. Lists that don't fit."""

import pytest

from tests.data.conftest import jpeg, refuses, write
from tests.data.sources.test_shards import tar
from tests.labels.packed import label_map, make_tree
from tlt.data.sources import open_images
from tlt.data.sources.folder import read_class_map
from tlt.labels.label_info import LabelInfo
from tlt.labels.store import open_labels
from tlt.labels.tree import write_map
from volo.train.data import listed_images

TORCHVISION = sorted(map(str, range(12)))  # 0, 1, 10, 11, 2, ...


@pytest.mark.parametrize("kind", ["folders", "shards"])
@pytest.mark.parametrize(
    ("own", "imposed", "by"),
    [
        (range(12), TORCHVISION, "name"),
        (range(3), ["2", "0", "1"], "name"),
        (range(2), ["2", "1", "0"], "name"),  # some of the list, as a validation set without images of a class
        (range(3), ["cat", "0", "2", "1"], "name"),
        ([0, 2, 5], ["5", "2", "1", "0"], "name"),
        (range(3), ["cat", "dog", "owl", "ox"], "number"),
        (range(3), ["0", "1", "3"], "nothing"),
        (range(3), ["1", "2", "3"], "nothing"),
        (range(3), ["cat", "dog"], "nothing"),
        ([1, 2], ["cat", "dog", "owl"], "nothing"),  # are they counted from 1?
        ([0, 2], ["cat", "dog", "owl"], "nothing"),
    ],
)
def test_listed_names_that_look_like_numbers_are_names(tmp_path, kind, own, imposed, by):
    names, split = [*map(str, own)], tmp_path / "train"
    files = {f"{name}/x{name}.jpg": jpeg(number) for number, name in enumerate(names)}
    if kind == "shards":  # which others made
        gap = by != "number"  # without images of the class between the first and the second
        numbers = {name: number + (number > 0) * gap for number, name in enumerate(names)}
        tar(split / "0.tar", files | {f"{name}/x{name}.cls": str(numbers[name]).encode() for name in names})
    else:
        write(split, files)
    assert (open_images(str(tmp_path), "train").class_names == names) or kind == "shards"
    if by == "nothing":
        with refuses("classes that are not in the class list"):
            open_images(str(tmp_path), "train", class_names=imposed)
        return
    images = open_images(str(tmp_path), "train", class_names=imposed)
    class_of = {path.split("/")[-2]: imposed[row] for path, row in zip(images.paths, images.classes, strict=True)}
    assert class_of == {name: name if by == "name" else imposed[int(name)] for name in names}
    assert {*images.folder_names} == {*class_of.values()} and images.class_names == imposed


CAFE, DECOMPOSED = "caf\u00e9", "cafe\u0301"
LIKE = "names that look the same differ in their Unicode form"


@pytest.mark.parametrize(
    ("own", "imposed", "line"),
    [
        (["n01440764", "n0144"], "n01440764 tench, Tinca\nn0144 goldfish", "the list holds 'n01440764 tench, T"),
        (["cat", "dog"], "0,cat\n1,dog", ": cat, dog; the list holds 0,cat, 1,dog: remove them, or add"),
        (["cat", "dog"], "cat\ndogs", "1 classes .*: dog; the list holds cat, dogs: remove them, or add"),
        ([DECOMPOSED, "tea"], f"{CAFE}\ntea", LIKE),
        ([CAFE, "tea"], f"tea\n{DECOMPOSED}", LIKE),
        (["\u1112\u1161\u11ab"], "\ud55c", LIKE),  # Hangul
        (["Cat", "tea"], "cat\ntea", LIKE),
    ],
)
def test_a_list_that_does_not_fit_says_what_it_holds(tmp_path, own, imposed, line):
    write(tmp_path / "train", {f"{name}/x.jpg": jpeg(0) for name in own})
    (tmp_path / "map.txt").write_text(imposed, "utf-8")
    with refuses(line):
        open_images(str(tmp_path), "train", class_names=read_class_map(tmp_path / "map.txt"))
    (tmp_path / "map.txt").write_text("\n".join([*own, "more"]), "utf-8-sig")
    listed = read_class_map(tmp_path / "map.txt")
    assert open_images(str(tmp_path), "train", class_names=listed).class_names[0] == own[0]


def test_lists_of_images_and_labels_say_what_they_hold(tmp_path):
    write(tmp_path / "train", {f"{DECOMPOSED}/{number}.jpg": jpeg(0) for number in (1, 2)})
    images, listed = open_images(str(tmp_path), "train"), tmp_path / "list"
    listed.write_text(f"{CAFE}/1.jpg\n", "utf-8")
    with refuses(rf"1 of its 1 images are not in .*\({CAFE}/1.jpg\), which holds {DECOMPOSED}/1.jpg, .*{LIKE}"):
        listed_images(images, str(listed))
    listed.write_text(f"{DECOMPOSED}/2.jpg\n", "utf-8-sig")
    assert listed_images(images, str(listed)).tolist() == [False, True]
    (tmp_path / "labels" / CAFE).mkdir(parents=True)
    write_map(tmp_path / "labels" / CAFE / "1.pt", label_map(0), 5)
    with refuses(rf"these labels are of another data set, or not complete: there are {CAFE}/1.pt; {LIKE}"):
        open_labels(tmp_path / "labels", images.paths)
    tree = make_tree(tmp_path / "tree", images, LabelInfo(2, (3, 4), 5, class_names=[CAFE, *"abcd"]))
    with refuses(rf"made for other class folders \(class 0 is {CAFE} there, {DECOMPOSED} here; {LIKE}"):
        open_labels(tree, images.paths, class_names=[DECOMPOSED, *"abcd"])


@pytest.mark.parametrize("name", ["lost+found", "@eaDir", "__MACOSX", "$RECYCLE.BIN", "System Volume Information"])
def test_folders_that_systems_make_are_no_classes(tmp_path, name):
    images = ("cat/1.jpg", "dog/2.jpg", f"{name}/x.jpg", f"dog/{name}/2.jpg")
    write(tmp_path / "train", dict.fromkeys(images, jpeg(0)))
    images = open_images(str(tmp_path), "train")
    assert images.class_names == ["cat", "dog"] and list(images.paths) == ["cat/1.jpg", "dog/2.jpg"]
    assert any("left out 2 folders of the system: " in line for line in images.warnings)
    assert len(open_images(str(tmp_path), "train", classes=False)) == 2


def test_classes_that_differ_in_case_alone_are_told(tmp_path):
    write(tmp_path / "train", {f"{name}/x.jpg": jpeg(0) for name in ("C0", "c0", "c1")})
    assert open_images(str(tmp_path), "train").warnings[-1].endswith("classes that differ in case alone: C0, c0")


@pytest.mark.parametrize("other", ["cafe\u0301", "caf\u00e9 "])
@pytest.mark.parametrize("kind", ["folders", "shards"])
def test_two_classes_that_look_the_same_are_refused(tmp_path, kind, other):
    split, images = tmp_path / "train", {f"{name}/{name}.jpg": jpeg(0) for name in (CAFE, other)}
    if kind == "shards":
        numbers = {f"{name}/{name}.cls": str(number).encode() for number, name in enumerate((CAFE, other))}
        tar(split / "0.tar", images | numbers)
    write(split, images if kind == "folders" else {})
    with refuses(f"two classes are named '{CAFE}': give each a name of its own"):
        open_images(str(tmp_path), "train")
