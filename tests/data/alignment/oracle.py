"""The measure of the alignment tests: the same for what must agree and for planted mistakes.

Image and label files whose values say where they are (`position_code`) go through the training loader, the device stage
and the target maker. What a token shows is read off its pixels, what it is said to show off its target. Neither reading
knows anything of the geometry in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.data.alignment.position_code import Comparison, Size, compare, position_classes, position_map, read_images
from tests.data.alignment.position_data import load_batch, write_images, write_maps
from tlt.data.augment.plan import AugmentConfig
from tlt.data.batch import Batch
from tlt.data.sources.folder import ImageFolder
from tlt.labels.store import LabelStore, open_labels
from tlt.targets import make_targets
from tlt.tools.pack import pack

SIZES = [(500, 375), (375, 500), (420, 420)]  # width, height
GRID = (14, 14)
PIXELS = (112, 112)
PIXEL_LIMIT = 0.05
SHARE_LIMIT = 0.01  # of the side; half of an 18 x 18 map's cell is 0.028


@dataclass(frozen=True)
class Scene:
    """Shots of images of some sizes, and label trees and archives of them by the size of the maps."""

    root: Path
    shots: list[ImageFolder]
    sizes: list[Size]

    @classmethod
    def write(cls, root: Path, sizes: list[Size], count: int) -> Scene:
        return cls(root, write_images(root / "images", sizes, count), sizes)

    def labels(self, cells: Size, area: str, archive: bool) -> LabelStore:
        names, classes = self.shots[0].paths, position_classes(*cells)
        tree = self.root / f"{cells[0]}x{cells[1]}"
        if not tree.exists():
            write_maps(tree, names, position_map(*cells), classes)
        if not archive:
            return open_labels(tree, names, area, classes)
        packed = tree.with_name(f"{tree.name}_{area}.archive")
        if not packed.exists():
            pack(str(tree), str(packed), self.shots[0].root, area=area)
        return open_labels(packed, names, None, classes)

    def areas(self, batch: Batch, area: str) -> tuple[Tensor, Tensor]:
        """(B, 4) what the maps really cover, and (B, 2) width and height of the images."""
        source = torch.tensor(self.sizes)[batch.classes.cpu()].double()
        spare = (1 - source.amin(1, keepdim=True) / source) / 2 if area == "center" else torch.zeros_like(source)
        return torch.cat([spare, 1 - spare], 1), source


@dataclass(frozen=True)
class Measured:
    """The comparison with the targets, and the (B, N) coverage that these state."""

    found: Comparison
    weight: Tensor
    classes: Tensor

    def pixels(self) -> float:
        """Largest distance in output pixels."""
        return float(self.found.output_pixels()[self.found.ramp].max())

    def typical(self) -> float:
        """Median distance in output pixels."""
        return float(self.found.output_pixels()[self.found.ramp].median())

    def share(self) -> float:
        """Largest mean distance, as a share of the side, of any image size."""
        return max(
            float(self.found.shares()[self.found.whole & (self.classes == number)[:, None]].mean())
            for number in self.classes.unique()
        )

    def coverage(self) -> float:
        """Mean difference between the share of each token that shows labelled image and what the targets say."""
        return float((self.found.cover - self.weight)[self.found.judged].abs().mean())


def measure(
    scene: Scene,
    config: AugmentConfig,
    cells: Size = (18, 18),
    area: str = "full",
    archive: bool = False,
    grid: Size = GRID,
    mistake: Callable[[Batch], Batch] | None = None,
    only: Tensor | None = None,
    **loading: Any,
) -> Measured:
    """Load all images of a scene once and compare them with their targets.

    Args:
        mistake: Spoils the batch before targets are made.
        only: (images,) bool, by index: the others are left out.
    """
    images, batch = load_batch(scene.shots, scene.labels(cells, area, archive), config, **loading)
    batch = mistake(batch) if mistake else batch
    classes = position_classes(*cells)
    made = make_targets(batch.labels, batch.affine, batch.visible, batch.classes, grid, classes, 0.0)
    assert made.tokens is not None
    kept = torch.ones(batch.size, dtype=torch.bool) if only is None else only[batch.indices.cpu()]
    areas, source = (part[kept] for part in scene.areas(batch, area))
    shown = read_images(images[:, kept].cpu())
    compared = compare(shown, made.tokens.dense(classes).cpu()[kept], grid, cells, areas, source)
    return Measured(compared, made.tokens.weight.cpu()[kept], batch.classes.cpu()[kept])


def check(
    measured: Measured, slack: float = 0.0, least_ramp: float = 0.2, unjudged: float = 0.25, erased: bool = False
) -> None:
    """Assert that labels lie where the tokens look.

    Args:
        slack: Pixels above the limit that the reading of the image explains.
        least_ramp: Share of the tokens that has to be comparable, so that the rest means something.
        unjudged: Share of the images that may show too little besides fill to be read.
        erased: Boxes are erased: what is no image needn't be uncovered.
    """
    seen = measured.found
    assert float((~seen.judged).double().mean()) <= unjudged
    assert float(seen.ramp[seen.judged].double().mean()) >= least_ramp
    assert measured.pixels() < PIXEL_LIMIT + slack
    assert measured.share() < SHARE_LIMIT
    assert (measured.weight[seen.whole] == 1).all()
    if erased:
        return
    assert measured.coverage() < 0.03
    assert not measured.weight[(seen.cover == 0) & seen.judged[:, None]].any()
