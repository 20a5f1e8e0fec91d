"""TensorFlow's Example messages: where in a record each byte string lies.

    Example {Features features = 1}      Features {map<string, Feature> feature = 1}
    Feature {BytesList = 1 | FloatList = 2 | Int64List = 3}, each {repeated value = 1}; numbers may be packed

Read strictly: a record that is anything else raises ValueError, and nothing outside of its bounds is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # wire types
_VARINT_BITS = 70  # of at most ten bytes


@dataclass
class Feature:
    """Values of a feature: places (start, stop) of byte strings in the record, or integers. Floats are left out."""

    places: list[tuple[int, int]] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)


class _Field(NamedTuple):
    """A field of a message: the value of a varint, else where its bytes lie."""

    number: int
    wire_type: int
    value: int
    start: int
    stop: int


def parse_example(record: bytes) -> dict[str, Feature]:
    """The features of an Example by name. Raises ValueError: it is none, or damaged."""
    found: dict[str, Feature] = {}
    for features in _messages(record, 0, len(record), 1):
        for entry in _messages(record, features.start, features.stop, 1):
            name, feature = "", Feature()
            for part in _fields(record, entry.start, entry.stop):
                if part.number == 1 and part.wire_type == _BYTES:
                    name = record[part.start : part.stop].decode()
                elif part.number == 2 and part.wire_type == _BYTES:
                    feature = _feature(record, part)
            found[name] = feature
    return found


def _feature(record: bytes, message: _Field) -> Feature:
    feature = Feature()
    for strings in _messages(record, message.start, message.stop, 1):
        feature.places += [(value.start, value.stop) for value in _messages(record, strings.start, strings.stop, 1)]
    for integers in _messages(record, message.start, message.stop, 3):
        for value in _fields(record, integers.start, integers.stop):
            feature.integers += _integers(record, value) if value.number == 1 else []
    return feature


def _integers(record: bytes, values: _Field) -> list[int]:
    """One integer, or several packed ones; 64 bits with a sign."""
    found, at = [values.value], values.stop
    if values.wire_type == _BYTES:
        found, at = [], values.start
    elif values.wire_type != _VARINT:
        raise ValueError("integers of another type")
    while at < values.stop:
        value, at = _varint(record, at, values.stop)
        found.append(value)
    return [value - 2**64 if value >= 2**63 else value for value in found]


def _messages(record: bytes, start: int, stop: int, number: int) -> Iterator[_Field]:
    """The fields of a number, which must be byte strings or messages."""
    for each in _fields(record, start, stop):
        if each.number == number:
            if each.wire_type != _BYTES:
                raise ValueError(f"field {number} is not of the type that it has in an Example")
            yield each


def _fields(record: bytes, start: int, stop: int) -> Iterator[_Field]:
    at = start
    while at < stop:
        tag, at = _varint(record, at, stop)
        number, wire_type, value, length = tag >> 3, tag & 7, 0, 0
        begin = at
        if wire_type == _VARINT:
            value, at = _varint(record, at, stop)
        elif wire_type == _BYTES:
            length, begin = _varint(record, at, stop)
            at = begin + length
        elif wire_type in (_EIGHT_BYTES, _FOUR_BYTES):
            at += 8 if wire_type == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if number == 0 or at > stop:
            raise ValueError("a field goes beyond its message")
        yield _Field(number, wire_type, value, begin, at)


def _varint(record: bytes, at: int, stop: int) -> tuple[int, int]:
    """An unsigned number of seven bits a byte, and where it ends."""
    value = 0
    for shift in range(0, _VARINT_BITS, 7):
        if at >= stop:
            break
        byte, at = record[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), at
    raise ValueError("a number without an end")
