"""Images and label maps that encode positions; the place of each token of a batch, read from both without geometry.

Images: red, green and blue are linear in the position, (x + y) / 2, (x - y) / 2 + 1 / 2 and 1 - x. An equal change of
all three cancels in x = (R + G - 2 B) / 3 + 1 / 2 and y = R - G + 1 / 2: a warp's truncation, and noise that makes
roundings independent. Shots differ in their noise alone and can be averaged. Magenta, the fill, is no position.

Maps: every cell lists the class COLUMN, whose logit counts columns, the class ROW, whose logit counts rows, and a class
of its own. One class is listed nowhere: softened targets give logits back as log ratios to it.

Legend: B images, N tokens, C classes. Places are shares (x, y) of the source image, edge to edge.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlt.label_map import LabelMap

COLUMN, ROW, FIRST_CELL = 0, 1, 2
CELL_LOGIT = 8.0
_NOISE, _LOW, _SPAN = 48.0, 54.0, 147.0  # grey levels; room for what bicubic filters make of the noise
# Grey levels: pixels further from the plane are left out of the fit, round by round, and in the end are no image.
_FIT_LIMITS = (8.0, 4.0, 2.0, 1.5, 1.5)
_CLEAN_LIMIT = 6.0
_LEAST_FITTED = 0.9  # images with a smaller fitted share are not judged
Size = tuple[int, int]


def ramp_image(width: int, height: int, shot: int = 0) -> np.ndarray:
    """Return an image (height, width, 3) uint8; shots differ in their noise."""
    x, y = (np.arange(width) + 0.5) / width, ((np.arange(height) + 0.5) / height)[:, None]
    ramps = np.stack([(x + y) / 2, (x - y) / 2 + 0.5, np.broadcast_to(1 - x, (height, width))], axis=2)
    generator = np.random.default_rng(shot)
    noise = generator.uniform(-_NOISE, _NOISE, (height, width, 1))
    # Rounded sums, not summed roundings: over any stretch of a row the error is below one level.
    sums = np.rint(np.cumsum(_LOW + _SPAN * ramps + noise, axis=1) + generator.uniform(-0.5, 0.5, (height, 1, 3)))
    return np.diff(sums, axis=1, prepend=0).clip(0, 255).astype(np.uint8)


def position_map(rows: int, cols: int) -> LabelMap:
    """Return a `rows x cols` map with `position_classes(rows, cols)` classes; exact in float16 up to 256 a side."""
    down, across = np.mgrid[:rows, :cols]
    scale = _logit_scale((rows, cols))
    values = np.stack([(across + 0.5) * scale, (down + 0.5) * scale, np.full((rows, cols), CELL_LOGIT)])
    ids = np.stack([np.full_like(down, COLUMN), np.full_like(down, ROW), FIRST_CELL + down * cols + across])
    return LabelMap(values.astype(np.float16), ids.astype(np.int32))


def position_classes(rows: int, cols: int) -> int:
    """Return the number of classes for maps of `rows x cols` cells; no map lists the last one."""
    return FIRST_CELL + rows * cols + 1


def _logit_scale(cells: Size) -> float:
    """Return the logit per cell: a power of two with which no logit exceeds 8."""
    return float(2.0 ** (3 - np.ceil(np.log2(max(cells)))))


def grid_points(grid: Size, offset: tuple[float, float] = (0.5, 0.5)) -> Tensor:
    """Return points (rows * cols, 2), (x, y) in the unit square, at the share `offset` = (x, y) of every grid cell."""
    y = (torch.arange(grid[0], dtype=torch.float64) + offset[1]) / grid[0]
    x = (torch.arange(grid[1], dtype=torch.float64) + offset[0]) / grid[1]
    return torch.stack([x.repeat(grid[0]), y.repeat_interleave(grid[1])], -1)


@dataclass(frozen=True)
class Shown:
    """The places that the pixels of a batch show."""

    affine: Tensor  # (B, 2, 3) float64, unit square of the output -> place: least squares through all clean pixels
    clean: Tensor  # (B, H, W) bool, pixels with the colours that an image has there: no fill, nothing erased
    fitted: Tensor  # (B,) share of the pixels with any image's colours that lie on the plane
    size: Size  # (H, W) of the output

    def places(self, points: Tensor) -> Tensor:
        """Map points (P, 2), (x, y) in the output's unit square, to places (B, P, 2)."""
        return points @ self.affine[:, :, :2].transpose(1, 2) + self.affine[:, None, :, 2]


def read_images(images: Tensor) -> Shown:
    """Read images (S, B, 3, H, W) in [0, 1], not normalised: S shots of the same images."""
    size = (images.shape[3], images.shape[4])
    red, green, blue = ((images.double() * 255 - _LOW) / _SPAN).mean(0).unbind(1)
    places = torch.stack([(red + green - 2 * blue) / 3 + 0.5, red - green + 0.5], -1).flatten(1, 2)  # (B, H * W, 2)
    points = torch.cat([grid_points(size), torch.ones(size[0] * size[1], 1, dtype=torch.float64)], 1)  # (H * W, 3)
    possible = ((places > -0.1) & (places < 1.1)).all(-1)
    used = possible.double()
    for limit in _FIT_LIMITS:
        weighted = points * used[..., None]  # (B, H * W, 3)
        affine = torch.linalg.pinv(weighted.mT @ points, hermitian=True) @ (weighted.mT @ places)  # (B, 3, 2)
        distance = (points @ affine - places).abs().amax(-1) * _SPAN
        used = (possible & (distance < limit)).double()
    fitted = used.sum(1) / possible.sum(1).clamp(min=size[0] * size[1] / 10)
    clean = possible & (distance < _CLEAN_LIMIT)
    return Shown(affine.mT, clean.view(-1, *size), fitted, size)


def read_targets(tokens: Tensor, cells: Size, area: Tensor) -> tuple[Tensor, Tensor]:
    """Read the places (B, N, 2) that soft labels without smoothing (B, N, C) describe, made from maps of `cells` =
    (rows, columns) over `area` (B, 4): by the ramps and by the classes of the cells."""
    logits = tokens.double().log()
    logits = logits - logits[..., -1:]
    ramp = logits[..., [COLUMN, ROW]] / (_logit_scale(cells) * torch.tensor([cells[1], cells[0]]))
    corner, extent = area[:, None, :2].double(), (area[:, None, 2:] - area[:, None, :2]).double()
    weights = logits[..., FIRST_CELL:-1].clamp(min=0)
    by_cell = (weights / weights.sum(-1).clamp(min=1e-9)[..., None]) @ grid_points(cells)
    return corner + ramp * extent, corner + by_cell * extent


@dataclass(frozen=True)
class Comparison:
    """The places that tokens show and those of their targets. Only pixels decide which tokens are compared."""

    by_ramp: Tensor  # (B, N, 2) places, described minus shown
    by_cell: Tensor  # (B, N, 2)
    whole: Tensor  # (B, N) bool, tokens that show only image, all of it inside the area of the map
    ramp: Tensor  # (B, N) bool, those of them between the centres of the outer cells, beyond which these continue
    cover: Tensor  # (B, N) share of the token's pixels that show image inside the area of the map
    weight: Tensor  # (B, N) this share as the targets state it
    judged: Tensor  # (B,) bool, images whose pixels could be read
    shown: Shown

    def output_pixels(self) -> Tensor:
        """Return the distances in pixels of the output, of all tokens that can be compared."""
        pixels = torch.linalg.pinv(self.shown.affine[:, None, :, :2]) @ self.by_ramp[..., None]
        return (pixels[..., 0] * torch.tensor(self.shown.size[::-1])).norm(dim=-1)[self.ramp]


def compare(shown: Shown, tokens: Tensor, weight: Tensor, grid: Size, cells: Size, area: Tensor) -> Comparison:
    """Compare what is shown, whole pixels per token, with targets (B, N, C) and weights (B, N) of maps over `area`."""
    by_ramp, by_cell = (named - shown.places(grid_points(grid)) for named in read_targets(tokens, cells, area))
    half = (area[:, 2:] - area[:, :2]) / torch.tensor([cells[1], cells[0]]) / 2
    inner = torch.cat([area[:, :2] + half, area[:, 2:] - half], 1)
    covered = shown.clean & _inside(shown.places(grid_points(shown.size)), area).view_as(shown.clean)
    judged = shown.fitted > _LEAST_FITTED
    height, width = (side // tokens for side, tokens in zip(shown.size, grid, strict=True))
    cover = covered.double().unflatten(1, (grid[0], height)).unflatten(3, (grid[1], width)).mean((2, 4)).flatten(1)
    corners = [shown.places(grid_points(grid, (x, y))) for x in (0.0, 1.0) for y in (0.0, 1.0)]
    whole, ramp = (torch.stack([_inside(corner, box) for corner in corners]).all(0) for box in (area, inner))
    whole &= (cover == 1) & judged[:, None]
    return Comparison(by_ramp, by_cell, whole, ramp & whole, cover, weight, judged, shown)


def _inside(places: Tensor, area: Tensor, margin: float = 1e-3) -> Tensor:
    """Tell whether places (B, P, 2) are in areas (B, 4), with a margin for the error of the fit."""
    return ((places >= area[:, None, :2] - margin) & (places <= area[:, None, 2:] + margin)).all(-1)
