"""Computes the target of every token from label maps of shares, as masks give them.

A token's target is the share of each class in what the token shows, without void: the mean of the cells' shares,
weighted by the area of each cell in the token and by the part of the cell that is not void. Through the affine map of
the augmentation a token is a parallelogram on the map. Its areas in the cells are exact, so where a cell is a pixel the
target is what counting pixels gives; larger cells count as equally filled.

What the cells' listed classes leave of 1 is spread evenly over the classes that a cell does not list
(`--label-tail exact`; without it the store has divided the listed shares by their sum).

Shapes: B images, a token grid of `rows x cols` with N = rows * cols tokens, C classes, maps of `h x w` cells with k
classes each, of which R x S cells cover any token.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.label_map import FULL_AREA, Area, LabelBatch, has_area, on_host
from tlt.sparse_labels import Reading, SparseLabels, Sums, merge_equal

_STRETCH = 2.0  # see `stretch_of`; published crops and warps stretch at most 1.6 times
_NOTHING = 1e-5  # share of a token up to which it counts as void


class _Shown(NamedTuple):
    """What each token shows of a map. Areas are shares of the token's own area."""

    cells: Tensor  # (B, N, R * S), the cells that may lie in it: index in a map of h * w cells
    areas: Tensor  # (B, N, R * S), its area in each


def stretch_of(labels: LabelBatch, affine: Tensor) -> float:
    """Return the most by which the map in a crop's extent exceeds what the same share of the whole map has. Of tensors
    on a device, which would have to be waited for, twice is returned."""
    sides = labels.area[:, 2:] - labels.area[:, :2]
    if not on_host(affine) or not on_host(sides):
        return _STRETCH
    extent = affine[:, :, :2].abs().sum(2) / sides.to(affine.dtype)
    return float(torch.where(sides > 0, extent, 0).amax())


def cells_across(map_size: tuple[int, int], how: Reading) -> tuple[int, int]:
    """Return (R, S), how many cells a token may touch. If `how.stretch` is exceeded, the cells beyond do not count."""
    spans = how.window[3] - how.window[1], how.window[2] - how.window[0]
    each = zip(map_size, how.grid, spans, strict=True)
    rows, cols = (min(size, math.ceil(how.stretch * size * span / tokens) + 1) for size, tokens, span in each)
    return rows, cols


def token_shares(labels: LabelBatch, affine: Tensor, visible: Tensor, how: Reading) -> SparseLabels:
    """Return the smoothed labels of all tokens. The values of `labels` have the type of affine and visible."""
    shown = _shown(labels, affine, visible, how)
    known, base, sums = _mean_shares(labels, shown, how.num_classes)
    # Rounding must not give a label to a token of void alone.
    weight = share = known.where(known > _NOTHING, 0).clamp(max=1)
    of_known = (share > 0).to(share)
    if how.uncovered == "uniform":  # what is not known has all classes equally
        of_known = share
        weight = has_area(labels).to(share)[:, None].expand_as(share)
    of_known = of_known * (1 - how.smoothing)
    base = base * of_known + (1 - of_known) / how.num_classes
    return SparseLabels(weight, base, sums.ids.int(), sums.sums * of_known[..., None])


def crop_shares(labels: LabelBatch, affine: Tensor, visible: Tensor, how: Reading) -> tuple[Tensor, Tensor]:
    """Return (B, C), the smoothed label of the whole crop, and (B, 1), how much of the crop counts."""
    crop = token_shares(labels, affine, visible, how._replace(grid=(1, 1), window=FULL_AREA))
    return crop.dense(how.num_classes)[:, 0], crop.weight


def _mean_shares(labels: LabelBatch, shown: _Shown, num_classes: int) -> tuple[Tensor, Tensor, Sums]:
    """Return the share of each token whose class is known, (B, N), and its label as in `SparseLabels`: the base (B, N)
    and the excess by class (B, N, M)."""
    assert labels.void is not None
    index = shown.cells.flatten(1)

    def read(cells: Tensor) -> Tensor:
        """Return (B, N, R * S, ...) of the values (B, ..., h, w) of all cells."""
        per_cell = cells.flatten(-2).movedim(-1, 1)  # (B, h * w, ...)
        chosen = index.view(*index.shape, *[1] * (per_cell.ndim - 2)).expand(*index.shape, *per_cell.shape[2:])
        return per_cell.gather(1, chosen).unflatten(1, shown.cells.shape[1:])

    known = shown.areas * (1 - read(labels.void))  # (B, N, R * S)
    total = known.sum(-1)
    weights = known / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
    values = read(labels.values)  # (B, N, R * S, k)
    listed = values > 0
    others = num_classes - listed.sum(-1)
    rest = torch.where(others > 0, (1 - values.sum(-1)).clamp(min=0) / others.clamp(min=1), 0)
    excess = torch.where(listed, values - rest[..., None], 0) * weights[..., None]
    sums = merge_equal(read(labels.ids).flatten(2), excess.flatten(2), excess[0, 0].numel())
    return total, (rest * weights).sum(-1), sums


def _shown(labels: LabelBatch, affine: Tensor, visible: Tensor, how: Reading) -> _Shown:
    """Return what the tokens show of the maps."""
    h, w = labels.values.shape[2:]
    area = labels.area.to(affine.dtype)
    sides = area[:, 2:] - area[:, :2]
    # Cells per unit of the image, (B, 2). Of a map without an area all lies in one point.
    per_side = torch.where(sides > 0, 1 / sides.clamp(min=torch.finfo(sides.dtype).eps), 0)
    scale = torch.stack([per_side[:, 0] * w, per_side[:, 1] * h], 1)
    corners = _corners(affine, how.grid, how.window) - area[:, :2, None, None]
    corners = corners * scale[..., None, None]  # in cells
    of_token = (corners[..., :-1, :-1], corners[..., :-1, 1:], corners[..., 1:, 1:], corners[..., 1:, :-1])
    around = torch.stack(of_token, -1).flatten(2, 3)  # (B, 2, N, 4)
    low = around.amin(-1).floor()  # (B, 2, N)
    reach = cells_across((h, w), how)
    bounds = (visible.unflatten(1, (2, 2)) - area[:, None, :2]) * scale[:, None]  # what the crop shows, in cells
    first, lines, numbers = [], [], []
    for axis, size, count in ((0, w, reach[1]), (1, h, reach[0])):
        first.append(low[:, axis].clamp(0, size - count))  # (B, N)
        steps = torch.arange(count + 1, dtype=affine.dtype, device=affine.device)
        begin, end = (bounds[:, side, axis, None] - first[-1] for side in (0, 1))
        lines.append(torch.minimum(torch.maximum(steps, begin[..., None]), end[..., None]))
        numbers.append((first[-1][..., None] + steps[:-1]).long())
    # Areas are computed in cells from the first one, so that digits are not lost.
    areas = areas_in_cells(around - torch.stack(first, 1)[..., None], *lines).flatten(2)
    token = (affine[:, 0, 0] * affine[:, 1, 1] - affine[:, 0, 1] * affine[:, 1, 0]).abs() * scale.prod(1)
    x0, y0, x1, y1 = how.window
    token = token * ((x1 - x0) * (y1 - y0) / math.prod(how.grid))  # in cells
    cells = (numbers[1][..., :, None] * w + numbers[0][..., None, :]).flatten(2)
    return _Shown(cells, areas / token.clamp(min=torch.finfo(token.dtype).tiny)[:, None, None])


def _corners(affine: Tensor, grid: tuple[int, int], window: Area) -> Tensor:
    """Return the corners of all tokens in shares of the image, (B, 2, rows + 1, cols + 1). What reaches beyond the crop
    is cut off."""
    x, y = (
        (low + torch.arange(n + 1, dtype=affine.dtype, device=affine.device) / n * (high - low)).clamp(0, 1)
        for n, low, high in ((grid[1], window[0], window[2]), (grid[0], window[1], window[3]))
    )
    matrix = affine[..., None, None]
    # We multiply elementwise rather than by a matrix product: TF32 would move the points.
    return matrix[:, :, 0] * x + matrix[:, :, 1] * y[:, None] + matrix[:, :, 2]


def areas_in_cells(around: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the areas (B, N, R, S) that parallelograms have in the cells of a lattice.

    By Green's theorem each is an integral around the parallelogram: over y within the cell's row, of how far x is
    beyond the cell's left line, up to its right one. Along one edge, x is linear in y, and so the integral known.

    Args:
        around: (B, 2, N, 4), x and y of the corners in order.
        x: (B, N, S + 1), the lines between the columns of cells, ascending.
        y: (B, N, R + 1), the lines between their rows, ascending.
    """
    total = around.new_zeros(())
    top, bottom = y[..., :-1], y[..., 1:]  # (B, N, R)
    for corner in range(4):
        (x0, y0), (x1, y1) = (around[..., number % 4, None].unbind(1) for number in (corner, corner + 1))  # (B, N, 1)
        begin, end = (torch.minimum(torch.maximum(each, top), bottom) for each in (y0, y1))  # (B, N, R)
        fall = y1 - y0
        slope = (x1 - x0) / torch.where(fall == 0, 1, fall)  # a level edge has no part in the integral
        # Where the edge enters and leaves the row. Rounding must not carry it beyond its ends.
        left = torch.minimum(x0, x1)
        right = torch.maximum(x0, x1)
        enters, leaves = (
            torch.minimum(torch.maximum(x0 + (each - y0) * slope, left), right)[..., None] for each in (begin, end)
        )
        below = _mean_below(enters, leaves, x[..., None, :])  # (B, N, R, S + 1)
        total = total + below.diff(dim=-1) * (end - begin)[..., None]
    return total.abs()


def _mean_below(begin: Tensor, end: Tensor, limit: Tensor) -> Tensor:
    """Return the mean of min(x, limit) over x from `begin` to `end`."""
    low = torch.minimum(begin, end)
    high = torch.maximum(begin, end)
    inside = torch.minimum(torch.maximum(limit, low), high) - low
    width = high - low
    over = inside.square() / torch.where(width > 0, 2 * width, 1) + (limit - high).clamp(min=0)
    return limit - over
