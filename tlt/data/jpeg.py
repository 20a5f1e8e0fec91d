"""The markers of a JPEG file (ITU T.81, annex B): what it holds, and whether they are sound up to its end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BASELINE, EXTENDED, PROGRESSIVE = 0xC0, 0xC1, 0xC2  # frame headers of what every decoder knows
_START, _END, _SCAN, _FILL = 0xD8, 0xD9, 0xDA, 0xFF
_TABLES = {0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}  # Huffman, quantisation, restart interval, comment, application
_FIRST_RESTART, _LAST_RESTART = 0xD0, 0xD7


class Frame(NamedTuple):
    """A frame header: its marker, bits of a sample, size in pixels, colour components."""

    process: int
    precision: int
    height: int
    width: int
    components: int


def whole_frame(data: bytes | bytearray) -> Frame | None:
    """The frame header of a Huffman-coded JPEG; None where its markers are not sound up to the end marker.

    Damage that leaves the markers alone goes unnoticed. What follows the end marker is not looked at.
    """
    frame: Frame | None = None
    in_scans: np.ndarray | None = None
    at = 2 if data[:2] == bytes((_FILL, _START)) else len(data)
    while at + 2 <= len(data) and data[at] == _FILL:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == _END:
            return frame
        if marker == _FILL:
            at += 1
            continue
        if marker in (BASELINE, EXTENDED, PROGRESSIVE) and frame is None and at + 10 <= len(data):
            height, width = int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
            frame = Frame(marker, data[at + 4], height, width, data[at + 9])
        elif marker != _SCAN and marker not in _TABLES:
            return None
        at += 2 + length
        if marker == _SCAN:
            in_scans = _scan_ends(data, at) if in_scans is None else in_scans
            after = in_scans[np.searchsorted(in_scans, at) :]
            at = int(after[0]) if len(after) else len(data)
    return None


def _scan_ends(data: bytes | bytearray, start: int) -> np.ndarray:
    """Where, from `start` on, markers are that end a scan: neither a coded 0xFF, nor fill, nor a restart."""
    found = np.flatnonzero(np.frombuffer(data, np.uint8)[start:-1] == _FILL) + start
    following = np.frombuffer(data, np.uint8)[found + 1]
    within = (following >= _FIRST_RESTART) & (following <= _LAST_RESTART)
    return found[(following != 0) & (following != _FILL) & ~within]
