"""Models in the hands of other programs, of those that docs/models.md names the ones that the tests install."""

import subprocess
import sys
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import volo  # noqa: F401, registers the models
from tlt.models import fast_ops

pytestmark = [pytest.mark.parametrize("name", ["volo_test", "lvvit_test"]), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def operators_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_ops, "MKL_IS_SLOW", True)


def build(name: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, **{"num_classes": 10, **kwargs}).eval()


def images(batch: int = 2, size: int = 64) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def test_symbolic_trace(name):
    for training in (False, True):
        model = build(name, drop_path_rate=0.2).train(training)
        traced = torch.fx.symbolic_trace(model)
        for x in (images(), images(3, 96)):
            outputs = []
            for each in (model, traced):
                torch.manual_seed(2)
                outputs.append(each(x))
            torch.testing.assert_close(*outputs)


def test_jit_trace(name, tmp_path):
    model, path = build(name), tmp_path / "traced.pt"
    torch.jit.save(torch.jit.trace(model, images()), path)
    torch.save((images(3), model(images(3)).detach()), tmp_path / "expected.pt")
    code = (
        "import torch\n"
        f"x, expected = torch.load({str(tmp_path / 'expected.pt')!r})\n"
        f"torch.testing.assert_close(torch.jit.load({str(path)!r})(x), expected)\n"
    )
    # Where this project can't be imported.
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_onnx_by_tracing(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, path = build(name), tmp_path / "model.onnx"
    torch.onnx.export(
        model, (images(),), path, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}}, opset_version=17
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    result = torch.from_numpy(session.run(None, {"x": images(3).numpy()})[0])
    torch.testing.assert_close(result, model(images(3)), rtol=1e-4, atol=1e-5)


def test_quantize_dynamic(name):
    model = build(name)
    quantized = torch.ao.quantization.quantize_dynamic(model)
    assert not [n for n, module in quantized.named_modules() if type(module) is nn.Linear]
    expected = model(images())
    assert 0 < (quantized(images()) - expected).abs().max() < 0.1 * expected.abs().max()


def test_hugging_face(name, tmp_path):
    model = build(name, img_size=(128, 32))
    timm.models.save_for_hf(model, tmp_path / "saved")
    assert '"input_size": [\n      3,\n      128,\n      32' in (tmp_path / "saved" / "config.json").read_text()
    again = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    assert again.img_size == (128, 32)
    torch.testing.assert_close(again(torch.ones(1, 3, 128, 32)), model(torch.ones(1, 3, 128, 32)))
