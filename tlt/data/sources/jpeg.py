"""The markers of a JPEG file (ITU T.81, annex B): the size they state, and whether they are sound up to its end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BASELINE, EXTENDED, PROGRESSIVE = 0xC0, 0xC1, 0xC2  # frame headers of what every decoder knows
_START, _END, _SCAN, _FILL = 0xD8, 0xD9, 0xDA, 0xFF
_TABLES = {0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}  # Huffman, quantisation, restart interval, comment, application
_QUANTISATION, _JFIF = 0xDB, 0xE0
_SKIPPED = (0xC4, 0xDD)  # Huffman tables, restart interval: a decoder's business
_FIRST_RESTART, _LAST_RESTART = 0xD0, 0xD7


class Frame(NamedTuple):
    """A frame header: its marker, bits of a sample, size in pixels, colour components."""

    process: int
    precision: int
    height: int
    width: int
    components: int


def plain_size(data: bytes | bytearray) -> tuple[int, int] | None:
    """Width and height in the header of a plain JPEG: 8 bits, gray or three components, JFIF or no application's
    segment, every length right. None for all other files, which only a decoder can judge.

    Pillow opens every such file and finds the same size, in ten times the time.
    """
    size = None
    at, end = (2 if data[:3] == b"\xff\xd8\xff" else len(data)), len(data)
    while at + 4 <= end and data[at] == _FILL:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        after = at + 2 + length
        if length < 2 or after > end:
            return None
        if marker == _SCAN:
            return size
        if marker == _QUANTISATION:
            plain = (length - 2) % 65 == 0 and not any(data[table] >> 4 for table in range(at + 4, after, 65))
        elif marker in (BASELINE, PROGRESSIVE):
            components = data[at + 9] if length > 7 else 0
            plain = size is None and components in (1, 3) and length == 8 + 3 * components and data[at + 4] == 8
            size = data[at + 7] << 8 | data[at + 8], data[at + 5] << 8 | data[at + 6]
            plain = plain and 0 not in size
        elif marker == _JFIF:
            plain = length == 16 and data[at + 4 : at + 9] == b"JFIF\0"
        else:
            plain = marker in _SKIPPED
        if not plain:
            return None
        at = after
    return None


def whole_frame(data: bytes | bytearray) -> Frame | None:
    """The frame header of a Huffman-coded JPEG; None where its markers are not sound up to the end marker.

    Damage that leaves the markers alone goes unnoticed, but for a progressive file some of whose scans are not there:
    decoders guess what is missing, each version of libjpeg otherwise. What follows the end marker is not looked at.
    """
    frame: Frame | None = None
    scans: list[bytes] = []  # headers
    in_scans: np.ndarray | None = None
    at = 2 if data[:2] == bytes((_FILL, _START)) else len(data)
    while at + 2 <= len(data) and data[at] == _FILL:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == _END:
            return frame if frame and (frame.process != PROGRESSIVE or _complete(frame, scans)) else None
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
            scans.append(bytes(data[at - length + 2 : at]))
            in_scans = _scan_ends(data, at) if in_scans is None else in_scans
            after = in_scans[np.searchsorted(in_scans, at) :]
            at = int(after[0]) if len(after) else len(data)
    return None


def _complete(frame: Frame, scans: list[bytes]) -> bool:
    """Whether the scans of a progressive file bring every coefficient of every component to its last bit."""
    missing: dict[int, np.ndarray] = {}  # component -> bits of each of its 64 coefficients
    for header in scans:
        if len(header) < 4 or len(header) != 4 + 2 * header[0]:
            return False
        first, last, bits = header[-3:]
        for component in header[1:-3:2]:
            missing.setdefault(component, np.ones(64, np.uint8))[first : last + 1] = bits & 15
    return len(missing) == frame.components and not any(each.any() for each in missing.values())


def _scan_ends(data: bytes | bytearray, start: int) -> np.ndarray:
    """Where, from `start` on, markers are that end a scan: neither a coded 0xFF, nor fill, nor a restart."""
    found = np.flatnonzero(np.frombuffer(data, np.uint8)[start:-1] == _FILL) + start
    following = np.frombuffer(data, np.uint8)[found + 1]
    within = (following >= _FIRST_RESTART) & (following <= _LAST_RESTART)
    return found[(following != 0) & (following != _FILL) & ~within]
