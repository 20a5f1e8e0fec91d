"""`volo export` as a user runs it: files that other programs run to the model's logits, and one line for a mistake."""

import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

import volo  # noqa: F401  registers the models
from volo.commands import export

SIZE = (32, 48)
LOOKS = {"img_size": list(SIZE), "in_chans": 3, "crop_pct": 0.9}


@pytest.fixture
def images() -> Tensor:
    """Five, which is neither the batch that a file is traced with nor one that it is checked with."""
    return torch.randn(5, 3, *SIZE, generator=torch.Generator().manual_seed(7))


def close(got: Tensor | np.ndarray, expected: Tensor) -> bool:
    return bool((torch.as_tensor(got) - expected).abs().max() < 1e-5 * expected.abs().max())


def test_onnx_with_both_heads(call, described, images, tmp_path):
    model, checkpoint = described("volo_test", {"layers": (1, 1, 0, 0)}, **LOOKS)
    ended = call("export", f"--checkpoint {checkpoint} -o {tmp_path}/model.onnx --dense")
    assert ended.code == 0 and {*tmp_path.iterdir()} == {checkpoint, tmp_path / "model.onnx"}, ended.err
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    graph = onnx.load(tmp_path / "model.onnx")
    assert [entry.version for entry in graph.opset_import if not entry.domain] == [18]
    assert not {"BatchNormalization", "Col2Im"} & {node.op_type for node in graph.graph.node}

    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 3, *SIZE]
    with torch.no_grad():
        expected = model(images, dense=True)
    assert [output.name for output in session.get_outputs()] == ["class_logits", "token_logits"]
    for got, wanted in zip(session.run(None, {"images": images.numpy()}), expected, strict=True):
        assert close(got, wanted)
    config = json.loads(session.get_modelmeta().custom_metadata_map["model_config"])
    assert config["class_names"] == list("abcdef") and config["img_size"] == list(SIZE) and config["crop_pct"] == 0.9
    assert config["token_grid"] == [2, 3]


ALONE = """
import sys, torch
images, = torch.load(sys.argv[2])
extra = {"model_config.json": ""}
torch.save(torch.export.load(sys.argv[1], extra_files=extra).module()(images), sys.argv[3])
assert not {"volo", "tlt", "timm"} & set(sys.modules)
print(extra["model_config.json"])
"""


@pytest.mark.slow
def test_a_pt2_file_runs_where_only_torch_is(call, described, images, tmp_path):
    model, checkpoint = described("volo_test", {"layers": (1, 1, 0, 0)}, **LOOKS)
    call("export", f"--checkpoint {checkpoint} -o {tmp_path}/model.pt2 --img-size 64 --crop-pct 0.8").ok()
    square = torch.nn.functional.interpolate(images, (64, 64))
    torch.save([square], tmp_path / "images.pt")
    files = [tmp_path / name for name in ("model.pt2", "images.pt", "logits.pt")]
    run = subprocess.run([sys.executable, "-I", "-c", ALONE, *files], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    with torch.no_grad():
        assert close(torch.load(tmp_path / "logits.pt")[0], model(square))
    config = json.loads(run.stdout)
    assert (config["img_size"], config["crop_pct"], config["num_classes"]) == ([64, 64], 0.8, 6)


def test_half_precision(call, described, images, tmp_path):
    model, checkpoint = described("lvvit_test", {"depth": 1}, **LOOKS)
    for file, dtype in (("m.pt2", "bfloat16"), ("m.onnx", "float16")):
        call("export", f"--checkpoint {checkpoint} -o {tmp_path / file} --model-dtype {dtype}").ok()
    program = torch.export.load(tmp_path / "m.pt2")
    assert {weight.dtype for weight in program.state_dict.values()} == {torch.bfloat16}
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = model(images)
    half = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
    for got, tolerance in ((program.module()(images)[0], 0.03), (half, 0.005)):
        assert got.dtype == torch.float32 and not close(got, expected)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("-o OUT/lvvit_test.pth --format onnx", "exists already"),
        ("-o OUT/nowhere/model.pt2", "nowhere"),
        ("-o OUT/model.pt2 --dense", "--dense"),
    ],
)
def test_bad_input_is_one_line(call, described, tmp_path, flags, named):
    _, checkpoint = described("lvvit_test", {"depth": 1}, **LOOKS, dense_head=False)
    ended = call("export", f"--checkpoint {checkpoint} {flags.replace('OUT', str(tmp_path))}")
    assert ended.refused(named), ended
    assert [file.name for file in tmp_path.iterdir()] == ["lvvit_test.pth"]


def test_unwritable_onnx_is_one_line(call, described, tmp_path, monkeypatch):
    def no_rule(*_: object, **__: object) -> None:
        try:
            raise AssertionError("only 4D query, key, and value are supported")
        except AssertionError as cause:
            raise torch.onnx.errors.OnnxExporterError("a page\nof internals") from cause

    _, checkpoint = described("lvvit_test", {"depth": 1}, **LOOKS)
    monkeypatch.setattr(torch.onnx, "export", no_rule)
    ended = call("export", f"--checkpoint {checkpoint} -o {tmp_path}/model.onnx")
    assert ended.refused("only 4D query") and "--format torch-export" in ended.err and "page" not in ended.err


def test_wrong_file_is_not_written(call, described, tmp_path, monkeypatch):
    _, checkpoint = described("lvvit_test", {"depth": 1}, **LOOKS)
    monkeypatch.setattr(export, "fold_batchnorm", lambda model: model.head.bias.data.add_(0.01))
    ended = call("export", f"--checkpoint {checkpoint} -o {tmp_path}/model.pt2")
    assert ended.code == 2 and "nothing was written" in ended.err
    assert [file.name for file in tmp_path.iterdir()] == ["lvvit_test.pth"]


def test_checkpoint_of_a_far_larger_model_is_refused(call, tmp_path):
    kwargs = {"layers": [9, 9, 9, 9], "embed_dims": [4096, 8192, 8192, 8192], "num_heads": [64, 64, 64, 64]}
    described = {"name": "volo_d1", "kwargs": kwargs, "num_classes": 4, "img_size": [224, 224]}
    torch.save({"state_dict": {"x": torch.zeros(1)}, "model_config": described}, tmp_path / "vast.pth")
    ended = call("export", f"--checkpoint {tmp_path}/vast.pth -o {tmp_path}/out.onnx")
    assert ended.refused("the checkpoint describes a model of"), ended
