"""A token's label is that of what the token shows, from files through the training loader, the device stage and the
target maker. A tenth of a pixel, half a cell, a flip or a transposed map that is wrong is seen.

Images: red, green and blue are linear in the position, (x + y) / 2, (x - y) / 2 + 1 / 2 and 1 - x. An equal change of
all three cancels in x = (R + G - 2 B) / 3 + 1 / 2 and y = R - G + 1 / 2: a warp's truncation, and noise that makes
roundings independent. Shots differ in their noise alone and can be averaged. Magenta, the fill, is no position.

Maps: every cell lists the class COLUMN, whose logit counts columns, the class ROW, whose logit counts rows, and a class
of its own. One class is listed nowhere: softened targets give logits back as log ratios to it.

Legend: B images, N tokens, C classes. Places are shares (x, y) of the source image, edge to edge.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tlt.api import Loader
from tlt.data.augment.plan import AugmentConfig
from tlt.data.augment.rand_augment import RandAugmentPolicy
from tlt.data.batch import Batch
from tlt.data.sources.folder import ImageFolder, scan_folder
from tlt.label_map import LabelMap
from tlt.labels.store import LabelStore, open_labels
from tlt.labels.tree import write_map
from tlt.targets import make_targets
from tlt.tools.pack import pack

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


SIZES = [(500, 375), (375, 500), (420, 420)]  # width, height
GRID = (14, 14)
PIXELS = (112, 112)
PIXEL_LIMIT = 0.05
SHARE_LIMIT = 0.01  # of the side; half of an 18 x 18 map's cell is 0.028
SHOTS, SEED = 8, 3
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")


@dataclass(frozen=True)
class GeometryOnly(AugmentConfig):
    """Augmentation with the given geometric operations, always applied, and unchanged colours; the fill is magenta."""

    hflip: float = 0.0
    color_jitter: float | tuple[float, ...] | None = None
    auto_augment: str | None = None
    reprob: float = 0.0
    mean: tuple[float, ...] = (1.0, 0.0, 1.0)
    operations: tuple[str, ...] = ()
    layers: int = 1
    magnitude: float = 9.0

    @property
    def policy(self) -> RandAugmentPolicy | None:
        if not self.operations or self.no_aug:
            return None
        bound = max(10.0, 2 * self.magnitude)  # a level cut at the bound repeats, and equal shears cancel
        return RandAugmentPolicy(self.operations, self.layers, self.magnitude, 0.5, bound, probability=1.0)


@dataclass(frozen=True)
class Scene:
    """Shots of images of some sizes, and label trees and archives of them by the size of the maps."""

    root: Path
    shots: list[ImageFolder]
    sizes: list[Size]

    @classmethod
    def write(cls, root: Path, sizes: list[Size], count: int) -> "Scene":
        """`count` images of each (width, height), a class per size, in a folder per shot."""
        for shot in range(SHOTS):
            for number, (width, height) in enumerate(sizes):
                folder = root / "images" / str(shot) / f"{number}_{width}x{height}"
                folder.mkdir(parents=True)
                Image.fromarray(ramp_image(width, height, shot)).save(folder / "0.bmp")
                for i in range(1, count):
                    (folder / f"{i}.bmp").hardlink_to(folder / "0.bmp")
        return cls(root, [scan_folder(root / "images" / str(shot)) for shot in range(SHOTS)], sizes)

    def labels(self, cells: Size, area: str, archive: bool) -> LabelStore:
        names, classes = self.shots[0].paths, position_classes(*cells)
        tree = self.root / f"{cells[0]}x{cells[1]}"
        if not tree.exists():
            tree.mkdir()
            write_map(tree / "map.pt", position_map(*cells), classes)
            for name in names:
                target = (tree / name).with_suffix(".pt")
                target.parent.mkdir(exist_ok=True)
                target.hardlink_to(tree / "map.pt")
            (tree / "map.pt").unlink()
        if not archive:
            return open_labels(tree, names, area, classes)
        packed = tree.with_name(f"{tree.name}_{area}.archive")
        if not packed.exists():
            pack(str(tree), str(packed), self.shots[0].root, area=area)
        return open_labels(packed, names, None, classes)

    def load(self, labels: LabelStore, config: AugmentConfig, device: str) -> list[Batch]:
        """All images of each shot in one batch, grey levels in [0, 1]."""
        batches = []
        for folder in self.shots:
            how: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1), "workers": 0}
            loader = Loader(folder, labels, config, len(folder), SEED, device=device, **how)
            batches += loader.epoch(1)
        return batches

    def areas(self, batch: Batch, area: str) -> Tensor:
        """(B, 4) what the maps really cover."""
        source = torch.tensor(self.sizes)[batch.classes.cpu()].double()
        spare = (1 - source.amin(1, keepdim=True) / source) / 2 if area == "center" else torch.zeros_like(source)
        return torch.cat([spare, 1 - spare], 1)


def check(scene, config, cells=(18, 18), area="full", archive=False, grid=GRID, device="cpu", slack=0.0) -> Comparison:
    """Load a scene, and compare it with its targets: labels lie where the tokens look, up to `slack` pixels that the
    reading of the image explains, and the weight of a token is the share of it that shows labelled image."""
    batches, classes = scene.load(scene.labels(cells, area, archive), config, device), position_classes(*cells)
    batch = batches[0]
    made = make_targets(batch.labels, batch.affine, batch.visible, batch.classes, grid, classes, 0.0).tokens
    shown = read_images(torch.stack([each.images for each in batches]).cpu())
    targets = made.dense(classes).cpu(), made.weight.cpu()
    compared = compare(shown, *targets, grid, cells, scene.areas(batch, area))
    judged = compared.judged
    assert judged.double().mean() >= 0.6  # others may show too little but fill
    assert compared.ramp[judged].double().mean() >= 0.1
    assert compared.output_pixels().max() < PIXEL_LIMIT + slack
    assert compared.by_cell.norm(dim=-1)[compared.whole].mean() < SHARE_LIMIT
    assert (compared.cover - compared.weight)[judged].abs().mean() < 0.03
    assert (compared.weight[compared.whole] == 1).all()
    assert not compared.weight[(compared.cover == 0) & judged[:, None]].any()
    return compared


CASES: dict[str, dict[str, Any]] = {
    "crop": {},
    "hflip": {"hflip": 1.0},
    "vflip": {"vflip": 1.0},
    **{name: {"operations": (name,)} for name in GEOMETRIC},
    "turns": {"hflip": 0.5, "operations": GEOMETRIC[:3], "layers": 2},
    "everything": {"hflip": 0.5, "vflip": 0.3, "operations": GEOMETRIC, "layers": 3, "magnitude": 5.0},
    "no_aug": {"no_aug": True},
}
# A shift gives all pixels one phase t, and what a filter does there doesn't average out. Bilinear: a warp truncates,
# which moves a noisy ramp by about 0.4 / (noise between neighbours, in grey levels). Bicubic: PIL's kernel for
# transforms (a = -1) reads t (2 - 3 t + 2 t t) where it should read t, up to 0.0962 off along either axis.
PHASE = {"bilinear": 0.03, "bicubic": 2**0.5 * 0.0962}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene.write(tmp_path_factory.mktemp("alignment"), SIZES, 3)


def geometry_only(case: str, size: tuple[int, int] = PIXELS, **settings: Any) -> GeometryOnly:
    return GeometryOnly(size, **({"interpolation": "bilinear"} | CASES[case] | settings))


@pytest.mark.parametrize("case", CASES)
def test_every_operation(scene, case):
    slack = PHASE["bilinear"] if case.startswith("Translate") else 0.0
    compared = check(scene, geometry_only(case), slack=slack)
    fills = case not in ("crop", "hflip", "vflip", "no_aug")
    assert (compared.cover < 1).any() == (compared.weight < 1).any() == fills


@pytest.mark.parametrize("seed", [0, 1])
def test_any_image_map_and_output(tmp_path, seed):
    """Sizes of images, maps, outputs and token grids drawn at random, with all operations at once."""
    rng = np.random.default_rng(seed)
    sizes = [(int(w), int(h)) for w, h in rng.integers(200, 600, (3, 2))]
    grid = tuple(rng.integers(6, 15, 2).tolist())
    size = tuple((np.array(grid) * rng.integers(7, 13, 2)).tolist())
    cells = tuple(rng.integers(8, 25, 2).tolist())
    area, archive = rng.choice(["full", "center"]), bool(rng.integers(2))
    filters = str(rng.choice(["bilinear", "bicubic"]))
    config = geometry_only("everything", size, interpolation=filters)
    check(Scene.write(tmp_path, sizes, 3), config, cells, str(area), archive, grid, slack=PHASE[filters])


@pytest.mark.gpu
def test_gpu(scene):
    check(scene, geometry_only("everything"), area="center", device="cuda")
