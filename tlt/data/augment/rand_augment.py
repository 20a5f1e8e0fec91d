"""Draws the operations of RandAugment (Cubuk et al. 2019, arXiv:1909.13719) and their arguments, as timm does.

`parse` reads timm's strings (`rand-m9-mstd0.5-inc1`); `sample_layers` turns uniform numbers into operations for a whole
batch. `operations.py` applies those that change colours to pixels; `plan.py` turns the others into maps.
"""

import math
import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tlt.data.augment.counter import Floats, Ints
from tlt.errors import UserError

LEVELS = 10.0  # timm's magnitudes run from 0 to 10 unless `mmax` raises the bound


class Kernel(IntEnum):
    """Numbers the operations of the device stage. 0 is none; those below ROTATE change colours, the others geometry."""

    NONE = 0
    AUTO_CONTRAST = 1
    EQUALIZE = 2
    INVERT = 3
    POSTERIZE = 4  # argument: bits kept
    SOLARIZE = 5  # argument: threshold, values from it on are inverted
    SOLARIZE_ADD = 6  # argument: added to values below 128
    COLOR = 7  # argument: saturation factor, 0 grey, 1 unchanged
    CONTRAST = 8  # argument: factor
    BRIGHTNESS = 9  # argument: factor
    SHARPNESS = 10  # argument: factor
    ROTATE = 20  # argument: degrees
    SHEAR_X = 21  # argument: factor
    SHEAR_Y = 22
    TRANSLATE_X = 23  # argument: pixels / image width
    TRANSLATE_Y = 24  # argument: pixels / image height


class Op(NamedTuple):
    """Says how timm computes an operation's argument: clip(offset + sign * (level / 10 * scale), low, high).

    With `sign` 0 the sign is drawn; `whole` truncates the product in brackets to an integer.
    """

    kernel: Kernel
    scale: float = 0.0
    offset: float = 0.0
    sign: int = 1
    whole: bool = False
    low: float = -math.inf
    high: float = math.inf


# timm 1.0.31, LEVEL_TO_ARG: the operations that a policy string can name.
OPS: dict[str, Op] = {
    "AutoContrast": Op(Kernel.AUTO_CONTRAST),
    "Equalize": Op(Kernel.EQUALIZE),
    "Invert": Op(Kernel.INVERT),
    "Rotate": Op(Kernel.ROTATE, 30.0, sign=0),
    "Posterize": Op(Kernel.POSTERIZE, 4.0, whole=True),
    "PosterizeIncreasing": Op(Kernel.POSTERIZE, 4.0, offset=4.0, sign=-1, whole=True),
    "Solarize": Op(Kernel.SOLARIZE, 256.0, whole=True, high=256.0),
    "SolarizeIncreasing": Op(Kernel.SOLARIZE, 256.0, offset=256.0, sign=-1, whole=True, low=0.0),
    "SolarizeAdd": Op(Kernel.SOLARIZE_ADD, 110.0, whole=True, high=128.0),
    "Color": Op(Kernel.COLOR, 1.8, offset=0.1),
    "ColorIncreasing": Op(Kernel.COLOR, 0.9, offset=1.0, sign=0, low=0.1),
    "Contrast": Op(Kernel.CONTRAST, 1.8, offset=0.1),
    "ContrastIncreasing": Op(Kernel.CONTRAST, 0.9, offset=1.0, sign=0, low=0.1),
    "Brightness": Op(Kernel.BRIGHTNESS, 1.8, offset=0.1),
    "BrightnessIncreasing": Op(Kernel.BRIGHTNESS, 0.9, offset=1.0, sign=0, low=0.1),
    "Sharpness": Op(Kernel.SHARPNESS, 1.8, offset=0.1),
    "SharpnessIncreasing": Op(Kernel.SHARPNESS, 0.9, offset=1.0, sign=0, low=0.1),
    "ShearX": Op(Kernel.SHEAR_X, 0.3, sign=0),
    "ShearY": Op(Kernel.SHEAR_Y, 0.3, sign=0),
    "TranslateXRel": Op(Kernel.TRANSLATE_X, 0.45, sign=0),
    "TranslateYRel": Op(Kernel.TRANSLATE_Y, 0.45, sign=0),
}
NAMES = tuple(OPS)
_KERNEL, _SCALE, _OFFSET, _SIGN, _WHOLE, _LOW, _HIGH = map(np.array, zip(*OPS.values(), strict=True))

_GEOMETRIC = ("ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
_COLOURS = ("Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast", "Brightness", "Sharpness")
_PLAIN = ("AutoContrast", "Equalize", "Invert", "Rotate", *_COLOURS, *_GEOMETRIC)
_INCREASING = tuple(name + "Increasing" if name + "Increasing" in OPS else name for name in _PLAIN)
_WEIGHTS: dict[str, float] = {  # of `tweights`
    **{"Rotate": 3, "ShearX": 2, "ShearY": 2, "TranslateXRel": 1, "TranslateYRel": 1},
    **{"ColorIncreasing": 0.25, "SharpnessIncreasing": 0.25, "AutoContrast": 0.25},
    **{"SolarizeIncreasing": 0.05, "SolarizeAdd": 0.05, "ContrastIncreasing": 0.05, "BrightnessIncreasing": 0.05},
    **{"Equalize": 0.05, "PosterizeIncreasing": 0.05, "Invert": 0.05},
}


@dataclass(frozen=True)
class RandAugmentPolicy:
    """Holds a parsed RandAugment string. Magnitudes are tenths of the full strength (0..10, up to `magnitude_max`)."""

    ops: tuple[str, ...] = _PLAIN
    layers: int = 2
    magnitude: float = LEVELS
    magnitude_std: float = 0.0  # inf: uniform in [0, magnitude]
    magnitude_max: float = LEVELS
    probability: float = 0.5
    weights: tuple[float, ...] | None = None  # None: uniform with replacement; else weighted without, as in timm

    @property
    def uniforms(self) -> int:
        """Return how many uniform numbers `sample_layers` needs for each sample."""
        return 5 * self.layers + (self.layers if self.weights is None else len(self.ops))


@lru_cache(maxsize=16)
def parse(policy: str) -> RandAugmentPolicy:
    """Parse timm's RandAugment string, with sections in any order: m (magnitude, 10), n (layers, 2), p (chance of a
    layer, 0.5), mstd (0; over 100: uniform), mmax (10), inc (0), tweights (rarer operations that change colours). Raise
    UserError if the string is another policy (original, v0, augmix, 3a), or a section is unknown, repeated or no
    number."""
    head, *sections = policy.split("-")
    if head != "rand":
        raise _reject(policy, f"'{head}' is not available: RandAugment (rand-...) is the one policy of this loader")
    options: dict[str, str] = {}
    for section in sections:
        match = re.fullmatch(r"(mstd|mmax|inc|[mnpt])(\d.*|weights)", section)
        if match is None or (match[1] == "t") != (match[2] == "weights"):
            known = "m, n, p, mstd, mmax and inc with a number, and tweights"
            raise _reject(policy, f"'{section}' is not a section of a RandAugment policy; there are {known}")
        name, value = match.groups()
        if name in options:
            raise _reject(policy, f"'{name}' is given twice")
        options[name] = value
    try:
        std = float(options.get("mstd", 0))
        layers = int(options.get("n", 2))
        ops = _INCREASING if int(options.get("inc", 0)) else _PLAIN
        if "t" in options and layers > len(_WEIGHTS):
            raise _reject(policy, f"{layers} of {len(_WEIGHTS)} weighted operations can't be drawn: lower n")
        return RandAugmentPolicy(
            ops=tuple(_WEIGHTS) if "t" in options else ops,
            weights=tuple(_WEIGHTS.values()) if "t" in options else None,
            layers=layers,
            magnitude=float(int(options.get("m", 10))),
            magnitude_std=math.inf if std > 100 else std,
            magnitude_max=float(int(options.get("mmax", 0)) or LEVELS),  # timm reads mmax0 as "not set"
            probability=float(options.get("p", 0.5)),
        )
    except ValueError as error:
        raise _reject(policy, f"m, n, mmax and inc are whole numbers, mstd and p are numbers ({error})") from None


def _reject(policy: str, reason: str) -> UserError:
    return UserError(f"--aa {policy}: {reason} (example: rand-m9-mstd0.5-inc1)")


def arguments(ops: Ints, levels: Floats, sign_draw: Floats) -> Floats:
    """Compute the argument of each operation. `ops` are positions in `NAMES`, `levels` magnitudes of 0..10 or more. A
    uniform `sign_draw` above 0.5 negates if timm draws the sign. All arrays have one shape."""
    amount = levels / LEVELS * _SCALE[ops]
    amount = np.where(_WHOLE[ops], np.trunc(amount), amount)
    sign = np.where(_SIGN[ops] == 0, np.where(sign_draw > 0.5, -1.0, 1.0), _SIGN[ops])
    return np.clip(_OFFSET[ops] + sign * amount, _LOW[ops], _HIGH[ops])


def sample_layers(policy: RandAugmentPolicy, draws: Floats) -> tuple[Ints, Floats]:
    """Turn uniform numbers (B, policy.uniforms) into kernels (B, n), NONE for skipped layers, and arguments (B, n)."""
    n = policy.layers
    # The fifth n of the draws are not used. Without them, resumed runs would get other augmentation.
    skip, radius, angle, sign, _, choice = np.split(draws, n * np.arange(1, 6), axis=1)
    if policy.weights is None:
        chosen = np.minimum((choice * len(policy.ops)).astype(np.int64), len(policy.ops) - 1)
    else:  # an exponential race: the order of arrival is that of weighted draws without replacement
        arrival = -np.log1p(-choice) / (np.asarray(policy.weights) / math.fsum(policy.weights))
        chosen = np.argsort(arrival, axis=1, kind="stable")[:, :n]
    if math.isinf(policy.magnitude_std):
        levels = policy.magnitude * radius
    else:  # Box-Muller
        gauss = np.sqrt(-2.0 * np.log1p(-radius)) * np.cos(2.0 * np.pi * angle)
        levels = policy.magnitude + policy.magnitude_std * gauss
    ops = np.array([NAMES.index(name) for name in policy.ops], np.int64)[chosen]
    values = arguments(ops, np.clip(levels, 0.0, policy.magnitude_max), sign)
    active = skip < policy.probability
    return np.where(active, _KERNEL[ops], Kernel.NONE), np.where(active, values, 0.0)
