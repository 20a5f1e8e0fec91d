"""Made-up scenes of which it is known what is where: scans of digits on textured ground, with label maps of the truth.

Every image has one large digit, which names its class, inside the central square, and two smaller ones of other
classes anywhere. Half of the images are landscapes (4:3), half portraits (3:4). Digits of training and of validation
are other scans.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.feed.labels import Sizes, write_archive
from tlt.label_map import LabelMap

CLASSES = 10
LONG, SHORT = 128, 96  # px
MAP = 18  # cells of a label map in a row
TOP_K = 3
_LARGE, _SMALL = (34, 48), (20, 28)  # px, sides of digits
_NEAR = 4.0  # px, over which a digit's share of the labels around it falls to 1 / e
_FLOOR = 0.02  # weight of the classes that are not in the image
HALF = float(np.log((_FLOOR + 0.5) / _FLOOR))  # logit of a class whose digit has half the weight it has on itself

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Digit:
    """A digit in a scene: its class and its box in pixels, x0, y0 and side."""

    number: int
    x: int
    y: int
    side: int


def write_scenes(root: Path, train: int, validation: int) -> None:
    """Write image folders `train` and `val`, and label archives of the truth: `train-truth`, `val-truth`, and
    `train-center`, whose maps cover the central square of the image, as those of annotators that see only this do."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    held_out = np.arange(len(scans.target)) % 5 == 0
    for split, count, rows in (("train", train, ~held_out), ("val", validation, held_out)):
        scenes = {}
        for number in range(count):
            generator = np.random.default_rng([split == "val", number])
            digits, pixels = draw_scene(generator, scans.images[rows], scans.target[rows], number)
            path = root / split / str(digits[0].number) / f"{number:05}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
            scenes[str(path.relative_to(root / split))] = digits, (pixels.shape[1], pixels.shape[0])
        names, sizes = sorted(scenes), Sizes(count, TOP_K, (MAP, MAP), CLASSES)
        write_archive(root / f"{split}-truth", names, sizes, (truth(*scenes[name]) for name in names))
        if split == "train":
            write_archive(root / "train-center", names, sizes, (truth(*scenes[name], center=True) for name in names))


def draw_scene(
    generator: np.random.Generator, scans: Floats, numbers: npt.NDArray[np.int64], number: int
) -> tuple[list[Digit], npt.NDArray[np.uint8]]:
    """Return the digits of scene `number`, the large one first, and its pixels (height, width, 3)."""
    width, height = (SHORT, LONG) if number % 2 else (LONG, SHORT)
    pixels = _ground(generator, width, height)
    digits: list[Digit] = []
    others = generator.permutation(CLASSES - 1)[:2]
    own = number // 2 % CLASSES  # as many scenes of each class, as many of them landscapes
    for place, digit_class in enumerate([own, *(own + 1 + others) % CLASSES]):
        scan = scans[generator.choice(np.flatnonzero(numbers == digit_class))]
        for _ in range(50):
            digit = _place(generator, int(digit_class), (width, height), large=place == 0)
            if not any(_overlap(digit, other) for other in digits):
                break
        else:
            continue  # no room is left
        digits.append(digit)
        ink = np.asarray(Image.fromarray(np.uint8(scan * 255 / 16)).resize((digit.side,) * 2, Image.Resampling.BICUBIC))
        opacity = (ink / 255.0)[..., None]
        colour = generator.uniform(150, 255, 3)
        window = pixels[digit.y : digit.y + digit.side, digit.x : digit.x + digit.side]
        window[:] = window * (1 - opacity) + colour * opacity
    return digits, pixels.clip(0, 255).astype(np.uint8)


def _ground(generator: np.random.Generator, width: int, height: int) -> Floats:
    coarse = generator.integers(20, 140, (height // 12 + 1, width // 12 + 1, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), float)
    return smooth + generator.normal(0, 12, (height, width, 1))


def _place(generator: np.random.Generator, number: int, size: tuple[int, int], large: bool) -> Digit:
    side = int(generator.integers(*(_LARGE if large else _SMALL)))
    # The large digit lies in the central square, which validation sees.
    free = [SHORT if large else length for length in size]
    x, y = (
        int(generator.integers(0, room - side + 1)) + (length - room) // 2
        for room, length in zip(free, size, strict=True)
    )
    return Digit(number, x, y, side)


def _overlap(one: Digit, two: Digit) -> bool:
    near = (one.side + two.side) / 2 - 2
    return (
        max(abs(one.x + one.side / 2 - two.x - two.side / 2), abs(one.y + one.side / 2 - two.y - two.side / 2)) < near
    )


def truth(digits: list[Digit], size: tuple[int, int], center: bool = False) -> LabelMap:
    """Return the label map of a scene of `size` (width, height), or of its central square: in each cell the digits'
    classes by their distance, as an annotator with a receptive field sees them; of the ground, all classes alike."""
    covered = [min(size) if center else length for length in size]
    x, y = (
        (length - part) / 2 + (np.arange(MAP) + 0.5) * part / MAP for length, part in zip(size, covered, strict=True)
    )
    weights = np.full((CLASSES, MAP, MAP), _FLOOR)
    for digit in digits:
        dx = np.maximum(0, np.abs(x - digit.x - digit.side / 2) - digit.side / 2)[None, :]
        dy = np.maximum(0, np.abs(y - digit.y - digit.side / 2) - digit.side / 2)[:, None]
        weights[digit.number] += np.exp(-np.hypot(dx, dy) / _NEAR)
    ids = np.argsort(-weights, 0, kind="stable")[:TOP_K]
    # Classes that are not listed have logit 0, which is the floor's.
    values = np.log(np.take_along_axis(weights, ids, 0) / _FLOOR)
    return LabelMap(values.astype(np.float16), ids.astype(np.int32))
