"""`volo validate --knn TRAIN_DIR`: how often the nearest training images name the class of an image.

As DINO evaluates features (arXiv:2104.14294): those before the class head, compared by their cosine; each of the k
nearest votes for its class with exp(cosine / 0.07).
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.data.loader import EvalLoader
from tlt.data.sources.open_images import open_images
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from volo.cluster.distributed import World
from volo.train.data import validation_loader
from volo.train.model import TimmModel
from volo.train.precision import Precision, compute_dtype


@torch.inference_mode()
def knn_row(
    args: Namespace, images: ImageSource, model: TimmModel, settings: dict[str, Any], world: World
) -> dict[str, Any]:
    """Return the row of the results: top-1 in percent with 10 and 20 neighbours, and the numbers of images."""
    if world.size > 1:
        raise UserError(f"--knn works with one process, there are {world.size}")
    voters = open_images(args.knn, "train", "", images.class_names, allow_root=True, split_flag="--knn")
    precision = Precision(world.device, compute_dtype(args, world.device))
    (bank, classes), (features, truth) = (
        _features(model, validation_loader(args, each, args.batch_size, settings, world), precision)
        for each in (voters, images)
    )
    row = {"model": args.model, "images": len(truth), "train_images": len(classes)}
    return row | {f"knn{k}": round(100 * knn_accuracy(bank, classes, features, truth, k), 4) for k in (10, 20)}


def knn_accuracy(bank: Tensor, classes: Tensor, features: Tensor, truth: Tensor, k: int) -> float:
    """Return the share of images, features (B, D) of classes `truth` (B,), whose class gets most votes of their k
    nearest in the bank, (N, D) of `classes` (N,)."""
    cosines, nearest = (F.normalize(features, dim=1) @ F.normalize(bank, dim=1).T).topk(min(k, len(bank)))
    votes = features.new_zeros(len(features), int(classes.max()) + 1)
    votes.scatter_add_(1, classes[nearest], (cosines / 0.07).exp())
    return float((votes.argmax(1) == truth).float().mean())


def _features(model: TimmModel, loader: EvalLoader, precision: Precision) -> tuple[Tensor, Tensor]:
    found = []
    for batch in loader:
        with precision.autocast():
            features = model.forward_head(model.forward_features(batch.images), pre_logits=True)
        if features.ndim != 2:
            raise UserError(f"--knn: {type(model).__name__} doesn't pool its features here: choose a --gp")
        found.append((features.float(), batch.classes))
    features, classes = (torch.cat(parts) for parts in zip(*found, strict=True))
    return features, classes
