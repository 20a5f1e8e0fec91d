"""The annotator network of `generate_label.py` and `--token-label-teacher`: its weights, and who it is."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from tlt.errors import UserError
from tlt.io.weights import count_weights, read_checkpoint
from tlt.models.token_labeling import TokenLabelModel
from tlt.models.wrap import dense_head_of, with_dense_head
from volo.checkpoint.finetune import load_weights
from volo.checkpoint.model_config import model_config_of
from volo.train.model import TimmModel, build_model, image_size_of


def load_annotator(args: Namespace, num_classes: int | None = None) -> tuple[TimmModel, dict[str, Any]]:
    """The annotator with its weights, and what its checkpoint says about it.

    Args:
        args: `model`, `checkpoint`, `pretrained`, `use_ema`, `num_classes`, `img_size`, `input_size`, `gp` and
            `model_kwargs`. What is missing there and stands in the checkpoint is filled in.
        num_classes: Of a checkpoint that does not say how many it has.

    Raises:
        UserError: No such model or file, or weights that don't fit.
    """
    if not args.checkpoint:
        return build_model(args), {}
    checkpoint = read_checkpoint(args.checkpoint)
    recorded = model_config_of(checkpoint, args.checkpoint) or {}
    args.model = args.model or recorded.get("name")
    if args.model is None:
        raise UserError(f"--checkpoint {args.checkpoint} does not say what model it holds: add --model NAME")
    args.num_classes = args.num_classes or recorded.get("num_classes") or num_classes
    if args.img_size is None and args.input_size is None:
        args.img_size = recorded.get("img_size")
    kwargs = recorded.get("kwargs") if args.model == recorded.get("name") else None
    model = build_model(args, kwargs, count_weights(checkpoint))
    if isinstance(model, TokenLabelModel) and not recorded.get("dense_head", True):
        model.set_dense_head(False)
    if recorded.get("dense_head") and dense_head_of(checkpoint, args.use_ema or None, args.checkpoint):
        model = with_dense_head(model, image_size_of(args))
    load_weights(model, args.checkpoint, args.use_ema or None, checkpoint)
    return model, recorded
