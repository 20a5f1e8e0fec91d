"""What a program may do with bad input, and ways to spoil good input."""

from collections.abc import Callable
from typing import TypeVar

from hypothesis import strategies as st

from tlt.errors import UserError

T = TypeVar("T")


def result_or_refusal(call: Callable[[], T], names: object = "") -> T | None:
    """What `call` returns, None if it refuses with one line that names the file. Every other end is a failure."""
    try:
        return call()
    except UserError as error:
        message = str(error)
        assert message and "\n" not in message and str(names) in message, message
        message.encode("utf-8", "surrogateescape")
        return None


@st.composite
def spoilt(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with some bits flipped, cut, with a stretch overwritten, moved or doubled."""
    kind = draw(st.sampled_from(("flip", "flip", "flip", "cut", "overwrite", "insert", "remove")))
    place = draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        changed = bytearray(content)
        for bit in draw(st.lists(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=3, unique=True)):
            changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)
    if kind == "cut":
        return content[:place]
    length = draw(st.integers(1, 64))
    if kind == "remove":
        return content[:place] + content[place + length :]
    new = draw(st.binary(min_size=1, max_size=64) | st.just(content[place : place + length]))
    return content[:place] + new + content[place + (len(new) if kind == "overwrite" else 0) :]
