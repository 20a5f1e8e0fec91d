"""Random numbers without state: each is a hash of (seed, epoch, index, stream, position).

The hash is splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), chained
over the words. Equal words give equal numbers on every machine, for every numpy version, in batches of any composition.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInts = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = (np.uint64(shift) for shift in (27, 30, 31, 11))


def _mix(z: UInts) -> UInts:
    """splitmix64's finaliser: a bijection of 64-bit words, elementwise. Writes into `z`."""
    z ^= z >> _S30
    z *= _MIX_1
    z ^= z >> _S27
    z *= _MIX_2
    z ^= z >> _S31
    return z


def _absorb(state: UInts, word: UInts) -> UInts:
    """The state after one more word (both broadcast)."""
    return _mix(state + (word + np.uint64(1)) * _GAMMA)


def _words(values: npt.ArrayLike | int) -> UInts:
    """Integers of any sign and size as 64-bit words (two's complement), at least one-dimensional."""
    if isinstance(values, int):
        return np.array([values & _MASK], np.uint64)
    return np.atleast_1d(np.asarray(values)).astype(np.int64, copy=False).view(np.uint64)


def keys(seed: int, *words: npt.ArrayLike | int) -> UInts:
    """Hash (seed, *words) to uint64 keys, at least one-dimensional; words are integers or arrays of them, broadcast."""
    state = _mix(_words(seed) + _GAMMA)
    for word in words:
        state = _absorb(state, _words(word))
    return state


def key(seed: int, *words: int) -> np.uint64:
    """One uint64 key of integers, for instance to seed `numpy.random.Philox(key=int(...))`."""
    return np.uint64(keys(seed, *words)[0])


def uniform(seed: int, epoch: int, indices: npt.ArrayLike, stream: int, k: int) -> npt.NDArray[np.float64]:
    """k numbers in [0, 1) per sample, a function of (seed, epoch, index, stream) alone -> (B, k) float64, 53 bits each.

    `stream` separates uses: two streams of one sample are independent.
    """
    state = keys(seed, epoch, indices, stream)
    bits = _absorb(state[:, None], np.arange(k, dtype=np.uint64)[None])
    return (bits >> _S11) * 2.0**-53
