"""Calls that may never come back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return `call()`, whose exceptions are raised here; dead storage and dead name servers don't stop us.

    Raises:
        TimeoutError: It takes longer than `seconds`. Its thread is left behind.
    """
    box: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            box.put((call(), None))
        except Exception as error:
            box.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        value, error = box.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # set where there is no error
