"""How the nodes talk: node 0 gives each of them tasks and collects the answers, through torch's TCPStore."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store, TCPStore

from volo.cluster.preflight.rendezvous import Rendezvous, Unfit
from volo.cluster.run_store import SECRET, SignedStore, connect, knock, serve

Task = dict[str, Any]
Answer = Any
_POLL_S = 0.02
# A node waits so long for its next task: as long as the slowest of the others may take for theirs, and longer.
PATIENCE_S = 300.0


class Meeting:
    """The nodes, as one of them reaches them.

    Args:
        patience: Seconds for which a node waits for its next task.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        store: Store,
        clock: Callable[[], float] = time.time,
        patience: float = PATIENCE_S,
    ) -> None:
        self.rendezvous, self._clock, self._patience = rendezvous, clock, patience
        self._store, self._told = store, SignedStore(store, "preflight")
        self._sent: Counter[int] = Counter()

    def arrive(self) -> None:
        """Tell node 0 that this node is there.

        Raises:
            Unfit: Another one has come under the same number, or counts other nodes.
        """
        host, rank = socket.gethostname(), self.rendezvous.rank
        me = [host, os.getpid(), self.rendezvous.nodes]
        first = self._told.set_first(f"here/{rank}", me)
        if first != me:
            other = first[0] if first else f"one that does not know the {SECRET} of {host}"
            raise Unfit(f"node {rank} is {other} already: give {host} another NODE_RANK")
        nodes = self._get("here/0", self._patience)[2]
        if nodes != self.rendezvous.nodes:
            name = self.rendezvous.name(rank)
            raise Unfit(
                f"{name}: NNODES is {self.rendezvous.nodes} here and {nodes} on node 0: set the same everywhere"
            )

    def arrived(self, deadline: float) -> list[int]:
        """Ranks of the nodes that have come until `deadline` (of time.monotonic); all of them, if it is early."""
        return sorted(self._gather({rank: f"here/{rank}" for rank in range(self.rendezvous.nodes)}, deadline))

    def ask(
        self, tasks: Mapping[int, Task], seconds: float, perform: Callable[[Task], Answer] | None = None
    ) -> dict[int, Answer]:
        """Give nodes their tasks and return the answers that come within `seconds`; node 0 does its own itself."""
        answers = {rank: self._send(rank, task) for rank, task in tasks.items() if rank}
        deadline = time.monotonic() + seconds
        own = {0: perform(tasks[0])} if perform and 0 in tasks else {}
        return own | self._gather(answers, deadline)

    def clock_offset(self, rank: int, seconds: float = 5.0, samples: int = 5) -> tuple[float, float]:
        """Return by how many seconds a node's clock is ahead of this one's, and how far off that may be.

        From the quickest of some round trips: the answer was given in the middle of it, give or take half of it.

        Raises:
            Unfit: It doesn't answer.
        """
        trips = []
        for _ in range(samples):
            before = self._clock()
            there = self._get(self._send(rank, {"do": "clock"}), seconds)
            after = self._clock()
            trips.append((after - before, there - (before + after) / 2))
        trip, offset = min(trips)
        return offset, trip / 2

    def follow(self, perform: Callable[[Task], Answer]) -> int:
        """Do what node 0 asks for until it tells the exit code.

        Raises:
            Unfit: Node 0 has gone.
        """
        rank = self.rendezvous.rank
        number = 0
        while True:
            number += 1
            task = self._get(f"task/{rank}/{number}", self._patience)
            answer = self._clock() if task["do"] == "clock" else "" if task["do"] == "end" else perform(task)
            self._told.set(f"answer/{rank}/{number}", answer)
            if task["do"] == "end":
                return int(task["code"])

    def _send(self, rank: int, task: Task) -> str:
        """Return the key of the answer."""
        self._sent[rank] += 1
        self._told.set(f"task/{rank}/{self._sent[rank]}", task)
        return f"answer/{rank}/{self._sent[rank]}"

    def _gather(self, keys: Mapping[int, str], deadline: float) -> dict[int, Answer]:
        found: dict[int, Answer] = {}
        while True:
            for rank, key in keys.items():
                if rank not in found and (answer := self._told.get(key)) is not None:
                    found[rank] = answer
            if len(found) == len(keys) or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)

    def _get(self, key: str, seconds: float) -> Any:
        failure = None
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            if (found := self._told.get(key)) is not None:
                return found
        except RuntimeError as error:
            failure = error
        asked = "node 0" if self.rendezvous.rank else f"node {key.split('/')[1]}"
        unknown = f"has another {SECRET}" if failure is None else "has stopped answering"
        raise Unfit(f"{asked} {unknown}: what it said, or its log, tells why") from failure


def open_store(rendezvous: Rendezvous, address: str, deadline: float) -> TCPStore:
    """Return node 0's store; it is made on node 0, and waited for until `deadline` on the others.

    A single node meets itself, at a port of its own.

    Raises:
        Unfit: Node 0 doesn't answer, or its port is taken.
    """
    if rendezvous.rank:
        _wait_for_node_0(rendezvous, address, deadline)
    try:
        return connect(address, rendezvous.port) if rendezvous.rank else serve(address, rendezvous.port)
    except DistError as error:
        reason = str(error).partition("\n")[0].partition(". Exception raised")[0]
        raise Unfit(f"{rendezvous.name(0)}: no store at {address}:{rendezvous.port} ({reason})") from error
    except OSError as error:
        raise Unfit(
            f"{rendezvous.name(0)}: port {rendezvous.port} (MASTER_PORT + 1) can't be used ({error.strerror}): "
            "choose another MASTER_PORT, below 32768, on all nodes"
        ) from error


def _wait_for_node_0(rendezvous: Rendezvous, address: str, deadline: float) -> None:
    """Knock until node 0 opens; the store's own client would not tell a firewall from a node that isn't there."""
    reason = "not tried"
    while time.monotonic() < deadline:
        try:
            return knock(address, rendezvous.port)
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(0.1)
    asked_from = rendezvous.name(rendezvous.rank)
    raise Unfit(
        f"{rendezvous.name(0)}: node 0 doesn't answer at {address}:{rendezvous.port}, asked from {asked_from} "
        f"({reason}): start the preflight there, too, with the same MASTER_ADDR and MASTER_PORT, and let that port "
        "through the firewall"
    )
