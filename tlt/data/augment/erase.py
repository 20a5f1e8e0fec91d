"""Random erasing (arXiv:1708.04896) in timm's three modes, with noise that is a function of (key, pixel) alone.

Legend: b boxes, S rows of pixels in them, P pixels in them.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tlt.data.augment.on_device import send
from tlt.data.augment.plan import Plan

Ints = npt.NDArray[np.int64]


def erase(images: Tensor, plan: Plan, mode: str) -> Tensor:
    """Fill the boxes of the plan in normalised images (B, C, H, W) float32, contiguous, in place; later boxes win."""
    for number in range(plan.erase.shape[1]):
        rows = np.flatnonzero(plan.erase[:, number, 2:].all(1))
        if len(rows):
            _erase_boxes(images, plan.erase[rows, number], rows, plan.erase_key[rows].view(np.int64), mode, number)
    return images


def _erase_boxes(images: Tensor, boxes: Ints, images_of: Ints, keys: Ints, mode: str, number: int) -> None:
    """Fill the `number`-th boxes (b, 4) of top, left, h, w, all at once."""
    channels, height, width = images.shape[1:]
    plane = height * width
    top, left, tall, wide = boxes.T
    line = np.arange(tall.sum()) - np.repeat(np.cumsum(tall) - tall - top, tall)  # (S,) y
    length = np.repeat(wide, tall)
    first = line * width + np.repeat(left, tall) - (np.cumsum(length) - length)  # y * W + x of its pixel k is first + k
    table = np.stack([first, np.repeat(keys, tall), np.repeat(images_of * channels * plane, tall), length])  # (4, S)
    shifts, row_keys, starts, lengths = send(table, images.device)
    total = int(length.sum())
    of_line = torch.arange(len(line), device=images.device).repeat_interleave(lengths, output_size=total)  # (P,)
    pixel = torch.arange(total, device=images.device) + shifts.index_select(0, of_line)  # (P,) y * W + x
    channel = torch.arange(channels, device=images.device)[:, None]  # (C, 1)
    if mode == "pixel":
        values = normal_noise(row_keys.index_select(0, of_line), channel * plane + pixel)
    elif mode == "rand":
        values = normal_noise(row_keys, channel + channels * number).index_select(1, of_line)
    else:
        values = images.new_zeros(channels, total)
    position = starts.index_select(0, of_line) + channel * plane + pixel  # (C, P)
    images.view(-1).scatter_(0, position.flatten(), values.flatten())


def _signed(word: int) -> int:
    """A 64-bit word as torch's signed integer."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(z: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def hash_words(keys: Tensor, words: Tensor) -> Tensor:
    """`tlt.data.augment.counter`'s hash of one more word, same bits: int64 keys and words (broadcast) -> int64."""
    z = ((words + 1) * _signed(0x9E3779B97F4A7C15)).add(keys)
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return z.bitwise_xor_(_shifted(z, 31))


def normal_noise(keys: Tensor, words: Tensor) -> Tensor:
    """Standard normal float32, a function of (key, word) alone (Box-Muller on the two ends of the hash)."""
    bits = hash_words(keys, words)
    radius = _shifted(bits, 40).float().add_(0.5).mul_(2.0**-24).log_().mul_(-2).sqrt_()
    return (bits & 0xFFFFFF).float().mul_(2 * math.pi * 2.0**-24).cos_().mul_(radius)
