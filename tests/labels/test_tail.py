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
from tlt.labels.store import open_labels
from tlt.labels.tail import relative_to_tail
from tlt.targets import make_targets


def annotator_says(classes: int, spread: float, shape: tuple[int, ...] = (2, 4, 5)) -> Tensor:
    """(B, h, w, C) dense logits."""
    return spread * torch.randn(*shape, classes, generator=torch.Generator().manual_seed(classes)) + 0.4


def written_out(values: Tensor, ids: Tensor, classes: int) -> Tensor:
    """(B, k, h, w) -> float64 (B, C, h, w), 0 where nothing is listed."""
    return torch.zeros(len(ids), classes, *ids.shape[2:], dtype=torch.float64).scatter_(1, ids.long(), values.double())


@pytest.mark.parametrize("classes,k,spread", [(6, 5, 3.0), (6, 1, 0.1), (40, 5, 4.0), (1000, 5, 2.0), (1000, 5, 8.0)])
def test_listed_classes_have_the_annotators_probabilities_and_the_others_the_rest(
    classes: int, k: int, spread: float
) -> None:
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


def archive_of(root: Path, dense: Tensor, k: int, log_sum_exp: bool = True, classes: int | None = None) -> list[str]:
    """An archive of (B, h, w, C) dense logits; returns the images' names."""
    found, names = _annotation(dense.clone(), k), [f"a/{number}.jpg" for number in range(len(dense))]
    writer = ArchiveWriter(root, LabelInfo(k, tuple(dense.shape[1:3]), classes, log_sum_exp=log_sum_exp), names)
    for row in range(len(names)):
        total = found.log_sum_exp[row].numpy() if log_sum_exp else None
        writer.write(row, LabelMap(found.values[row].numpy(), found.ids[row].numpy(), log_sum_exp=total))
    writer.finish()
    return names


def test_pooled_labels_are_those_of_the_mean_of_the_shifted_logits(tmp_path: Path) -> None:
    classes, k = 30, 3
    dense = annotator_says(classes, 2.0, (2, 2, 2))
    names = archive_of(tmp_path / "out", dense, k)
    store = open_labels(tmp_path / "out", names, num_classes=classes, label_tail="exact")
    labels = LabelBatch.stack([store.read(index) for index in range(2)])
    assert labels.values.dtype == torch.float32
    whole, all_of_it = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]]).repeat(2, 1, 1), torch.tensor([[0.0, 0, 1, 1]] * 2)
    # One token over four cells, each of which counts for a quarter.
    targets = make_targets(labels, whole, all_of_it, torch.zeros(2), (1, 1), classes, smoothing=0.0)
    assert targets.tokens is not None
    found = _annotation(dense.clone(), k)
    listed = written_out(found.values, found.ids, classes)  # (B, C, h, w)
    rest = dense.double().permute(0, 3, 1, 2).scatter(1, found.ids.long(), -torch.inf)
    tail = torch.log(rest.exp().sum(1, keepdim=True) / (classes - k))
    shifted = torch.where(listed != 0, listed - tail, 0.0)
    expected = shifted.mean((2, 3)).softmax(1)
    torch.testing.assert_close(targets.tokens.dense(classes)[:, 0].double(), expected, rtol=0, atol=1e-6)


def test_stores_without_log_sum_exp_are_refused(tmp_path: Path) -> None:
    dense = annotator_says(6, 1.0)
    names = archive_of(tmp_path / "without", dense, 2, log_sum_exp=False)
    with pytest.raises(UserError, match="without has no log-sum-exp: make an archive with `volo label`"):
        open_labels(tmp_path / "without", names, num_classes=6, label_tail="exact")
    archive_of(tmp_path / "with", dense, 2)
    with pytest.raises(UserError, match="does not say how many classes"):
        open_labels(tmp_path / "with", names, label_tail="exact")
    dense[1, 2, 3] = 1e30
    with pytest.raises(UserError, match="NaN or infinite"):
        archive_of(tmp_path / "infinite", dense, 2)
