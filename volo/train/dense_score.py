"""Measures how often a token's prediction is its label: the dense top-1 of a validation set."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tlt.data.batch import Batch
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.labels.store import LabelStore
from tlt.loss import TokenLabelLoss
from tlt.models.wrap import TOKEN_LABEL_MODELS
from tlt.targets import is_best
from volo.cluster.distributed import World
from volo.config.settings_data import LabelMaps
from volo.record.metrics import Sums
from volo.train.data import open_labels


class DenseScore:
    """Compares the top class of every token of validation images with that of its label, at the same place. Tokens
    whose label prefers no class are left out; one of several top classes of a label is right. `maps` says how to read
    the folder `path` of label maps, which `flag` names. The model has a trained dense head, and is neither compiled nor
    wrapped in DistributedDataParallel; `data_config` has the `input_size` of validation."""

    def __init__(
        self,
        path: str,
        maps: LabelMaps,
        flag: str,
        model: Any,
        data_config: Mapping[str, Any],
        images: ImageSource,
        world: World,
    ) -> None:
        if not (isinstance(model, TOKEN_LABEL_MODELS) and model.dense_head):
            raise UserError(f"{flag}: this model has no trained dense head to compare with them")
        self.labels, self.warnings = open_labels(path, maps, images, model.num_classes, flag=flag)
        self._loss = TokenLabelLoss.of(model, data_config["input_size"][1:], smoothing=0.0)
        self._both_heads = model.both_heads
        self._sums = Sums(("tokens", "right", "of_the_class"), world)

    def logits(self, model: Any, batch: Batch) -> Tensor:
        """Return the same logits (B, C) as `model(batch.images)`, but run both heads and count the tokens."""
        cls_logits, token_logits = model(batch.images, dense=True)
        tokens = self._loss.targets(batch).tokens
        classes = self._loss.num_classes
        assert tokens is not None
        right, counts = is_best(tokens, token_logits.argmax(-1), classes)
        of_the_class, _ = is_best(tokens, batch.classes[:, None], classes)
        self._sums.add(counts.sum(), right.sum(), of_the_class.sum())
        return self._both_heads(cls_logits, token_logits)

    def take(self) -> dict[str, Any]:
        """Return the fields of `volo.record.metrics.Evaluation` about tokens, and reset. Every rank must call this."""
        totals = self._sums.totals()
        self._sums.reset()
        percent = 100 / totals["tokens"] if totals["tokens"] else math.nan
        other = isinstance(self.labels, LabelStore) and self.labels.info.transfer
        annotator = None if other else percent * totals["of_the_class"]
        return {"tokens": int(totals["tokens"]), "dense_top1": percent * totals["right"], "annotator_top1": annotator}
