"""A token's label is that of what the token shows, from files (`position_code`) through the training loader, the device
stage and the target maker. A tenth of a pixel, half a cell, a flip or a transposed map that is wrong is seen."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.data.alignment import position_code as code
from tlt.api import Loader
from tlt.data.augment.plan import AugmentConfig
from tlt.data.augment.rand_augment import RandAugmentPolicy
from tlt.data.batch import Batch
from tlt.data.sources.folder import ImageFolder, scan_folder
from tlt.labels.store import LabelStore, open_labels
from tlt.labels.tree import write_map
from tlt.targets import make_targets
from tlt.tools.pack import pack

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
    sizes: list[code.Size]

    @classmethod
    def write(cls, root: Path, sizes: list[code.Size], count: int) -> "Scene":
        """`count` images of each (width, height), a class per size, in a folder per shot."""
        for shot in range(SHOTS):
            for number, (width, height) in enumerate(sizes):
                folder = root / "images" / str(shot) / f"{number}_{width}x{height}"
                folder.mkdir(parents=True)
                Image.fromarray(code.ramp_image(width, height, shot)).save(folder / "0.bmp")
                for i in range(1, count):
                    (folder / f"{i}.bmp").hardlink_to(folder / "0.bmp")
        return cls(root, [scan_folder(root / "images" / str(shot)) for shot in range(SHOTS)], sizes)

    def labels(self, cells: code.Size, area: str, archive: bool) -> LabelStore:
        names, classes = self.shots[0].paths, code.position_classes(*cells)
        tree = self.root / f"{cells[0]}x{cells[1]}"
        if not tree.exists():
            tree.mkdir()
            write_map(tree / "map.pt", code.position_map(*cells), classes)
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


def check(
    scene: Scene,
    config: AugmentConfig,
    cells: code.Size = (18, 18),
    area: str = "full",
    archive: bool = False,
    grid: code.Size = GRID,
    device: str = "cpu",
    slack: float = 0.0,
) -> code.Comparison:
    """Load a scene, and compare it with its targets: labels lie where the tokens look, up to `slack` pixels that the
    reading of the image explains, and the weight of a token is the share of it that shows labelled image."""
    batches, classes = scene.load(scene.labels(cells, area, archive), config, device), code.position_classes(*cells)
    batch = batches[0]
    made = make_targets(batch.labels, batch.affine, batch.visible, batch.classes, grid, classes, 0.0).tokens
    assert made is not None
    shown = code.read_images(torch.stack([each.images for each in batches]).cpu())
    targets = made.dense(classes).cpu(), made.weight.cpu()
    compared = code.compare(shown, *targets, grid, cells, scene.areas(batch, area))
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
def test_every_operation(scene: Scene, case: str) -> None:
    slack = PHASE["bilinear"] if case.startswith("Translate") else 0.0
    compared = check(scene, geometry_only(case), slack=slack)
    fills = case not in ("crop", "hflip", "vflip", "no_aug")
    assert (compared.cover < 1).any() == (compared.weight < 1).any() == fills


@pytest.mark.parametrize("seed", [0, 1])
def test_any_image_map_and_output(tmp_path: Path, seed: int) -> None:
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
def test_gpu(scene: Scene) -> None:
    check(scene, geometry_only("everything"), area="center", device="cuda")
