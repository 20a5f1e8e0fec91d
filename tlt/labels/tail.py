"""The share of the classes that a cell does not list (`--label-tail exact`).

Published targets take the logits of classes that a cell does not list to be 0. With the log-sum-exp (LSE) of all the
annotator's logits their true share is known: each of them gets the same logit,
t = log((exp(LSE) - sum of exp(listed)) / (C - k)), so that listed classes have the annotator's own probabilities. A
softmax doesn't change if all logits are shifted: with t subtracted from the listed ones, the others have 0, as the code
that makes targets expects.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relative_to_tail(values: Tensor, log_sum_exp: Tensor, num_classes: int) -> Tensor:
    """Listed logits less the mean logit t of those that are not listed.

    A tail share too small for float32 (rounding may even make it negative) counts as half the last digit
    of the log-sum-exp: probabilities are right to about 1e-7 times that, and logits stay finite.

    Args:
        values: (..., k, h, w), of different classes in a cell.
        log_sum_exp: (..., h, w) float32.
        num_classes: C.

    Returns:
        (..., k, h, w) float32. Where all classes are listed there is no tail, and the values are as they were.
    """
    k = values.shape[-3]
    if k >= num_classes:
        return values.float()
    total = log_sum_exp.double()
    last_digit = 2.0**-24 * total.abs().clamp(min=1)
    share = torch.maximum(-torch.expm1(values.double().logsumexp(-3) - total), last_digit)
    tail = total + torch.log(share / (num_classes - k))
    return (values.double() - tail.unsqueeze(-3)).float()
