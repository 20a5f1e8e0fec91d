"""The page that shows what a model is trained on: images, their label maps, and the augmented images with the targets.

`tlt show` and the picture of a run's first batch are this page. What it shows comes from the training pipeline
itself: a `Batch` and its targets.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tlt import geometry
from tlt.data.batch import Batch
from tlt.data.dataset import TrainDataset
from tlt.label_map import Area, LabelBatch
from tlt.targets import SparseLabels, Targets
from tlt.tools.drawing import (
    FAINT,
    INK,
    Cells,
    Colours,
    Pixels,
    class_colours,
    draw_cells,
    name_regions,
    new_figure,
    place,
    shorten,
    show_image,
    write,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_IMAGES = 64
_SOURCE_PIXELS = 480  # longer side of the source images as drawn
_PANEL, _GAP, _HEAD, _EDGE = 1.85, 0.12, 0.34, 0.25  # inches
_LEGEND_COLUMN, _LEGEND_ROW, _LEGEND_ROWS = 2.2, 0.19, 6
_KEY_COLUMN = 5.2
_WINDOW = "#ffee00"


@dataclass(frozen=True)
class Example:
    """One image of a batch, ready to be drawn.

    Attributes:
        name: Of the image.
        source: The image as it is in its file, possibly made smaller.
        size: (width, height) of the file's image in pixels; `window`, `crop` and `area` count in them.
        window: (4, 2) x, y: where the corners of the augmented image lie, from its upper left one clockwise.
        crop: (x0, y0, x1, y1); outside of it the augmented image shows the fill colour.
        augmented: What the model sees, without the normalisation.
        truth: Class of the folder.
        label: Label map of the source, None without token labels.
        area: (x0, y0, x1, y1), what the label map covers.
        tokens: Targets of the tokens, None where only the whole image has one.
        target: Most probable class of the whole image's target and its probability, None without targets.
    """

    name: str
    source: Pixels
    size: tuple[int, int]
    window: npt.NDArray[np.float64]
    crop: Area
    augmented: Pixels
    truth: int
    label: Cells | None = None
    area: Area | None = None
    tokens: Cells | None = None
    target: tuple[int, float] | None = None

    def classes(self) -> Counter[int]:
        """How many cells show each class."""
        shown = [cells.ids[cells.weight > 0] for cells in (self.label, self.tokens) if cells is not None]
        return Counter(np.concatenate([[self.truth], *shown]).astype(int).tolist())


def read_examples(
    dataset: TrainDataset, batch: Batch, targets: Targets | None, mean: Sequence[float], std: Sequence[float]
) -> list[Example]:
    """The images of a batch with their sources, read again.

    Args:
        dataset: Where the batch comes from.
        targets: Those of the batch, None where the loss has none but the classes.
        mean, std: By which the images are normalised.

    Raises:
        BadImage: A source image can't be read (any more).
    """
    scale, shift = (torch.tensor(tuple(v), device=batch.images.device).view(-1, 1, 1) for v in (std, mean))
    pixels = ((batch.images * scale + shift) * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
    affine, visible = batch.affine.double().cpu().numpy(), batch.visible.double().cpu().numpy()
    labels = None if batch.labels is None else batch.labels.to("cpu")
    examples = []
    for row, index in enumerate(batch.indices.tolist()):
        source, (width, height) = _source(dataset, index)
        corners = geometry.apply(affine[row : row + 1], [[0, 0], [1, 0], [1, 1], [0, 1]])[0]
        examples.append(
            Example(
                os.path.relpath(dataset.path(index), dataset.root),
                source,
                (width, height),
                corners * (width, height),
                _box(visible[row], width, height),
                pixels[row],
                int(batch.classes[row]),
                None if labels is None or targets is None else _map_cells(labels, row, targets.cls.shape[1]),
                None if labels is None else _box(labels.area[row].double().numpy(), width, height),
                None if targets is None else _token_cells(targets, row),
                None if targets is None else _best(targets.cls[row]),
            )
        )
    return examples


def _source(dataset: TrainDataset, index: int) -> tuple[Pixels, tuple[int, int]]:
    """The image in its file, and its true (width, height)."""
    encoded = dataset.backend.open(dataset.path(index), dataset.source.read(index))
    width, height = encoded.width, encoded.height
    scale = min(1.0, _SOURCE_PIXELS / max(width, height))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    pixels = dataset.backend.decode(encoded, (0, 0, width, height), size, "bilinear")
    return pixels.permute(1, 2, 0).numpy(), (width, height)


def _box(shares: npt.NDArray[np.float64], width: int, height: int) -> Area:
    x0, y0, x1, y1 = (shares * (width, height, width, height)).tolist()
    return x0, y0, x1, y1


def _map_cells(labels: LabelBatch, row: int, num_classes: int) -> Cells:
    """The first class of every cell of a map, its probability as in the targets: other classes have logit 0."""
    values = labels.values[row].double()  # (k, h, w)
    top, rank = values.max(dim=0)
    others = max(num_classes - len(values), 0) * torch.exp(-top)
    probability = 1 / (torch.exp(values - top).sum(dim=0) + others)
    ids = labels.ids[row].gather(0, rank[None])[0]
    x0, y0, x1, y1 = labels.area[row].tolist()
    covered = torch.full_like(probability, float(x1 > x0 and y1 > y0))
    return Cells(ids.long().numpy(), probability.numpy(), covered.numpy())


def _token_cells(targets: Targets, row: int) -> Cells | None:
    if targets.tokens is None or targets.weight is None:
        return None
    # Image by image: the targets of many at once are large where there are many classes.
    sparse, one = targets.tokens, slice(row, row + 1)
    tokens = SparseLabels(sparse.base[one], sparse.ids[one], sparse.excess[one]).dense(targets.cls.shape[1])[0]
    probability, ids = tokens.max(dim=-1)  # (N,)
    shaped = (values.reshape(targets.grid).cpu().numpy() for values in (ids, probability.double(), targets.weight[row]))
    return Cells(*shaped)


def _best(row: Tensor) -> tuple[int, float]:
    probability, class_id = row.max(dim=0)
    return int(class_id), float(probability)


def draw_page(examples: Sequence[Example], class_names: Sequence[str], title: str, note: str = "") -> Figure:
    """Draw the examples, two abreast if there are more than three, and the legend.

    Args:
        class_names: By class id; ids beyond them are shown as numbers.
        title: First line of the page.
        note: What the probabilities are, for the legend.
    """
    counts = sum((example.classes() for example in examples), Counter[int]())
    colours = class_colours(class_id for class_id, _ in counts.most_common())
    names = {i: class_names[i] if i < len(class_names) else f"class {i}" for i in counts}
    panels = _panels(examples)
    abreast = 2 if len(examples) > 3 else 1
    rows = -(-len(examples) // abreast)
    block = len(panels) * (_PANEL + _GAP) + _GAP
    width = max(abreast * block + _EDGE, _KEY_COLUMN + 3)
    per_row = max(1, int((width - 2 * _EDGE) / _LEGEND_COLUMN))
    coloured = "label" in panels or "tokens" in panels
    swatches = min(len(counts), per_row * _LEGEND_ROWS) if coloured else 0
    legend = 0.75 + _LEGEND_ROW * -(-swatches // per_row)
    body = rows * (_HEAD + _PANEL) + 0.5
    figure = new_figure(width, body + legend)
    write(figure, _EDGE, 0.12, title, size=10, weight="bold")
    for number, example in enumerate(examples):
        left, top = _EDGE + number % abreast * block, 0.4 + number // abreast * (_HEAD + _PANEL)
        _draw_example(figure, left, top, example, panels, colours, names)
    _draw_key(figure, body, note, coloured)
    common = sorted(class_id for class_id, _ in counts.most_common(swatches))
    if coloured:
        _draw_swatches(figure, body + 0.5, common, colours, names, per_row, len(counts) - len(common))
    return figure


def _panels(examples: Sequence[Example]) -> list[str]:
    """The pictures that are drawn for each image."""
    label = ["label"] if any(example.label is not None for example in examples) else []
    tokens = ["tokens"] if any(example.tokens is not None for example in examples) else []
    return ["source", *label, "augmented", *tokens]


def _draw_example(
    figure: Figure,
    left: float,
    top: float,
    example: Example,
    panels: Sequence[str],
    colours: Colours,
    names: dict[int, str],
) -> None:
    write(figure, left, top, shorten(example.name, 30 * len(panels)), size=7.5)
    for panel in panels:
        axes = place(figure, left, top + 0.17, _PANEL, _PANEL)
        axes.set_gid(panel)
        _PAINTERS[panel](axes, example, colours, names)
        left += _PANEL + _GAP
    if example.target is not None:
        class_id, probability = example.target
        name = shorten(names.get(class_id, f"class {class_id}"), 24)
        write(figure, left - _GAP, top, f"target: {name} {probability:.2f}", size=7.5, ha="right", color=FAINT)


def _draw_source(axes: Axes, example: Example, colours: Colours, names: dict[int, str]) -> None:
    """The image as it is, and the window that the augmented image shows."""
    from matplotlib.patches import Polygon, Rectangle
    from matplotlib.patheffects import withStroke

    show_image(axes, example.source, example.size)
    x0, y0, x1, y1 = example.crop
    common: dict[str, Any] = {"fill": False, "clip_on": False}
    dotted: dict[str, Any] = {"edgecolor": "white", "linewidth": 1.0, "linestyle": (0, (2, 2))}
    around = [withStroke(linewidth=2, foreground="#00000080")]
    axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, label="crop", path_effects=around, **dotted, **common))
    solid: dict[str, Any] = {"edgecolor": _WINDOW, "linewidth": 1.6, "joinstyle": "miter"}
    around = [withStroke(linewidth=3, foreground="#000000a0")]
    axes.add_patch(Polygon(example.window, closed=True, label="window", path_effects=around, **solid, **common))
    axes.plot(*example.window[0], marker="o", color=_WINDOW, markersize=6, markeredgecolor=INK, clip_on=False)
    corners = np.concatenate([example.window, [(0, 0), example.size]])
    (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
    axes.set(xlim=(left, right), ylim=(bottom, top))


def _draw_label(axes: Axes, example: Example, colours: Colours, names: dict[int, str]) -> None:
    """The label map over the image, and the area that it covers."""
    from matplotlib.patches import Rectangle

    show_image(axes, example.source, example.size, muted=True)
    if example.label is None or example.area is None:
        return
    x0, y0, x1, y1 = example.area
    if x1 <= x0 or y1 <= y0:
        axes.text(0.5, 0.5, "no label", transform=axes.transAxes, ha="center", fontsize=9)
        return
    draw_cells(axes, example.label, example.area, colours)
    name_regions(axes, example.label, example.area, names)
    style: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 1.2, "linestyle": (0, (4, 2)), "zorder": 7}
    axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, clip_on=False, label="area", **style))
    axes.set(xlim=(0, example.size[0]), ylim=(example.size[1], 0))


def _draw_augmented(axes: Axes, example: Example, colours: Colours, names: dict[int, str]) -> None:
    show_image(axes, example.augmented)
    axes.plot(0, 0, marker="o", color=_WINDOW, markersize=6, markeredgecolor=INK, clip_on=False)


def _draw_tokens(axes: Axes, example: Example, colours: Colours, names: dict[int, str]) -> None:
    show_image(axes, example.augmented, muted=True)
    if example.tokens is not None:
        height, width = example.augmented.shape[:2]
        draw_cells(axes, example.tokens, (0, 0, width, height), colours)
        name_regions(axes, example.tokens, (0, 0, width, height), names)
        axes.set(xlim=(0, width), ylim=(height, 0))


_PAINTERS = {"source": _draw_source, "label": _draw_label, "augmented": _draw_augmented, "tokens": _draw_tokens}


def _draw_key(figure: Figure, top: float, note: str, coloured: bool) -> None:
    """One line that says what the marks mean."""
    from matplotlib.patches import Rectangle

    width = figure.get_size_inches()[0] - 2 * _EDGE
    axes = place(figure, _EDGE, top, width, 0.4)
    axes.set(xlim=(0, width), ylim=(0.4, 0))

    def explain(x: float, y: float, text: str) -> None:
        axes.text(x + 0.36, y, text, fontsize=7.5, va="center", color=INK)

    def box(x: float, y: float, **style: Any) -> None:
        axes.add_patch(Rectangle((x, y), 0.26, 0.12, **{"facecolor": "none", **style}))

    box(0.02, 0.03, edgecolor=_WINDOW, linewidth=1.8)
    axes.plot(0.02, 0.03, marker="o", color=_WINDOW, markersize=5, markeredgecolor=INK, clip_on=False)
    explain(0.02, 0.09, "window of the augmented image, dot at its upper left (dotted: fill colour beyond)")
    if not coloured:
        return
    steps = np.linspace(0, 1, 32)[None]
    axes.imshow(steps, extent=(0.02, 0.28, 0.36, 0.24), cmap="Greys", aspect="auto", vmin=0, vmax=1.2)
    explain(0.02, 0.30, f"opacity 0 to 1: {note} x share of the token that has a label")
    box(_KEY_COLUMN, 0.24, edgecolor="#808080", hatch="//////", linewidth=0.3)
    explain(_KEY_COLUMN, 0.30, "no label: left out of the dense loss")
    box(_KEY_COLUMN, 0.03, linestyle=(0, (4, 2)), edgecolor=INK)
    explain(_KEY_COLUMN, 0.09, "what the label map covers")


def _draw_swatches(
    figure: Figure, top: float, ids: Sequence[int], colours: Colours, names: dict[int, str], per_row: int, more: int
) -> None:
    """The colours of the classes, row by row."""
    from matplotlib.patches import Rectangle

    width, height = figure.get_size_inches()
    for number, class_id in enumerate(ids):
        left, y = _EDGE + number % per_row * _LEGEND_COLUMN, top + number // per_row * _LEGEND_ROW
        box = (left / width, 1 - (y + 0.13) / height), 0.22 / width, 0.13 / height
        figure.add_artist(Rectangle(*box, facecolor=colours[class_id], edgecolor=INK, linewidth=0.4))
        write(figure, left + 0.3, y + 0.065, shorten(names[class_id], 28), size=7.5, va="center")
    if more:
        write(figure, width - _EDGE, top - 0.12, f"and {more} more classes", size=7, ha="right", color=FAINT)
