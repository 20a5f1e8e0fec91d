"""Draws random numbers without state: each is a hash of (seed, epoch, index, stream, position).

The hash is splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), chained
over the words. Equal words give equal numbers on every machine and device, in batches of any composition. A 64-bit word
is held in one of torch's signed integers.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


def _signed(word: int) -> int:
    """Return the lower 64 bits of an integer of any sign and size, as a signed integer."""
    return ((word + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


_GAMMA, _MIX_1, _MIX_2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shift to the right and fill with zeros, also where the word is negative."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mix(z: Tensor) -> Tensor:
    """Apply splitmix64's finaliser, a bijection of 64-bit words, to each element."""
    z = (z ^ _shifted(z, 30)).mul_(_MIX_1)
    z.bitwise_xor_(_shifted(z, 27)).mul_(_MIX_2)
    return z.bitwise_xor_(_shifted(z, 31))


def absorb(state: Tensor | int, word: Tensor) -> Tensor:
    """Return the hash of the words in `state` and one more (both are 64-bit words, broadcast)."""
    return _mix(((word + 1) * _GAMMA).add(state))


def _words(values: npt.ArrayLike | int) -> Tensor:
    """Turn integers into words, at least one-dimensional."""
    if isinstance(values, int):
        return torch.tensor([_signed(values)], device="cpu")
    return torch.from_numpy(np.atleast_1d(np.asarray(values, np.int64)))


def _hash(seed: int, *words: npt.ArrayLike | int) -> Tensor:
    state = _mix(_words(seed) + _GAMMA)
    for word in words:
        state = absorb(state, _words(word))
    return state


def keys(seed: int, *words: npt.ArrayLike | int) -> npt.NDArray[np.uint64]:
    """Hash (seed, *words) to uint64 keys, at least one-dimensional; words are integers or arrays of them, broadcast."""
    return _hash(seed, *words).numpy().view(np.uint64)


def key(seed: int, *words: int) -> int:
    """Hash integers to one key, for instance to seed `numpy.random.Philox(key=...)`."""
    return int(keys(seed, *words)[0])


def uniform(seed: int, epoch: int, indices: npt.ArrayLike, stream: int, k: int) -> Floats:
    """Return (B, k) float64 in [0, 1) of 53 bits each, a function of (seed, epoch, index, stream) alone.

    Each use has a `stream` of its own: two streams of one sample are independent.
    """
    bits = absorb(_hash(seed, epoch, indices, stream)[:, None], torch.arange(k))
    return (_shifted(bits, 11).double() * 2.0**-53).numpy()


def normal_noise(key: Tensor | int, words: Tensor) -> Tensor:
    """Return standard normal float32 on the device of the words, each a function of a signed key and a word (broadcast)
    alone: Box-Muller takes the two ends of their hash."""
    bits = absorb(key, words)
    radius = _shifted(bits, 40).float().add_(0.5).mul_(2.0**-24).log_().mul_(-2).sqrt_()
    return (bits & 0xFFFFFF).float().mul_(2 * math.pi * 2.0**-24).cos_().mul_(radius)
