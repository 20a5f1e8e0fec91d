"""Starts this node's processes by torch's elastic agent (what torchrun is), and ends with one exit code.

torch's own rendezvous listen at all addresses of a machine and exchange pickles. `OneAddress` takes their place: a
store at one address, loopback for a run on one machine, in which the nodes meet and later their ranks.

The agent would answer a signal by ending the processes and forget how they ended. So signals are passed on to the
processes, which save and end by themselves.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from volo.cluster.launch import Launch
from volo.cluster.store import connect, meet, serve

LOST = 5
_TOLD = (85, 130)
FINAL = (2, 3, 4, 6, *_TOLD)  # bad input, divergence, full disk, machines that aren't fit: the same would happen again

_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
_POLL_S = 0.1
_SAME_S = 1.0  # one warning may come several times
_END_S = 60  # for which a node that is done waits for the others


class NotTogether(Exception):
    """The nodes don't come together; the processes are not started."""

    def __init__(self, reason: str, code: int = LOST) -> None:
        super().__init__(reason)
        self.code = code


class ToldToEnd(Exception):
    """A signal came before there were processes to pass it on to."""


class OneAddress(RendezvousHandler):
    """The nodes of a launch, in the order of their numbers, and the store of node 0.

    Args:
        name: Of this launcher, unlike all others.

    Attributes:
        complete: Whether all nodes have come.
    """

    use_agent_store = True  # the ranks meet in the same store

    def __init__(self, launch: Launch, name: str) -> None:
        self._launch, self._name, self._run_id = launch, name, name
        self._store: TCPStore | None = None  # ends with the object
        self.complete = False

    def get_backend(self) -> str:
        return "one-address"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """A launch has one start, so there is nothing to close."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return once all nodes are there.

        Raises:
            NotTogether: One does not come in time, has a number that another one has, or the port is in use.
        """
        launch, until = self._launch, time.monotonic() + self._launch.join_timeout
        within = f"{launch.address}:{launch.port} within {launch.join_timeout} s"
        self._store = self._serve() if launch.node_rank == 0 else connect(launch.address, launch.port, until)
        if self._store is None:
            raise NotTogether(
                f"node 0 did not answer at {within}: is it started there, with the same MASTER_ADDR and MASTER_PORT, "
                "and does a firewall keep the port shut?"
            )
        if self._store.compare_set(f"node/{launch.node_rank}", "", self._name).decode() != self._name:
            raise NotTogether(f"another machine has joined as NODE_RANK {launch.node_rank}, too: each needs its own", 2)
        if missing := meet(self._store, launch.node_rank, launch.nodes, until):
            raise NotTogether(
                f"node {', '.join(map(str, missing))} did not join {within}: see what was printed there; NNODES, "
                "MASTER_ADDR and MASTER_PORT must be the same on all nodes"
            )
        self._run_id = self._store.get("node/0").decode()  # the run of all nodes has the name of node 0's launcher
        where = RendezvousStoreInfo(launch.address, self._store.port)
        self.complete = True
        return RendezvousInfo(PrefixStore("agents", self._store), launch.node_rank, launch.nodes, where)

    def _serve(self) -> TCPStore:
        address, port = self._launch.address, self._launch.port
        try:
            return serve(address, port)
        except OSError as error:
            remedy = "node 0 is the one that has MASTER_ADDR; where another run uses the port, choose a MASTER_PORT"
            raise NotTogether(f"can't listen at {address}, port {port} ({error.strerror}): {remedy}", code=2) from error


class Launcher:
    """This node's launcher: starts of its processes, one after the other, until one ends well or for good."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.name = launch, f"volo-{uuid.uuid4().hex[:12]}"
        self.signals: list[int] = []  # passed on so far
        self._told_at = 0.0
        self._agent: LocalElasticAgent | None = None
        self._nodes: OneAddress | None = None

    def run(self) -> int:
        """Return the exit code of this node.

        Raises:
            NotTogether: See `OneAddress`.
        """
        # What the agent reports is what the processes have said themselves.
        logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
        logging.getLogger("torch.distributed.elastic").propagate = False
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # by the agent; the others are handled here
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._received)
        for restart in range(self.launch.restarts + 1):
            os.environ["LAUNCH_RESTARTS"] = str(restart)
            try:
                code = self._start()
            except ToldToEnd:
                return self._told_to_end()
            if code == 0 or code in FINAL or self.signals:
                break
            if restart < self.launch.restarts:
                of = f"restart {restart + 1} of {self.launch.restarts}"
                print(f"a process ended with code {code}: {of}", file=sys.stderr, flush=True)
        return code

    def _start(self) -> int:
        """Run the processes once."""
        launch = self.launch
        with tempfile.TemporaryDirectory(prefix="volo_launch_", ignore_cleanup_errors=True) as scratch:
            told = Path(scratch, "told")  # where ranks that end note what they say, so that others don't repeat it
            told.touch()
            os.environ |= {"LAUNCH_TOLD": str(told), "LAUNCH_PID": str(os.getpid())}
            self._nodes = OneAddress(launch, self.name)
            spec = WorkerSpec(
                role="default",
                local_world_size=launch.processes,
                rdzv_handler=self._nodes,
                entrypoint=sys.executable,
                args=("-u", *launch.program),
                max_restarts=0,
                monitor_interval=_POLL_S,
            )
            logs = DefaultLogsSpecs(launch.log_dir or scratch, tee=Std.ALL if launch.prefix else Std.NONE)
            self._agent = LocalElasticAgent(
                spec, logs, exit_barrier_timeout=_END_S, log_line_prefix_template=launch.prefix
            )
            result, self._agent = self._agent.run(), None
        code = telling_code([failure.exitcode for failure in result.failures.values()])  # as they were seen
        # A process that was not yet there to handle the signal it got.
        return self._told_to_end() if self.signals and code == 128 + self.signals[0] else code

    def _received(self, number: int, frame: FrameType | None) -> None:
        agent = self._agent
        if agent is None or self._nodes is None or not self._nodes.complete:
            self.signals.append(number)
            raise ToldToEnd
        processes = [worker.id for worker in agent.get_worker_group().workers]
        if not all(processes):  # just being started
            _later(_POLL_S, os.kill, os.getpid(), number)
            return
        again = bool(self.signals) and time.monotonic() > self._told_at + _SAME_S
        self._told_at = self._told_at if self.signals else time.monotonic()
        self.signals.append(number)
        _send(processes, number)
        # Whoever is inside of C++ code does not hear a second signal.
        _later(_SAME_S if again else self.launch.patience, _send, processes, signal.SIGKILL)

    def _told_to_end(self) -> int:
        return 130 if self.signals[0] == signal.SIGINT else 85


def _later(seconds: float, function: Callable[..., None], *args: object) -> None:
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True  # or the launcher would end no sooner
    timer.start()


def _send(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def telling_code(codes: Sequence[int]) -> int:
    """Return a shell's exit code for processes that failed with these codes, in this order; negative: by a signal.

    One that lost another process, or was killed or told to end after another one had failed, doesn't tell why where
    another one does.
    """
    told_first = [code for code in codes[:1] if code in _TOLD]
    telling = [code for code in codes if code > 0 and code != LOST and code not in _TOLD]
    code = (told_first + telling + list(codes) + [0])[0]
    return code if code >= 0 else 128 - code
