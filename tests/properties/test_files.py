"""Label files, label archives and checkpoints with spoilt bytes: refused, or equal to what was written. Never else."""

import copy
import functools
import io
import json
import operator
import os
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.labels.packed import SHAPE, label_map, make_tree
from tests.properties.outcomes import result_or_refusal, spoilt
from tlt.data.sources import open_images
from tlt.data.sources.folder import ImageFolder, read_class_map
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.records import FORMAT, ROW, RecordImages
from tlt.data.sources.records import _crc as table_crc
from tlt.data.sources.tar_shards import scan_packed
from tlt.data.sources.tfrecords import scan_records
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.weights import check_finite, peek_checkpoint, read_checkpoint, state_dict_of
from tlt.label_map import LabelMap
from tlt.labels.label_info import LabelInfo
from tlt.labels.shards import ShardReader
from tlt.labels.store import open_labels
from tlt.labels.tree import read_map
from tlt.tools.pack import pack, unpack
from volo.checkpoint.resume import newest_checkpoint, verified
from volo.checkpoint.state import TrainState, optimizer_state_of
from volo.cluster import preflight
from volo.commands.predict import names_of_classes
from volo.commands.report import run as report
from volo.commands.validate import RealLabels, read_numbers
from volo.config.recipes import load_yaml
from volo.config.settings_tools import REPORT
from volo.config.train import TRAIN
from volo.train.data import listed_images

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch, of bytes that aren't one

NAMES = ["a/0.jpg", "a/1.jpg", "b/2.jpg"]
CLASSES = 5


def _same_label(one: LabelMap, two: LabelMap) -> bool:
    same = one.values.tobytes() == two.values.tobytes() and (one.ids == two.ids).all()
    return bool(same) and tuple(one.area) == tuple(two.area)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    info = LabelInfo(SHAPE[0], SHAPE[1:], CLASSES, annotator={"model": "x"})
    return make_tree(tmp_path_factory.mktemp("tree"), SimpleNamespace(paths=NAMES), info)


@pytest.fixture(scope="module")
def archive(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("archive") / "a.tlt"
    pack(str(tree), str(root))
    return root


@given(data=st.data())
def test_a_spoilt_label_file_is_refused_or_reads_the_same(data, tree, tmp_path):
    file = tmp_path / "label.pt"
    file.write_bytes(data.draw(spoilt((tree / "a" / "0.pt").read_bytes())))
    result = result_or_refusal(lambda: read_map(file, CLASSES))
    assert result is None or _same_label(result, label_map(0))


def _read_all(root: Path) -> list[LabelMap]:
    store = open_labels(root, NAMES, num_classes=CLASSES)
    return [store.read(index, 8, 8) for index in range(len(NAMES))]


@given(data=st.data())
def test_spoilt_archive(data, archive, tree, tmp_path_factory):
    file = data.draw(st.sampled_from(sorted(archive.glob("[!.]*"))))
    good, out = file.read_bytes(), tmp_path_factory.mktemp("out") / "tree"
    try:
        file.write_bytes(data.draw(spoilt(good)))
        result = result_or_refusal(lambda: _read_all(archive))
        unpacked = result_or_refusal(lambda: unpack(str(archive), str(out)))
    finally:
        file.write_bytes(good)
    assert result is None or all(_same_label(map_, label_map(mark)) for mark, map_ in enumerate(result))
    for path in tree.rglob("*.pt") if unpacked is not None else ():
        assert (out / path.relative_to(tree)).read_bytes() == path.read_bytes()


class _Tiny(torch.nn.Module):
    num_classes = 3
    default_cfg: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 3)


def _state() -> TrainState:
    torch.manual_seed(0)
    model = _Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.head(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return TrainState(model, optimizer, epoch=2, update=14, metadata={"arch": "tiny"}, updates_per_epoch=7)


def _bytes(payload: Any, **how: Any) -> bytes:
    torch.save(payload, buffer := io.BytesIO(), **how)
    return buffer.getvalue()


PAYLOAD = _state().state_dict()
CHECKPOINT = _bytes(PAYLOAD)


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(_equal(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(_equal, one, two))
    return one == two


def test_a_record_that_calls_itself_a_folder_is_refused(tmp_path):
    """torch reads nothing of such a record, and takes what happens to be in the memory for its numbers."""
    content = bytearray(CHECKPOINT)
    entry = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02") + 4)
    while b"/data/" not in content[entry + 46 : entry + 80]:
        entry = content.index(b"PK\x01\x02", entry + 4)
    content[entry + 38] ^= 0x10  # external attributes
    file = tmp_path / "last.pth.tar"
    file.write_bytes(content)
    assert result_or_refusal(lambda: read_checkpoint(file)) is None


@given(content=spoilt(CHECKPOINT))
def test_a_spoilt_checkpoint_is_refused_or_reads_the_same(content, tmp_path):
    file = tmp_path / "last.pth.tar"
    file.write_bytes(content)
    result = result_or_refusal(lambda: read_checkpoint(file))
    assert result is None or _equal(result, PAYLOAD)
    result_or_refusal(lambda: peek_checkpoint(file))
    assert (newest_checkpoint(tmp_path).path is None) == (result is None)


@given(data=st.data())
def test_spoilt_files_without_checksums_are_refused_or_read(data, tree, tmp_path):
    """A pickle of before torch 1.6, safetensors, a tree's labels.json: nothing tells that a number has changed."""
    weights, file = PAYLOAD["state_dict"], tmp_path / "file"
    old, new = _bytes(weights, _use_new_zipfile_serialization=False), safetensors.torch.save(weights)
    file.write_bytes(data.draw(st.sampled_from((old, new)).flatmap(spoilt)))
    result = result_or_refusal(lambda: read_checkpoint(file))
    if result is not None:
        result_or_refusal(lambda: check_finite(state_dict_of(result, path=file), file))
    file.write_bytes(data.draw(spoilt((tree / "labels.json").read_bytes())))
    result_or_refusal(lambda: LabelInfo.read(file))


ANY: Any = None
THREE_CLASSES: Any = SimpleNamespace(model=SimpleNamespace(num_classes=3))
# How each file that a user names is opened.
OPENED: dict[str, Callable[[str], object]] = {
    "recipe": lambda file: load_yaml(file, TRAIN.parser()),
    "class map": read_class_map,
    "table": lambda file: open_images(os.path.dirname(file), "train", f"csv/{os.path.basename(file)}"),
    "image list": lambda file: listed_images(ImageFolder("", NAMES, np.zeros(3), ["a"]), file),
    "valid labels": read_numbers,
    "real labels": lambda file: RealLabels(file, ANY, ANY),
    "class names": lambda file: names_of_classes(file, THREE_CLASSES),
    "label": read_map,
    "labels.json": LabelInfo.read,
    "checkpoint": read_checkpoint,
    "tar": scan_packed,
    "TFRecord": scan_records,
    "preflight": preflight._size,
}


@pytest.mark.parametrize("kind", OPENED)
def test_no_pipe_is_waited_for(kind, tmp_path):
    """One that is read all the same gets a writer, who writes nothing."""
    pipe, over = str(tmp_path / "pipe"), threading.Event()
    os.mkfifo(pipe)

    def write() -> None:
        while not over.wait(0.02):
            with suppress(OSError):  # nobody reads
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))

    (writer := threading.Thread(target=write)).start()
    try:
        with pytest.raises((UserError, OSError), match="regular file") as caught:
            OPENED[kind](pipe)
    finally:
        over.set()
        writer.join()
    assert pipe in str(caught.value)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_INF = float("inf")
STRANGE: list[Any] = [
    _INF, -_INF, float("nan"), 10**400, -1, None, "x", [], {}, [1], [[1, 2, 3]], [[_INF, _INF, "checkpoint-1.pth.tar"]],
    ["../x"], {1: torch.ones(2)}, torch.ones(2), torch.ones(()), True, {"a": 1}, {"state": [], "param_groups": 3},
    {"head.weight": 3}, {"state": {0: 3}, "param_groups": [{"params": [0, 1]}]}, {"skipped_steps": [1, 2]},
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something lies in nested dicts and lists, the whole left out."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in inner for place in [(*path, key), *_places(each, (*path, key))]]


_PLACES = _places(PAYLOAD)
_REMOVED = object()


@settings(max_examples=2 * settings().max_examples)
@given(
    place=st.sampled_from([(key,) for key in PAYLOAD]) | st.sampled_from(_PLACES),
    value=st.sampled_from([*STRANGE, _REMOVED]),
)
@example(place=("optimizer", "state", 0, "step"), value=_REMOVED)
@example(place=("optimizer", "state", 0, "exp_avg"), value=torch.ones(()))  # torch's fused step read beyond its end
@example(place=("optimizer", "state", 1, "exp_avg_sq"), value=3)
def test_strange_checkpoint_entry_changes_nothing_or_trains(place, value, tmp_path):
    payload, file = copy.deepcopy(PAYLOAD), tmp_path / "last.pth.tar"
    parent = functools.reduce(operator.getitem, place[:-1], payload)
    if value is _REMOVED:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    torch.save(payload, file)
    newest_checkpoint(tmp_path)
    if (result := result_or_refusal(lambda: verified(file), file)) is None:
        return
    state = _state()
    with torch.no_grad():
        state.model.head.weight += 1
    before = copy.deepcopy(state.model.state_dict())
    if result_or_refusal(lambda: state.load(result, file), file) is None:
        assert len(place) > 1 or _equal(state.model.state_dict(), before)
        return

    def go_on() -> None:
        state.model.head(torch.ones(1, 4)).sum().backward()
        with optimizer_state_of(state.unproven):  # as the loop takes its first step
            state.optimizer.step()

    result_or_refusal(go_on, file)


_STRANGE_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "meta": lambda dense: dense.to("meta"),
    "sparse": lambda dense: dense.to_sparse(),
    "compressed": lambda dense: dense.flatten(1).to_sparse_csr(),
    "quantized": lambda dense: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
    "nested": lambda dense: torch.nested.nested_tensor([dense, dense]),
    "jagged": lambda dense: torch.nested.nested_tensor([dense, dense], layout=torch.jagged),
    "float8": lambda dense: dense.to(torch.float8_e5m2),
    "complex": lambda dense: dense.to(torch.complex64),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of prototypes
@pytest.mark.parametrize("kind", _STRANGE_TENSORS)
def test_tensor_of_another_kind_is_refused_wherever_it_lies(kind, tmp_path):
    file, change = tmp_path / "x.pt", _STRANGE_TENSORS[kind]
    torch.save(change(torch.ones(2, *SHAPE)), file)
    assert result_or_refusal(lambda: read_map(file, CLASSES).validate(CLASSES), file) is None
    for place in ("state_dict", "args", "optimizer"):
        torch.save({**PAYLOAD, place: {"a": [change(torch.ones(2, 3))]}}, file)
        for read in (read_checkpoint, peek_checkpoint):
            assert result_or_refusal(lambda read=read: read(file), file) is None
    if kind == "float8":
        safetensors.torch.save_file({"a": change(torch.ones(2))}, file)
        assert result_or_refusal(lambda: read_checkpoint(file), file) is None


@pytest.mark.parametrize("wrap", [torch.nn.Parameter, lambda label: label.requires_grad_()])
def test_a_label_with_gradients_reads_as_one_without(wrap, tree, tmp_path):
    torch.save(wrap(torch.load(tree / "a" / "0.pt", weights_only=True)), tmp_path / "x.pt")
    assert _same_label(read_map(tmp_path / "x.pt", CLASSES), label_map(0))


_COUNTS = st.sampled_from((-1, 0, 1, 7, 2**31 - 1, -(2**31)))


@given(data=st.data())
def test_strange_table_with_a_right_checksum_is_refused_or_read(data, tmp_path):
    table, rows, block = str(tmp_path / "labels"), np.zeros(3, ROW), b"a/0a/1b/2"
    (tmp_path / "x.tar").write_bytes(bytes(64))
    rows["length"], rows["offset"], rows["crc32"] = 8, (0, 8, 16), zlib.crc32(bytes(8))
    rows["name_end"], rows["class"] = (3, 6, 9), (0, 0, 1)
    for field in data.draw(st.lists(st.sampled_from(("offset", "length", "class", "name_end")), max_size=2)):
        rows[field][data.draw(st.integers(0, 2))] = data.draw(_COUNTS)
    about: Any = {"info": {"k": 1, "grid": [1, 1]}, "identity": "x"}
    words: dict[str, Any] = {"files": [["x.tar", 64]], "class_names": ["a", "b"], "folder_names": ["a", "b"]}
    words |= {"warnings": [], "about": about}
    for key in data.draw(st.lists(st.sampled_from([*words, *about]), max_size=1)):
        place, value = about if key in about else words, data.draw(st.just(_REMOVED) | _SCALARS | st.lists(_SCALARS))
        place.pop(key) if value is _REMOVED else place.update({key: value})
    np.save(f"{table}.npy", rows)
    Path(f"{table}.names").write_bytes(block)
    content = {"format": FORMAT, "crc32": table_crc(rows, block, words), "description": words}
    Path(f"{table}.json").write_text(json.dumps(content))
    if (result := result_or_refusal(lambda: RecordImages(table), f"{table}.json")) is not None:
        assert len(list(result.paths)) == 3 and all(result.class_names[number] for number in result.classes)
        for row in range(3):
            with suppress(BadImage):
                result.read(row)
        reader = result_or_refusal(lambda: ShardReader(str(tmp_path), Names(NAMES)), f"{table}.json")
        for index in range(3) if reader else ():
            assert result_or_refusal(lambda index=index: reader.read(index).validate(CLASSES)) is None


_RECORDS = st.dictionaries(
    st.sampled_from(("time", "kind", "rank", "node", "pid", "update", "epoch", "event", "exit_code", "reason", "path",
                     "skipped", "world_size", "seconds", "wait_seconds", "updates", "images", "loss", "eval_top1")),
    st.sampled_from(("start", "end", "resume", "train", "epoch", "2026-01-02T03:04:05", 0, 1))
    | _SCALARS | st.lists(_SCALARS),
)  # fmt: skip


@given(data=st.data())
def test_a_report_of_any_records(data, tmp_path):
    for name in ("events.jsonl", "metrics.jsonl"):
        records = data.draw(st.lists(_RECORDS, max_size=4))
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "run.json").write_text(json.dumps(data.draw(_SCALARS | st.lists(_RECORDS | _SCALARS))))
    assert report(REPORT.parse([str(tmp_path), "--html", "--quick"])) == 0
