"""Reading checkpoints: what is accepted, what is refused and in which words."""

import argparse
import gzip
import math
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from tlt.errors import UserError
from tlt.io.weights import (
    check_finite,
    clean_state_dict,
    foreign_prefix,
    load_clean,
    peek_checkpoint,
    read_checkpoint,
    state_dict_of,
)
from tlt.utils import load_pretrained_weights
from volo.checkpoint.finetune import load_finetune, load_weights
from volo.checkpoint.state import TrainState
from volo.train.architecture import ModelRequest
from volo.train.trained_model import load_model


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(5, 7, generator=generator) for name in ("a.weight", "a.bias", "b")}


def write(path: Path, form: str, content: dict[str, Any]) -> None:
    if form == "safetensors":
        safetensors.torch.save_file(content["state_dict"], path)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.pth.tar"
    torch.save({"state_dict": weights(), "epoch": 3}, path)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_files_of_torch_and_safetensors_are_read_by_content(tmp_path, form):
    args = argparse.Namespace(lr=1e-3, names=["a"])  # timm's
    for name in ("x.pth.tar", "x.safetensors"):
        write(tmp_path / name, form, {"state_dict": weights(), "epoch": 3, "args": args})
        checkpoint = read_checkpoint(tmp_path / name)
        assert_equal(state_dict_of(checkpoint), weights())
        if form != "safetensors":
            assert checkpoint["epoch"] == 3 and checkpoint["args"] == {"lr": 1e-3, "names": ["a"]}


class Payload:
    """Unpickled by an incautious reader, it runs a shell command."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.witness}'",)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("read", [read_checkpoint, peek_checkpoint])
def test_fault_17_malicious_pickle_is_not_run(tmp_path, legacy, read, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    witness, path = tmp_path / "witness", tmp_path / "evil.pth.tar"
    content = {"state_dict": weights(), "args": argparse.Namespace(x=Payload(witness))}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UserError, match=rf"{path} is refused: it holds (posix|os)\.system"):
        read(path)
    assert not witness.exists()
    torch.load(path, weights_only=False)  # the file is a real attack
    assert witness.exists()


def test_fault_05_bit_flip_names_the_record(good):
    with zipfile.ZipFile(good) as archive:
        record = next(r for r in archive.infolist() if r.filename.endswith("data/1"))
    content = bytearray(good.read_bytes())
    at = content.index(weights()["a.bias"].numpy().tobytes())
    content[at + 2] ^= 1
    good.write_bytes(content)
    assert not torch.equal(torch.load(good)["state_dict"]["a.bias"], weights()["a.bias"])  # torch does not notice
    assert f"record {record.filename} does not match its checksum" in refusal(good)
    assert peek_checkpoint(good)["epoch"] == 3  # looks at numbers only


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_fault_04_truncated_file(tmp_path, form):
    path = tmp_path / "x.pth.tar"
    write(path, form, {"state_dict": weights()})
    whole = path.read_bytes()
    for share in (0.0, 0.001, 0.3, 0.9, 0.999):
        path.write_bytes(whole[: min(math.ceil(len(whole) * share), len(whole) - 1)])
        assert ("empty" in refusal(path)) == (share == 0)


def test_fault_18_compressed_record_is_refused(tmp_path, good):
    bomb = tmp_path / "bomb.pth.tar"
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(bomb, "w") as new:
        for record in old.infolist():
            kind = zipfile.ZIP_DEFLATED if record.filename.endswith("data/0") else zipfile.ZIP_STORED
            new.writestr(record.filename, old.read(record), kind)
    assert torch.load(bomb)["epoch"] == 3  # torch inflates it
    assert "data/0 is compressed" in refusal(bomb)


def test_fault_16_missing_and_special_files(tmp_path, good):
    os.mkfifo(tmp_path / "fifo")
    for name in ("nothing.pth", "fifo"):
        assert "no such checkpoint, or no regular file" in refusal(tmp_path / name)
    zipfile.ZipFile(good).extractall(tmp_path / "unpacked")
    assert "a directory: name a checkpoint in it; a .pth.tar is not to be unpacked" in refusal(tmp_path / "unpacked")


def test_other_files_are_told_by_how_they_begin(tmp_path, good):
    path = tmp_path / "d1_224_84.2.pth.tar"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 106\n"
    for content in (pointer, b"\n<!DOCTYPE html><html>", b"hello", gzip.compress(good.read_bytes())):
        path.write_bytes(content)
        assert f"is no checkpoint, it begins with {content[:40]!r}" in refusal(path)
    with tarfile.open(path, "w") as archive:
        archive.add(good, "good.pth.tar")
    assert "unpack it where it is a tar" in refusal(path)
    for names in (["readme.txt"], ["model/data.pkl", "model/code/__torch__.py", "model/constants.pkl"]):
        with zipfile.ZipFile(path, "w") as other:
            for name in names:
                other.writestr(name, "")
        assert "truncated or damaged" in refusal(path)
    torch.save([1, 2], path)
    assert "holds a list" in refusal(path)


def test_ema_or_plain():
    plain, ema = weights(), {k: v + 1 for k, v in weights().items()}
    both = {"state_dict": plain, "state_dict_ema": ema}
    for checkpoint, use_ema, expected in (
        (both, True, ema), (both, False, plain), (both, None, ema), ({"model": plain}, None, plain),
        (plain, None, plain), ({"model": plain, "model_ema": ema}, True, ema),
    ):  # fmt: skip
        assert_equal(state_dict_of(checkpoint, use_ema), expected)
    for checkpoint in ({"state_dict": plain}, plain, {"state_dict": plain, "state_dict_ema": None}):
        with pytest.raises(UserError, match="file.pth holds no EMA weights"):
            state_dict_of(checkpoint, use_ema=True, path="file.pth")
    with pytest.raises(UserError, match="holds no weights under state_dict or model; it holds state_dict_ema"):
        state_dict_of({"state_dict_ema": ema}, use_ema=False)


def test_prefixes_of_wrappers_are_removed():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    bare = {k: v.clone() for k, v in model.state_dict().items()}
    inner = nn.Sequential(torch.compile(model[0]), model[1])
    parallel, compiled = nn.DataParallel(model), torch.compile(model)
    for wrapped in (parallel, compiled, nn.DataParallel(compiled), torch.compile(parallel), torch.compile(inner)):
        assert list(wrapped.state_dict()) != list(bare)
        assert_equal(state_dict_of(dict(wrapped.state_dict())), bare)
        assert_equal(clean_state_dict(wrapped), bare)
        load_clean(wrapped, {k: torch.full_like(v, 3) for k, v in bare.items()})
        assert all(bool((p == 3).all()) for p in model.parameters())
        load_clean(wrapped, bare)
    assert_equal(clean_state_dict(model), bare)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fault_06_non_finite_weights_name_the_tensor(dtype):
    state = {k: v.to(dtype) for k, v in weights().items()} | {"steps": torch.tensor(3)}
    state["bound"] = torch.tensor(float("inf"))  # that bounds nothing
    check_finite(state, "file.pth")
    for value in (float("nan"), float("inf"), float("-inf")):
        state["a.bias"][4, 6] = value
        with pytest.raises(UserError, match=r"file.pth is refused: a.bias holds 1 NaN or infinite of 35 values"):
            check_finite(state, "file.pth")
    with pytest.raises(UserError, match="bound holds 1 NaN or infinite of 1 values"):
        check_finite({"bound": torch.tensor(float("nan"), dtype=dtype)})


def _before(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in state.items()}


# What others write, by whom: content, and what stands before the names.
OTHERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "torchvision": (
        lambda state: {
            "model": {name: value + 1 for name, value in state.items()},
            "model_ema": {"n_averaged": torch.tensor(3), **_before("module.", state)},
            "optimizer": {"state": {}, "param_groups": []},
            "args": argparse.Namespace(model_ema=True, lr=np.float64(0.1)),
        },
        "module.",
    ),
    "SWA": (lambda state: {"n_averaged": torch.tensor(3), **_before("module.", state)}, "module."),
    "Lightning": (lambda state: {"state_dict": _before("model.", state), "epoch": 3, "loops": {}}, "model."),
    "a wrapper": (lambda state: _before("timm_model.", state), "timm_model."),
    "DeepSpeed": (lambda state: {"module": _before("_forward_module.", state)}, "_forward_module."),
    "MoCo": (
        lambda state: {
            "state_dict": _before("module.encoder_q.", state)
            | _before("module.encoder_k.", {name: value + 1 for name, value in state.items()})
            | {"module.queue": torch.ones(9)}
        },
        "encoder_q.",
    ),
    "DINO": (
        lambda state: {
            "student": _before("module.backbone.", {name: value + 1 for name, value in state.items()}),
            "teacher": _before("backbone.", state) | {"head.last_layer.weight": torch.ones(9)},
        },
        "backbone.",
    ),
    "DINOv2": (
        lambda state: {
            "model": _before("student.backbone.", {name: value + 1 for name, value in state.items()})
            | _before("teacher.backbone.", state)
        },
        "teacher.backbone.",
    ),
    "two networks": (lambda state: {"critic": {"a.weight": torch.ones(2)}, "generator": state}, ""),
    "NumPy": (lambda state: {"net": state, "best": np.float32(0.7), "epoch": np.int64(3), "ok": np.bool_(True)}, ""),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("whose", OTHERS)
def test_checkpoints_of_others(tmp_path, whose, legacy):
    make, prefix = OTHERS[whose]
    model = timm.create_model("test_resnet", num_classes=3)
    state = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    torch.save(make(state), tmp_path / "x.pth", _use_new_zipfile_serialization=not legacy)
    for load in (load_weights, load_finetune):
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        report = load(model, tmp_path / "x.pth")
        assert len(report.kept) == len(state) and not report.dropped and report.prefix == prefix
        assert (f"names without their {prefix}" in str(report)) == bool(prefix)
        assert report.entry != "student" and f"x.pth ({report.entry or 'the whole file'}" in str(report)
        assert_equal(model.state_dict(), state)
    load_pretrained_weights(model, tmp_path / "x.pth", use_ema=whose == "torchvision")
    plain = {"torchvision": "", "DINOv2": "student.backbone."}.get(whose, prefix)
    checkpoint = read_checkpoint(tmp_path / "x.pth")
    optimizer = torch.optim.SGD(model.parameters())
    told = TrainState(model, optimizer, updates_per_epoch=1).load(checkpoint, "x.pth", load_optimizer=False)
    request = ModelRequest(name="test_resnet", num_classes=3)
    for lines in (told, load_model(request, tmp_path / "x.pth", use_ema=False).notes):
        entry = {"DINO": "student", "DINOv2": "model"}.get(whose, report.entry or "the whole file")
        expected = f"weights: {entry}, names without their {plain}"
        assert [each for each in lines if "their" in each] == [expected] * bool(plain)
    entry = {"DINO": "teacher", "torchvision": "model"}.get(whose, entry)
    assert f"weights: {entry}" in load_model(request, tmp_path / "x.pth").notes[-1]


def test_what_few_names_share_is_no_prefix():
    own = ["norm.weight", "norm.bias", "head.weight", "blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert foreign_prefix(["encoder.norm.weight", "encoder.norm.bias", "encoder.x", "y", "z"], own) == ""
    assert foreign_prefix([*own, *(f"ema.{name}" for name in own)], own) == ""
