"""A list of many names that needs little memory."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np


class Names(Sequence[str]):
    """A sequence of names stored in one block of bytes, which processes share. Reading a list of a million strings
    changes their reference counts, and so makes every data worker copy their memory pages. It equals any sequence of
    the same names. They must have no NUL, which would split a name in two. `block` holds the concatenated names, `ends`
    (N,) int64 the end of each in it."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        encoded = os.fsencode("".join(f"{name}\0" for name in names))
        self.ends: np.ndarray = np.flatnonzero(np.frombuffer(encoded, np.uint8) == 0)
        self.ends -= np.arange(len(self.ends))
        self.block: bytes | memoryview = encoded.replace(b"\0", b"")

    @classmethod
    def packed(cls, block: bytes | memoryview, ends: np.ndarray) -> "Names":
        """Return names from `block`, in which name i ends at byte `ends[i]`, without copying."""
        names = cls()
        names.block = block
        names.ends = ends
        return names

    def __reduce__(self) -> tuple[Any, tuple[bytes, np.ndarray]]:
        return Names.packed, (bytes(self.block), self.ends)  # mapped memory can't be pickled

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "Names": ...
    def __getitem__(self, index: int | slice) -> "str | Names":
        if isinstance(index, slice):
            return Names(self[i] for i in range(*index.indices(len(self))))
        row = range(len(self))[index]
        start = int(self.ends[row - 1]) if row else 0
        return os.fsdecode(bytes(self.block[start : int(self.ends[row])]))

    def __iter__(self) -> Iterator[str]:
        block = bytes(self.block)
        start = 0
        for end in self.ends.tolist():
            yield os.fsdecode(block[start:end])
            start = end

    def rows_of(self, names: Sequence[str]) -> np.ndarray:
        """Return (N,) int64, the index of each of N names in this sequence, or -1."""
        if names == self:
            return np.arange(len(self))
        row_of = {name: row for row, name in enumerate(self)}
        return np.array([row_of.get(name, -1) for name in names], np.int64)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        if isinstance(other, Names):
            return np.array_equal(self.ends, other.ends) and memoryview(self.block) == memoryview(other.block)
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]
