"""Models in the hands of other programs, those that docs/models.md names: each test is skipped where its program is not
installed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import volo  # noqa: F401, registers the models
from tlt.models import products

NAMES = ("volo_test", "lvvit_test")


def build(name: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, **{"num_classes": 10, **kwargs}).eval()


def images(batch: int = 2, size: int = 64) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def symbolic_trace(name: str, folder: Path) -> None:
    for training in (False, True):
        model = build(name, drop_path_rate=0.2).train(training)
        traced = torch.fx.symbolic_trace(model)
        for x in (images(), images(3, 96)):
            outputs = []
            for each in (model, traced):
                torch.manual_seed(2)
                outputs.append(each(x))
            torch.testing.assert_close(*outputs)


def jit_trace(name: str, folder: Path) -> None:
    model, path = build(name), folder / "traced.pt"
    torch.jit.save(torch.jit.trace(model, images()), path)
    torch.save((images(3), model(images(3)).detach()), folder / "expected.pt")
    code = (
        "import torch\n"
        f"x, expected = torch.load({str(folder / 'expected.pt')!r})\n"
        f"torch.testing.assert_close(torch.jit.load({str(path)!r})(x), expected)\n"
    )
    # Where this project can't be imported.
    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def onnx_by_tracing(name: str, folder: Path) -> None:
    import onnxruntime

    model, path = build(name), folder / "model.onnx"
    torch.onnx.export(
        model, (images(),), path, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}}, opset_version=17
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {"x": images(3).numpy()})[0])
    torch.testing.assert_close(found, model(images(3)), rtol=1e-4, atol=1e-5)


def openvino(name: str, folder: Path) -> None:
    import openvino

    model = build(name)
    converted = openvino.convert_model(model, example_input=images())
    compiled = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = torch.from_numpy(compiled(images(3).numpy())[0])
    torch.testing.assert_close(found, model(images(3)), rtol=1e-3, atol=1e-4)


def torchao(name: str, folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = build(name)
    expected = model(images())
    quantize_(model, Int8WeightOnlyConfig())
    assert type(model.head.weight) is not nn.Parameter
    check_close(model(images()), expected)


def quantize_dynamic(name: str, folder: Path) -> None:
    model = build(name)
    quantized = torch.ao.quantization.quantize_dynamic(model)
    assert not [n for n, module in quantized.named_modules() if type(module) is nn.Linear]
    check_close(quantized(images()), model(images()))


def check_close(found: Tensor, expected: Tensor) -> None:
    difference = (found - expected).abs().max()
    assert 0 < difference < 0.1 * expected.abs().max()


def captum(name: str, folder: Path) -> None:
    from captum.attr import IntegratedGradients

    model = build(name)
    model.set_dense_head(False)  # whose maximum has corners
    _, left = IntegratedGradients(model).attribute(images(), target=1, n_steps=50, return_convergence_delta=True)
    assert left.abs().max() < 1e-3


def peft(name: str, folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = build(name)
    expected = model(images())
    adapted = get_peft_model(model, LoraConfig(target_modules=["qkv", "fc1", "fc2"], r=4))
    torch.testing.assert_close(adapted.eval()(images()), expected)  # adapters begin at nothing
    adapted.train()(images()).sum().backward()
    gradients = {n: p.grad is not None for n, p in adapted.named_parameters() if "lora_" in n}
    assert gradients and all(gradients.values())


def segmentation(name: str, folder: Path) -> None:
    import segmentation_models_pytorch as smp

    if name == "lvvit_test":
        with pytest.raises(ValueError, match="downsampling pattern"):
            smp.Unet("tu-lvvit_test", encoder_weights=None, classes=3)
        return
    model = smp.DPT("tu-volo_d0", encoder_weights=None, classes=3).eval()
    assert model(images(1, 224)).shape == (1, 3, 224, 224)


def accelerate(name: str, folder: Path) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), build(name).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.head.weight.clone()
    accelerator.backward(model(images()).square().mean())
    optimizer.step()
    assert not torch.equal(before, model.head.weight)


def hugging_face(name: str, folder: Path) -> None:
    model = build(name, img_size=(128, 32))
    timm.models.save_for_hf(model, folder / "saved")
    assert '"input_size": [\n      3,\n      128,\n      32' in (folder / "saved" / "config.json").read_text()
    again = timm.create_model(f"local-dir:{folder / 'saved'}", pretrained=True).eval()
    assert again.img_size == (128, 32)
    torch.testing.assert_close(again(torch.ones(1, 3, 128, 32)), model(torch.ones(1, 3, 128, 32)))


CLIENTS: dict[str, tuple[str, Callable[[str, Path], None]]] = {  # package that has to be installed, what is tried
    "torch.fx": ("torch", symbolic_trace),
    "torch.jit": ("torch", jit_trace),
    "torch.onnx": ("onnxruntime", onnx_by_tracing),
    "openvino": ("openvino", openvino),
    "torchao": ("torchao", torchao),
    "torch.ao": ("torch", quantize_dynamic),
    "captum": ("captum", captum),
    "peft": ("peft", peft),
    "segmentation_models_pytorch": ("segmentation_models_pytorch", segmentation),
    "accelerate": ("accelerate", accelerate),
    "timm and Hugging Face": ("huggingface_hub", hugging_face),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.filterwarnings("ignore")
def test_client(client: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MKL_IS_SLOW", True)  # with operators of our own wherever they may be
    package, check = CLIENTS[client]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    check(name, tmp_path)
