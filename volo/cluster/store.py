"""torch's key-value store, in which the processes of a run meet, at one address alone."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

_ANSWER = timedelta(seconds=60)
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


def connect(address: str, port: int) -> TCPStore:
    """Return the store that listens there.

    Raises:
        OSError: Nobody listens, or a firewall keeps the port shut.
        DistError: The connection breaks off.
    """
    # The store's own client would wait and let no signal through.
    socket.create_connection((address, port), timeout=2).close()
    return TCPStore(address, port, None, False, _ANSWER, wait_for_workers=False)
