"""What a model takes for what: the accuracy of each class, counts of answers, and the mistakes of which it was surest.

`evaluate` keeps the answer to every image, so that nothing is evaluated again for them. N images, C classes.
"""

import importlib.util
import io
import math
import os
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tlt.data.augment.operations import precise_dtype
from tlt.data.batch import BatchKey
from tlt.data.dataset import EvalDataset
from tlt.io.files import write_csv, write_whole
from tlt.io.text import printable
from tlt.tools.drawing import INK, drawable, new_figure, save_figure, shorten, show_image
from volo.cluster.distributed import World, sum_over_ranks
from volo.record.metrics import top_classes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
CLASSES = "classes.csv"
COUNTS = "confusion.csv"
CONFUSION = "confusion.png"
MISTAKES = "mistakes.png"
ANSWERS = "answers.npz"
MOST = 2000  # classes: the table of counts has the square of them
WORST = 20  # classes in a short list
_LEGIBLE = 50  # classes that a picture can show
_NUMBERED = 21  # classes of a picture up to which its cells have room for a number
_SHEET = (4, 3)  # rows and columns of the sheet of mistakes
_TEXT: dict[str, Any] = {"fontsize": 6.5, "parse_math": False}


class Answers:
    """The class that a model gives each of N images, and its probability. `add` never waits for the device."""

    def __init__(self, images: int, world: World) -> None:
        self._world = world
        self._values = torch.zeros(2, images, dtype=precise_dtype(world.device), device=world.device)

    def add(self, logits: Tensor, indices: Tensor) -> None:
        """Keep the answers to the images `indices` (B,), given their logits (B, C)."""
        best = top_classes(logits)[:, :1]
        rows = torch.cat([best + 1, logits.softmax(dim=1).gather(1, best)], dim=1)
        self._values[:, indices] = rows.T.to(self._values.dtype)

    def of_all_ranks(self) -> Floats:
        """Return (2, N): class, -1 for an image without answer, and probability. Every rank must call this."""
        values = sum_over_ranks(self._values) / self._world.tensor_parallel  # ranks of a group see the same images
        return values.double().cpu().numpy() - [[1.0], [0.0]]


class Confusion:
    """How often the images of each class got each answer.

    Args:
        dataset: The images.
        answers: (2, N), of `Answers.of_all_ranks`.
        classes: C.

    Attributes:
        counts, shares: (C, C), a row for each true class; shares are of its images.
        worst: Classes with images, the least accurate first; of equal ones, that with most images.
        taken_for: (C,) the most frequent wrong answer; the class itself if there is none.
    """

    def __init__(self, dataset: EvalDataset, answers: Floats, classes: int) -> None:
        self.dataset = dataset
        self.true = dataset.classes
        self.predicted = answers[0].astype(np.int64)
        self.probability = np.nan_to_num(answers[1])
        names = dataset.source.class_names
        self.names = [*map(printable, names), *(f"class {number}" for number in range(len(names), classes))]
        places = (self.true * classes + self.predicted)[self.predicted >= 0]
        self.counts = np.bincount(places, minlength=classes**2).reshape(classes, classes)
        images = self.counts.sum(axis=1)
        self.shares = self.counts / np.maximum(images, 1)[:, None]
        order = np.lexsort((-images, self.shares.diagonal()))
        self.worst = order[images[order] > 0]
        self.wrong = self.counts - np.diag(self.counts.diagonal())
        self.taken_for = np.where(self.wrong.any(axis=1), self.wrong.argmax(axis=1), np.arange(classes))

    def table(self) -> list[tuple[str, ...]]:
        """Return a row for each class that has images, the worst first, below a heading."""
        rows: list[tuple[str, ...]] = [("class", "images", "top-1 (%)", "mostly taken for", "times")]
        for row, other in zip(self.worst, self.taken_for[self.worst], strict=True):
            accuracy = f"{100 * self.shares[row, row]:.2f}"
            taken_for = "" if row == other else self.names[other]
            rows.append(
                (self.names[row], str(self.counts[row].sum()), accuracy, taken_for, str(self.wrong[row, other]))
            )
        return rows

    def draw(self, title: str) -> "Figure":
        """Draw the shares of each class, a row, that got each answer. Of more than 50 classes draw the 20 worst, and in
        the columns what these are taken for."""
        from matplotlib.colors import PowerNorm

        shown = rows = np.flatnonzero(self.counts.any(axis=0) | self.counts.any(axis=1))
        if len(shown) > _LEGIBLE:
            rows = self.worst[:WORST]
            shown = np.union1d(rows, self.taken_for[rows])
            title += f"\nthe {len(rows)} worst of {len(self.worst)} classes; {CLASSES} has all"
        columns = shown[neighbours_together(self.shares[np.ix_(shown, shown)])]
        rows = columns[np.isin(columns, rows)]
        shares = self.shares[np.ix_(rows, columns)]
        side = min(0.2, 4.2 / len(columns))  # of a cell, in inches
        figure = new_figure(side * len(columns), side * len(rows))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
        names = {number: shorten(drawable(self.names[number]), 18) for number in columns.tolist()}
        right = [f"{names[n]}  {100 * self.shares[n, n]:.0f} %" if n in self.worst else names[n] for n in rows.tolist()]
        numbered = len(columns) <= _NUMBERED
        axes.set_xticks(range(len(columns)), [*names.values()], rotation=90, **_TEXT)
        axes.set_yticks(range(len(rows)), right, **_TEXT)
        axes.tick_params(length=0, labelsize=6.5 if numbered else 5.5)
        axes.set_title(title, loc="left", **_TEXT)
        axes.set_xlabel("answer, in % of the row" if numbered else "answer: white 0 %, dark 100 % of the row", **_TEXT)
        axes.set_ylabel("class, and % right", **_TEXT)
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.005 and numbered:
                ink = "white" if share > 0.3 else INK
                axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=ink, **_TEXT)
        return figure

    def draw_mistakes(self, title: str) -> "Figure":
        """Draw the mistakes whose answers were the most probable, the surest first. Their images are read again."""
        wrong = np.flatnonzero((self.predicted >= 0) & (self.predicted != self.true))
        surest = wrong[np.argsort(-self.probability[wrong], kind="stable")][: math.prod(_SHEET)]
        rows = -(-len(surest) // _SHEET[1])
        figure = new_figure(4.4, 1.85 * max(1, rows))
        grid = figure.subplots(max(1, rows), _SHEET[1], squeeze=False, gridspec_kw={"hspace": 0.5, "wspace": 0.1})
        for axes in grid.flat:
            axes.set_axis_off()
        told = "Of the surest mistakes, probability and answer, then the class:" if rows else "No mistake."
        grid[0, 0].annotate(f"{title}\n{told}", (0, 1), (0, 36), "axes fraction", "offset points", **_TEXT)
        batch = self.dataset.load(BatchKey(0, tuple(surest.tolist())))
        for axes, image, index in zip(grid.flat, batch.images.cpu(), batch.indices.tolist(), strict=False):
            show_image(axes, image.expand(3, -1, -1).permute(1, 2, 0).numpy())
            true, answer = (self.names[kind[index]] for kind in (self.true, self.predicted))
            said = f"{100 * self.probability[index]:.0f} % {answer}"
            texts = os.path.basename(self.dataset.path(index)), said, f"is {true}"
            axes.set_title("\n".join(shorten(drawable(text), 18) for text in texts), loc="left", **_TEXT)
        return figure


def neighbours_together(shares: Floats) -> list[int]:
    """Return an order of the classes in which those that are confused with each other lie together, given the `shares`
    (n, n) of the images of each class (row) that got each answer. Chains of classes are joined, beginning with the
    greatest mean confusion, at the ends that are confused most."""
    between = shares + shares.T
    chains = [[number] for number in range(len(shares))]
    while len(chains) > 1:
        one, other = max(combinations(chains, 2), key=lambda pair: between[np.ix_(*pair)].mean())
        ends = ((a, b) for a in (one, one[::-1]) for b in (other, other[::-1]))
        left, right = max(ends, key=lambda pair: between[pair[0][-1], pair[1][0]])
        chains[chains.index(one)] = left + right
        chains.remove(other)
    return chains[0]


_PICTURES = {CONFUSION: Confusion.draw, MISTAKES: Confusion.draw_mistakes}


def keep_answers(folder: Path, answers: Floats, epoch: int, best: bool) -> None:
    """Keep the answers of an epoch in a run's directory if possible, for `show_answers` at the run's end; if it is not
    the best epoch, only if there are none."""
    if not best and (folder / ANSWERS).exists():
        return
    content = io.BytesIO()
    np.savez(content, answers=answers, epoch=epoch)
    with suppress(OSError):
        write_whole(folder / ANSWERS, content.getvalue())


def show_answers(
    folder: Path, dataset: EvalDataset, classes: int, answers: Floats | None = None, what: str = ""
) -> list[str]:
    """Write tables and, if matplotlib is installed, pictures of the answers to the images of a data set.

    Args:
        classes: Number of the model's classes.
        answers: From `Answers.of_all_ranks`; None takes the epoch's that `keep_answers` has kept in the folder.
        what: What gave them, for the pictures.

    Returns:
        Lines to print. What fails is one of them, because no picture may end a run.
    """
    if classes > MOST:
        return [f"{CONFUSION} is not drawn: {classes} classes are more than {MOST}"]
    try:
        if answers is None:
            kept = np.load(folder / ANSWERS)
            answers = kept["answers"]
            what = f"epoch {kept['epoch'] + 1}"
        confusion = Confusion(dataset, answers, classes)
        images = confusion.counts.sum()
        what += f": {100 * confusion.counts.trace() / images:.2f} % of {images} images right"
        counts = zip(confusion.names, confusion.counts.tolist(), strict=True)
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(folder / CLASSES, confusion.table())
        write_csv(folder / COUNTS, [("true/predicted", *confusion.names), *((name, *row) for name, row in counts)])
        drawn = {} if importlib.util.find_spec("matplotlib") is None else _PICTURES
        for name, draw in drawn.items():
            save_figure(draw(confusion, drawable(what)), folder / name, bbox_inches="tight")
    except Exception as error:
        return [f"warning: {CONFUSION} could not be drawn: {type(error).__name__}: {error}"]
    missing = "" if drawn else ", and no pictures, which need the pip extra plot"
    return [f"wrote {', '.join((CLASSES, COUNTS, *drawn))}{missing} ({what})"]
