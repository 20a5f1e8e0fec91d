"""`--label-tail exact` against a float64 softmax of all the annotator's logits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tlt.errors import UserError
from tlt.label_map import LabelMap
from tlt.labels.annotate import _annotation
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo
from tlt.labels.store import open_labels, relative_to_tail


def annotator_says(classes: int, spread: float, shape: tuple[int, ...] = (2, 4, 5)) -> Tensor:
    """(B, h, w, C) dense logits."""
    return spread * torch.randn(*shape, classes, generator=torch.Generator().manual_seed(classes)) + 0.4


def written_out(values: Tensor, ids: Tensor, classes: int) -> Tensor:
    """(B, k, h, w) -> float64 (B, C, h, w), 0 where nothing is listed."""
    return torch.zeros(len(ids), classes, *ids.shape[2:], dtype=torch.float64).scatter_(1, ids.long(), values.double())


@pytest.mark.parametrize("classes,k,spread", [(6, 1, 0.1), (40, 5, 4.0), (1000, 5, 8.0)])
def test_listed_classes_have_the_annotators_probabilities(classes: int, k: int, spread: float) -> None:
    dense = annotator_says(classes, spread)
    annotation = _annotation(dense.clone(), k)
    # The listed logits are stored in half precision: the truth is a softmax of these and the exact others.
    exact = dense.double().permute(0, 3, 1, 2).scatter(1, annotation.ids.long(), annotation.values.double())
    truth = exact.softmax(1)
    shifted = relative_to_tail(annotation.values, annotation.log_sum_exp, classes)
    assert shifted.dtype == torch.float32 and annotation.log_sum_exp.dtype == torch.float32
    probabilities = written_out(shifted, annotation.ids, classes).softmax(1)
    listed = annotation.ids.long()
    digit = 2**-23 * max(1.0, float(annotation.log_sum_exp.abs().max()))
    torch.testing.assert_close(probabilities.gather(1, listed), truth.gather(1, listed), rtol=0, atol=digit)
    tails = [1 - p.gather(1, listed).sum(1) for p in (probabilities, truth)]
    torch.testing.assert_close(*tails, rtol=0, atol=digit)
    unlisted = probabilities.scatter(1, listed, torch.nan)
    assert (unlisted.nan_to_num(2).amin(1) * (classes - k) - tails[0]).abs().max() < 1e-9  # shared out evenly
    # The published definition says something else.
    published = written_out(annotation.values, annotation.ids, classes).softmax(1)
    assert (published.gather(1, listed) - truth.gather(1, listed)).abs().max() > 1e-2


def test_tails_that_rounding_has_taken_are_as_good_as_nothing() -> None:
    values = torch.tensor([30.0, -5.0]).half()[:, None, None]
    for total in (30.0, 29.99999, 30.000002):  # nothing left, less than nothing, next to nothing
        shifted = relative_to_tail(values, torch.full((1, 1), total), 1000)
        assert torch.isfinite(shifted).all()
        probabilities = written_out(shifted[None], torch.tensor([0, 1])[None, :, None, None], 1000).softmax(1)
        assert abs(float(probabilities[0, 0]) - 1) < 3e-6
        torch.testing.assert_close(shifted[0] - shifted[1], torch.full((1, 1), 35.0))
    everything = annotator_says(3, 2.0)
    annotation = _annotation(everything.clone(), 3)
    assert torch.equal(relative_to_tail(annotation.values, annotation.log_sum_exp, 3), annotation.values.float())


def test_a_store_shifts_what_the_targets_read(tmp_path: Path) -> None:
    annotation = _annotation(annotator_says(30, 2.0, (1, 2, 2)), 3)
    values, ids, total = (part[0].numpy() for part in annotation)
    for known in (30, None):
        writer = ArchiveWriter(tmp_path / f"{known}", LabelInfo(3, (2, 2), known, log_sum_exp=True), ["a/0.jpg"])
        writer.write(0, LabelMap(values, ids, log_sum_exp=total))
        writer.finish()
    with pytest.raises(UserError, match="does not say how many classes"):
        open_labels(tmp_path / "None", ["a/0.jpg"], label_tail="exact")
    read = open_labels(tmp_path / "30", ["a/0.jpg"], label_tail="exact").read(0).values
    assert torch.equal(torch.from_numpy(read), relative_to_tail(annotation.values, annotation.log_sum_exp, 30)[0])
