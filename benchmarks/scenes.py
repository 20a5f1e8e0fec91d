"""Scenes for `benchmark.py ablation`: a large thing in the central square names the class, two smaller ones of other
classes lie anywhere, on textured ground. What shows where is known.

Shapes: scenes of `size` (width, height) in px, n tokens in a row of what a model sees.
"""

import gzip
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tlt.errors import UserError
from tlt.io.files import blamed_on

CLASSES = 10
GROUND = 255  # in masks, where no thing lies
SHORT = 96  # px, the shorter side of scenes of digits; the shortest of products
LONG = 128
MAP = 18  # cells of a label map in a row
TOP_K = 3  # classes in each
NEAR = 4.0  # px in which a digit's weight around it falls to 1 / e
FLOOR = 0.02  # weight of what is not in the image
HALF = float(np.log((FLOOR + 0.5) / FLOOR))  # logit of a class whose digit has half the weight it has on itself
PRODUCTS = "/usr/share/datasets/fashion-mnist"  # where Debian's package has its files
Size = tuple[int, int]
Range = tuple[float, float]


class Thing(NamedTuple):
    """A thing in a scene: its class and its box in pixels."""

    number: int
    x: int
    y: int
    side: int


class Scene(NamedTuple):
    """What `Scenes.draw` gives."""

    things: list[Thing]  # the large one first
    pixels: np.ndarray  # (height, width, 3) uint8
    mask: np.ndarray  # (height, width) uint8: the class that shows there, or GROUND


@dataclass(frozen=True)
class Scenes(ABC):
    """A kind of scenes.

    Attributes:
        scale: Scenes are so many times as large.
        large, small, alone: Sides of things, in shares of the shorter side; `alone` without others.
        masks: Whether masks are written; else label maps of the truth.
    """

    scale: int = 1
    large: Range = (34 / SHORT, 48 / SHORT)
    small: Range = (20 / SHORT, 28 / SHORT)
    alone: Range = (0.4, 0.9)
    masks: bool = True

    @abstractmethod
    def pictures(self, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return uint8 pictures (N, height, width) of things, black where nothing is, and their classes (N,)."""

    @abstractmethod
    def size(self, generator: np.random.Generator, number: int) -> Size:
        """Return the size of a scene."""

    @abstractmethod
    def ground(self, generator: np.random.Generator, size: Size) -> np.ndarray:
        """Return the pixels (height, width, 3) of the ground, 0 to 255."""

    @abstractmethod
    def painted(self, generator: np.random.Generator, ink: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return opacity (side, side, 1) in 0..1 and colours (3,) or (side, side, 3) of a picture of 0..255."""

    def draw(
        self, generator: np.random.Generator, pictures: np.ndarray, classes: np.ndarray, number: int, single: bool
    ) -> Scene:
        """Draw scene `number`, or a single thing."""
        size = self.size(generator, number)
        pixels = self.ground(generator, size)
        mask = np.full(pixels.shape[:2], GROUND, np.uint8)
        things: list[Thing] = []
        others = generator.permutation(CLASSES - 1)[:2]
        own = number // 2 % CLASSES  # as many scenes of each class, as many of each class landscapes
        sides = [self.alone] if single else [self.large, self.small, self.small]
        for side, thing_class in zip(sides, [own, *(own + 1 + others) % CLASSES], strict=False):
            picture = pictures[generator.choice(np.flatnonzero(classes == thing_class))]
            for _ in range(50):
                thing = _place(generator, int(thing_class), size, side, central=not things)
                if not any(_overlap(thing, other) for other in things):
                    break
            else:
                continue  # no room is left
            things.append(thing)
            ink = np.asarray(Image.fromarray(picture).resize((thing.side,) * 2, Image.Resampling.BICUBIC))
            opacity, colour = self.painted(generator, ink)
            window = np.s_[thing.y : thing.y + thing.side, thing.x : thing.x + thing.side]
            pixels[window] = pixels[window] * (1 - opacity) + colour * opacity
            mask[window][opacity[..., 0] >= 0.5] = thing.number
        return Scene(things, pixels.clip(0, 255).astype(np.uint8), mask)

    def write(
        self, root: Path, train: int, validation: int, side: int, n: int, seed: int = 0, single: bool = False
    ) -> None:
        """Write image folders `train` and `val`, masks or label maps of the truth beside them, and `validation.pt`: the
        central squares of the latter in `side` px, their classes, and the class of each of n x n tokens, -1 where less
        than half of it shows one. Another `seed` draws others."""
        held: list[tuple[Tensor, int, Tensor]] = []
        for split, count in (("train", train), ("val", validation)):
            pictures, classes = self.pictures(split == "val")
            for number in range(count):
                generator = np.random.default_rng([split == "val", number, seed])
                scene = self.draw(generator, pictures, classes, number, single)
                image = Image.fromarray(scene.pixels)
                beside = "drawn" if self.masks else "truth"
                folders = [root / folder / str(scene.things[0].number) for folder in (split, f"{split}-{beside}")]
                for folder in folders:
                    folder.mkdir(parents=True, exist_ok=True)
                image.save(folders[0] / f"{number:05}.png")
                if self.masks:
                    Image.fromarray(scene.mask).save(folders[1] / f"{number:05}.png")
                else:
                    torch.save(torch.from_numpy(truth(scene.things, image.size)), folders[1] / f"{number:05}.pt")
                if split == "val":
                    square = _central(image.size)
                    seen = np.array(image.resize((side, side), Image.Resampling.BICUBIC, square))
                    names = shown(scene.mask, square, n) if self.masks else named(scene, image.size, square, n)
                    own = scene.things[0].number
                    held.append((torch.from_numpy(seen).permute(2, 0, 1), own, torch.from_numpy(names)))
        images, numbers, tokens = zip(*held, strict=True)
        torch.save([torch.stack(images), torch.tensor(numbers), torch.stack(tokens)], root / "validation.pt")


class Digits(Scenes):
    """scikit-learn's scans of digits."""

    def pictures(self, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
        from sklearn.datasets import load_digits

        scans = load_digits()
        rows = (np.arange(len(scans.target)) % 5 == 0) == held_out
        return np.uint8(scans.images[rows] * 255 / 16), scans.target[rows]

    def size(self, generator: np.random.Generator, number: int) -> Size:
        width, height = (SHORT, LONG) if number % 2 else (LONG, SHORT)
        return width * self.scale, height * self.scale

    def ground(self, generator: np.random.Generator, size: Size) -> np.ndarray:
        width, height = size
        coarse = generator.integers(20, 140, (height // 12 + 1, width // 12 + 1, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), float)
        return smooth + generator.normal(0, 12, (height, width, 1))

    def painted(self, generator: np.random.Generator, ink: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (ink / 255.0)[..., None], generator.uniform(150, 255, 3)


@dataclass(frozen=True)
class Products(Scenes):
    """Photographs of products (Fashion-MNIST, MIT licence), tinted, of which each has 28 px."""

    folder: str = PRODUCTS
    large: Range = (0.5, 0.65)
    small: Range = (0.22, 0.3)

    def pictures(self, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
        kind = "t10k" if held_out else "train"
        return self._read(f"{kind}-images-idx3-ubyte", 16, (28, 28)), self._read(f"{kind}-labels-idx1-ubyte", 8, ())

    def _read(self, name: str, start: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the bytes (N, *shape) of an idx file, packed or not. Raise UserError."""
        file = next((file for file in Path(self.folder).glob(f"{name}*")), None)
        if file is None:
            raise UserError(
                f"{self.folder} has no {name}.gz: apt-get install dataset-fashion-mnist, or name a folder that has the "
                "four files by --products FOLDER"
            )
        with blamed_on(file), gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
            return np.frombuffer(content.read(), np.uint8, offset=start).reshape(-1, *shape)

    def size(self, generator: np.random.Generator, number: int) -> Size:
        width, height = (int(side) * 16 * self.scale for side in generator.integers(6, 11, 2))
        return width, height

    def ground(self, generator: np.random.Generator, size: Size) -> np.ndarray:
        y, x = np.mgrid[: size[1], : size[0]]
        angle = generator.uniform(0, np.pi)
        along = x * np.cos(angle) + y * np.sin(angle)
        step = generator.uniform(6, 30)
        coarse = Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8))
        textures = (
            (along - along.min()) / np.ptp(along),  # from one colour to the other
            (np.sin(along * 2 * np.pi / step) + 1) / 2,  # stripes
            np.asarray(coarse.resize(size, Image.Resampling.BICUBIC)) / 255,  # spots
            (x // step + y // step) % 2,  # checks
        )
        share = textures[generator.integers(len(textures))][..., None]
        one, two = generator.uniform(0, 120, (2, 3))
        return one + (two - one) * share + generator.normal(0, generator.uniform(0, 15), (*share.shape[:2], 3))

    def painted(self, generator: np.random.Generator, ink: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.clip(ink / 40, 0, 1)[..., None], 100 + ink[..., None] * generator.uniform(0.2, 0.6, 3)


def _place(generator: np.random.Generator, number: int, size: Size, sides: Range, central: bool) -> Thing:
    short = min(size)
    low, high = (round(share * short) for share in sides)
    side = int(generator.integers(low, high))
    # The large thing lies in the central square, which validation sees.
    free = [(short if central else length, length) for length in size]
    x, y = (int(generator.integers(0, room - side + 1)) + (length - room) // 2 for room, length in free)
    return Thing(number, x, y, side)


def _overlap(one: Thing, two: Thing) -> bool:
    apart = (abs(a + one.side / 2 - b - two.side / 2) for a, b in ((one.x, two.x), (one.y, two.y)))
    return max(apart) < (one.side + two.side) / 2 - 2


def _central(size: Size) -> tuple[int, int, int, int]:
    """Return the central square, (left, top, right, bottom)."""
    short = min(size)
    left, top = ((length - short) // 2 for length in size)
    return left, top, left + short, top + short


def shown(mask: np.ndarray, square: tuple[int, int, int, int], n: int) -> np.ndarray:
    """Return the class (n * n,) that at least half the pixels of each token of a square have, or -1."""
    left, top, right, bottom = square
    seen = mask[top:bottom, left:right]
    place = ((np.arange(len(seen)) + 0.5) * n // len(seen)).astype(int)
    token = place[:, None] * n + place
    counts = np.bincount((token * 256 + seen).ravel(), minlength=n * n * 256).reshape(n * n, 256)
    best = counts[:, :CLASSES].argmax(1)
    return np.where(2 * counts[np.arange(n * n), best] >= counts.sum(1), best, -1)


def named(scene: Scene, size: Size, square: tuple[int, int, int, int], n: int) -> np.ndarray:
    """Return the class (n * n,) that the truth gives the centre of each token of a square, or -1."""
    logits, ids = truth(scene.things, size)[:, 0]
    centres = (np.arange(n) + 0.5) / n * min(size)
    columns, rows = (
        ((start + centres) / length * MAP).astype(int) for start, length in zip(square, size, strict=False)
    )
    return np.where(logits > HALF, ids, -1)[rows[:, None], columns].astype(int).ravel()


def truth(things: Sequence[Thing], size: Size) -> np.ndarray:
    """Return the label map of a scene of `size` (width, height) as logits and class ids (2, TOP_K, MAP, MAP): in each
    cell the things' classes by their distance, as an annotator with a receptive field sees them."""
    x, y = ((np.arange(MAP) + 0.5) * length / MAP for length in size)
    weights = np.full((CLASSES, MAP, MAP), FLOOR)
    for thing in things:
        dx = np.maximum(0, np.abs(x - thing.x - thing.side / 2) - thing.side / 2)[None, :]
        dy = np.maximum(0, np.abs(y - thing.y - thing.side / 2) - thing.side / 2)[:, None]
        weights[thing.number] += np.exp(-np.hypot(dx, dy) / NEAR)
    ids = np.argsort(-weights, 0, kind="stable")[:TOP_K]
    # Classes that are not listed have logit 0, which is the floor's.
    return np.stack([np.log(np.take_along_axis(weights, ids, 0) / FLOOR), ids]).astype(np.float16)
