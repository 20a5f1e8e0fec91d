"""torch's key-value store, in which the processes of a run meet, at one address alone."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from torch.distributed import DistError, Store, TCPStore

_ANSWER = timedelta(seconds=60)
_POLL_S = 0.1
_BACKLOG = 4096  # connections that wait: all ranks of a large run come at once


def serve(address: str, port: int) -> TCPStore:
    """Return a store that listens on this IP address alone (torch's own would listen on all), on a free port for 0.

    Raises:
        OSError: The port is in use, or this machine has no such address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return TCPStore(address, port, None, True, _ANSWER, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(address: str, port: int, until: float) -> TCPStore | None:
    """Return the store that listens there; None if nobody has answered by then, by the monotonic clock."""
    while time.monotonic() < until:
        try:
            # The store's own client would wait and let no signal through.
            socket.create_connection((address, port), timeout=2).close()
            return TCPStore(address, port, None, False, _ANSWER, wait_for_workers=False)
        except (OSError, DistError):
            time.sleep(_POLL_S)
    return None


def meet(store: Store, number: int, size: int, until: float) -> list[int]:
    """Come as the `number`th of `size`; return the numbers that have not come by then, at once when all have. The store
    ends with number 0."""
    try:
        store.set(f"here/{number}", "")
        store.add("here", 1)
        while store.add("here", 0) < size:
            if time.monotonic() > until:
                return [each for each in range(size) if not store.check([f"here/{each}"])]
            time.sleep(_POLL_S)
    except DistError:
        return [0]
    return []
