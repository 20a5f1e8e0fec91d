"""Draw what the attention layers of a VOLO or LV-ViT model attend to in an image, and what its heads predict.

    volo attention image.jpg --checkpoint output/train/RUN -o attention.png
    volo attention image.jpg --model volo_d1 --pretrained --query 0.3 0.6 -o attention.png

A checkpoint of this project records its model and the preparation of its images; flags override that. The models don't
keep attention weights (`scaled_dot_product_attention`), so they are recomputed from the inputs of the layers.

In shapes: B images, H x W cells of the outlooker stage, h x w windows, K the kernel's side, N tokens, C channels.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.data.augment.device_stage import EvalStage
from tlt.data.dataset import BatchKey
from tlt.data.sources.folder import ImageFolder
from tlt.errors import UserError
from tlt.io.files import refuse_existing
from tlt.io.text import printable
from tlt.models.layers import SelfAttention
from tlt.tools.drawing import (
    Cells,
    Pixels,
    check_format,
    class_colours,
    draw_cells,
    drawable,
    new_figure,
    save_figure,
    shorten,
    show_image,
)
from volo.checkpoint.model_config import class_names
from volo.commands.console import say
from volo.commands.inference import load, world_of_one
from volo.config.settings_tools import AttentionSettings
from volo.models.volo import ClassAttention, OutlookAttention
from volo.train.data import eval_dataset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOP = 5
_ROWS: dict[type[nn.Module], str] = {
    OutlookAttention: "outlook attention: how much each cell is looked at by its neighbours",
    SelfAttention: "self-attention: what the query looks at",
    ClassAttention: "class attention: what the class token looks at",
}
_ACROSS = 3  # layers drawn of each kind: the first, a middle and the last one
_SIDE = 3.4  # inches: width of a picture
_LINES = 0.55  # inches: height of the lines above it
# The colours' scale is the same for every map, so that a difference of a hundredth is not drawn as one of ten times.
_MOST = 4.0  # times even attention, at the ends of the colours
_EVEN = 1.1  # times even attention: up to here it is nearly even
_COLOURS = ("#0072b2", "#a0a0a0", "#f0e442")
_LEGEND = (
    "Means over the heads. Grey: even attention; blue: a quarter of it; yellow: four times as much. Cyan: the query."
)


class Heat(NamedTuple):
    """The attention of one layer over the image, averaged over the heads."""

    what: str  # a text of `_ROWS`
    name: str  # name of the layer's block
    values: npt.NDArray[np.float64]  # (rows, columns); 1 everywhere would be uniform attention
    cell: int  # side of a cell in pixels


class View(NamedTuple):
    """Everything that is drawn about one image."""

    top: list[tuple[int, float]]  # id and probability of the most probable classes
    tokens: Cells | None  # top class of each token by the dense head; None if there is no dense head
    token_box: tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels of the area that the tokens cover
    maps: list[list[Heat]]  # a row for each kind of layer in `_ROWS` that the model has


def run(settings: AttentionSettings) -> int:
    """Draw the attention and write it to `--output`."""
    picture = settings.picture
    say(settings.notes)
    check_format(picture.output)
    refuse_existing(picture.output, "-o")
    device = world_of_one(settings.images.device).device
    trained = load(settings.network, settings.images.pixels)
    data_config = trained.data_config
    model = trained.model.to(device)
    images = ImageFolder("", [picture.image], np.zeros(1, np.int64), [])
    batch = eval_dataset(images, data_config).load(BatchKey(0, (0,)))
    if batch.skipped:
        raise UserError(f"image {printable(picture.image)}: {batch.skipped[0][1]}")
    image = batch.images[0]  # (3, H, W) uint8, as evaluation prepares it
    normalise = EvalStage(data_config["mean"], data_config["std"]).to(device)
    content = view(model, normalise(image[None].to(device)), picture.query)
    title = f"{picture.image}: {trained.name}, {image.shape[1]} x {image.shape[2]} px"
    names = class_names(trained.config, model.num_classes)
    figure = draw_attention(image.permute(1, 2, 0).numpy(), content, picture.query, names, title)
    save_figure(figure, picture.output)
    print(f"wrote {printable(picture.output)}", flush=True)
    return 0


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention layers in the model's order, by the name of their block. Raises UserError if the model has
    no layer whose weights can be computed here."""
    every = model.named_modules()
    kinds = tuple(_ROWS)
    if matching := {name.removesuffix(".attn"): module for name, module in every if isinstance(module, kinds)}:
        return matching
    raise UserError(f"--model: {type(model).__name__} has none of the attention layers of VOLO and LV-ViT")


@torch.no_grad()
def forward_with_inputs(model: Any, images: Tensor) -> tuple[Tensor, dict[nn.Module, Tensor]]:
    """Return `model.forward_features(images)`, and the input of each attention layer."""
    inputs: dict[nn.Module, Tensor] = {}
    layers = attention_layers(model).values()
    hooks = [layer.register_forward_hook(lambda layer, x, _: inputs.update({layer: x[0]})) for layer in layers]
    try:
        return model.forward_features(images), inputs
    finally:
        for hook in hooks:
            hook.remove()


def self_attention(layer: SelfAttention, x: Tensor) -> Tensor:
    """Map a layer's input (B, ..., C) to its weights (B, heads, N, N), whose rows sum to 1."""
    qkv = layer.qkv(x.flatten(1, -2)).unflatten(-1, (3, layer.num_heads, -1))  # (B, N, 3, heads, C / heads)
    q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)


def class_attention(layer: ClassAttention, x: Tensor) -> Tensor:
    """Map a layer's input (B, 1 + N, C) to the class token's weights (B, heads, 1 + N), itself first; they sum to 1."""
    q = layer.q(x[:, :1]).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)  # (B, heads, 1, C / heads)
    k = layer.kv(x).unflatten(-1, (2, layer.num_heads, -1))[:, :, 0].transpose(1, 2)  # (B, heads, 1 + N, C / heads)
    return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)[:, :, 0]


def outlook_attention(layer: OutlookAttention, x: Tensor) -> Tensor:
    """Map a layer's input (B, H, W, C) to the attention that each cell receives, (B, heads, H, W); 1 is the average."""
    pooled = F.avg_pool2d(x.permute(0, 3, 1, 2), layer.stride, ceil_mode=True).permute(0, 2, 3, 1)
    places = layer.kernel_size**2
    logits = (layer.attn(pooled) * layer.scale).unflatten(-1, (layer.num_heads, places, places))
    read = logits.softmax(dim=-1).sum(dim=-2).permute(0, 3, 4, 1, 2).flatten(3)  # (B, heads, K * K read, windows)

    def add_up(values: Tensor) -> Tensor:  # sums over the windows that contain a cell
        size = (x.shape[1], x.shape[2])
        form = {"padding": layer.padding, "stride": layer.stride}
        return F.fold(values.flatten(1, 2), size, layer.kernel_size, **form).unflatten(1, values.shape[1:2])

    return add_up(read) / add_up(torch.ones_like(read))


@torch.no_grad()
def view(model: Any, image: Tensor, query: Sequence[float]) -> View:
    """Run the model on one normalised image (1, 3, H, W), and compute the attention of some of its layers to the token
    at `query`, (x, y) as shares of the image."""
    features, inputs = forward_with_inputs(model, image)
    grid = model.token_grid(tuple(image.shape[-2:]))
    cell = model.patch_size * model.mix_scale
    count = grid[0] * grid[1]
    row, column = (min(int(query[1 - n] * image.shape[2 + n] / cell), grid[n] - 1) for n in (0, 1))
    at = row * grid[1] + column - count  # counted from the end, because a class token may come first

    def heat(text: str, name: str, layer: Any) -> Heat:
        x = inputs[layer]
        if isinstance(layer, OutlookAttention):
            return Heat(text, name, _array(outlook_attention(layer, x)[0].mean(dim=0)), model.patch_size)
        is_class = isinstance(layer, ClassAttention)
        weights = class_attention(layer, x)[0] if is_class else self_attention(layer, x)[0, :, at]
        return Heat(text, name, _array(weights[:, -count:].mean(dim=0).unflatten(-1, grid) * count), cell)

    maps = []
    for kind, text in _ROWS.items():
        if layers := [item for item in attention_layers(model).items() if isinstance(item[1], kind)]:
            drawn_layers = sorted({*np.linspace(0, len(layers) - 1, _ACROSS).astype(int).tolist()})
            maps.append([heat(text, *layers[number]) for number in drawn_layers])
    probabilities = model.forward_head(features)[0].float().softmax(-1)
    best = probabilities.topk(min(TOP, len(probabilities)))
    tokens = None
    if model.dense_head and model.num_classes:
        probability, ids = model.aux_head(features[0, 1:]).double().softmax(-1).max(-1)
        tokens = Cells(ids.view(grid).cpu().numpy(), _array(probability.view(grid)), np.ones(grid))
    top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return View(top, tokens, (0.0, 0.0, float(grid[1] * cell), float(grid[0] * cell)), maps)


def _array(tensor: Tensor) -> npt.NDArray[np.float64]:
    return tensor.double().cpu().numpy()


def draw_attention(image: Pixels, content: View, query: Sequence[float], names: Sequence[str], title: str) -> "Figure":
    """Draw the image before normalisation, the predictions of both heads, and the rows of attention maps."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    scale: dict[str, Any] = {
        "cmap": LinearSegmentedColormap.from_list("", _COLOURS),
        "norm": LogNorm(1 / _MOST, _MOST, clip=True),
    }
    figure, rows = answers_page(1 + len(content.maps), image, content, names, f"{drawable(title)}\n{_LEGEND}")
    height, width = image.shape[:2]
    grey = (image @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)[..., None].repeat(3, axis=2)
    rows[0][0].plot(query[0] * width, query[1] * height, marker="+", color="#00e5ff", ms=11, mew=2)
    for row, maps in zip(rows[1:], content.maps, strict=True):
        for axes, heat in zip(row, maps, strict=False):
            low = np.min(heat.values)
            high = np.max(heat.values)
            nearly = ", nearly even" if 1 / _EVEN < low <= high < _EVEN else ""
            note = f"{heat.name}: {low:.2f} to {high:.2f} x even{nearly}"
            _caption(axes, f"{heat.what}\n{note}" if axes is row[0] else note)
            show_image(axes, grey, muted=True)  # the only colours are those of the map
            extent = (0, heat.values.shape[1] * heat.cell, heat.values.shape[0] * heat.cell, 0)
            axes.imshow(heat.values, extent=extent, interpolation="nearest", alpha=0.65, label="map", **scale)
            axes.set(xlim=(0, width), ylim=(height, 0))
    return figure


def answers_page(
    rows: int, image: Pixels, content: View, names: Sequence[str], title: str
) -> "tuple[Figure, list[list[Axes]]]":
    """Return a page with three pictures per row, and its axes. The first row shows the image, the dense head's classes
    over it, and the most probable classes."""
    height = _SIDE * min(1.0, image.shape[0] / image.shape[1])
    figure = new_figure(3 * _SIDE, rows * (height + _LINES) + 0.4)
    figure.set_layout_engine("constrained")
    figure.suptitle(title, fontsize=9, parse_math=False)
    grid = [list(row) for row in figure.subplots(rows, 3, squeeze=False)]
    for axes in (axes for row in grid for axes in row):
        axes.set_axis_off()
    picture, tokens, bars = grid[0]
    show_image(picture, image)
    _caption(picture, "image")
    name_of = dict(enumerate(names))
    label_ids = [] if content.tokens is None else np.unique(content.tokens.ids).tolist()
    colours = class_colours([*label_ids, *(class_id for class_id, _ in content.top)])
    if content.tokens is not None:
        show_image(tokens, image, muted=True)
        class_texts = {class_id: name_of.get(class_id, f"class {class_id}") for class_id in label_ids}
        draw_cells(tokens, content.tokens, content.token_box, colours, class_texts)
        _caption(tokens, "dense head: first class of each token")
    _caption(bars, "most probable classes")
    bars.set(xlim=(0, 1), ylim=(len(content.top) - 0.3, -0.9))
    for number, (class_id, probability) in enumerate(content.top):
        bars.barh(number, probability, height=0.35, color=colours[class_id])
        text = f"{shorten(name_of.get(class_id, f'class {class_id}'), 46)}  {100 * probability:.1f} %"
        bars.text(0, number - 0.28, drawable(text), fontsize=8, va="bottom", parse_math=False)
    return figure, grid


def _caption(axes: "Axes", text: str) -> None:
    axes.set_title(text, loc="left", fontsize=7.5, parse_math=False)
