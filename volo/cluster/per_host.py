"""What the first rank of each host finds out, and sends to its other ranks: arrays, and plain data as JSON."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from tlt.errors import UserError
from volo.cluster.distributed import AlreadyReported, finish, from_all, wait_for_hosts

T = TypeVar("T")
Packed: TypeAlias = tuple[Mapping[str, np.ndarray], Any]  # arrays by name, and what JSON can hold
_LONG = timedelta(hours=12)  # a file server may take long to list a data set


class OncePerHost:
    """Has the first rank of each host make what takes long; `OncePerHost(alive)(make, pack, unpack)`.

    A rank that waits for another one is alive: its connections tell when that one has ended. All ranks make the object,
    and call it, in the same order.

    Args:
        alive: Called now and then while this rank waits.
    """

    def __init__(self, alive: Callable[[], None]) -> None:
        self._alive = alive
        if dist.is_initialized():
            hosts, own = from_all(socket.gethostname()), socket.gethostname()
            self._ranks = [rank for rank, host in enumerate(hosts) if host == own]
            self._all = dist.new_group(timeout=_LONG, backend="gloo")
            self._here: Any = dist.new_group(self._ranks, _LONG, "gloo", use_local_synchronization=True)

    def __call__(self, make: Callable[[], T], pack: Callable[[T], Packed | None], unpack: Callable[..., T]) -> T:
        """Return what `make` returns on the first rank of each host, and elsewhere an equal value that `unpack` makes.
        All ranks return together.

        Args:
            make: Its UserError is raised on all ranks of the host.
            pack: Returns the two arguments of `unpack`; None: all ranks call `make`, the first of a host before the
                others.
        """
        if not dist.is_initialized():
            return make()
        if dist.get_rank() == self._ranks[0]:
            try:
                value = make()
            except UserError as error:
                self._from_first(str(error), None)
                raise
            self._from_first("", pack(value) if len(self._ranks) > 1 else None)
        else:
            refused, packed = self._from_first("", None)
            if refused:
                raise AlreadyReported(refused)
            value = make() if packed is None else unpack(*packed)
        wait_for_hosts(self._all, self._alive)
        return value

    def _from_first(self, refused: str, packed: Packed | None) -> tuple[str, Packed | None]:
        """Return on all ranks of this host what its first rank has called this with, when all of them have it."""
        arrays, plain = packed or ({}, None)
        text, file = json.dumps([refused, packed is not None, plain]), io.BytesIO()
        np.savez(file, allow_pickle=False, json=np.frombuffer(text.encode(), np.uint8), **dict(arrays))
        content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        length = self._broadcast(torch.tensor(len(content)))
        if dist.get_rank() != self._ranks[0]:
            content = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(content)
        wait_for_hosts(self._here, self._alive)
        found = dict(np.load(io.BytesIO(content.numpy().tobytes()), allow_pickle=False))
        refused, is_packed, plain = json.loads(found.pop("json").tobytes())
        return refused, (found, plain) if is_packed else None

    def _broadcast(self, values: torch.Tensor) -> torch.Tensor:
        finish(dist.broadcast(values, self._ranks[0], self._here, async_op=True), self._alive)
        return values
