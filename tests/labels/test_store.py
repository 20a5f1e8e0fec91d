"""The published label tree: found, read, written, and what is wrong with it reported in one line."""

import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from tests.data.conftest import refuses
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.label_map import FULL_AREA, NO_AREA, LabelMap
from tlt.labels.label_info import LabelInfo
from tlt.labels.shards import ShardReader
from tlt.labels.store import LabelStore, open_labels
from tlt.labels.tree import label_files_below, label_names, read_map, write_map

NAMES = ["c0/0.jpg", "c0/1.png", "c1/0.jpg"]
SHAPE = (2, 3, 4)


def published(mark: int = 0, shape: tuple[int, int, int] = SHAPE) -> torch.Tensor:
    """[2, k, H, W] as the published program writes it; the first logit is `mark`."""
    k, h, w = shape
    values = torch.arange(k * h * w).view(shape) / 8
    values[0, 0, 0] = mark
    ids = torch.arange(k)[:, None, None].expand(shape)
    return torch.stack([values.half(), ids.half()])


def make_tree(root: Path, names: list[str]) -> Path:
    """One label per name, marked 0, 1, 2, ..."""
    for mark, name in enumerate(label_names(names)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(published(mark), root / name)
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path, NAMES)


def marks(store: LabelStore) -> list[float]:
    return [float(store.read(index, 8, 8).values[0, 0, 0]) for index in range(len(store))]


def test_published_tree_reads_as_written_in_workers_too(tree):
    store = pickle.loads(pickle.dumps(open_labels(tree, NAMES, num_classes=2)))
    assert (len(store), store.shape, store.warnings, marks(store)) == (3, SHAPE, [], [0, 1, 2])
    stored, expected = store.read(1), published(1)
    assert (stored.values.dtype, stored.ids.dtype, stored.area) == (np.float16, np.int32, FULL_AREA)
    np.testing.assert_array_equal(stored.values, expected[0].numpy())
    np.testing.assert_array_equal(stored.ids, expected[1].int().numpy())


def test_links_of_a_tree_are_followed_but_not_in_circles(tree, tmp_path_factory):
    expected = label_files_below(str(tree))
    (tree / "c0" / "across").symlink_to(shutil.copytree(tree / "c1", tmp_path_factory.mktemp("aside") / "c1"))
    for name, target in (("one", tree), ("two", tree), ("c1/up", tree.parent), ("c0/across/back", tree / "c0")):
        (tree / name).symlink_to(target)
    across = {f"c0/across/{name[3:]}" for name in expected if name.startswith("c1/")}
    assert label_files_below(str(tree)) == expected | across


def test_a_tree_is_known_by_what_its_files_hold(tree, tmp_path):
    known, elsewhere = open_labels(tree, NAMES).identity(), shutil.copytree(tree, tmp_path / "elsewhere")
    assert open_labels(elsewhere, NAMES).identity() == known != open_labels(tree, NAMES, area="center").identity()
    torch.save(published(mark=99), elsewhere / "c1" / "0.pt")
    assert open_labels(elsewhere, NAMES).identity() != known


@pytest.mark.parametrize("classes,dtype", [(2049, torch.float16), (2050, torch.float32), (21841, torch.float32)])
def test_fault_51_ids_survive_for_any_number_of_classes(tmp_path, classes, dtype):
    ids = np.arange(classes - 24, classes, dtype=np.int32).reshape(2, 3, 4)
    write_map(tmp_path / "a.pt", LabelMap(np.zeros(SHAPE, np.float16), ids), classes)
    written = torch.load(tmp_path / "a.pt", weights_only=True)  # as the published reader expects it
    assert (written.dtype, written.shape) == (dtype, (2, *SHAPE)) and [p.name for p in tmp_path.iterdir()] == ["a.pt"]
    np.testing.assert_array_equal(written[1].numpy(), ids)
    np.testing.assert_array_equal(read_map(tmp_path / "a.pt", classes).ids, ids)


@pytest.mark.parametrize("dtype,limit", [(torch.float16, 2048), (torch.bfloat16, 256)])
def test_fault_51_ids_that_the_number_format_lost_are_refused(tmp_path, dtype, limit):
    near, far = published().float(), published().float()
    far[1] = limit + 2
    for entry, classes in ((near, limit + 2), (far, None)):
        torch.save(entry.to(dtype), tmp_path / "a.pt")
        with pytest.raises(UserError, match=rf"a\.pt: class ids in \w+ are exact to {limit} only"):
            read_map(tmp_path / "a.pt", classes)
    torch.save(near.to(dtype), tmp_path / "a.pt")
    assert read_map(tmp_path / "a.pt", limit + 1).ids.max() == 1


def with_value(value: float, plane: int) -> torch.Tensor:
    tensor = published()
    tensor[plane, 1, 2, 3] = value
    return tensor


BAD = {
    "dict": ({"values": 1}, "holds a dict"),
    "3d": (published()[0], r"shape \(2, 3, 4\) is not \[2, k, H, W\]"),
    "nan": (with_value(float("nan"), 0), "NaN or infinite"),
    "half id": (with_value(0.5, 1), "not whole numbers"),
    "id 7 of 3": (with_value(7, 1), r"class id 7 is not in 0\.\.2"),
    "id -1": (with_value(-1, 1), "class id -1"),
    "10 GB of one value": (torch.zeros(1).expand(2, 5, 32768, 8192), "holds fewer values than its"),
    "10 GB of no value": (torch.sparse_coo_tensor(size=(2, 5, 32768, 8192)), "no dense tensor of plain numbers"),
}


@pytest.mark.parametrize("case", BAD)
def test_fault_47_48_unusable_content_names_the_file(tmp_path, case):
    content, message = BAD[case]
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(UserError, match=rf"x\.pt.*{message}"):
        read_map(tmp_path / "x.pt", num_classes=3).validate(3)


@pytest.mark.parametrize("kind", ["float64", "float16", "shards"])
@pytest.mark.parametrize("number", [0.5, float("nan"), 2**31, 2**32 + 1, 2**40, -(2**40)])
def test_class_ids_beyond_32_bits_are_refused(tmp_path, monkeypatch, kind, number):
    path, ids = tmp_path / "x.pt", np.full(SHAPE, number)
    if kind == "shards":  # as they stand in a file that other programs have made
        ids = ids if number != number or number % 1 else ids.astype(np.int64)
        content = save({"values": np.zeros(ids.shape, np.float16), "ids": ids})
        info = {"info": {"k": 2, "grid": [3, 4]}, "identity": "x"}
        table = SimpleNamespace(paths=Names(["x.pt"]), about=info, read=lambda row: content)
        monkeypatch.setattr("tlt.labels.shards.RecordImages", lambda path: table)
        (tmp_path / "labels.json").touch()
        read = partial(ShardReader(str(tmp_path), Names(["x.pt"])).read, 0)
    else:
        torch.save(torch.stack([torch.zeros(ids.shape), torch.from_numpy(ids)]).to(getattr(torch, kind)), path)
        read = partial(read_map, path)
    with refuses(r"label .*x\.pt.*: class ids are not whole numbers of 32 bits"):
        read()


class Code:
    """Unpickles as a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.path,)


def test_fault_49_code_in_a_label_file_is_not_run(tmp_path):
    torch.save(Code(tmp_path / "ran"), tmp_path / "x.pt")
    with pytest.raises(UserError, match=r"x\.pt is refused: it holds [\w.]+, neither .* \(nothing of it was run\)"):
        read_map(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("policy,area", [("skip", NO_AREA), ("uniform", FULL_AREA)])
def test_fault_45_46_missing_and_odd_maps(tree, policy, area):
    (tree / "c1" / "0.pt").unlink()
    torch.save(published(shape=(2, 9, 9)), tree / "c0" / "0.pt")
    LabelInfo(2, (3, 4), 2).write(tree / "labels.json")
    with pytest.raises(UserError, match=r"1 of 3 images have no label in .*first is c1/0\.jpg \(looked for .*c1/0\.pt"):
        open_labels(tree, NAMES)
    with pytest.raises(UserError, match=r"c0/0\.pt: shape \(k, h, w\) = \(2, 9, 9\), but the others' is \(2, 3, 4\)"):
        open_labels(tree, NAMES[:2]).read(0, 8, 8)
    with pytest.raises(UserError, match="2 of 2 images have no label"):
        open_labels(tree, ["d/0.jpg", "d/1.jpg"], bad_label=policy)
    store = open_labels(tree, NAMES, bad_label=policy)
    assert "1 of 3 images have no label" in store.warnings[0]
    assert store.read(1, 8, 8).values[0, 0, 0] == 1 and store.take_faults() == []
    for index in (0, 2):
        replaced = store.read(index, 8, 8)
        assert replaced.shape == SHAPE and replaced.area == area and not replaced.values.any()
    ((image, reason),) = store.take_faults()
    assert image == "c0/0.jpg" and "shape" in reason and store.take_faults() == []


def test_fault_50_every_name_has_its_own_label(tmp_path):
    names = ["c1.x/1.v2.jpg", "c1.x/1.jpg", "c1.x/1.crop.jpg", "c/x.jpg", "c/x.png", "c/y.jpg"]
    assert label_names(names)[3:] == ["c/x.jpg.pt", "c/x.png.pt", "c/y.pt"]
    make_tree(tmp_path, names)
    torch.save(published(9), tmp_path / "c" / "x.pt")  # which neither of two images needs
    assert marks(open_labels(tmp_path, names)) == [0, 1, 2, 3, 4, 5]
    (tmp_path / "c1.x" / "1.crop.pt").unlink()
    with pytest.raises(UserError, match=r"1 of 6 images have no label.*c1\.x/1\.crop\.jpg"):
        open_labels(tmp_path, names)
    (tmp_path / "c" / "x.jpg.pt").rename(tmp_path / "c" / "x.pt")
    (tmp_path / "c" / "x.png.pt").unlink()
    with pytest.raises(UserError, match=r"x\.pt fits c/x\.jpg and c/x\.png"):
        open_labels(tmp_path, names)


def test_what_is_recorded_is_compared_with_the_maps_and_the_data(tree):
    info = LabelInfo(2, (3, 4), 2, (0.0, 0.1, 1.0, 0.9), {"model": "resnet50"}, ["c0", "c1"], skipped=["c1/0.jpg"])
    info.write(tree / "labels.json")
    assert LabelInfo.read(tree / "labels.json") == info
    torch.save(with_value(2, 1), tree / "c1" / "0.pt")
    with pytest.raises(UserError, match=r"c1/0\.pt: class id 2 is not in 0\.\.1"):
        open_labels(tree, NAMES).read(2)
    replaced = open_labels(tree, NAMES, bad_label="skip")
    assert replaced.read(2).area == NO_AREA and "class id 2" in replaced.take_faults()[0][1]
    (tree / "c1" / "0.pt").unlink()
    store = open_labels(tree, NAMES, num_classes=2, class_names=["c0", "c1"])
    assert store.read(0).area == (0.0, 0.1, 1.0, 0.9)
    assert store.warnings == [] and store.read(2).area == NO_AREA
    assert "overrides" in open_labels(tree, NAMES, area="full").warnings[0]
    with pytest.raises(UserError, match="labels of 2 classes, but the model has 3"):
        open_labels(tree, NAMES, num_classes=3)
    with pytest.raises(UserError, match="class 0 is c0 there, c1 here"):
        open_labels(tree, NAMES, class_names=["c1", "c0"])
    with pytest.raises(UserError, match="2 classes there, 3 here"):
        open_labels(tree, NAMES, class_names=["c0", "c1", "c2"])


VALID = '{"format": "volo-tlt label tree, version 1", "k": 2, "grid": [3, 4]'


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"format": "other"}', '{"format": "volo-tlt label tree, version 1"}', "[" * 100_000),
        *(f'{VALID}, "area": {area}}}' for area in ('"left"', "[0.5, 0, 0.5, 1]")),
        *(f"{VALID}, {entry}}}" for entry in ('"k": 0', '"num_classes": 1e99', '"class_names": 0', '"skipped": [1]')),
    ],
)
def test_other_descriptions_are_refused(tmp_path, text):
    (tmp_path / "labels.json").write_text(text)
    with refuses(r"labels\.json"):
        LabelInfo.read(tmp_path / "labels.json")
