"""Triton programs of outlook attention for windows of 3 x 3 pixels, 2 apart, 1 pixel of padding. Imports Triton.

Window (i, j) reads and writes its places 0..8 = 3 ky + kx, the pixels (2i - 1 + ky, 2j - 1 + kx). Cell (i, j) consists
of the four pixels (2i, 2j) to (2i + 1, 2j + 1), called first, second, third and fourth. Nine pairs of window and place
lie in each cell, and each pair lies in exactly one cell:

                          first   second   third   fourth
    window (i, j)         4       5        7       8
    window (i, j + 1)             3                6
    window (i + 1, j)                      1       2
    window (i + 1, j + 1)                          0

So a program that owns a block of cells (in raster order, from image to image) gathers all that windows write to them:
it needs no atomics, and every sum has a fixed order. The backward pass gathers in the same way with transposed weights.
Only pixels near the block are also read by other programs, mostly from caches: neighbouring programs compute the heads
of the same block, which lie side by side in memory. Sums are float32.

    v, out, grad, grad_v   (B, H, W, heads * D)
    logits, grad_logits    (B, h, w, heads * 81): 9 times place written, plus place read
    lse                    (heads, 9, B * h * w) float32: log2 of the sum of exp2 over each row of scaled logits

Logits may reach 2^30. exp2(logit * scale - largest) is one multiply-add, so for a row's largest logit the exponent is
the rounding error of its product. Beyond 2^31 that overflows. At 30,000, weights computed from lse are exact to 1e-3.

A cell and its own window have the same number. A program computes BLOCK of them. D is the number of channels per head.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ("height", "width", "rows", "columns", "cells", "heads")  # not specialised: one compiled program serves all


@triton.jit
def cells_of_program(cells, heads, BLOCK: tl.constexpr):
    """Return the numbers of BLOCK cells; the last program repeats the last cell, and writes the same each time."""
    return tl.minimum(tl.program_id(0) // heads * BLOCK + tl.arange(0, BLOCK), cells - 1)


@triton.jit
def position(number, rows, columns):
    """Return image, row and column of cells (or windows). This takes two divisions, which are slow."""
    image = number // (rows * columns)
    in_image = number - image * (rows * columns)
    row = in_image // columns
    return image, row, in_image - row * columns


@triton.jit
def first_pixels(image, row, column, height, width, heads, head, D: tl.constexpr):
    """Return the offsets (BLOCK, D) of the cells' first pixels in v; other pixels are at fixed distances from them."""
    pixel = (image * height + 2 * row) * width + 2 * column
    return pixel.to(tl.int64)[:, None] * (heads * D) + (head * D + tl.arange(0, D))[None, :]


@triton.jit
def in_image(row, column, height, width, DOWN: tl.constexpr, RIGHT: tl.constexpr):
    """Return, for each of the nine places of the windows (DOWN, RIGHT) of each cell, a mask (BLOCK,) of real pixels.

    All are False if there is no such window, because its centre, the first pixel of that cell, is outside the image.
    """
    there = (2 * (row + DOWN) < height) & (2 * (column + RIGHT) < width)
    inside = ()
    for k in tl.static_range(9):
        y = 2 * (row + DOWN) - 1 + k // 3
        x = 2 * (column + RIGHT) - 1 + k % 3
        inside = inside + (there & (y >= 0) & (y < height) & (x >= 0) & (x < width),)
    return inside


@triton.jit
def read_window(
    pixels, lse, row, column, height, width, cells, channels,
    DOWN: tl.constexpr, RIGHT: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Return the nine places of these windows, (BLOCK, D) each, 0 outside the image; for the backward pass also lse of
    the nine rows. `pixels` points to the cells' first pixels and `lse` to the windows."""
    inside = in_image(row, column, height, width, DOWN, RIGHT)
    values = ()
    sums = ()
    for k in tl.static_range(9):
        away = ((2 * DOWN - 1 + k // 3) * width + 2 * RIGHT - 1 + k % 3) * channels
        values = values + (tl.load(pixels + away, mask=inside[k][:, None], other=0.0).to(tl.float32),)
        if BACKWARD:
            sums = sums + (tl.load(lse + k * cells),)
    return values, sums


@triton.jit
def add_window(pixels, window, sums, values, scale_log2e, PLACE: tl.constexpr, BACKWARD: tl.constexpr):
    """Add what windows write to their PLACE: `values` times row PLACE of their weights, the softmax of their logits.

    In the backward pass, add the gradient of what they read there: `values` times column PLACE, computed from `sums`.
    """
    weights = ()
    if BACKWARD:
        for p in tl.static_range(9):
            logit = tl.load(window + p * 9 + PLACE).to(tl.float32)
            weights = weights + (tl.exp2(logit * scale_log2e - sums[p]),)
    else:
        row = ()
        for q in tl.static_range(9):
            row = row + (tl.load(window + PLACE * 9 + q).to(tl.float32),)
        top = row[0]
        for q in tl.static_range(1, 9):
            top = tl.maximum(top, row[q])
        top *= scale_log2e
        powers = ()
        total = tl.zeros_like(top)
        for q in tl.static_range(9):
            power = tl.exp2(row[q] * scale_log2e - top)
            powers = powers + (power,)
            total += power
        share = 1.0 / total
        for q in tl.static_range(9):
            weights = weights + (powers[q] * share,)
    for k in tl.static_range(9):
        pixels += weights[k][:, None] * values[k]
    return pixels


@triton.jit
def store_cells(pixels, inside, first, second, third, fourth, width, channels):
    """Write the four pixels of each cell that lie in the image: the places 4, 5, 7 and 8 of the cell's own window."""
    kind = pixels.dtype.element_ty
    tl.store(pixels, first.to(kind), mask=inside[4][:, None])
    tl.store(pixels + channels, second.to(kind), mask=inside[5][:, None])
    tl.store(pixels + width * channels, third.to(kind), mask=inside[7][:, None])
    tl.store(pixels + (width + 1) * channels, fourth.to(kind), mask=inside[8][:, None])


@triton.jit
def gather(
    source, out, logits, lse, height, width, rows, columns, cells, heads, scale_log2e,
    D: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Write to `out`, for BLOCK cells and one head, what the windows make of `source`: the values in the forward pass,
    or the gradient of the output in the backward pass, which also needs `lse`."""
    head = tl.program_id(0) % heads
    number = cells_of_program(cells, heads, BLOCK)
    image, row, column = position(number, rows, columns)
    right = tl.where(column + 1 < columns, 1, 0)
    below = tl.where(row + 1 < rows, columns, 0)
    pixel = first_pixels(image, row, column, height, width, heads, head, D)
    # For a missing neighbour this window's weights are read, and multiply pixels that are all 0.
    window = logits + (number.to(tl.int64) * heads + head) * 81
    if BACKWARD:
        lse += head.to(tl.int64) * 9 * cells + number

    # The window with most places comes last, so that few registers hold sums until then.
    size = (row, column, height, width, cells, heads * D)
    zero = tl.zeros([BLOCK, D], tl.float32)
    values, sums = read_window(source + pixel, lse + right + below, *size, 1, 1, BACKWARD)
    diagonal = window + (right + below) * heads * 81
    fourth = add_window(zero, diagonal, sums, values, scale_log2e, 0, BACKWARD)
    values, sums = read_window(source + pixel, lse + below, *size, 1, 0, BACKWARD)
    third = add_window(zero, window + below * heads * 81, sums, values, scale_log2e, 1, BACKWARD)
    fourth = add_window(fourth, window + below * heads * 81, sums, values, scale_log2e, 2, BACKWARD)
    values, sums = read_window(source + pixel, lse + right, *size, 0, 1, BACKWARD)
    second = add_window(zero, window + right * heads * 81, sums, values, scale_log2e, 3, BACKWARD)
    fourth = add_window(fourth, window + right * heads * 81, sums, values, scale_log2e, 6, BACKWARD)
    values, sums = read_window(source + pixel, lse, *size, 0, 0, BACKWARD)
    first = add_window(zero, window, sums, values, scale_log2e, 4, BACKWARD)
    second = add_window(second, window, sums, values, scale_log2e, 5, BACKWARD)
    third = add_window(third, window, sums, values, scale_log2e, 7, BACKWARD)
    fourth = add_window(fourth, window, sums, values, scale_log2e, 8, BACKWARD)
    inside = in_image(row, column, height, width, 0, 0)
    store_cells(out + pixel, inside, first, second, third, fourth, width, heads * D)


@triton.jit(do_not_specialize=SIZES)
def outlook_forward(
    v, logits, out, height, width, rows, columns, cells, heads, scale_log2e, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute `out` for BLOCK cells and one head."""
    gather(v, out, logits, out, height, width, rows, columns, cells, heads, scale_log2e, D, BLOCK, False)


@triton.jit(do_not_specialize=SIZES)
def outlook_backward_logits(
    grad, v, logits, grad_logits, lse, height, width, rows, columns, cells, heads, scale, scale_log2e,
    D: tl.constexpr, BLOCK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute grad_logits and lse for BLOCK windows and one head.

    With the weights A and dA = grad times values of the places, grad_logits = A * (dA - sum of A * dA over the row).
    """
    head = tl.program_id(0) % heads
    number = cells_of_program(cells, heads, BLOCK)
    place = tl.arange(0, 16)  # only the first 9 exist
    image, row, column = position(number, rows, columns)
    y = (2 * row - 1)[:, None] + (place // 3)[None, :]
    x = (2 * column - 1)[:, None] + (place % 3)[None, :]
    inside = (place < 9)[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    pixel = (image[:, None] * height + y) * width + x
    offset = (pixel.to(tl.int64) * (heads * D) + head * D)[:, :, None] + tl.arange(0, D)[None, None, :]
    at_written = tl.load(grad + offset, mask=inside[:, :, None], other=0.0)
    at_read = tl.load(v + offset, mask=inside[:, :, None], other=0.0)
    if WIDEN:
        at_written = at_written.to(tl.float32)
        at_read = at_read.to(tl.float32)
    # Nothing is written outside the image, so the gradients there are 0, and so are those of the logits.
    grad_weights = tl.dot(at_written, tl.permute(at_read, (0, 2, 1)), input_precision="tf32x3")  # (BLOCK, 16, 16)

    start = tl.program_id(0) // heads * BLOCK
    logits += (start.to(tl.int64) * heads + head) * 81
    grad_logits += (start.to(tl.int64) * heads + head) * 81
    row_of_nine = ((number - start) * (heads * 81))[:, None] + (place * 9)[None, :]
    element = row_of_nine[:, :, None] + place[None, None, :]
    entry = ((place < 9)[:, None] & (place < 9)[None, :])[None, :, :]
    logit = tl.load(logits + element, mask=entry, other=0.0)
    if WIDEN:
        logit = logit.to(tl.float32)
    # The product with the identity has the register layout of grad_weights, so sums over rows need few shuffles. It
    # must keep float32 exactly: tf32x3 would round to 23 bits, and spoil all weights computed from a row's lse.
    identity = tl.where(place[:, None] == place[None, :], 1.0, 0.0).to(logit.dtype)
    logit = tl.dot(logit, tl.broadcast_to(identity[None, :, :], (BLOCK, 16, 16)), input_precision="ieee")
    logit = tl.where((place < 9)[None, None, :], logit, -1e30)
    top = tl.max(logit, 2) * scale_log2e
    power = tl.exp2(logit * scale_log2e - top[:, :, None])
    total = tl.sum(power, 2)
    sums = lse + (head * 9 + place)[None, :].to(tl.int64) * cells + number[:, None]
    tl.store(sums, top + tl.log2(total), mask=(place < 9)[None, :])
    share = 1.0 / total
    along_row = tl.sum(power * grad_weights, 2) * share
    gradient = power * (grad_weights - along_row[:, :, None]) * (scale * share)[:, :, None]
    tl.store(grad_logits + element, gradient.to(grad_logits.dtype.element_ty), mask=entry)


@triton.jit(do_not_specialize=SIZES)
def outlook_backward_values(
    grad, logits, lse, grad_v, height, width, rows, columns, cells, heads, scale_log2e,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute grad_v for BLOCK cells and one head, with lse from `outlook_backward_logits`."""
    gather(grad, grad_v, logits, lse, height, width, rows, columns, cells, heads, scale_log2e, D, BLOCK, True)
