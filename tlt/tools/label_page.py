"""The page that shows what a model is trained on: images, their label maps, and the augmented images with the targets.

`tlt show` and the picture of a run's first batch are this page. What it shows comes from the training pipeline
itself: a `Batch` and its targets.
"""

from __future__ import annotations

import os
import textwrap
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
    drawable,
    name_regions,
    new_figure,
    shorten,
    show_image,
    write,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_IMAGES = 64
_SOURCE_PIXELS = 480  # longer side of the source images as drawn
_PANEL, _HEAD, _EDGE = 2.0, 0.3, 0.15  # inches: a picture, what stands above it, the page's edge
_LEGEND_ROWS, _LEGEND_ROW = 6, 0.2
_WINDOW = "#ffee00"
_KEY = (
    "Yellow: the window that the augmented image shows, with a dot at its upper left; dotted: fill colour beyond. "
    "Dashed: what the label map covers. Hatched: no label. Opacity: {} x share of the token that has a label."
)


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
    if targets.tokens is None:
        return None
    # Image by image: the targets of many at once are large where there are many classes.
    tokens = SparseLabels(*(part[row : row + 1] for part in targets.tokens))
    probability, ids = tokens.dense(targets.cls.shape[1])[0].max(dim=-1)  # (N,)
    shaped = (values.reshape(targets.grid).cpu().numpy() for values in (ids, probability.double(), tokens.weight[0]))
    return Cells(*shaped)


def _best(row: Tensor) -> tuple[int, float]:
    probability, class_id = row.max(dim=0)
    return int(class_id), float(probability)


def draw_page(examples: Sequence[Example], class_names: Sequence[str], title: str, note: str = "") -> Figure:
    """Draw the examples, a row each, and the legend.

    Args:
        class_names: By class id; ids beyond them are shown as numbers.
        title: First line of the page.
        note: What the probabilities are, for the legend.
    """
    from matplotlib.patches import Patch

    counts = sum((example.classes() for example in examples), Counter[int]())
    colours = class_colours(class_id for class_id, _ in counts.most_common())
    names = {i: class_names[i] if i < len(class_names) else f"class {i}" for i in counts}
    panels = _panels(examples)
    width = max(len(panels) * (_PANEL + _EDGE) + _EDGE, 2 * (_PANEL + _EDGE) + _EDGE)
    columns = max(1, int(width / 2))
    shown = sorted(class_id for class_id, _ in counts.most_common(columns * _LEGEND_ROWS))
    body = 0.4 + len(examples) * (_PANEL + _HEAD)
    figure = new_figure(width, body + 0.8 + _LEGEND_ROW * -(-len(shown) // columns))
    write(figure, _EDGE, 0.1, title, size=9, weight="bold")
    for row, example in enumerate(examples):
        _draw_row(figure, 0.4 + row * (_PANEL + _HEAD), example, panels, colours, names)
    for number, line in enumerate(textwrap.wrap(_KEY.format(note or "probability"), int(19 * width))):
        write(figure, _EDGE, body + 0.05 + 0.13 * number, line, size=7)
    patches = [Patch(facecolor=colours[i], label=drawable(shorten(names[i], 28))) for i in shown]
    more = f"and {len(counts) - len(shown)} more classes" if len(counts) > len(shown) else None
    legend = figure.legend(handles=patches, loc="lower left", ncols=columns, fontsize=7, frameon=False, title=more)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _panels(examples: Sequence[Example]) -> list[str]:
    """The pictures that are drawn of each image."""
    label = ["label"] if any(example.label is not None for example in examples) else []
    tokens = ["tokens"] if any(example.tokens is not None for example in examples) else []
    return ["source", *label, "augmented", *tokens]


def _draw_row(
    figure: Figure, top: float, example: Example, panels: Sequence[str], colours: Colours, names: dict[int, str]
) -> None:
    """The pictures of an image beside each other, below its name and the target of the whole image."""
    target = ""
    if example.target is not None:
        class_id, probability = example.target
        target = f"   target: {shorten(names.get(class_id, f'class {class_id}'), 24)} {probability:.2f}"
    write(figure, _EDGE, top + 0.08, shorten(example.name, 60) + target, size=7, color=FAINT)
    page_width, page_height = figure.get_size_inches()
    for column, panel in enumerate(panels):
        left, low = _EDGE + column * (_PANEL + _EDGE), page_height - top - _HEAD - _PANEL
        box = (left / page_width, low / page_height, _PANEL / page_width, _PANEL / page_height)
        axes = figure.add_axes(box, label=f"{panel} {top}", gid=panel)
        axes.set_axis_off()
        if panel == "source":
            _draw_source(axes, example)
        elif panel == "label":
            _draw_label(axes, example, colours, names)
        else:
            _draw_augmented(axes, example, example.tokens if panel == "tokens" else None, colours, names)


def _draw_source(axes: Axes, example: Example) -> None:
    """The image as it is, and the window that the augmented image shows."""
    from matplotlib.patches import Polygon, Rectangle

    show_image(axes, example.source, example.size)
    x0, y0, x1, y1 = example.crop
    dotted: dict[str, Any] = {"edgecolor": "white", "linewidth": 1.0, "linestyle": (0, (2, 2)), "fill": False}
    axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, label="crop", clip_on=False, **dotted))
    solid: dict[str, Any] = {"edgecolor": _WINDOW, "linewidth": 1.6, "fill": False}
    axes.add_patch(Polygon(example.window, closed=True, label="window", clip_on=False, **solid))
    axes.plot(*example.window[0], marker="o", color=_WINDOW, markersize=5, markeredgecolor=INK, clip_on=False)
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
    dashed: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 1.2, "linestyle": (0, (4, 2)), "zorder": 7}
    axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, clip_on=False, label="area", **dashed))
    axes.set(xlim=(0, example.size[0]), ylim=(example.size[1], 0))


def _draw_augmented(
    axes: Axes, example: Example, tokens: Cells | None, colours: Colours, names: dict[int, str]
) -> None:
    """What the model sees, with the targets of its tokens over it where there are any."""
    show_image(axes, example.augmented, muted=tokens is not None)
    height, width = example.augmented.shape[:2]
    if tokens is None:
        axes.plot(0, 0, marker="o", color=_WINDOW, markersize=5, markeredgecolor=INK, clip_on=False)
        return
    draw_cells(axes, tokens, (0, 0, width, height), colours)
    name_regions(axes, tokens, (0, 0, width, height), names)
    axes.set(xlim=(0, width), ylim=(height, 0))
