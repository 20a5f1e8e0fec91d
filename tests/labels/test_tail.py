"""`--label-tail exact` against a float64 softmax of all the annotator's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tlt.errors import UserError
from tlt.label_map import LabelBatch, LabelMap
from tlt.labels.annotate import _annotation
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo
from tlt.labels.store import open_labels, relative_to_tail
from tlt.targets import make_targets


def annotator_says(classes: int, spread: float, shape: tuple[int, ...] = (2, 4, 5)) -> Tensor:
    """(B, h, w, C) dense logits."""
    return spread * torch.randn(*shape, classes, generator=torch.Generator().manual_seed(classes)) + 0.4


def written_out(values: Tensor, ids: Tensor, classes: int) -> Tensor:
    """(B, k, h, w) -> float64 (B, C, h, w), 0 where nothing is listed."""
    return torch.zeros(len(ids), classes, *ids.shape[2:], dtype=torch.float64).scatter_(1, ids.long(), values.double())


@pytest.mark.parametrize("classes,k,spread", [(6, 1, 0.1), (40, 5, 4.0), (1000, 5, 8.0)])
def test_listed_classes_have_the_annotators_probabilities(classes: int, k: int, spread: float) -> None:
    dense = annotator_says(classes, spread)
    found = _annotation(dense.clone(), k)
    # The listed logits are stored in half precision: the truth is a softmax of these and the exact others.
    exact = dense.double().permute(0, 3, 1, 2).scatter(1, found.ids.long(), found.values.double())
    truth = exact.softmax(1)
    shifted = relative_to_tail(found.values, found.log_sum_exp, classes)
    assert shifted.dtype == torch.float32 and found.log_sum_exp.dtype == torch.float32
    said = written_out(shifted, found.ids, classes).softmax(1)
    listed = found.ids.long()
    digit = 2**-23 * max(1.0, float(found.log_sum_exp.abs().max()))
    torch.testing.assert_close(said.gather(1, listed), truth.gather(1, listed), rtol=0, atol=digit)
    tails = [1 - each.gather(1, listed).sum(1) for each in (said, truth)]
    torch.testing.assert_close(*tails, rtol=0, atol=digit)
    unlisted = said.scatter(1, listed, torch.nan)
    assert (unlisted.nan_to_num(2).amin(1) * (classes - k) - tails[0]).abs().max() < 1e-9  # shared out evenly
    # The published definition says something else.
    published = written_out(found.values, found.ids, classes).softmax(1)
    assert (published.gather(1, listed) - truth.gather(1, listed)).abs().max() > 1e-2


def test_tails_that_rounding_has_taken_are_as_good_as_nothing() -> None:
    values = torch.tensor([30.0, -5.0]).half()[:, None, None]
    for total in (30.0, 29.99999, 30.000002):  # nothing left, less than nothing, next to nothing
        shifted = relative_to_tail(values, torch.full((1, 1), total), 1000)
        assert torch.isfinite(shifted).all()
        said = written_out(shifted[None], torch.tensor([0, 1])[None, :, None, None], 1000).softmax(1)
        assert abs(float(said[0, 0]) - 1) < 3e-6
        torch.testing.assert_close(shifted[0] - shifted[1], torch.full((1, 1), 35.0))
    everything = annotator_says(3, 2.0)
    found = _annotation(everything.clone(), 3)
    assert torch.equal(relative_to_tail(found.values, found.log_sum_exp, 3), found.values.float())


def test_pooled_labels_are_those_of_the_mean_of_the_shifted_logits(tmp_path: Path) -> None:
    classes, k, names = 30, 3, ["a/0.jpg", "a/1.jpg"]
    dense = annotator_says(classes, 2.0, (2, 2, 2))
    found = _annotation(dense.clone(), k)
    for known in (classes, None):
        writer = ArchiveWriter(tmp_path / f"{known}", LabelInfo(k, (2, 2), known, log_sum_exp=True), names)
        for row, (values, ids, total) in enumerate(zip(*(part.numpy() for part in found), strict=True)):
            writer.write(row, LabelMap(values, ids, log_sum_exp=total))
        writer.finish()
    with pytest.raises(UserError, match="does not say how many classes"):
        open_labels(tmp_path / "None", names, label_tail="exact")
    store = open_labels(tmp_path / f"{classes}", names, label_tail="exact")
    labels = LabelBatch.stack([store.read(index) for index in range(2)])
    assert labels.values.dtype == torch.float32
    whole, all_of_it = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]]).repeat(2, 1, 1), torch.tensor([[0.0, 0, 1, 1]] * 2)
    # One token over four cells, each of which counts for a quarter.
    targets = make_targets(labels, whole, all_of_it, torch.zeros(2), (1, 1), classes, smoothing=0.0)
    assert targets.tokens is not None
    listed = written_out(found.values, found.ids, classes)  # (B, C, h, w)
    rest = dense.double().permute(0, 3, 1, 2).scatter(1, found.ids.long(), -torch.inf)
    tail = torch.log(rest.exp().sum(1, keepdim=True) / (classes - k))
    expected = torch.where(listed != 0, listed - tail, 0.0).mean((2, 3)).softmax(1)
    torch.testing.assert_close(targets.tokens.dense(classes)[:, 0].double(), expected, rtol=0, atol=1e-6)
