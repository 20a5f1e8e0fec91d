"""A model as a file that runs without this project: ONNX, and torch.export's .pt2.

Both have one input, `images` (B, channels, H, W), float32 and normalised, for any B and the (H, W) they were made for,
and float32 outputs named after `output_names`. Both carry a JSON text `model_config`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tlt.errors import UserError, require

INPUT = "images"
CONFIG = "model_config"
_LARGEST_ONNX = 2**31 - 2**20  # bytes of weights: a file is one protobuf message, which ends at 2 GiB


class Inference(nn.Module):
    """What a file computes: the model between float32 images and float32 logits, whatever its own type.

    Args:
        model: In evaluation, all its floating-point weights of one type.
        dense: Both heads, as `model(x, dense=True)`.
    """

    def __init__(self, model: nn.Module, dense: bool) -> None:
        super().__init__()
        self.model = model
        self.dense = dense
        self.dtype = next(model.parameters()).dtype

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(B, channels, H, W) -> (B, K), and (B, N, K) with `dense`."""
        images = images.to(self.dtype)
        outputs = self.model(images, dense=True) if self.dense else (self.model(images),)
        return tuple(logits.float() for logits in outputs)


def output_names(dense: bool) -> list[str]:
    """The names of the outputs, in their order."""
    return ["class_logits", "token_logits"] if dense else ["logits"]


def trace(module: Inference, images: Tensor) -> ExportedProgram:
    """The module as a graph for any batch of images of this size.

    Args:
        images: At least two; torch takes a batch of one for a constant.

    Raises:
        UserError: The model can't be traced.
    """
    try:
        with torch.no_grad():
            return torch.export.export(module, (images,), dynamic_shapes={INPUT: {0: Dim("batch", min=1)}})
    except RuntimeError as error:
        name = type(module.model).__name__
        raise UserError(f"{name} can't be exported for any batch: {str(error).strip().splitlines()[0]}") from error


class Format(NamedTuple):
    """How one kind of file is written and read."""

    packages: tuple[str, ...]  # of the extra "onnx", needed beyond torch
    write: Callable[[ExportedProgram, list[str], str, Path, int], None]  # graph, outputs, model_config, file, opset
    load: Callable[[Path], Callable[[Tensor], tuple[Tensor, ...]]]


def write_onnx(program: ExportedProgram, outputs: list[str], config: str, path: Path, opset: int) -> None:
    """Write one .onnx file, the weights in it; `model_config` is an entry of its metadata.

    Raises:
        UserError: Too large for one file, or an opset that torch can't write.
    """
    size = sum(t.numel() * t.element_size() for t in program.state_dict.values())
    if size > _LARGEST_ONNX:
        raise UserError(f"{size / 2**30:.1f} GiB of weights: an ONNX file ends at 2 GiB; use --format torch-export")
    with _quiet():
        written: Any = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=opset,
            input_names=[INPUT],
            output_names=outputs,
            dynamic_shapes={INPUT: {0: "batch"}},
        )
    if written.model.opset_imports[""] != opset:  # where a conversion fails, the graph is left as it was
        raise UserError(f"--opset {opset}: torch's exporter can't write it; use a lower one")
    written.model.metadata_props[CONFIG] = config
    written.save(path, external_data=False)


def load_onnx(path: Path) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The file as a function on the CPU, by onnxruntime.

    Raises:
        UserError: onnxruntime can't run it: it is older than the opset, or misses an operator in this type.
    """
    runtime = require("onnxruntime", extra="onnx")
    try:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # it derives its errors from nothing narrower
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"onnxruntime can't run the exported model ({reason}): use a lower --opset, or float32"
        ) from error
    return lambda images: tuple(map(torch.from_numpy, session.run(None, {INPUT: images.numpy()})))


def write_torch_export(program: ExportedProgram, outputs: list[str], config: str, path: Path, opset: int) -> None:
    """Write one .pt2 file; `model_config.json` is an extra file in it. Its outputs are a tuple, without names."""
    torch.export.save(program, path, extra_files={f"{CONFIG}.json": config})


def load_torch_export(path: Path) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The file as a function on the CPU."""
    return torch.export.load(path).module()


FORMATS = {
    "onnx": Format(("onnx", "onnxscript", "onnxruntime"), write_onnx, load_onnx),
    "torch-export": Format((), write_torch_export, load_torch_export),
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on its own workings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
