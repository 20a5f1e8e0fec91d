"""Token labels of images that Mixup or CutMix mixed: every token is compared with the labels of both images it shows.

A label that is a mixture of two costs what the two cost, each by its share: cross-entropy is linear in the label. So a
token's loss is that against its own image's label times the share that stays, plus that against the partner's
label times the rest; each image's coverage counts for its own part. No mixed labels are built, whatever form they have.

Shapes: B images, N tokens, C classes. The partner of sample i is sample B - 1 - i.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor

from tlt.loss import LossTerms, blend_truth, token_label_loss
from tlt.mix import Shares
from tlt.mixtoken import Box


def mixed_token_label_loss(
    cls_logits: Tensor,
    token_logits: Tensor | None,
    targets: Any,
    mix_box: Box | None = None,
    *,
    shares: Shares | None = None,
    cls_weight: float = 1.0,
    dense_weight: float = 0.5,
    ground_truth: bool = False,
    gt_weight_agree: float = 0.5,
    gt_weight_disagree: float = 0.1,
) -> LossTerms:
    """As `tlt.loss.token_label_loss`, for outputs of images that were mixed.

    Args:
        targets: Those of the images before they were mixed.
        mix_box: MixToken's box, which mixed what was mixed already: a token inside it shows the partner's mixture.
        shares: What `tlt.mix.Mixup.draw` drew; None: nothing was mixed.

    With `ground_truth` each image's own class label is blended before it is mixed. A token may weigh less than 1 where
    one of its two images is not labelled.
    """
    cls = targets.cls
    if ground_truth:
        cls = blend_truth(cls, targets.truth_target(), gt_weight_agree, gt_weight_disagree)
    loss_of = functools.partial(token_label_loss, dense_weight=dense_weight)
    if shares is None:
        return loss_of(cls_logits, token_logits, replace(targets, cls=cls), mix_box, cls_weight=cls_weight)
    mixed = replace(targets, cls=shares.blend_labels(cls))
    if token_logits is None or targets.weight is None or not dense_weight:
        return loss_of(cls_logits, token_logits, mixed, mix_box, cls_weight=cls_weight)
    stays = shares.of_tokens(targets.grid, targets.window, targets.weight)  # (B or 1, N)
    part = replace(mixed, weight=targets.weight * stays)
    own = loss_of(cls_logits, token_logits, part, mix_box, cls_weight=cls_weight)
    rest = replace(mixed, weight=targets.weight * (1 - stays.flip(0)))
    other = loss_of(cls_logits, token_logits.flip(0), rest, cls_weight=0.0)
    return LossTerms(own.total + other.total, own.cls, own.dense + other.dense)
