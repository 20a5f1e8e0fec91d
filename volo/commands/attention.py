"""Draw what the attention layers of a VOLO or LV-ViT look at in an image, and what its heads say about it.

    volo attention image.jpg --checkpoint output/train/RUN/model_best.pth.tar -o attention.png
    volo attention image.jpg --model volo_d1 --pretrained --query 0.3 0.6 -o attention.png

A checkpoint of ours says which model it is and how its images are prepared; flags win over that.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tlt.data.augment.device_stage import EvalStage
from tlt.data.batch import BatchKey
from tlt.data.sources.folder import ImageFolder
from tlt.errors import UserError
from tlt.io.files import refuse_existing
from tlt.io.text import printable
from tlt.tools.drawing import (
    FAINT,
    Pixels,
    check_format,
    class_colours,
    draw_cells,
    drawable,
    name_regions,
    new_figure,
    save_figure,
    shorten,
    show_image,
    write,
)
from volo.checkpoint.model_config import class_names
from volo.cluster.distributed import choose_device
from volo.commands.attention_maps import Heat, View, choose_layers, view
from volo.commands.console import say
from volo.train.data import eval_dataset
from volo.train.trained_model import load_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST, _MOST = 4, 6  # maps in a row
_TILE, _LINES, _EDGE = 2.0, 0.6, 0.25  # inches: width of a map, text above it, margin of the page
_MARK, _COLOURS = "#00e5ff", "plasma"
_REACH = 2  # cells that are drawn around the centre of a window
_LEGEND = (
    "Colours run from a map's smallest value (blue) to its largest (yellow), as multiples of even attention. "
    "Cyan: the query."
)


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    say(args.notes)
    check_format(args.output)
    outputs = [output_path(args.output, number, len(args.images)) for number in range(1, len(args.images) + 1)]
    for out in outputs:
        refuse_existing(out, "-o")
    device = choose_device(args.device, 0)
    trained = load_model(args, args.checkpoint or None)
    say(trained.notes)
    model, args, settings = trained.model, trained.args, trained.settings
    layers = choose_layers(model, args.layers)
    pixels = read_images(args.images, settings)
    stage, model = EvalStage(settings["mean"], settings["std"]).to(device), model.to(device).eval()
    names = class_names(trained.config, int(model.num_classes))
    query = (args.query[0], args.query[1])
    for path, image, out in zip(args.images, pixels, outputs, strict=True):
        seen = view(model, stage(image[None].to(device)), layers, query, args.heads)
        title = f"{path}: {args.model}, {image.shape[1]} x {image.shape[2]} px"
        figure = draw_attention(image.permute(1, 2, 0).numpy(), seen, query, names, title)
        save_figure(figure, out)
        print(f"wrote {printable(str(out))}", flush=True)
    return 0


def read_images(paths: list[str], settings: dict[str, Any]) -> torch.Tensor:
    """Read the images as evaluation prepares them, (B, 3, H, W) uint8.

    Raises:
        UserError: An image can't be read.
    """
    folder = ImageFolder("", paths, np.zeros(len(paths), np.int64), [])
    batch = eval_dataset(folder, settings).load(BatchKey(0, tuple(range(len(paths)))))
    if batch.skipped:
        path, reason = batch.skipped[0]
        raise UserError(f"image {printable(path)}: {reason}")
    return batch.images


def output_path(output: str, number: int, count: int) -> Path:
    """Return the path of picture `number` of `count`."""
    path = Path(output)
    return path if count == 1 else path.with_stem(f"{path.stem}-{number}")


def draw_attention(image: Pixels, seen: View, query: tuple[float, float], names: Sequence[str], title: str) -> Figure:
    """Draw the page of one image: the image, what both heads say, and a row of maps for each kind of attention.

    Args:
        image: As the model sees it, before normalisation.
        query: The place that looks, (x, y) shares of the image.
        names: Of the classes, by id; ids beyond them are shown as numbers.
    """
    across = min(_MOST, max(_LEAST, *(len(maps) for _, maps in seen.sections)))
    rows = [(heading, maps[i : i + across]) for heading, maps in seen.sections for i in range(0, len(maps), across)]
    height = _TILE * min(1.0, image.shape[0] / image.shape[1])
    width, page = across * _TILE + 2 * _EDGE, (1 + len(rows)) * (height + _LINES) + 0.7
    figure = new_figure(width, page)
    write(figure, _EDGE, 0.12, title, size=10, weight="bold")
    write(figure, _EDGE, page - 0.3, _LEGEND, size=7, color=FAINT)
    grid = figure.add_gridspec(
        1 + len(rows),
        across,
        left=_EDGE / width,
        right=1 - _EDGE / width,
        top=1 - (0.3 + _LINES) / page,
        bottom=0.4 / page,
        wspace=0.07,
        hspace=_LINES / height,
    )
    pictures, bars = [figure.add_subplot(grid[0, i]) for i in (0, 1)], figure.add_subplot(grid[0, 2:])
    draw_answers(pictures, bars, image, seen, names, "image, and the query")
    figure.axes[0].plot(query[0] * image.shape[1], query[1] * image.shape[0], marker="+", color=_MARK, ms=11, mew=2)
    above = ""
    for row, (heading, maps) in enumerate(rows, start=1):
        for column, heat in enumerate(maps):
            axes = figure.add_subplot(grid[row, column])
            axes.set(gid=heat.title)
            axes.set_axis_off()
            shown = heat.values if heat.values.ndim == 2 else heat.values[heat.values > 0]
            limits = float(shown.min()), float(shown.max())
            first_line = heading if column == 0 and heading != above else ""
            _caption(axes, first_line, heat.title, f"{limits[0]:.2f} to {limits[1]:.2f} x even{heat.note}")
            (_draw_map if heat.values.ndim == 2 else _draw_windows)(axes, image, heat, limits)
        above = heading
    return figure


def _caption(axes: Axes, heading: str, title: str, note: str = "") -> None:
    """Three lines above a picture; only the heading may be wider than the picture."""
    styles: tuple[dict[str, Any], ...] = ({"size": 6.5, "color": FAINT}, {"size": 7.5}, {"size": 9, "weight": "bold"})
    for line, (text, style) in enumerate(zip((note, title, heading), styles, strict=True)):
        place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(drawable(text), (0, 1), (0, 3 + 10 * line), parse_math=False, **place, **style)


def draw_answers(
    pictures: list[Axes], bars: Axes, image: Pixels, seen: View, names: Sequence[str], caption: str
) -> None:
    """Draw the image under its caption, the dense head's classes over it, and the most probable classes."""

    def name(class_id: int) -> str:
        return names[class_id] if class_id < len(names) else f"class {class_id}"

    for axes, gid in ((pictures[0], "image"), (pictures[1], "dense"), (bars, "top")):
        axes.set(gid=gid)
        axes.set_axis_off()
    show_image(pictures[0], image)
    _caption(pictures[0], "", caption)
    if seen.tokens is not None:
        shown = np.unique(seen.tokens.ids).tolist()
        show_image(pictures[1], image, muted=True)
        draw_cells(pictures[1], seen.tokens, seen.token_box, class_colours(shown))
        name_regions(pictures[1], seen.tokens, seen.token_box, {class_id: name(class_id) for class_id in shown})
        pictures[1].set(xlim=(0, image.shape[1]), ylim=(image.shape[0], 0))
        _caption(pictures[1], "", "dense head: first class of each token")
    _caption(bars, "", "most probable classes")
    bars.barh(range(len(seen.top)), [probability for _, probability in seen.top], height=0.35, color="#1e69e1")
    bars.set(xlim=(0, 1), ylim=(len(seen.top) - 0.3, -0.9))
    for number, (class_id, probability) in enumerate(seen.top):
        text = f"{shorten(name(class_id), 46)}  {100 * probability:.1f} %"
        bars.text(0, number - 0.28, drawable(text), fontsize=8, va="bottom", parse_math=False)


def _draw_map(axes: Axes, image: Pixels, heat: Heat, limits: tuple[float, float]) -> None:
    """The map in colours over the image in grey."""
    (rows, cols), (height, width) = heat.values.shape, image.shape[:2]
    grey = image @ np.array([0.299, 0.587, 0.114])
    axes.imshow(grey, extent=(0, width, height, 0), interpolation="bilinear", cmap="gray", vmin=0, vmax=300)
    extent = (0, cols * heat.cell, rows * heat.cell, 0)
    style: dict[str, Any] = {"cmap": _COLOURS, "vmin": limits[0], "vmax": limits[1], "alpha": 0.65, "label": "map"}
    axes.imshow(heat.values, extent=extent, interpolation="nearest", **style)
    if heat.query is not None:
        _mark_cell(axes, heat.query[1] * heat.cell, heat.query[0] * heat.cell, heat.cell)
    axes.set(xlim=(0, width), ylim=(height, 0))


def _draw_windows(axes: Axes, image: Pixels, heat: Heat, limits: tuple[float, float]) -> None:
    """The window of every head over the part of the image around it, one head beside the other."""
    assert heat.query is not None
    (row, col), (heads, rows, cols) = heat.query, heat.values.shape
    top, bottom = max(row - _REACH, 0), min(row + _REACH + 1, rows)
    left, right = max(col - _REACH, 0), min(col + _REACH + 1, cols)
    patch = image[top * heat.cell : bottom * heat.cell, left * heat.cell : right * heat.cell]
    across = int(np.ceil(np.sqrt(heads)))
    step = 2 * _REACH + 1.4  # cells from one head to the next
    style: dict[str, Any] = {"cmap": _COLOURS, "vmin": limits[0], "vmax": limits[1], "alpha": 0.8}
    for head in range(heads):
        x, y = head % across * step, head // across * step
        extent = (x, x + right - left, y + bottom - top, y)
        axes.imshow(patch, extent=extent, interpolation="bilinear")
        values = heat.values[head, top:bottom, left:right]
        axes.imshow(np.ma.masked_equal(values, 0), extent=extent, interpolation="nearest", **style)
        _mark_cell(axes, x + col - left, y + row - top, 1)
    axes.set(xlim=(0, across * step), ylim=(-(-heads // across) * step, 0))


def _mark_cell(axes: Axes, x: float, y: float, side: float) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor=_MARK, linewidth=1.2))
