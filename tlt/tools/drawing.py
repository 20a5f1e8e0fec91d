"""Draws pictures with token labels, and the page that shows training data: images, their label maps or stored features,
and the augmented images with the targets.

`tlt show` and the picture of a run's first batch draw this page, from a `Batch` and its targets, which come from the
training pipeline itself. Only drawing needs matplotlib, not the import of this module. Nothing changes matplotlib's
global state.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tlt import geometry
from tlt.data.batch import Batch
from tlt.data.dataset import TrainDataset
from tlt.errors import UserError, require
from tlt.io.files import os_errors_as, write_whole
from tlt.io.text import printable
from tlt.label_map import Area, LabelBatch
from tlt.targets import SparseLabels, Targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Pixels: TypeAlias = npt.NDArray[np.uint8]  # (h, w, 3)
Colours: TypeAlias = dict[int, str]  # of class ids

INK = "#202020"
# The seven colours of Okabe and Ito, then those that differ most (in OKLab) from them and each other under every kind
# of colour vision. Other classes are grey.
PALETTE = (
    *("#009e73", "#d55e00", "#56b4e9", "#f0e442", "#cc79a7", "#0072b2", "#e69f00"),
    *("#551122", "#002288", "#77ffff", "#0000ff", "#993311"),
)
_OTHERS = "#c0c0c0"
_OPACITY = 0.6  # opacity of a cell whose class has probability 1; the image stays visible
_FEATURE_OPACITY = 0.85  # opacity of a cell whose colour shows features
_NAMED = 4  # number of classes that are named in a picture
_EDGE = 0.2  # share of a picture's width near its edges, where names are not centred on their cell
_SOURCE_PIXELS = 480  # longer side of the source images in the page
_PANEL = 2.2  # inches: side of a picture
_ABOVE = 0.3  # inches: space above it
_ACROSS = 4  # pictures per row
_WINDOW = "#ffee00"
_MIX = "#ff00ff"
# Attribute of `Example` -> heading of its picture.
_PANELS = {"source": "image", "mask": "mask", "label": "label map", "augmented": "augmented"}
_PANELS |= {"mixed": "mixed", "tokens": "targets of the tokens"}
_FEATURE_PANELS = _PANELS | {"label": "stored features", "tokens": "what the tokens read"}


@dataclass(frozen=True)
class Cells:
    """The most probable class, or the colour, of every cell of a grid with r rows and c columns."""

    ids: npt.NDArray[np.int64]  # (r, c) class ids
    probability: npt.NDArray[np.float64]  # (r, c) probability of that class, in [0, 1]
    weight: npt.NDArray[np.float64]  # (r, c) share of the cell that the label covers, in [0, 1]
    colour: npt.NDArray[np.float64] | None = None  # (r, c, 3) in [0, 1], of cells that have features and no class

    @classmethod
    def of_features(cls, colour: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]) -> Cells:
        """Return cells of these colours (r, c, 3)."""
        return cls(np.zeros(weight.shape, np.int64), np.ones(weight.shape), weight, colour)

    def named(self) -> npt.NDArray[np.int64]:
        """Return the class ids of the cells that have a class."""
        return self.ids[self.weight > 0] if self.colour is None else np.empty(0, np.int64)


def class_colours(ids: Iterable[int]) -> Colours:
    """Return a colour for each class, the same in every picture. If two classes have the same colour (there are
    twelve), the first in `ids` gets it, and the other is grey and shown by name."""
    owners: dict[int, int] = {}
    return {i: PALETTE[n] if owners.setdefault(n := i % len(PALETTE), i) == i else _OTHERS for i in ids}


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """Return an empty page of width x height inches. Raise UserError if matplotlib is not installed."""
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure  # not pyplot, because a notebook chooses pyplot's backend

    return Figure(figsize=(width, height), dpi=120, facecolor="white", **options)


def drawable(text: str) -> str:
    """Return the text on one line, with escapes for characters that matplotlib's own font lacks."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    return "".join(
        c if font.get_char_index(ord(c)) else c.encode("unicode_escape").decode("ascii") for c in printable(text)
    )


def shorten(text: str, length: int) -> str:
    """Shorten a text to at most `length` characters by omitting the middle."""
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[: length - 1 - half]}…{text[-half:]}"


def show_image(axes: Axes, image: Pixels, size: tuple[float, float] | None = None, muted: bool = False) -> None:
    """Draw an image with its upper left corner at (0, 0) and `size` (width, height) in axis units; default: in pixels.
    Make it grey and pale if it is `muted`, so that colours drawn over it can be distinguished."""
    width, height = size or (image.shape[1], image.shape[0])
    if muted:
        grey = image @ np.array([0.299, 0.587, 0.114])
        image = (64 + 0.75 * (0.6 * grey[..., None] + 0.4 * image)).clip(0, 255).astype(np.uint8)
    axes.imshow(image, extent=(0, width, height, 0), interpolation="bilinear")
    axes.set(xlim=(0, width), ylim=(height, 0))


def draw_cells(
    axes: Axes, cells: Cells, box: tuple[float, float, float, float], colours: Colours, names: Mapping[int, str]
) -> None:
    """Draw cells over the box (x0, y0, x1, y1). The colour shows the class or the features; cells without either are
    hatched. Grey classes, then those with the most cells, are named, each on its cell nearest to the centre of its
    cells."""
    from matplotlib.collections import PathCollection
    from matplotlib.colors import to_rgb
    from matplotlib.path import Path as Outline
    from matplotlib.patheffects import withStroke

    x0, y0, x1, y1 = box
    limits = axes.axis()
    # A cell of weight 0 shows no colour, and its class may have none.
    colour_of = np.vectorize(lambda class_id: to_rgb(colours.get(class_id, INK)), otypes=[float] * 3)
    rgb = np.stack(colour_of(cells.ids), axis=-1) if cells.colour is None else cells.colour  # (r, c, 3)
    opacity = (_OPACITY if cells.colour is None else _FEATURE_OPACITY) * cells.probability * cells.weight
    rgba = np.concatenate([rgb, opacity[..., None]], axis=-1)
    axes.imshow(rgba, extent=(x0, x1, y1, y0), interpolation="nearest", zorder=2, label="cells")
    rows, cols = cells.ids.shape
    width = (x1 - x0) / cols
    height = (y1 - y0) / rows
    blank = np.argwhere(cells.weight == 0)[:, None, ::-1] + [(0, 0), (1, 0), (1, 1), (0, 1)]  # (n, 4, 2) corners x, y
    # One path: matplotlib takes milliseconds to hatch each.
    paths = [Outline.make_compound_path_from_polys(blank * (width, height) + (x0, y0))] if len(blank) else []
    style: dict[str, Any] = {"facecolor": "none", "edgecolor": "#80808080", "linewidth": 0.3, "hatch": "//////"}
    axes.add_collection(PathCollection(paths, zorder=3, label="blank", **style))
    class_ids, counts = np.unique(cells.named(), return_counts=True)
    coloured = np.array([colours.get(class_id) != _OTHERS for class_id in class_ids.tolist()])
    for class_id in class_ids[np.lexsort((-counts, coloured))][:_NAMED]:
        places = np.argwhere((cells.ids == class_id) & (cells.weight > 0)) + 0.5
        row, col = places[((places - places.mean(axis=0)) ** 2).sum(axis=1).argmin()]
        x = x0 + col * width
        share = (x - limits[0]) / (limits[1] - limits[0])
        side = "left" if share < _EDGE else "right" if share > 1 - _EDGE else "center"  # keeps the name in the picture
        style = {"ha": side, "va": "center", "fontsize": 7, "color": INK, "parse_math": False}
        style["path_effects"] = [withStroke(linewidth=2, foreground="#ffffffd0")]
        text = drawable(shorten(names[int(class_id)], 14))
        axes.text(x, y0 + row * height, text, zorder=8, clip_on=True, **style)
    axes.axis(limits)


def save_figure(figure: Figure, path: str | Path, **options: Any) -> None:
    """Write the page to `path` atomically; the file's suffix chooses the format. `options` are those of `savefig`.
    Raise UserError if the file can't be written."""
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix[1:].lower(), **options)
    with os_errors_as(lambda error: f"{printable(str(path))} can't be written: {error.strerror or error}"):
        write_whole(path, content.getvalue())


def check_format(path: str | Path) -> None:
    """Raise UserError if a page can't be written under this name."""
    formats = sorted(new_figure(1, 1).canvas.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in formats:
        raise UserError(f"-o {printable(str(path))}: end the name in .png, or another of {', '.join(formats)}")


@dataclass(frozen=True)
class Example:
    """One image of a batch, with all that is drawn of it."""

    name: str  # the image's path relative to the data set
    source: Pixels  # the image in its file, possibly made smaller
    size: tuple[int, int]  # (width, height) of the file's image in pixels, the units of `window` and `area`
    # (4, 2) x, y of the corners of the augmented image, clockwise from its upper left one.
    window: npt.NDArray[np.float64]
    augmented: Pixels  # the image that the model sees, without normalisation
    label: Cells | None = None  # the label map of the source; None without token labels
    area: Area | None = None  # the area (x0, y0, x1, y1) that the label map covers
    tokens: Cells | None = None  # the targets of the tokens; None if only the image has a target
    target: tuple[int, float] | None = None  # the most probable class of the image's target, and its probability
    mixed: Pixels | None = None  # the augmented image after Mixup, CutMix and MixToken; None without them
    mix_box: Area | None = None  # the area (x0, y0, x1, y1) in pixels in which MixToken shows another image
    mask: Cells | None = None  # pixels of the mask of which the label map was made


def read_examples(
    dataset: TrainDataset, batch: Batch, targets: Targets | None, mean: Sequence[float], std: Sequence[float]
) -> list[Example]:
    """Return the images of a batch with their sources, which are read again. `dataset` has made the batch; `targets` is
    None if the loss uses only the classes; `mean` and `std` have normalised the images. Raise BadImage if a source
    image can't be read."""
    pixels = pixels_of(batch.images, mean, std)
    corners = geometry.apply(batch.affine.double().cpu().numpy(), [[0, 0], [1, 0], [1, 1], [0, 1]])
    labels = None if batch.labels is None or targets is None else batch.labels.to("cpu")
    examples = []
    for row, index in enumerate(batch.indices.tolist()):
        source, size = _source(dataset, index)
        name = os.path.relpath(dataset.path(index), dataset.root)
        label = None
        area = None
        if labels is not None and targets is not None:
            x0, y0, x1, y1 = (labels.area[row].double() * torch.tensor(size * 2)).tolist()
            label = _map_cells(labels, row, targets.cls.shape[1])
            area = (x0, y0, x1, y1)
        tokens = target = None
        if targets is not None:
            probability, class_id = targets.cls[row].max(dim=-1)
            tokens = _token_cells(targets, row)
            target = (int(class_id), float(probability))
        examples.append(Example(name, source, size, corners[row] * size, pixels[row], label, area, tokens, target))
    return examples


def pixels_of(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> Pixels:
    """Return the uint8 pixels (B, H, W, 3) of normalised images (B, 3, H, W), or of grey ones (B, 1, H, W)."""
    scale, shift = (torch.tensor(tuple(values), device=images.device).view(-1, 1, 1) for values in (std, mean))
    levels = ((images * scale + shift) * 255).round().clamp(0, 255).byte()
    return levels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu().numpy()


def _source(dataset: TrainDataset, index: int) -> tuple[Pixels, tuple[int, int]]:
    """Return the image in its file, possibly made smaller, and its true (width, height)."""
    encoded = dataset.backend.open(dataset.path(index), dataset.source.read(index))
    width, height = encoded.width, encoded.height
    scale = min(1.0, _SOURCE_PIXELS / max(width, height))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    pixels = dataset.backend.decode(encoded, (0, 0, width, height), size, "bilinear")
    return pixels.permute(1, 2, 0).numpy(), (width, height)


def _map_cells(labels: LabelBatch, row: int, num_classes: int) -> Cells:
    """Return the top class of every cell of a map. As in the targets, unlisted classes count with logit 0, or of maps
    of shares as --label-tail says."""
    values = labels.values[row].double()  # (k, h, w)
    top, rank = values.max(dim=0)
    unlisted = max(num_classes - len(values), 0) * torch.exp(-top)
    probability = top if labels.void is not None else 1 / (torch.exp(values - top).sum(dim=0) + unlisted)
    ids = labels.ids[row].gather(0, rank[None])[0]
    x0, y0, x1, y1 = labels.area[row].tolist()
    covered = torch.full_like(probability, float(x1 > x0 and y1 > y0))
    if labels.void is not None:
        covered *= 1 - labels.void[row]
    return Cells(ids.long().numpy(), probability.numpy(), covered.numpy())


def _token_cells(targets: Targets, row: int) -> Cells | None:
    if targets.tokens is None:
        return None
    # One image at a time, because dense targets are large if there are many classes.
    tokens = SparseLabels(*(part[row : row + 1] for part in targets.tokens))
    probability, ids = tokens.dense(targets.cls.shape[1])[0].max(dim=-1)  # (N,)
    shaped = (values.reshape(targets.grid).cpu().numpy() for values in (ids, probability.double(), tokens.weight[0]))
    return Cells(*shaped)


def draw_page(examples: Sequence[Example], class_names: Sequence[str], title: str, note: str = "") -> Figure:
    """Draw the examples and the legend below a title. Ids without a class name are shown as numbers. `note` is the
    meaning of the probabilities, or of the colours of features, for the legend."""
    cells = [cell for example in examples for cell in (example.mask, example.label, example.tokens) if cell is not None]
    counts = Counter(np.concatenate([np.empty(0, int), *(cell.named() for cell in cells)]).tolist())
    features = any(cell.colour is not None for cell in cells)
    colours = class_colours([class_id for class_id, _ in counts.most_common()])
    class_ids = counts.keys() | {example.target[0] for example in examples if example.target is not None}
    names = {i: class_names[i] if i < len(class_names) else f"class {i}" for i in class_ids}
    panels = [panel for panel in _PANELS if any(getattr(example, panel) is not None for example in examples)]
    across = min(len(examples), max(1, _ACROSS // len(panels)))  # examples in a row
    rows = -(-len(examples) // across)
    columns = across * len(panels)
    side = max(_ACROSS, columns) * _PANEL / columns
    figure = new_figure(side * columns, rows * (side + _ABOVE) + 1.5, layout="constrained")
    figure.suptitle(drawable(title), fontsize=9, parse_math=False)
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[*[side + _ABOVE] * rows, 0.6])
    for place, (example, panel) in enumerate(product(examples, panels)):
        axes = figure.add_subplot(grid[divmod(place, columns)])
        axes.set(gid=panel, anchor="N")
        axes.set_axis_off()
        _draw(axes, example, panel, colours, names)
        style: dict[str, Any] = {"fontsize": 7, "parse_math": False}
        if place < columns:
            at: dict[str, Any] = {"xycoords": "axes fraction", "xytext": (0, 16), "textcoords": "offset points"}
            heading = (_FEATURE_PANELS if features else _PANELS)[panel]
            axes.annotate(heading, (0.5, 1), ha="center", weight="bold", **at, **style)
        if panel == panels[0]:
            axes.set_title(drawable(shorten(example.name, 32)), loc="left", **style)
        if panel == "tokens" and example.target is not None:
            name = shorten(names[example.target[0]], 20)
            probability = example.target[1]
            axes.set_title(drawable(f"target: {name} {probability:.2f}"), loc="right", color="#606060", **style)
    if colours:
        _draw_legend(figure, colours, names, columns)
    boxed = any(example.mix_box is not None for example in examples)
    _draw_key(figure.add_subplot(grid[rows, :]), panels, note or "probability", boxed, features)
    return figure


def _draw_legend(figure: Figure, colours: Colours, names: Mapping[int, str], columns: int) -> None:
    """Draw the legend of the coloured classes, and above it the names of the grey ones."""
    from matplotlib.patches import Patch

    coloured = {i: colour for i, colour in sorted(colours.items()) if colour != _OTHERS}
    patches = [Patch(facecolor=colour, label=drawable(shorten(names[i], 24))) for i, colour in coloured.items()]
    grey_names = [shorten(names[i], 24) for i in colours if i not in coloured]
    more = f" and {len(grey_names) - _NAMED} more" if len(grey_names) > _NAMED else ""
    title = drawable(f"grey: {', '.join(grey_names[:_NAMED])}{more}") if grey_names else ""
    layout: dict[str, Any] = {"loc": "outside lower center", "ncols": max(_ACROSS, columns), "frameon": False}
    legend = figure.legend(handles=patches, fontsize=7, title=title, title_fontsize=7, **layout)
    for text in (legend.get_title(), *legend.get_texts()):
        text.set_parse_math(False)


def _draw_key(axes: Axes, panels: Sequence[str], note: str, boxed: bool, features: bool) -> None:
    """Draw a key that explains the marks in the pictures."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    shades = tuple(Patch(facecolor=INK, alpha=_OPACITY * share) for share in (0.1, 0.4, 0.7, 1.0))
    of = "feature" if features else "label"
    entries: list[tuple[Any, str]] = [
        (Patch(fill=False, edgecolor="#e0c800", linewidth=1.6), "window of the augmented image, dot at its upper left"),
        (Patch(fill=False, linestyle="--"), f"what the {of} map covers"),
        (Patch(fill=False, edgecolor=_MIX), "MixToken's box: tokens of another image of the batch"),
        (shades, f"opacity 0 to 1: {note} x share of the token that has a label"),
        (tuple(Patch(facecolor=colour) for colour in ("#ff0000", "#00ff00", "#0000ff")), note),
        (Patch(facecolor="none", edgecolor="#808080", hatch="//////"), f"no {of}: left out of the dense loss"),
    ]
    labelled = not {"label", "tokens"}.isdisjoint(panels)
    shown = (True, "label" in panels, boxed, labelled and not features, features, labelled)
    handles, texts = zip(*compress(entries, shown), strict=True)
    layout: dict[str, Any] = {"loc": "center", "ncols": 2, "frameon": False, "fontsize": 7}
    key = axes.legend(handles, texts, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, **layout)
    key.set_in_layout(False)  # it fits below all pictures together
    axes.set(gid="key")
    axes.set_axis_off()


def _draw(axes: Axes, example: Example, panel: str, colours: Colours, names: dict[int, str]) -> None:
    """Draw one picture of an example."""
    from matplotlib.patches import Polygon, Rectangle

    height, width = example.augmented.shape[:2]
    cells = example.tokens if panel == "tokens" else None
    box = (0.0, 0.0, float(width), float(height))
    if panel in ("source", "mask", "label"):
        show_image(axes, example.source, example.size, muted=panel != "source")
    elif panel == "mixed" and example.mixed is not None:
        show_image(axes, example.mixed)
        if example.mix_box is not None:
            x0, y0, x1, y1 = example.mix_box
            axes.add_patch(
                Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=_MIX, linewidth=1.6, label="box")
            )
    else:
        show_image(axes, example.augmented, muted=panel == "tokens")
    if panel == "source":
        axes.add_patch(Polygon(example.window, fill=False, edgecolor=_WINDOW, linewidth=1.6, label="window"))
        axes.plot(*example.window[0], marker="o", color=_WINDOW, markersize=5, markeredgecolor="black", clip_on=False)
        corners = np.concatenate([example.window, [(0, 0), example.size]])
        (left, top) = corners.min(axis=0)
        (right, bottom) = corners.max(axis=0)
        axes.set(xlim=(left, right), ylim=(bottom, top))
    elif panel == "mask":
        cells = example.mask
        box = (0.0, 0.0, float(example.size[0]), float(example.size[1]))
    elif panel == "label" and example.area is not None:
        x0, y0, x1, y1 = box = example.area
        if x1 <= x0 or y1 <= y0:
            axes.text(0.5, 0.5, "no label", transform=axes.transAxes, ha="center", fontsize=9)
        else:
            cells = example.label
            axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, linestyle="--", label="area", zorder=7))
    if cells is not None:
        draw_cells(axes, cells, box, colours, names)
