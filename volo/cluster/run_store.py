"""torch's key-value store, in which the processes of a run meet, made safe: it listens at one address alone, and what
processes tell each other through it is JSON that they sign.

The store itself has no authentication: whoever reaches its port reads and writes it. So nothing that comes out of it
is unpickled, and what wasn't signed with RUN_SECRET (the launcher makes one for each run on a single machine; several
nodes must be given the same one) counts as not written.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore

from volo.cluster.ranks import launch_id, restarts

SECRET = "RUN_SECRET"
BEGUN = "begun"  # a key of `start_scope`: from now on ranks may have something to lose
_ANSWER = timedelta(seconds=60)
_BACKLOG = 4096  # connections that wait: all ranks of a large run come at once
_POLL_S = 0.1


def serve(address: str, port: int) -> TCPStore:
    """Return a store that listens on this IP address alone (torch's own would listen on all), on a free port for 0.

    Raises:
        OSError: The port is in use, or this machine has no such address.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections don't hold the port
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
    except OSError:
        listener.close()
        raise
    return TCPStore(address, port, None, True, _ANSWER, wait_for_workers=False, master_listen_fd=listener.detach())


def knock(address: str, port: int, seconds: float = 2) -> None:
    """Return if somebody listens there. The store's own client would wait and let no signal through.

    Raises:
        OSError: Nobody listens, or a firewall keeps the port shut.
    """
    socket.create_connection((address, port), timeout=seconds).close()


def wait_for_store(address: str, port: int, deadline: float, check: Callable[[], None] = lambda: None) -> None:
    """Knock until somebody listens there.

    Args:
        deadline: Of `time.monotonic()`; there is one attempt at least.
        check: Called after each failure; it may raise to end the waiting.

    Raises:
        OSError: The last failure before the deadline.
    """
    while True:
        try:
            return knock(address, port)
        except OSError:
            check()
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def connect(address: str, port: int) -> TCPStore:
    """Return the store that listens there."""
    return TCPStore(address, port, None, False, _ANSWER, wait_for_workers=False)


def start_scope(launch: str | None = None, start: int | None = None) -> str:
    """Return the prefix of a start of a launch (default: that of this process) in the store, unlike those before it."""
    return f"{launch or launch_id() or ''}/{restarts() if start is None else start}"


class SignedStore:
    """JSON values in a store; what was not written by a process of this run counts as not written.

    Args:
        scope: What the values belong to (a launch, a start of it): values of another scope are not valid here.
    """

    def __init__(self, store: Store, scope: str = "") -> None:
        self._store, self._scope = store, scope
        self._secret = os.environ.get(SECRET, "").encode()

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._store.set(key, self._signed(key, value))

    def set_first(self, key: str, value: Any) -> Any:
        """Write a value unless there is one; return the value that is there then."""
        return self._value(key, self._store.compare_set(key, "", self._signed(key, value)))

    def get(self, key: str) -> Any:
        """Return a value, None where none was written."""
        return self._value(key, self._store.get(key)) if self.is_there(key) else None

    def is_there(self, key: str) -> bool:
        """Return whether a value was written, signed or not."""
        return bool(self._store.check([key]))

    def get_all(self, keys: Sequence[str]) -> list[Any]:
        """Return the values of keys that are there, None where the signature is not of this run."""
        if not keys:
            return []
        return [self._value(key, found) for key, found in zip(keys, self._store.multi_get(list(keys)), strict=True)]

    def sign(self, text: str) -> bytes:
        """Return the 32 bytes of a signature that can't be made without the secret."""
        return hmac.digest(self._secret, f"{self._scope}\n{text}".encode(), hashlib.sha256)

    def _signed(self, key: str, value: Any) -> str:
        text = json.dumps(value)
        return f"{self.sign(f'{key} {text}').hex()} {text}"

    def _value(self, key: str, found: bytes) -> Any:
        signature, _, text = found.decode(errors="replace").partition(" ")
        expected = self.sign(f"{key} {text}").hex()
        return json.loads(text) if hmac.compare_digest(signature.encode(), expected.encode()) else None
