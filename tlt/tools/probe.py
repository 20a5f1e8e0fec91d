"""Finds out from the images whether label maps are transposed and what part of the images they cover (`tlt probe`).

Where a label map fits its image, what a patch looks like tells what its cell says. For every image and hypothesis, a
small linear classifier is fitted (least squares): from the colours and edges of the patch that each cell would lie on
to the cell's shares of classes. Its score is the share of the map's variance that it explains, less the mean of what it
explains of the maps of other images: this takes out the overfit, and what any smooth map has in common with any image,
such as objects in the middle. Nothing is carried from image to image, so classes needn't be known, nor be many.

How sure: images are drawn again with replacement, 2,000 times. "Sure" is the share of draws in which the best
hypothesis still is the best; "fits at all" is the share in which its score is above zero.

Legend: N cells, d features, c classes of a map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tlt.data.backends.decode import TorchvisionBackend, resized_crop
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.open_images import open_images
from tlt.data.sources.source import ImageSource
from tlt.errors import MachineFault, UserError
from tlt.io.progress import Progress
from tlt.label_map import LabelMap
from tlt.labels.agreement import class_shares
from tlt.labels.store import open_labels

HYPOTHESES = (
    ("as stored", "full image"),
    ("as stored", "centre square"),
    ("transposed", "full image"),
    ("transposed", "centre square"),
)
_PATCH = 8  # pixels per cell and side
_OTHERS = 8  # maps of other images that each image is compared with
_DRAWS = 2000
_SURE, _FITS = 0.95, 0.99
_MIN_IMAGES = 8


@dataclass(frozen=True)
class Verdict:
    """The result of `probe`.

    Attributes:
        scores: (images, 4) explained share above that of other images' maps, by hypothesis.
        best: Index into `HYPOTHESES`.
        sure: Share of bootstrap draws in which `best` has the highest score.
        sure_axes, sure_area: The same for each half of the hypothesis.
        fits: Share of bootstrap draws in which `best` scores above zero.
        square: Share of images that are square: their full image is their centre square.
        recorded: What the store says.
    """

    scores: np.ndarray
    best: int
    sure: float
    sure_axes: float
    sure_area: float
    fits: float
    square: float
    recorded: str

    def lines(self) -> list[str]:
        """The verdict as lines of text."""
        means, errors = self.scores.mean(axis=0), self.scores.std(axis=0) / np.sqrt(len(self.scores))
        lines = [f"{len(self.scores)} images, recorded: {self.recorded}; explained above chance, +- standard error:"]
        for place, (axes, area) in enumerate(HYPOTHESES):
            mark = " <- best" if place == self.best else ""
            lines.append(f"  {axes:10s} x {area:13s} {means[place]:+.4f} +- {errors[place]:.4f}{mark}")
        lines += [
            f"axes: {HYPOTHESES[self.best][0]} in {100 * self.sure_axes:.1f} % of {_DRAWS} bootstrap draws",
            f"area: {HYPOTHESES[self.best][1]} in {100 * self.sure_area:.1f} % of the draws"
            + (f" ({100 * self.square:.0f} % of the images are square and don't tell)" if self.square else ""),
            f"both: {100 * self.sure:.1f} % of the draws; fits at all: {100 * self.fits:.1f} %",
            self._conclusion(),
        ]
        return lines

    def _conclusion(self) -> str:
        if self.fits < _FITS:
            return (
                "verdict: the maps don't fit these images clearly better than other images' maps do; they are another "
                "data set's, or have too few cells to tell (the order of the four ways may still be right)"
            )
        axes, area = HYPOTHESES[self.best]
        said = axes if self.sure_axes >= _SURE else "axes not certain"
        covered = area if self.sure_area >= _SURE else "area not certain"
        advice = "; look at more images (-n)" if self.sure < _SURE else ""
        return f"verdict: {said}, {covered}{advice}"


def probe(data: str, labels: str, split: str = "train", n: int = 512, seed: int = 0) -> Verdict:
    """Compare the maps of `n` images, drawn at random, with the images.

    Raises:
        UserError: No images or labels, or too few of them that can be used.
    """
    folder = open_images(data, split, allow_root=True)
    store = open_labels(labels, folder.paths, bad_label="skip")
    generator = np.random.default_rng(seed)
    rows = np.setdiff1d(np.arange(len(folder)), store.missing())
    rows = np.sort(generator.permutation(rows)[:n])
    progress = Progress("probing", len(rows), "image")
    features: list[np.ndarray] = []
    shares: list[np.ndarray] = []
    grid, square = (0, 0), 0
    for row in rows.tolist():
        progress.step()
        try:
            pixels, width, height = _pixels(folder, row)
            label_map = store.load(row, width, height)
        except MachineFault:
            raise
        except (BadImage, UserError):
            continue
        described = _shares(label_map)
        if described is None or (features and label_map.shape[1:] != grid):
            continue  # one class all over, or a map of another shape
        grid = label_map.shape[1:]
        features.append(_patches(pixels, grid))
        shares.append(described)
        square += width == height
    progress.close()
    if len(features) < _MIN_IMAGES:
        raise UserError(
            f"{len(features)} of {len(rows)} images have a usable map that isn't the same all over: too few"
        )
    scores = _scores(np.stack(features), shares, generator)
    recorded = f"{store.area if isinstance(store.area, str) else 'part of the'} image"
    return _verdict(scores, generator, square / len(features), recorded)


def _pixels(folder: ImageSource, row: int) -> tuple[np.ndarray, int, int]:
    """(3, H, W) uint8 of an image, its width and its height."""
    backend = TorchvisionBackend()
    encoded = backend.open(folder.path(row), folder.read(row))
    pixels = backend.decode(encoded, None, (encoded.height, encoded.width), "bilinear")
    return pixels.numpy(), encoded.width, encoded.height


def _patches(pixels: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """(4, N, d) patches' features under every hypothesis, in the order of the stored cells.

    Args:
        pixels: (3, H, W).
        grid: Rows and columns of the map as stored.
    """
    height, width = pixels.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    regions = {"full image": (0, 0, width, height), "centre square": (left, top, side, side)}
    found = []
    for axes, area in HYPOTHESES:
        turned = axes == "transposed"
        described = _features(pixels, regions[area], grid[::-1] if turned else grid)  # (rows, columns, d)
        found.append((described.swapaxes(0, 1) if turned else described).reshape(grid[0] * grid[1], -1))
    return np.stack(found)


def _features(pixels: np.ndarray, region: tuple[int, int, int, int], grid: tuple[int, int]) -> np.ndarray:
    """(rows, columns, d): mean and deviation of the colours of each patch, and its edges in four directions."""
    rows, cols = grid
    size = (rows * _PATCH, cols * _PATCH)
    small = resized_crop(torch.from_numpy(pixels), region, size, "bilinear").numpy().astype(np.float32) / 255
    red, green, blue = small
    colours = np.stack([(red + green + blue) / 3, red - green, (red + green) / 2 - blue])  # (3, H, W)
    grey = np.pad(colours[0], ((0, 1), (0, 1)), mode="edge")
    edges = [np.abs(np.diff(grey, axis=axis))[: size[0], : size[1]] for axis in (0, 1)]
    diagonals = [np.abs(grey[1:, 1:] - grey[:-1, :-1]), np.abs(grey[1:, :-1] - grey[:-1, 1:])]
    planes = np.concatenate([colours, np.stack(edges + diagonals)])  # (7, H, W)
    cells = planes.reshape(7, rows, _PATCH, cols, _PATCH)
    means, deviations = cells.mean(axis=(2, 4)), cells[:3].std(axis=(2, 4))
    return np.concatenate([means, deviations]).transpose(1, 2, 0)


def _shares(label_map: LabelMap) -> np.ndarray | None:
    """(N, c) shares of the classes of a map, centred and of unit norm; None where they are the same all over."""
    _, shares = class_shares(label_map)
    centred = shares - shares.mean(axis=0)
    norm = np.linalg.norm(centred)
    return None if norm < 1e-3 else centred / norm


def _basis(features: np.ndarray) -> np.ndarray:
    """(N, r) orthonormal basis of what a linear function of the (N, d) features, less their mean, can be."""
    centred = features - features.mean(axis=0)
    vectors, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    return vectors[:, sizes > 1e-4 * max(sizes.max(), 1e-12)]


def _explained(basis: np.ndarray, shares: np.ndarray) -> float:
    """Share of the variance of (N, c) from `_shares` that the least-squares fit on a basis explains."""
    return float(np.square(basis.T @ shares).sum())


def _scores(features: np.ndarray, shares: Sequence[np.ndarray], generator: np.random.Generator) -> np.ndarray:
    """(images, 4) explained shares of the own map, less the mean of those of `_OTHERS` other maps."""
    images = len(shares)
    scores = np.zeros((images, len(HYPOTHESES)))
    for image in range(images):
        others = (image + 1 + generator.permutation(images - 1)[:_OTHERS]) % images
        for place in range(len(HYPOTHESES)):
            basis = _basis(features[image, place])
            chance = np.mean([_explained(basis, shares[other]) for other in others])
            scores[image, place] = _explained(basis, shares[image]) - chance
    return scores


def _verdict(scores: np.ndarray, generator: np.random.Generator, square: float, recorded: str) -> Verdict:
    images = len(scores)
    draws = generator.multinomial(images, np.full(images, 1 / images), size=_DRAWS) @ scores / images  # (draws, 4)
    best = int(scores.mean(axis=0).argmax())
    # Ties (square images) go to neither side: the winner must be above the other one.
    axes, area = best // 2, best % 2
    by_axes = draws.reshape(-1, 2, 2).max(axis=2)
    by_area = draws.reshape(-1, 2, 2).max(axis=1)
    above = [draws[:, best] > draws[:, other] for other in range(len(HYPOTHESES)) if other != best]
    return Verdict(
        scores,
        best,
        float(np.logical_and.reduce(above).mean()),
        float((by_axes[:, axes] > by_axes[:, 1 - axes]).mean()),
        float((by_area[:, area] > by_area[:, 1 - area]).mean()),
        float((draws[:, best] > 0).mean()),
        square,
        recorded,
    )
