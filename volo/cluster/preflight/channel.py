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
from volo.cluster.run_store import SECRET, SignedStore, connect, serve, wait_for_store

Task = dict[str, Any]
Answer = Any
_POLL_S = 0.02
# Added to --timeout, it is longer than the slowest of the other nodes may take for a task.
PATIENCE_S = 300.0


class Channel:
    """Tasks and answers between node 0 and the other nodes, as one of them sees it.

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
        self._store, self._signed = store, SignedStore(store, "preflight")
        self._sent: Counter[int] = Counter()

    def announce(self) -> None:
        """Tell node 0 that this node has come.

        Raises:
            Unfit: Another machine has come under the same rank, or NNODES is not the same as on node 0.
        """
        host, rank = socket.gethostname(), self.rendezvous.rank
        own = [host, os.getpid(), self.rendezvous.nodes]
        first = self._signed.set_first(f"here/{rank}", own)
        if first != own:
            other = first[0] if first else f"one that does not know the {SECRET} of {host}"
            raise Unfit(f"node {rank} is {other} already: give {host} another NODE_RANK")
        nodes = self._wait_for("here/0", self._patience)[2]
        if nodes != self.rendezvous.nodes:
            name = self.rendezvous.name(rank)
            raise Unfit(
                f"{name}: NNODES is {self.rendezvous.nodes} here and {nodes} on node 0: set the same everywhere"
            )

    def wait_for_nodes(self, deadline: float) -> list[int]:
        """Return the ranks that have come, once all have or at `deadline` (of time.monotonic)."""
        return sorted(self._gather({rank: f"here/{rank}" for rank in range(self.rendezvous.nodes)}, deadline))

    def ask(
        self, tasks: Mapping[int, Task], seconds: float, perform: Callable[[Task], Answer] | None = None
    ) -> dict[int, Answer]:
        """Give nodes their tasks, by rank, and return the answers that come within `seconds`.

        Node 0 performs its own task itself, by `perform`.
        """
        keys = {rank: self._send(rank, task) for rank, task in tasks.items() if rank}
        deadline = time.monotonic() + seconds
        own = {0: perform(tasks[0])} if perform and 0 in tasks else {}
        return own | self._gather(keys, deadline)

    def clock_offset(self, rank: int, seconds: float = 5.0, samples: int = 5) -> tuple[float, float]:
        """Return by how many seconds a node's clock is ahead of this one's, and the uncertainty of that.

        The quickest of some round trips counts: its answer was given in the middle of it, give or take half of it.
        """
        trips = []
        for _ in range(samples):
            before = self._clock()
            there = self._wait_for(self._send(rank, {"do": "clock"}), seconds)
            after = self._clock()
            trips.append((after - before, there - (before + after) / 2))
        trip, offset = min(trips)
        return offset, trip / 2

    def follow(self, perform: Callable[[Task], Answer]) -> int:
        """Perform the tasks that node 0 gives until it ends the preflight; return the exit code that it decided.

        Raises:
            Unfit: Node 0 has stopped answering.
        """
        rank = self.rendezvous.rank
        number = 0
        while True:
            number += 1
            task = self._wait_for(f"task/{rank}/{number}", self._patience)
            answer = self._clock() if task["do"] == "clock" else "" if task["do"] == "end" else perform(task)
            self._signed.set(f"answer/{rank}/{number}", answer)
            if task["do"] == "end":
                return int(task["code"])

    def _send(self, rank: int, task: Task) -> str:
        """Give a node a task; return the key of its answer."""
        self._sent[rank] += 1
        self._signed.set(f"task/{rank}/{self._sent[rank]}", task)
        return f"answer/{rank}/{self._sent[rank]}"

    def _gather(self, keys: Mapping[int, str], deadline: float) -> dict[int, Answer]:
        found: dict[int, Answer] = {}
        while True:
            for rank, key in keys.items():
                if rank not in found and (answer := self._signed.get(key)) is not None:
                    found[rank] = answer
            if len(found) == len(keys) or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)

    def _wait_for(self, key: str, seconds: float) -> Any:
        failure = None
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            if (found := self._signed.get(key)) is not None:
                return found
        except RuntimeError as error:
            failure = error
        asked = "node 0" if self.rendezvous.rank else f"node {key.split('/')[1]}"
        problem = f"has another {SECRET}" if failure is None else "has stopped answering"
        raise Unfit(f"{asked} {problem}: what it said, or its log, tells why") from failure


def open_store(rendezvous: Rendezvous, address: str, deadline: float) -> TCPStore:
    """Return node 0's store. Node 0 serves it; the others wait for it until `deadline` (of time.monotonic).

    Raises:
        Unfit: Node 0 doesn't answer, or its port is taken.
    """
    if rendezvous.rank:
        try:
            wait_for_store(address, rendezvous.port, deadline)
        except OSError as error:
            raise Unfit(
                f"{rendezvous.name(0)}: node 0 doesn't answer at {address}:{rendezvous.port}, asked from "
                f"{rendezvous.name(rendezvous.rank)} ({error.strerror or error}): start the preflight there, too, with "
                "the same MASTER_ADDR and MASTER_PORT, and let that port through the firewall"
            ) from error
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
