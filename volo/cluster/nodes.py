"""The launchers of a run's nodes: they start their processes together, and end with one exit code.

They meet in a store that the launcher of node 0 serves, in which their processes meet, too, and hear of each other by
a heartbeat. Node 0 decides for all: whether everybody is ready, who is missing or gone, and what the exit codes amount
to. Each launcher, node 0's own as well, waits for these decisions.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from torch.distributed import DistError, TCPStore

from volo.cluster.heartbeat import Heartbeat, State
from volo.cluster.run_store import BEGUN, SECRET, SignedStore, connect, serve, start_scope, wait_for_store

LOST = 5
# Bad input, divergence, a full disk: the same would happen again. 85 and 130: told to end.
FINAL = (2, 3, 4, 85, 130)
_INTERVAL_S = 0.25
_POLL_S = 0.05
_SILENT_S = 20.0  # without a sign of life a node is gone
_LEAVE_S = 5.0
_NAMED = 8  # nodes that a message to all names, at most


class LaunchError(Exception):
    """The launch ends here, with this exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass
class Node:
    """What a launcher tells node 0."""

    host: str
    address: str
    processes: int
    restarts: int  # that it would make
    joined: int = -1  # the start that it is ready for
    ended: list[int] = field(default_factory=list)  # exit code of each start
    signal: int | None = None  # that told it to end
    said: str = ""  # by its processes, of their end
    left: bool = False


@dataclass(frozen=True)
class Decisions:
    """What node 0 tells all launchers.

    Attributes:
        node: Name of node 0.
        awaited: Names of nodes that are not ready for the start that is due, or still run.
        started: The last start for which all were ready.
        failed: Exit code and reason, where the launch ends before its processes run.
        not_begun: Why processes that wait for others can be killed: those have ended, and nothing is lost.
        ended: The last start that has ended on all nodes, or on all that are not gone.
        code: The exit code of that start.
        again: Whether all nodes start their processes once more if the code allows it.
        gone: Names of the nodes that were lost in that start.
    """

    node: str = "node 0"
    awaited: tuple[str, ...] = ()
    started: int = -1
    failed: tuple[int, str] | None = None
    not_begun: str = ""
    ended: int = -1
    code: int = 0
    again: bool = False
    gone: tuple[str, ...] = ()


class Start(NamedTuple):
    """A start as the processes of this node are told: the launch it belongs to, and their place in it."""

    launch: str
    number: int
    first_rank: int
    world_size: int


class Nodes:
    """This launcher among those of all nodes.

    Args:
        where: Address and port of node 0's store; port 0 of a single node: any.
        patience: Seconds until all nodes must be there.
        own: This node.
        told_to_end: Returns the signal that told this launcher to end, None so far.
        kill: Kills the processes of this node at once; called in another thread.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        where: tuple[str, int],
        run_id: str,
        patience: float,
        own: Node,
        told_to_end: Callable[[], int | None],
        kill: Callable[[], None],
    ) -> None:
        self.rank, self.count, self.run_id, self.patience = rank, count, run_id, patience
        self.address, self.port = where
        self.own, self._told_to_end, self._kill = own, told_to_end, kill
        self._launch = uuid.uuid4().hex  # node 0's is the name of the launch
        self._decisions = Decisions()
        self._joining_since = 0.0
        self._not_begun = ""  # why the processes of this node were killed
        self._store: TCPStore | None = None
        self._heartbeat: Heartbeat | None = None

    def join(self, start: int) -> Start:
        """Wait until every node is ready for this start.

        Raises:
            LaunchError: Another node is missing or has left, or this launcher was told to end.
        """
        self._joining_since = time.monotonic()
        self.own.joined = start
        if self._heartbeat is None:
            self._store = self._open_store(self._joining_since + self.patience)
            self._heartbeat = Heartbeat(self._store, self.run_id, self.run_id, self.rank, self.count, _INTERVAL_S)
            self._heartbeat.start(self._tell, self._decide, self._hear)
        while self._decisions.started < start:
            if self._decisions.failed:
                raise LaunchError(*self._decisions.failed)
            self._check()
            # Node 0 has decided by then: its reason says more.
            if self._waited() > self.patience + (self.rank == 0) or self._node_0_is_gone():
                raise LaunchError(LOST, self._missing(self._decisions.awaited or ("node 0",)))
            time.sleep(_POLL_S)
        try:
            assert self._store is not None
            launch, processes = SignedStore(self._store, self.run_id).get(f"start/{start}")
        except DistError as error:
            raise LaunchError(LOST, f"{self._decisions.node} broke off the connection") from error
        return Start(launch, start, sum(processes[: self.rank]), sum(processes))

    def agree(self, start: int, code: int, said: str) -> tuple[int, bool]:
        """Tell how this node's processes have ended; return the exit code of all nodes, and whether all may go on.

        Raises:
            LaunchError: This launcher was told to end while others still run.
        """
        self.own.signal = self._told_to_end()
        # A process that ended by itself before it could be killed says why.
        if self._not_begun and self.own.signal is None and code in (0, 128 + signal.SIGKILL):
            print(f"the run has not begun: {self._not_begun}", file=sys.stderr)
            code, self._not_begun = LOST, ""
        self.own.said = said or f"its processes have ended with code {code}"
        self.own.ended.append(code)
        while self._decisions.ended < start and not self._node_0_is_gone():
            if self.own.signal is None:
                self._check()
            time.sleep(_POLL_S)
        outcome = self._decisions
        if outcome.ended < start:
            outcome = replace(outcome, code=telling_code([code, LOST]), again=False, gone=(outcome.node,))
        for name in outcome.gone:
            print(f"{name} is gone: its launcher has ended, or machine or network failed", file=sys.stderr)
        return outcome.code, outcome.again

    def leave(self) -> bool:
        """Say goodbye; node 0 takes the store along, so it waits for the others.

        Returns:
            False if the store does not answer: the process must end by `os._exit`.
        """
        if self._heartbeat is None:
            return True
        self.own.signal = self.own.signal or self._told_to_end()
        self.own.left = True
        deadline = time.monotonic() + _LEAVE_S
        self._heartbeat.told(_LEAVE_S)
        while self.rank == 0 and time.monotonic() < deadline and not self._others_have_left():
            time.sleep(_POLL_S)
        return self._heartbeat.stop(2)

    def _others_have_left(self) -> bool:
        assert self._heartbeat is not None
        return all(self._is_gone(rank) for rank in list(self._heartbeat.members) if rank)

    def _open_store(self, deadline: float) -> TCPStore:
        where = f"{self.address}:{self.port}"
        if self.rank > 0:
            try:
                wait_for_store(self.address, self.port, deadline, self._check)
            except OSError as error:
                raise LaunchError(
                    LOST,
                    f"node 0 did not answer at {where} within {self.patience:g} s: is it started there, with the same "
                    "MASTER_ADDR and MASTER_PORT, and does a firewall keep the port shut?",
                ) from error
        try:
            if self.rank > 0:
                return connect(self.address, self.port)
            if not os.environ.get(SECRET):
                print(f"warning: no {SECRET}: whoever reaches port {self.port} can disturb this run", file=sys.stderr)
            store = serve(self.address, self.port)
        except DistError as error:
            raise LaunchError(LOST, f"node 0 broke off the connection at {where}") from error
        except OSError as error:
            remedy = "another run uses it? Choose a MASTER_PORT"
            raise LaunchError(2, f"can't listen on port {self.port} ({error.strerror}): {remedy}") from error
        self.port = store.port
        return store

    def _tell(self) -> State:
        return asdict(self.own)

    def _hear(self, state: State) -> None:
        """Take over what node 0 has decided."""
        self._decisions = Decisions(**state)
        start = self.own.joined
        if self._decisions.not_begun and self._decisions.started == start and len(self.own.ended) <= start:
            self._not_begun = self._decisions.not_begun
            self._kill()

    def _decide(self) -> State:
        """Node 0: decide what follows from what all nodes have told, and hear it itself."""
        assert self._heartbeat is not None
        nodes = {rank: Node(**member.state) for rank, member in sorted(self._heartbeat.members.items())}
        before, start = replace(self._decisions, node=self._name(0), awaited=(), not_begun=""), self.own.joined
        if before.failed or before.ended == start:
            decisions = before
        elif before.started < start:
            decisions = self._decide_whether_to_start(before, start, nodes)
        else:
            decisions = self._decide_whether_it_has_ended(before, start, nodes)
        state = asdict(decisions)
        self._hear(state)
        return state

    def _decide_whether_to_start(self, before: Decisions, start: int, nodes: dict[int, Node]) -> Decisions:
        for rank, node in nodes.items():
            if node.left and node.signal:
                return replace(before, failed=(128 + node.signal, f"{self._name(rank)} got {_name(node.signal)}"))
        ready = {rank for rank, node in nodes.items() if node.joined >= start and not self._is_gone(rank)}
        missing = [rank for rank in range(self.count) if rank not in ready]
        names = [self._name(rank) for rank in missing]
        if any(node.left for node in nodes.values()) or self._waited() > self.patience:
            return replace(before, failed=(LOST, self._missing(names)))
        if missing:
            return replace(before, awaited=tuple(names[:_NAMED]))
        assert self._store is not None
        processes = [nodes[rank].processes for rank in range(self.count)]
        SignedStore(self._store, self.run_id).set(f"start/{start}", [self._launch, processes])
        return replace(before, started=start)

    def _decide_whether_it_has_ended(self, before: Decisions, start: int, nodes: dict[int, Node]) -> Decisions:
        running = [rank for rank in nodes if len(nodes[rank].ended) <= start]
        gone = [rank for rank in running if self._is_gone(rank)]
        codes = [node.ended[start] for node in nodes.values() if len(node.ended) > start] + [LOST] * len(gone)
        if gone or not running:
            again = not gone and all(node.signal is None for node in nodes.values())
            return replace(
                before,
                ended=start,
                code=telling_code(codes),
                again=again and start < min(node.restarts for node in nodes.values()),
                gone=tuple(map(self._name, gone)),
            )
        decisions = replace(before, awaited=tuple(map(self._name, running[:_NAMED])))
        assert self._store is not None
        if any(codes) and not self._store.check([f"{start_scope(self._launch, start)}/{BEGUN}"]):
            failed = [rank for rank, node in nodes.items() if len(node.ended) > start and node.ended[start]]
            return replace(decisions, not_begun="; ".join(f"{self._name(rank)}: {nodes[rank].said}" for rank in failed))
        return decisions

    def _is_gone(self, rank: int) -> bool:
        """Node 0: return whether a node that was there has left, or gives no sign of life."""
        assert self._heartbeat is not None
        member = self._heartbeat.members[rank]
        return rank > 0 and (member.state["left"] or time.monotonic() - member.moved > _SILENT_S)

    def _node_0_is_gone(self) -> bool:
        """Return whether node 0 gives no sign of life. It leaves as the last one."""
        if self.rank == 0 or self._heartbeat is None:
            return False
        member = self._heartbeat.members.get(0)
        return self._heartbeat.lost or member is not None and time.monotonic() - member.moved > _SILENT_S

    def _check(self) -> None:
        number = self._told_to_end()
        if number is not None:
            awaited = ", ".join(self._decisions.awaited) or "node 0"
            raise LaunchError(128 + number, f"{_name(number)} while waiting for {awaited}")
        if self._heartbeat is not None and self._heartbeat.has_twin:
            raise LaunchError(2, f"another machine has joined as NODE_RANK {self.rank}, too: each needs its own")

    def _waited(self) -> float:
        return time.monotonic() - self._joining_since

    def _missing(self, names: Sequence[str]) -> str:
        return (
            f"{', '.join(names)} did not join {self.address}:{self.port} within {self._waited():.0f} s: see what was "
            f"printed there; NNODES, MASTER_ADDR, MASTER_PORT, RUN_ID and {SECRET} must be the same on all nodes"
        )

    def _name(self, rank: int) -> str:
        """Node 0: return what messages call a node."""
        member = self._heartbeat.members.get(rank) if self._heartbeat else None
        return f"node {rank} ({member.state['host']}, {member.state['address']})" if member else f"node {rank}"


def telling_code(codes: Iterable[int]) -> int:
    """Return the exit code that tells most: one that lost another process, or was killed, does not tell why.

    Args:
        codes: In the order of preference among equals; 0 does not count if there is another one.
    """
    failed = [code for code in codes if code]
    return min(failed, key=lambda code: (code == LOST, code > 128 and code not in FINAL), default=0)


def _name(number: int) -> str:
    return signal.Signals(number).name
