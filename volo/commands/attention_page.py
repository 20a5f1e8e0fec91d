"""The page of `volo attention`: the image, what both heads say, and a heat map per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tlt.tools.drawing import (
    FAINT,
    INK,
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
from volo.commands.attention_view import HeadWindows, Heat, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST, _MOST, _TILE, _GAP, _EDGE, _CAPTION, _HEADING = 4, 6, 1.85, 0.14, 0.25, 0.36, 0.24  # tiles in a row; inches
_MARK = "#00e5ff"
_REACH = 2  # cells around a window's centre that are drawn
_LEGEND = (
    "Colours run from a map's smallest value (blue) to its largest (yellow), as multiples of even attention. "
    "Cyan: the query."
)
_COLOURS = "plasma"


def draw_attention(image: Pixels, view: View, query: tuple[float, float], names: Sequence[str], title: str) -> Figure:
    """Draw one image's page.

    Args:
        image: As the model sees it, without the normalisation.
        query: The place that looks, (x, y) shares of the image.
        names: Of the classes, by id; ids beyond them are shown as numbers.
    """
    height, width = image.shape[:2]
    tile = _TILE * min(1.0, height / width) + _CAPTION
    across = min(_MOST, max(_LEAST, *(len(tiles) for _, tiles in view.sections)))
    rows = [-(-len(tiles) // across) for _, tiles in view.sections]
    page = 0.45 + tile + sum(_HEADING + count * (tile + _GAP) + _GAP for count in rows) + 0.3
    figure = new_figure(across * (_TILE + _GAP) + 2 * _EDGE - _GAP, page)
    write(figure, _EDGE, 0.12, title, size=10, weight="bold")
    _draw_answers(figure, 0.45, tile - _CAPTION, image, view, query, names)
    top = 0.45 + tile
    for (heading, tiles), count in zip(view.sections, rows, strict=True):
        write(figure, _EDGE, top, heading, size=9, weight="bold")
        for number, each in enumerate(tiles):
            left = _EDGE + number % across * (_TILE + _GAP)
            _draw_tile(figure, left, top + _HEADING + number // across * (tile + _GAP), tile - _CAPTION, image, each)
        top += _HEADING + count * (tile + _GAP) + _GAP
    write(figure, _EDGE, page - 0.3, _LEGEND, size=7, color=FAINT)
    return figure


def _draw_answers(
    figure: Figure,
    top: float,
    height: float,
    image: Pixels,
    view: View,
    query: tuple[float, float],
    names: Sequence[str],
) -> None:
    """The image, the dense head's classes over it, and the most probable classes."""
    axes = place(figure, _EDGE, top + 0.17, _TILE, height)
    axes.set_gid("image")
    show_image(axes, image)
    axes.plot(query[0] * image.shape[1], query[1] * image.shape[0], marker="+", color=_MARK, markersize=11, mew=2)
    write(figure, _EDGE, top, "image, and the query", size=7.5)
    left = _EDGE + _TILE + _GAP
    if view.tokens is not None:
        rows, cols = view.tokens.ids.shape
        box = (0.0, 0.0, float(cols * view.token_cell), float(rows * view.token_cell))
        shown = np.unique(view.tokens.ids).tolist()
        axes = place(figure, left, top + 0.17, _TILE, height)
        axes.set_gid("dense")
        show_image(axes, image, muted=True)
        draw_cells(axes, view.tokens, box, class_colours(shown))
        name_regions(axes, view.tokens, box, {class_id: _name(names, class_id) for class_id in shown})
        axes.set(xlim=(0, image.shape[1]), ylim=(image.shape[0], 0))
        write(figure, left, top, "dense head: first class of each token", size=7.5)
        left += _TILE + _GAP
    _draw_bars(figure, left + 0.2, top, height, view, names)


def _draw_bars(figure: Figure, left: float, top: float, height: float, view: View, names: Sequence[str]) -> None:
    write(figure, left, top, "most probable classes", size=7.5)
    axes = place(figure, left, top + 0.17, 2 * _TILE, height)
    axes.set_gid("top")
    probabilities = [probability for _, probability in view.top]
    axes.barh(range(len(probabilities)), probabilities, height=0.35, color="#1e69e1")
    axes.set(xlim=(0, 1), ylim=(len(probabilities) - 0.3, -0.9))
    for number, (class_id, probability) in enumerate(view.top):
        text = f"{shorten(_name(names, class_id), 46)}  {100 * probability:.1f} %"
        axes.text(0, number - 0.28, text, fontsize=8, color=INK, va="bottom", parse_math=False)


def _draw_tile(figure: Figure, left: float, top: float, height: float, image: Pixels, tile: Heat | HeadWindows) -> None:
    axes = place(figure, left, top + _CAPTION - 0.06, _TILE, height)
    axes.set_gid(tile.title)
    if isinstance(tile, Heat):
        _draw_heat(axes, image, tile)
    else:
        _draw_windows(axes, image, tile)
    low, high = _limits(tile)
    note = tile.note if isinstance(tile, Heat) else ""
    write(figure, left, top, tile.title, size=7.5)
    write(figure, left, top + 0.13, f"{low:.2f} to {high:.2f} x even{note}", size=6.5, color=FAINT)


def _limits(tile: Heat | HeadWindows) -> tuple[float, float]:
    """The smallest and the largest value that are shown."""
    shown = tile.values if isinstance(tile, Heat) else tile.values[tile.values > 0]
    return float(shown.min()), float(shown.max())


def _paint(values: npt.NDArray[np.float64], limits: tuple[float, float]) -> npt.NDArray[np.float64]:
    """(..., 4) colours of values, from the first limit to the second."""
    from matplotlib import colormaps

    low, high = limits
    return colormaps[_COLOURS]((values - low) / max(high - low, 1e-12))


def _draw_heat(axes: Axes, image: Pixels, tile: Heat) -> None:
    """The map in colours over the image in grey."""
    rows, cols = tile.values.shape
    height, width = image.shape[:2]
    grey = image @ np.array([0.299, 0.587, 0.114])
    axes.imshow(grey, extent=(0, width, height, 0), interpolation="bilinear", cmap="gray", vmin=0, vmax=300)
    colours = _paint(tile.values, _limits(tile))
    colours[..., 3] = 0.65
    axes.imshow(colours, extent=(0, cols * tile.cell, rows * tile.cell, 0), interpolation="nearest", label="map")
    if tile.query is not None:
        _mark_cell(axes, tile.query[1] * tile.cell, tile.query[0] * tile.cell, tile.cell)
    axes.set(xlim=(0, width), ylim=(height, 0))


def _draw_windows(axes: Axes, image: Pixels, tile: HeadWindows) -> None:
    """Every head's window over the part of the image around it, one head beside the other."""
    heads, rows, cols = tile.values.shape
    row, col = tile.query
    top, bottom = max(row - _REACH, 0), min(row + _REACH + 1, rows)
    left, right = max(col - _REACH, 0), min(col + _REACH + 1, cols)
    patch = image[top * tile.cell : bottom * tile.cell, left * tile.cell : right * tile.cell]
    across = int(np.ceil(np.sqrt(heads)))
    step = 2 * _REACH + 1.4  # cells from one head to the next
    for head in range(heads):
        x, y = head % across * step, head // across * step
        extent = (x, x + right - left, y + bottom - top, y)
        axes.imshow(patch, extent=extent, interpolation="bilinear")
        values = tile.values[head, top:bottom, left:right]
        colours = _paint(values, _limits(tile))
        colours[..., 3] = np.where(values > 0, 0.8, 0.0)
        axes.imshow(colours, extent=extent, interpolation="nearest")
        _mark_cell(axes, x + col - left, y + row - top, 1)
    axes.set(xlim=(0, across * step), ylim=(-(-heads // across) * step, 0))


def _mark_cell(axes: Axes, x: float, y: float, side: float) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor=_MARK, linewidth=1.2))


def _name(names: Sequence[str], class_id: int) -> str:
    return names[class_id] if class_id < len(names) else f"class {class_id}"
