"""Pictures with token labels, and the page that shows what a model is trained on: images, their label maps, and the
augmented images with the targets.

`tlt show` and the picture of a run's first batch are that page. What it shows comes from the training pipeline itself:
a `Batch` and its targets. matplotlib is needed to draw, not to import this module; nothing of its global state is
changed.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tlt import geometry
from tlt.data.batch import Batch
from tlt.data.dataset import TrainDataset
from tlt.errors import UserError, require
from tlt.io.files import write_whole
from tlt.io.text import printable
from tlt.label_map import Area, LabelBatch
from tlt.targets import SparseLabels, Targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Pixels: TypeAlias = npt.NDArray[np.uint8]  # (h, w, 3)
Colours: TypeAlias = dict[int, str]  # of class ids

INK = "#202020"
# Chosen one after the other, each as far as possible (in OKLab) from those before it; no dark, pale or grey ones.
PALETTE = (
    "#1e69e1", "#3cf03c", "#ff0000", "#006900", "#f05aff", "#5ad2f0", "#ffb42d", "#872d69", "#a56900", "#f096b4",
    "#8700d2", "#69a500", "#9696ff", "#e10087", "#0f96b4", "#a5d287", "#a51e00", "#a569a5", "#f0782d", "#4b4b96",
)  # fmt: skip
_OPACITY = 0.6  # of a cell whose class has probability 1: the image stays visible
_NAMED = 4  # classes of a picture
_SOURCE_PIXELS = 480  # longer side of the source images as drawn
_PANEL = 2.2  # inches
_IN_LEGEND = 24  # classes
_WINDOW = "#ffee00"
_KEY = (
    "Yellow: the window that the augmented image shows, a dot at its upper left. Dashed: what the label map covers.\n"
    "Hatched: no label. Opacity: {} x share of the token that has a label."
)


@dataclass(frozen=True)
class Cells:
    """The most probable class of every cell of a grid of r rows and c columns.

    Attributes:
        ids: (r, c) class ids.
        probability: (r, c) of that class, in [0, 1].
        weight: (r, c) share of the cell that its label covers, in [0, 1].
    """

    ids: npt.NDArray[np.int64]
    probability: npt.NDArray[np.float64]
    weight: npt.NDArray[np.float64]


def class_colours(ids: Iterable[int]) -> Colours:
    """A colour for each class; colours repeat where there are more classes than colours."""
    return {class_id: PALETTE[number % len(PALETTE)] for number, class_id in enumerate(dict.fromkeys(ids))}


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """An empty page of width x height inches. Raises UserError: matplotlib is not installed."""
    require("matplotlib", extra="plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, facecolor="white", **options)
    FigureCanvasAgg(figure)
    return figure


def drawable(text: str) -> str:
    """The text on one line; what matplotlib's own font has no sign for is escaped."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    return "".join(
        c if font.get_char_index(ord(c)) else c.encode("unicode_escape").decode("ascii") for c in printable(text)
    )


def shorten(text: str, length: int) -> str:
    """At most `length` characters, the middle left out."""
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[: length - 1 - half]}…{text[-half:]}"


def show_image(axes: Axes, image: Pixels, size: tuple[float, float] | None = None, muted: bool = False) -> None:
    """An image with its upper left corner at (0, 0), in units of which it is `size` (width, height) large: pixels.

    Args:
        muted: Greyed and paler, so that colours drawn over it can be told apart.
    """
    width, height = size or (image.shape[1], image.shape[0])
    if muted:
        grey = image @ np.array([0.299, 0.587, 0.114])
        image = (64 + 0.75 * (0.6 * grey[..., None] + 0.4 * image)).clip(0, 255).astype(np.uint8)
    axes.imshow(image, extent=(0, width, height, 0), interpolation="bilinear")
    axes.set(xlim=(0, width), ylim=(height, 0))


def draw_cells(
    axes: Axes, cells: Cells, box: tuple[float, float, float, float], colours: Colours, names: Mapping[int, str]
) -> None:
    """Cells over the box (x0, y0, x1, y1): colour is the class; hatched where no label counts. The classes with the
    most cells are named, each on its cell nearest to the middle of all its cells."""
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    (x0, y0, x1, y1), limits = box, axes.axis()
    # A cell that counts for nothing shows no colour, and its class may have none.
    known = np.vectorize(lambda class_id: to_rgb(colours.get(class_id, INK)), otypes=[float] * 3)
    rgba = np.stack([*known(cells.ids), _OPACITY * cells.probability * cells.weight], axis=-1)  # (r, c, 4)
    axes.imshow(rgba, extent=(x0, x1, y1, y0), interpolation="nearest", zorder=2, label="cells")
    rows, cols = cells.ids.shape
    width, height = (x1 - x0) / cols, (y1 - y0) / rows
    blank = [Rectangle((x0 + c * width, y0 + r * height), width, height) for r, c in np.argwhere(cells.weight == 0)]
    style: dict[str, Any] = {"facecolor": "none", "edgecolor": "#80808080", "linewidth": 0.3, "hatch": "//////"}
    axes.add_collection(PatchCollection(blank, zorder=3, label="blank", **style))
    found, counts = np.unique(cells.ids[cells.weight > 0], return_counts=True)
    for class_id in found[np.argsort(-counts, kind="stable")][:_NAMED]:
        own = np.argwhere((cells.ids == class_id) & (cells.weight > 0)) + 0.5
        row, col = own[((own - own.mean(axis=0)) ** 2).sum(axis=1).argmin()]
        style = {"ha": "center", "va": "center", "fontsize": 7, "color": INK, "parse_math": False}
        style["path_effects"] = [withStroke(linewidth=2, foreground="#ffffffd0")]
        text = drawable(shorten(names[int(class_id)], 14))
        axes.text(x0 + col * width, y0 + row * height, text, zorder=8, clip_on=True, **style)
    axes.axis(limits)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write the page, replacing `path` in one step; its suffix is the format.

    Raises:
        UserError: The file can't be written.
    """
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix[1:].lower())
    try:
        write_whole(path, content.getvalue())
    except OSError as error:
        raise UserError(f"{printable(str(path))} can't be written: {error.strerror or error}") from error


def check_format(path: str | Path) -> None:
    """Raise UserError if a page can't be written under this name."""
    formats = sorted(new_figure(1, 1).canvas.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in formats:
        raise UserError(f"-o {printable(str(path))}: end the name in .png, or another of {', '.join(formats)}")


@dataclass(frozen=True)
class Example:
    """One image of a batch, ready to be drawn.

    Attributes:
        name: Of the image.
        source: The image as it is in its file, possibly made smaller.
        size: (width, height) of the file's image in pixels; `window` and `area` count in them.
        window: (4, 2) x, y: where the corners of the augmented image lie, from its upper left one clockwise.
        augmented: What the model sees, without the normalisation.
        label: Label map of the source, None without token labels.
        area: (x0, y0, x1, y1), what the label map covers.
        tokens: Targets of the tokens, None where only the whole image has one.
    """

    name: str
    source: Pixels
    size: tuple[int, int]
    window: npt.NDArray[np.float64]
    augmented: Pixels
    label: Cells | None = None
    area: Area | None = None
    tokens: Cells | None = None


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
    corners = geometry.apply(batch.affine.double().cpu().numpy(), [[0, 0], [1, 0], [1, 1], [0, 1]])
    labels = None if batch.labels is None or targets is None else batch.labels.to("cpu")
    examples = []
    for row, index in enumerate(batch.indices.tolist()):
        source, size = _source(dataset, index)
        name, label, area = os.path.relpath(dataset.path(index), dataset.root), None, None
        if labels is not None and targets is not None:
            x0, y0, x1, y1 = (labels.area[row].double() * torch.tensor(size * 2)).tolist()
            label, area = _map_cells(labels, row, targets.cls.shape[1]), (x0, y0, x1, y1)
        tokens = None if targets is None else _token_cells(targets, row)
        examples.append(Example(name, source, size, corners[row] * size, pixels[row], label, area, tokens))
    return examples


def _source(dataset: TrainDataset, index: int) -> tuple[Pixels, tuple[int, int]]:
    """The image in its file, and its true (width, height)."""
    encoded = dataset.backend.open(dataset.path(index), dataset.source.read(index))
    width, height = encoded.width, encoded.height
    scale = min(1.0, _SOURCE_PIXELS / max(width, height))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    pixels = dataset.backend.decode(encoded, (0, 0, width, height), size, "bilinear")
    return pixels.permute(1, 2, 0).numpy(), (width, height)


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


def draw_page(examples: Sequence[Example], class_names: Sequence[str], title: str, note: str = "") -> Figure:
    """Draw the examples, a row each, and the legend.

    Args:
        class_names: By class id; ids beyond them are shown as numbers.
        title: First line of the page.
        note: What the probabilities are, for the legend.
    """
    from matplotlib.patches import Patch

    cells = [each for example in examples for each in (example.label, example.tokens) if each is not None]
    counts = Counter(np.concatenate([np.empty(0, int), *(each.ids[each.weight > 0] for each in cells)]).tolist())
    colours = class_colours(class_id for class_id, _ in counts.most_common())
    names = {i: class_names[i] if i < len(class_names) else f"class {i}" for i in counts}
    panels = ["source", "label", "augmented", "tokens"]
    panels = [panel for panel in panels if any(getattr(example, panel) is not None for example in examples)]
    width, height = _PANEL * len(panels), (_PANEL + 0.2) * len(examples)
    figure = new_figure(width, height + 1.5, layout="constrained")
    figure.suptitle(drawable(title), fontsize=9, parse_math=False)
    grid = figure.subplots(len(examples), len(panels), squeeze=False)
    for example, row in zip(examples, grid, strict=True):
        row[0].set_title(drawable(shorten(example.name, 40)), fontsize=7, loc="left", parse_math=False)
        for axes, panel in zip(row, panels, strict=True):
            axes.set(gid=panel)
            axes.set_axis_off()
            _draw(axes, example, panel, colours, names)
    shown = [class_id for class_id, _ in counts.most_common(_IN_LEGEND)]
    patches = [Patch(facecolor=colours[i], label=drawable(shorten(names[i], 24))) for i in shown]
    more = f"\nand {len(counts) - len(shown)} more classes" if len(counts) > len(shown) else ""
    more = _KEY.format(note or "probability") + more
    layout: dict[str, Any] = {"loc": "outside lower center", "ncols": len(panels), "frameon": False}
    legend = figure.legend(handles=patches, fontsize=7, title=more, title_fontsize=7, **layout)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _draw(axes: Axes, example: Example, panel: str, colours: Colours, names: dict[int, str]) -> None:
    """One picture of an example."""
    from matplotlib.patches import Polygon, Rectangle

    height, width = example.augmented.shape[:2]
    cells, box = example.tokens if panel == "tokens" else None, (0.0, 0.0, float(width), float(height))
    if panel in ("source", "label"):
        show_image(axes, example.source, example.size, muted=panel == "label")
    else:
        show_image(axes, example.augmented, muted=panel == "tokens")
    if panel == "source":
        axes.add_patch(Polygon(example.window, fill=False, edgecolor=_WINDOW, linewidth=1.6, label="window"))
        axes.plot(*example.window[0], marker="o", color=_WINDOW, markersize=5, markeredgecolor="black", clip_on=False)
        corners = np.concatenate([example.window, [(0, 0), example.size]])
        (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
        axes.set(xlim=(left, right), ylim=(bottom, top))
    elif panel == "label" and example.area is not None:
        x0, y0, x1, y1 = box = example.area
        if x1 <= x0 or y1 <= y0:
            axes.text(0.5, 0.5, "no label", transform=axes.transAxes, ha="center", fontsize=9)
        else:
            cells = example.label
            axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, linestyle="--", label="area", zorder=7))
    if cells is not None:
        draw_cells(axes, cells, box, colours, names)
