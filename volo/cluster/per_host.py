"""What the first rank of each host finds out, and its other ranks read from a file: arrays, and plain data as JSON.

Other users of the machine and of the network can't choose the file: it lies in a folder that is this user's alone, at a
place that every rank derives by itself, under the hash of a number that the first rank draws for it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

import numpy as np
import torch.distributed as dist

from tlt.errors import UserError
from tlt.io.tensor_file import MappedTensors, write_tensors
from volo.cluster.distributed import Told, from_all, poll, wait_for_hosts

T = TypeVar("T")
Packed: TypeAlias = tuple[Mapping[str, np.ndarray], Any]  # arrays by name, and what JSON can hold
_CALLS = itertools.count()  # of `OncePerHost`, in the same order on every rank
_LONG = timedelta(days=7)
_FORMAT = "volo-tlt of the ranks of a host, version 1"


class OncePerHost:
    """Has the first rank of each host make what takes long; `OncePerHost(alive)(make, pack, unpack)`.

    A file server may take long to list a data set: a rank that waits is alive as long as another one makes steps. All
    ranks make it, and call it, in the same order.

    Args:
        alive: Called on every rank at each step of any rank.
    """

    def __init__(self, alive: Callable[[], None]) -> None:
        self._alive, self._steps = alive, 0
        # Its connections tell a rank that waits when one on another host has ended.
        self._group = dist.new_group(timeout=_LONG, backend="gloo") if dist.is_initialized() else None

    def step(self) -> None:
        """Tell all ranks that this one has found something; `make` calls it."""
        self._alive()
        if dist.is_initialized():
            _store().add("steps", 1)

    def __call__(self, make: Callable[[], T], pack: Callable[[T], Packed | None], unpack: Callable[..., T]) -> T:
        """Return what `make` returns on the first rank of each host, and elsewhere an equal value that `unpack` makes.
        All ranks return together.

        Args:
            make: Its UserError is raised on all ranks of the host.
            pack: Returns the two arguments of `unpack`; None: all ranks call `make`, the first of a host before the
                others.
            unpack: Its arrays are read only, in memory that the ranks share.
        """
        if not dist.is_initialized():
            return make()
        rank, drawn = dist.get_rank(), from_all([socket.gethostname(), uuid4().hex])
        hosts = [host for host, _ in drawn]
        first, others = hosts.index(hosts[rank]), hosts.count(hosts[rank]) - 1
        file = hashlib.sha256(drawn[first][1].encode()).hexdigest()
        store, key = _store(), f"once/{next(_CALLS)}"
        said = f"{key}/{first}"  # an error, or nothing
        if rank == first:
            try:
                value = make()
            except UserError as error:
                store.set(said, json.dumps(str(error)))
                # The store may end with this rank: first the others must have read the error.
                poll(lambda: store.add(f"{said}/told", 0) == others, self._notice_steps, seconds=10.0)
                raise
            if others and (packed := pack(value)):
                with suppress(OSError):  # no room, or a folder that isn't this user's alone: the others call `make`
                    write_tensors(str(_folder() / file), _FORMAT, *packed)
            store.set(said, json.dumps(""))
        else:
            poll(lambda: store.check([said]), self._notice_steps)
            if refused := json.loads(store.get(said)):
                store.add(f"{said}/told", 1)
                raise Told(refused)
            try:
                shared = MappedTensors(str(_folder() / file), _FORMAT, "")
            except (OSError, UserError):
                value = make()
            else:
                value = unpack(shared.tensors, shared.description)
        wait_for_hosts(self._group, self._notice_steps)
        if rank == first and others:
            with suppress(OSError):
                (_folder() / file).unlink()
        return value

    def _notice_steps(self) -> None:
        if self._steps != (steps := _store().add("steps", 0)):
            self._steps = steps
            self._alive()


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _folder() -> Path:
    """Return the folder, which is made where there is none. Raises OSError: it is a link, somebody else's, or open to
    others."""
    folder = Path(tempfile.gettempdir(), f"volo-{os.geteuid()}")
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder
