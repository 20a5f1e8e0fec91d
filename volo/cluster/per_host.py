"""What the first rank of each host finds out, and its other ranks read from a file: arrays, and plain data as JSON.

Other users of the machine and of the network can't choose the file: it lies in a folder that is this user's alone, at a
place that every rank derives by itself, under the hash of a number that the first rank draws for it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

import numpy as np
import torch.distributed as dist

from tlt.errors import UserError
from tlt.io.tensor_file import MappedTensors, write_tensors
from volo.cluster.distributed import Told, from_all
from volo.cluster.run_store import SignedStore, start_scope

T = TypeVar("T")
Packed: TypeAlias = tuple[Mapping[str, np.ndarray], Any]  # arrays by name, and what JSON can hold
_CALLS = itertools.count()  # of `once_per_host`, in the same order on every rank
_FORMAT = "volo-tlt of the ranks of a host, version 1"


def once_per_host(make: Callable[[], T], pack: Callable[[T], Packed | None], unpack: Callable[..., T]) -> T:
    """Return what `make` returns on the first rank of each host, and elsewhere an equal value that `unpack` makes. All
    ranks return together.

    No rank waits in a collective, which has a time limit: a file server may take long to list a data set. The watchdog
    decides which rank hangs.

    Args:
        make: Its UserError is raised on all ranks of the host.
        pack: Returns the two arguments of `unpack`; None: all ranks call `make`, the first of a host before the others.
        unpack: Its arrays are read only, in memory that the ranks share.
    """
    if not dist.is_initialized():
        return make()
    rank, drawn = dist.get_rank(), from_all([socket.gethostname(), uuid4().hex])
    hosts = [host for host, _ in drawn]
    first, others = hosts.index(hosts[rank]), hosts.count(hosts[rank]) - 1
    name = hashlib.sha256(drawn[first][1].encode()).hexdigest()
    store, key = dist.distributed_c10d._get_default_store(), f"once/{next(_CALLS)}"
    signed, said = SignedStore(store, start_scope()), f"{key}/{first}"
    if rank == first:
        try:
            value = make()
        except UserError as error:
            signed.set(said, str(error))
            # The store may end with this rank: first the others must have read the error.
            _wait_until(lambda: store.add(f"{said}/told", 0) == others, seconds=10.0)
            raise
        if others and (packed := pack(value)):
            with suppress(OSError):  # no room, or a folder that isn't this user's alone: the others call `make`
                write_tensors(str(_folder() / name), _FORMAT, *packed)
        signed.set(said, "")
    else:
        _wait_until(lambda: signed.get(said) is not None)
        if refused := signed.get(said):
            store.add(f"{said}/told", 1)
            raise Told(refused)
        try:
            file = MappedTensors(str(_folder() / name), _FORMAT, "")
        except (OSError, UserError):
            value = make()
        else:
            value = unpack(file.tensors, file.description)
    store.add(f"{key}/ready", 1)
    _wait_until(lambda: store.add(f"{key}/ready", 0) == dist.get_world_size())
    if rank == first and others:
        with suppress(OSError):
            (_folder() / name).unlink()
    return value


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


def _wait_until(happened: Callable[[], bool], seconds: float = math.inf) -> None:
    until, pause = time.monotonic() + seconds, 0.01
    while not happened() and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
