"""Write a trained model as a file that runs without this project, and check the file against the model.

    volo export -o volo.onnx --checkpoint output/train/RUN
    volo export -o volo_d1_384.pt2 --model volo_d1 --pretrained --img-size 384 --dense

The exported model takes any number of images of one size. Its only input is `images` (B, channels, H, W), float32 and
normalised. Its outputs are float32: `logits`, or `class_logits` and `token_logits` (a .pt2 has no names). BatchNorm is
folded into the stem. The JSON text `model_config` in the file says how images are prepared and gives the class names.
The file is loaded and compared with the model before it gets its final name.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tlt.errors import UserError, reason_of, require
from tlt.io.files import blamed_on, refuse_existing
from tlt.io.text import printable
from tlt.models.folding import fold_batchnorm
from volo.checkpoint.checkpoint import explained, install, tensor_bytes
from volo.checkpoint.model_config import class_names
from volo.commands.console import say
from volo.commands.hub import write_folder
from volo.commands.inference import load
from volo.config.settings_tools import ExportSettings
from volo.train.precision import check_convolutions
from volo.train.trained_model import TrainedModel

BATCHES = (1, 3)  # batch sizes with which the file is checked; another one is used for tracing
# The largest allowed difference from the float32 model, relative to the largest logit.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
INPUT = "images"
CONFIG = "model_config"
_LARGEST_ONNX = 2**31 - 2**20  # bytes of weights: an ONNX file is one protobuf message, which is limited to 2 GiB


class ExportModule(nn.Module):
    """The exported computation: the model with float32 images and logits, whatever dtype it computes in.

    Args:
        model: The model in evaluation mode; all floating-point weights have one dtype.
        dense: Whether to return the logits of both heads, as `model(x, dense=True)` does.
    """

    def __init__(self, model: nn.Module, dense: bool) -> None:
        super().__init__()
        self.model = model
        self.dense = dense
        self.dtype = next(model.parameters()).dtype

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map (B, channels, H, W) to logits (B, K), and with `dense` also to (B, N, K)."""
        images = images.to(self.dtype)
        outputs = self.model(images, dense=True) if self.dense else (self.model(images),)
        return tuple(logits.float() for logits in outputs)


def trace(module: ExportModule, images: Tensor) -> ExportedProgram:
    """Return the module as a graph for any number of images of the size of these, at least two, because torch would
    treat a batch size of one as a constant. Raises UserError if the model can't be traced."""
    name = type(module.model).__name__
    with blamed_on(name, "can't be exported for any batch", "it has to be one that torch can trace"), torch.no_grad():
        return torch.export.export(module, (images,), dynamic_shapes={INPUT: {0: Dim("batch", min=1)}})


def write_onnx(program: ExportedProgram, outputs: list[str], config: str, path: Path, opset: int) -> None:
    """Write one .onnx file that contains the weights, and `model_config` in its metadata. Raises UserError if the
    weights are too large for one file, or torch can't write this opset or one of the model's layers."""
    if (size := tensor_bytes(program.state_dict)) > _LARGEST_ONNX:
        raise UserError(f"{size / 2**30:.1f} GiB of weights: an ONNX file ends at 2 GiB; use --format torch-export")
    logging.disable(logging.CRITICAL)  # silences the exporter's messages about its internals
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written: Any = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                opset_version=opset,
                input_names=[INPUT],
                output_names=outputs,
                dynamic_shapes={INPUT: {0: "batch"}},
            )
    except torch.onnx.OnnxExporterError as error:  # its text is a page about torch's internals; the cause is a line
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UserError(
            f"torch's exporter can't write the model as ONNX ({reason_of(cause)}): use --format torch-export"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    if written.model.opset_imports[""] != opset:  # the exporter keeps its own opset if it can't convert the graph
        raise UserError(f"--opset {opset}: torch's exporter can't write it; use a lower one")
    written.model.metadata_props[CONFIG] = config
    written.save(path, external_data=False)


def load_onnx(path: Path) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return the file as a function on the CPU, which onnxruntime computes. Raises UserError if onnxruntime can't run
    it: it is too old for the opset, or lacks an operator for this dtype."""
    runtime = require("onnxruntime", extra="onnx")
    with blamed_on("onnxruntime", "can't run the model", "use a lower --opset, or float32"):
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: tuple(map(torch.from_numpy, session.run(None, {INPUT: images.numpy()})))


def run(settings: ExportSettings) -> int:
    """Export the model: write a file, or with `--to-hf` a folder for the Hugging Face Hub."""
    file = settings.file
    say(settings.notes)
    if file.to_hf:
        trained = load(settings.network, settings.pixels, dense=False)
        say([write_folder(trained, settings.network.checkpoint, Path(file.to_hf), file.licence, file.origin_url)])
        return 0
    path = Path(file.output)
    refuse_existing(path, "-o")
    if not path.parent.is_dir():
        raise UserError(f"-o {path}: there is no folder {path.parent}: make it first")
    for package in ("onnx", "onnxscript", "onnxruntime") if file.format == "onnx" else ():
        require(package, extra="onnx")
    trained = load(settings.network, settings.pixels, dense=file.dense)
    if file.dense and not getattr(trained.model, "dense_head", False):
        raise UserError(f"--dense: {trained.name} has no trained dense head here; leave the flag out")

    shape = tuple(trained.data_config["input_size"])  # channels, height, width
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(count, *shape, generator=generator) for count in BATCHES]  # noise
    expected = run_all(ExportModule(trained.model, file.dense), images)
    config = json.dumps(recorded_config(trained, file.dense))
    fold_batchnorm(trained.model)
    dtype = getattr(torch, file.model_dtype)
    say(check_convolutions(trained.model, trained.data_config["input_size"], dtype, torch.device("cpu")))
    if file.format == "onnx":  # torch's exporter can't write some attention that is one operation; onnxruntime fuses it
        for layer in trained.model.modules():
            if hasattr(layer, "fused_attn"):
                layer.fused_attn = False
    module = ExportModule(trained.model.to(dtype), file.dense)
    program = trace(module, torch.zeros(2, *shape))

    def fill(staged: Path) -> None:
        if file.format == "onnx":
            names = ["class_logits", "token_logits"] if file.dense else ["logits"]
            write_onnx(program, names, config, staged, file.opset)
        else:
            torch.export.save(program, staged, extra_files={f"{CONFIG}.json": config})
        with staged.open("rb") as written:
            os.fsync(written.fileno())
        compute = load_onnx(staged) if file.format == "onnx" else torch.export.load(staged).module()
        check_outputs(run_all(compute, images), expected, file.model_dtype)

    with explained(path, lambda: tensor_bytes(program.state_dict)):
        install(path, fill)
    description = f"{trained.name} in {file.model_dtype}, any number of images of {' x '.join(map(str, shape))}"
    print(f"wrote {printable(str(path))}: {description}, {path.stat().st_size / 2**20:.1f} MiB")
    return 0


@torch.no_grad()
def run_all(compute: Callable[[Tensor], tuple[Tensor, ...]], batches: list[Tensor]) -> list[Tensor]:
    """Return all outputs for all batches."""
    return [output for images in batches for output in compute(images)]


def check_outputs(got: list[Tensor], expected: list[Tensor], dtype: str) -> None:
    """Compare the outputs of the file with those of the model, and print the difference. Raises UserError if the
    difference is larger than rounding can explain."""
    shares = [(g - e).abs().max() / e.abs().max() for g, e in zip(got, expected, strict=True)]
    worst = torch.stack(shares).max().item()  # NaN if any share is NaN
    print(f"largest difference from the model in PyTorch, in float32: {worst:.1e} of the largest logit", flush=True)
    if not worst <= TOLERANCES[dtype]:
        raise UserError(
            f"the exported model's logits are {worst:.1e} of the largest off, more than {TOLERANCES[dtype]:g}: nothing "
            "was written" + ("; try --model-dtype float32" if dtype != "float32" else "")
        )


def recorded_config(trained: TrainedModel, dense: bool) -> dict[str, Any]:
    """Return the `model_config` of the file, from the checkpoint, the model and the flags."""
    model, data_config = trained.model, trained.data_config
    size = data_config["input_size"][1:]
    return {
        "name": trained.name,
        "num_classes": model.num_classes,
        "img_size": list(size),
        "in_chans": data_config["input_size"][0],
        "token_grid": list(model.token_grid(size)) if dense else None,
        **{name: data_config[name] for name in ("crop_pct", "crop_mode", "mean", "std", "interpolation")},
        "class_names": class_names(trained.config, model.num_classes),
    }
