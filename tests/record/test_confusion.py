"""What is taken for what: counted by hand, drawn for any number of classes, and right for a network that is spoiled."""

import csv
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from volo.cluster.distributed import World
from volo.record import confusion


class Pictures:
    """A data set of grey images of these classes."""

    def __init__(self, classes: np.ndarray, names: list[str]) -> None:
        self.classes, self.source = classes, SimpleNamespace(class_names=names)

    def path(self, index: int) -> str:
        return f"/data/{index}.jpg"

    def load(self, key: Any) -> SimpleNamespace:
        count = len(key.indices)
        return SimpleNamespace(images=torch.full((count, 1, 8, 8), 99).byte(), indices=torch.tensor(key.indices))


def _random(classes: int, images: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    """Images of all classes but the last, about two thirds of which are answered with their class."""
    generator = np.random.default_rng(seed)
    true = np.arange(images) % max(1, classes - 1)
    predicted = np.where(generator.random(images) < 0.65, true, generator.integers(0, classes, images))
    answers = np.stack([predicted.astype(float), generator.random(images)])
    return Pictures(true, [f"name {number}" for number in range(classes - 1)]), answers


def _all_right(classes: int) -> tuple[Any, np.ndarray]:
    true = np.arange(classes)
    return Pictures(true, []), np.stack([true, true + 0.5])


def _rows(file: Path) -> list[list[str]]:
    return list(csv.reader(file.open(encoding="utf-8", newline="")))


def test_the_tables_count_the_answers_to_every_image(tmp_path):
    images, answers = _random(classes=5, images=200)
    images.source.class_names[1] = "a, 靴\n\udcff"
    answers[0, :3] = -1  # unreadable
    confusion.keep_answers(tmp_path, answers[::-1], epoch=2, best=False)  # all that there is
    confusion.keep_answers(tmp_path, answers, epoch=3, best=True)
    confusion.keep_answers(tmp_path, answers[::-1], epoch=4, best=False)
    (line,) = confusion.show_answers(tmp_path, images, 5)
    names = ["name 0", r"a, 靴\n\udcff", "name 2", "name 3", "class 4"]
    pairs = Counter(zip(images.classes[3:].tolist(), answers[0, 3:].astype(int).tolist(), strict=True))
    right = {row: pairs[row, row] / sum(pairs[row, column] for column in range(5)) for row in range(4)}
    heading, *counts = _rows(tmp_path / "confusion.csv")
    assert heading[1:] == names == [row[0] for row in counts]  # also the class that only the model has
    for row, cells in enumerate(counts):
        assert [*map(int, cells[1:])] == [pairs[row, column] for column in range(5)]
    _, *classes = _rows(tmp_path / "classes.csv")
    order = sorted(right, key=lambda row: right[row])
    assert [row[0] for row in classes] == [names[row] for row in order]
    for row, (_, count, top1, other, times) in zip(order, classes, strict=True):
        wrong = {names[column]: pairs[row, column] for column in range(5) if column != row}
        assert int(count) == (49 if row < 3 else 50) and float(top1) == pytest.approx(100 * right[row], abs=0.01)
        assert wrong[other] == int(times) == max(wrong.values())
    accuracy = 100 * sum(pairs[row, row] for row in range(4)) / 197
    assert f"(epoch 4: {accuracy:.2f} % of 197 images right)" in line and all(
        (tmp_path / name).is_file() for name in (confusion.CONFUSION, confusion.MISTAKES)
    )


def test_answers_are_those_that_count_as_correct():
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [float("nan")] * 3])
    answers = confusion.Answers(5, World(0, 0, 1, torch.device("cpu")))
    answers.add(logits[:2], torch.tensor([4, 0]))
    answers.add(logits[2:], torch.tensor([1]))
    predicted, probability = answers.of_all_ranks()
    first = logits[:2].topk(3).indices[:, 0]
    assert predicted[[4, 0]].tolist() == first.tolist() and predicted[[2, 3]].tolist() == [-1, -1]
    assert probability[[4, 0]].tolist() == pytest.approx(logits[:2].softmax(1).max(1).values.tolist())


def test_what_is_confused_lies_together():
    generator = np.random.default_rng(0)
    groups = generator.permutation(np.repeat(np.arange(7), [1, 2, 3, 4, 5, 6, 1]))
    inside = groups[:, None] == groups
    shares = generator.uniform(0, 0.01, inside.shape) + inside * generator.uniform(0.1, 0.2, inside.shape)
    order = confusion.neighbours_together(shares)
    assert sorted(order) == [*range(22)]
    assert (np.diff(groups[order]) != 0).sum() == 6  # each group in one piece
    assert confusion.neighbours_together(np.eye(3)) == [0, 1, 2]


@pytest.mark.parametrize("classes", [2, 21, 50, 51, 1000])
def test_the_picture_is_legible_for_any_number(classes, recwarn):
    images, answers = _random(classes, images=20 * classes)
    images.source.class_names[0] = "靴 $x$ " + "W" * 60
    found = confusion.Confusion(images, answers, classes)
    figure, many = found.draw("epoch 1"), classes > 50
    figure.draw_without_rendering()
    (axes,) = figure.axes
    drawn = np.asarray(axes.get_images()[0].get_array())
    assert len(drawn) == (20 if many else classes) and drawn.shape[1] <= (40 if many else classes)
    assert ("the 20 worst of" in axes.get_title("left")) == many and figure.bbox.width <= 510  # besides the names
    names, labels = ([tick.get_text() for tick in each.get_ticklabels()] for each in (axes.xaxis, axes.yaxis))
    assert all(len(name) <= 18 for name in names) and (many or any(name.startswith(r"\u9774 ") for name in names))
    worst = [row[0] for row in found.table()[1:21]]
    for label, row in zip(labels, drawn, strict=True):
        name, _, right = label.partition("  ")
        assert (f"{100 * row[names.index(name)]:.0f} %" == right) if right else not row.any()
        assert not many or name in worst or name.startswith(r"\u9774 ")
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_the_sheet_begins_with_the_surest_mistake():
    images, answers = _random(classes=4, images=100)
    answers[:, :2] = [[-1, 3], [1, np.nan]]  # unreadable; without a finite output
    page = confusion.Confusion(images, answers, 4).draw_mistakes("epoch 1")
    axes = [each for each in page.axes if each.get_images()]
    wrong = [n for n in range(2, 100) if answers[0, n] != images.classes[n]]
    surest = sorted(wrong, key=lambda n: -answers[1, n])[:12]
    said = [f"{n}.jpg\n{100 * answers[1, n]:.0f} % {'class 3' if answers[0, n] == 3 else f'name {answers[0, n]:.0f}'}"
            f"\nis name {images.classes[n]}" for n in surest]  # fmt: skip
    assert [each.get_title("left") for each in axes] == said and len(said) == 12
    answers[0] = images.classes
    first, *_ = confusion.Confusion(images, answers, 4).draw_mistakes("epoch 1").axes
    figure = confusion.Confusion(*_all_right(60), 60).draw("epoch 1")
    assert np.asarray(figure.axes[0].get_images()[0].get_array()).tolist() == np.eye(20).tolist()
    assert "No mistake." in first.texts[0].get_text()
