"""Signs of life in a group of processes (the launchers of a run, its ranks) through torch's key-value store.

Each member writes its own state at an interval and reads one short bulletin. Member 0 alone reads all states, decides
what they mean, and writes the bulletin. So the traffic at the host of the store grows with the number of members, not
with its square: at 500 nodes of 8 ranks about 1 MB/s.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from volo.cluster.run_store import SignedStore

State = dict[str, Any]


@dataclass
class Member:
    """A member as another one sees it.

    Attributes:
        beat: How often it has written; it is alive while this number moves.
        state: What it wrote last.
        moved: `time.monotonic()` here when its beat last moved.
    """

    id: str
    beat: int
    state: State
    moved: float


class Heartbeat:
    """This process among `size` members of the group `name`.

    A thread does the talking, because a store whose host has stopped never answers.

    Args:
        store: Where they meet; cloned, as a connection that another thread uses may be blocked.
        scope: What the values belong to; see `SignedStore`.
        interval: Seconds between two beats.
        timeout: Seconds that the store may take to answer.

    Attributes:
        members: Those heard of, by number: on member 0 all that have come, elsewhere member 0 (with its state) alone.
        answered: `time.monotonic()` when the store last answered.
        lost: The connection to the store is broken.
        has_twin: Another process has joined under this member's number.
    """

    def __init__(
        self,
        store: Store,
        scope: str,
        name: str,
        rank: int,
        size: int,
        interval: float,
        timeout: float = 20.0,
    ) -> None:
        self.rank, self.interval = rank, interval
        self.members: dict[int, Member] = {}
        self.answered = time.monotonic()
        self.lost = self.has_twin = False
        self._id = uuid.uuid4().hex
        self._beat = 0
        clone = store.clone()
        clone.set_timeout(timedelta(seconds=timeout))
        self._signed = SignedStore(clone, scope)
        self._keys = [f"{name}/{member}" for member in range(size)]
        self._bulletin = f"{name}/bulletin"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, tell: Callable[[], State], decide: Callable[[], State], hear: Callable[[State], None]) -> None:
        """Begin; all three are called in the thread.

        Args:
            tell: Returns the state of this member, as plain data.
            decide: Member 0 only: returns what all members are to know, as short plain data.
            hear: Receives what member 0 has decided; not called on member 0.
        """
        self._thread = threading.Thread(target=self._run, args=(tell, decide, hear), daemon=True)
        self._thread.start()

    def told(self, seconds: float) -> bool:
        """Wait until the present state has been written; return False if that has not happened within `seconds`."""
        deadline, beat = time.monotonic() + seconds, self._beat + 2
        while self._beat < beat and not self.lost and time.monotonic() < deadline:
            time.sleep(self.interval / 10)
        return self._beat >= beat

    def stop(self, seconds: float) -> bool:
        """End the thread; return False if it is still inside of the store after `seconds`.

        A process that ends by the way out of Python with a thread inside of the store is aborted.
        """
        self._ended.set()
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, tell: Callable[[], State], decide: Callable[[], State], hear: Callable[[State], None]) -> None:
        try:
            while True:
                self._exchange(tell, decide, hear)
                if self._ended.wait(self.interval):
                    return
        except RuntimeError:  # of the store: its host has gone, or is about to
            self.lost = True

    def _exchange(self, tell: Callable[[], State], decide: Callable[[], State], hear: Callable[[State], None]) -> None:
        own = self._keys[self.rank]
        there = self._signed.get(own) if self._beat else None
        self.has_twin = self.has_twin or there is not None and there["id"] != self._id
        self._write(own, tell())
        if self.rank == 0:
            self._read(list(enumerate(self._keys)))
            self._write(self._bulletin, decide())
        else:
            self._read([(0, self._bulletin)])
            if 0 in self.members:
                hear(self.members[0].state)
        self._beat += 1
        self.answered = time.monotonic()

    def _write(self, key: str, state: State) -> None:
        self._signed.set(key, {"id": self._id, "beat": self._beat, "state": state})

    def _read(self, keys: list[tuple[int, str]]) -> None:
        """Read what members have written; one request for all that are known, and one for each that is not."""
        there = [(rank, key) for rank, key in keys if rank in self.members or self._signed.is_there(key)]
        found = self._signed.get_all([key for _, key in there])
        now = time.monotonic()
        for (rank, _), written in zip(there, found, strict=True):
            if written is None:  # by somebody who does not know the secret
                continue
            before = self.members.get(rank)
            same = before is not None and (before.id, before.beat) == (written["id"], written["beat"])
            self.members[rank] = Member(**written, moved=before.moved if before and same else now)
