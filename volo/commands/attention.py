"""Draw what the attention layers of a VOLO or LV-ViT look at in an image, and what its heads say about it.

    volo attention image.jpg --checkpoint output/train/RUN/model_best.pth.tar -o attention.png
    volo attention image.jpg --model volo_d1 --pretrained --query 0.3 0.6 -o attention.png

A checkpoint of ours says which model it is and how its images are prepared; flags win over that.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tlt.data.augment.device_stage import EvalStage
from tlt.data.dataset import BatchKey, EvalDataset
from tlt.data.sources.folder import ImageFolder
from tlt.errors import UserError
from tlt.io.text import printable
from tlt.tools.drawing import check_format, save_figure
from volo.checkpoint.model_config import class_names
from volo.cluster.distributed import choose_device
from volo.commands.attention_page import draw_attention
from volo.commands.attention_view import choose_layers, view
from volo.train.model import eval_settings
from volo.train.trained_model import load_annotator


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    print(*args.notes, sep="\n", end="\n" if args.notes else "")
    check_format(args.output)
    device = choose_device(args.device, 0)
    built, recorded = load_annotator(args)
    model: Any = built  # with timm's interface
    layers = choose_layers(model, args.layers)
    settings = eval_settings(args, model, recorded)
    pixels = read_images(args.images, settings)
    stage, model = EvalStage(settings["mean"], settings["std"]).to(device), model.to(device).eval()
    names = class_names(recorded, int(model.num_classes))
    query = (args.query[0], args.query[1])
    for number, (path, image) in enumerate(zip(args.images, pixels, strict=True), start=1):
        seen = view(model, stage(image[None].to(device)), layers, query, args.heads)
        title = f"{path}: {args.model}, {image.shape[1]} x {image.shape[2]} px"
        figure = draw_attention(image.permute(1, 2, 0).numpy(), seen, query, names, title)
        out = output_path(args.output, number, len(pixels))
        save_figure(figure, out)
        print(f"wrote {printable(str(out))}", flush=True)
    return 0


def read_images(paths: list[str], settings: dict[str, Any]) -> torch.Tensor:
    """The images as they are in evaluation, (B, 3, H, W) uint8.

    Raises:
        UserError: One can't be read.
    """
    folder = ImageFolder("", paths, np.zeros(len(paths), np.int64), [])
    dataset = EvalDataset(
        folder,
        settings["input_size"][1:],
        settings["crop_pct"],
        settings["crop_mode"],
        settings["interpolation"],
        fill=[min(255, round(255 * value)) for value in settings["mean"]],
    )
    batch = dataset.load(BatchKey(0, tuple(range(len(paths)))))
    if batch.skipped:
        path, reason = batch.skipped[0]
        raise UserError(f"image {printable(path)}: {reason}")
    return batch.images


def output_path(output: str, number: int, count: int) -> Path:
    """Where picture `number` of `count` goes."""
    path = Path(output)
    return path if count == 1 else path.with_stem(f"{path.stem}-{number}")
