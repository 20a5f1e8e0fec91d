"""Label files, label archives and checkpoints with spoilt bytes: refused, or equal to what was written. Never else."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.labels.packed import SHAPE, label_map, make_tree
from tests.properties.outcomes import result_or_refusal, spoilt
from tlt.io.weights import check_finite, peek_checkpoint, read_checkpoint, state_dict_of
from tlt.label_map import LabelMap
from tlt.labels.label_info import LabelInfo
from tlt.labels.store import open_labels
from tlt.labels.tree import read_map
from tlt.tools.pack import pack, unpack
from volo.checkpoint.resume import find_resume
from volo.checkpoint.state import TrainState
from volo.commands.report import run as report
from volo.config.flags_programs import REPORT

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
def test_a_spoilt_label_file_is_refused_or_reads_the_same(data: st.DataObject, tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "label.pt"
    file.write_bytes(data.draw(spoilt((tree / "a" / "0.pt").read_bytes())))
    found = result_or_refusal(lambda: read_map(file, CLASSES))
    assert found is None or _same_label(found, label_map(0))


def _read_all(root: Path) -> list[LabelMap]:
    store = open_labels(root, NAMES, num_classes=CLASSES)
    return [store.read(index, 8, 8) for index in range(len(NAMES))]


@given(data=st.data())
def test_a_spoilt_archive_reads_the_same(
    data: st.DataObject, archive: Path, tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = data.draw(st.sampled_from(sorted(archive.glob("[!.]*"))))
    good, out = file.read_bytes(), tmp_path_factory.mktemp("out") / "tree"
    try:
        file.write_bytes(data.draw(spoilt(good)))
        found = result_or_refusal(lambda: _read_all(archive))
        unpacked = result_or_refusal(lambda: unpack(str(archive), str(out)))
    finally:
        file.write_bytes(good)
    assert found is None or all(_same_label(map_, label_map(mark)) for mark, map_ in enumerate(found))
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


def test_a_record_that_calls_itself_a_folder_is_refused(tmp_path: Path) -> None:
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
def test_a_spoilt_checkpoint_is_refused_or_reads_the_same(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "last.pth.tar"
    file.write_bytes(content)
    found = result_or_refusal(lambda: read_checkpoint(file))
    assert found is None or _equal(found, PAYLOAD)
    result_or_refusal(lambda: peek_checkpoint(file))
    assert find_resume("auto", tmp_path).checkpoint is not None or found is None


@given(data=st.data())
def test_spoilt_files_without_checksums_are_refused_or_read(data: st.DataObject, tree: Path, tmp_path: Path) -> None:
    """A pickle of before torch 1.6, safetensors, a tree's labels.json: nothing tells that a number has changed."""
    weights, file = PAYLOAD["state_dict"], tmp_path / "file"
    old, new = _bytes(weights, _use_new_zipfile_serialization=False), safetensors.torch.save(weights)
    file.write_bytes(data.draw(st.sampled_from((old, new)).flatmap(spoilt)))
    found = result_or_refusal(lambda: read_checkpoint(file))
    if found is not None:
        result_or_refusal(lambda: check_finite(state_dict_of(found, path=file), file))
    file.write_bytes(data.draw(spoilt((tree / "labels.json").read_bytes())))
    result_or_refusal(lambda: LabelInfo.read(file))


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_INF = float("inf")
STRANGE: list[Any] = [
    _INF, -_INF, float("nan"), 10**400, -1, None, "x", [], {}, [1], [[1, 2, 3]], [[_INF, _INF, "checkpoint-1.pth.tar"]],
    ["../x"], {1: torch.ones(2)}, torch.ones(2), torch.ones(()), True, {"a": 1}, {"state": [], "param_groups": 3},
    {"head.weight": 3}, {"state": {0: 3}, "param_groups": [{"params": [0, 1]}]}, {"skipped_steps": [1, 2]},
]  # fmt: skip


@pytest.mark.parametrize("key", sorted(PAYLOAD))
def test_a_checkpoint_with_a_strange_entry_changes_nothing_or_is_loaded(key: str, tmp_path: Path) -> None:
    file = tmp_path / "last.pth.tar"
    for value in STRANGE:
        torch.save({**PAYLOAD, key: value}, file)
        state = _state()
        with torch.no_grad():
            state.model.head.weight += 1
        before = {name: value.clone() for name, value in state.model.state_dict().items()}
        checkpoint = result_or_refusal(lambda: find_resume(str(file), tmp_path).checkpoint)
        result_or_refusal(lambda: find_resume("auto", tmp_path))
        if checkpoint is not None and result_or_refusal(lambda c=checkpoint, s=state: s.load(c, file)) is None:
            assert _equal(dict(state.model.state_dict()), before)


_RECORDS = st.dictionaries(
    st.sampled_from(("time", "kind", "rank", "node", "pid", "update", "epoch", "event", "exit_code", "reason", "path",
                     "skipped", "world_size", "seconds", "wait_seconds", "updates", "images", "loss", "eval_top1")),
    st.sampled_from(("start", "end", "resume", "train", "epoch", "2026-01-02T03:04:05", 0, 1))
    | _SCALARS | st.lists(_SCALARS),
)  # fmt: skip


@given(data=st.data())
def test_a_report_of_any_records(data: st.DataObject, tmp_path: Path) -> None:
    for name in ("events.jsonl", "metrics.jsonl"):
        records = data.draw(st.lists(_RECORDS, max_size=4))
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "run.json").write_text(json.dumps(data.draw(_SCALARS | st.lists(_RECORDS | _SCALARS))))
    assert report(REPORT.parse([str(tmp_path), "--html", "--quick"])) == 0
