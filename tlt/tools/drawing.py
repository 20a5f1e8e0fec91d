"""Parts of pictures with token labels: class colours, label cells over an image, text, files.

matplotlib is needed to draw, not to import this module; nothing of its global state is changed.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tlt.errors import UserError, require
from tlt.io.files import write_whole
from tlt.io.text import printable

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
