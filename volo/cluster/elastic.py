"""Starts this node's processes by torch's elastic agent (what torchrun is), and ends with one exit code.

torch's own rendezvous listen at all addresses of a machine and exchange pickles. `OneAddress` takes their place: a
store at one address, loopback for a run on one machine, in which the nodes meet and later their ranks.

The agent would answer a signal by ending the processes within 30 s and forget how they ended. So it runs in a thread
of its own, and signals are passed on to the processes, which save and end by themselves, however long that takes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from volo.cluster.launch import Launch
from volo.cluster.store import connect, serve

LOST = 5
# Bad input, divergence, a full disk, machines that are not fit: the same would happen again. 85 and 130: told to end.
FINAL = (2, 3, 4, 6, 85, 130)
_TOLD = (85, 130)

_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
_POLL_S = 0.1
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
        check: Called while waiting; it may raise to end that.
    """

    use_agent_store = True  # the ranks meet in the same store

    def __init__(self, launch: Launch, name: str, check: Callable[[], None]) -> None:
        self._launch, self._name, self._check = launch, name, check
        self._store: TCPStore | None = None  # ends with the object

    def get_backend(self) -> str:
        return "one-address"

    def get_run_id(self) -> str:
        return self._launch.run_id

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
        self._store = store = self._serve() if launch.node_rank == 0 else self._reach(until)
        if store.compare_set(f"node/{launch.node_rank}", "", self._name).decode() != self._name:
            raise NotTogether(f"another machine has joined as NODE_RANK {launch.node_rank}, too: each needs its own", 2)
        self._wait_for_all(store, until)
        # Before the processes are started, which inherit it: the name of the launch is that of node 0.
        os.environ["LAUNCH_ID"] = store.get("node/0").decode()
        where = RendezvousStoreInfo(launch.address, store.port)
        return RendezvousInfo(PrefixStore("agents", store), launch.node_rank, launch.nodes, where)

    def _serve(self) -> TCPStore:
        address, port = self._launch.address, self._launch.port
        try:
            return serve(address, port)
        except OSError as error:
            remedy = "another run uses it? Choose a MASTER_PORT"
            raise NotTogether(f"can't listen at {address}, port {port} ({error.strerror}): {remedy}", code=2) from error

    def _reach(self, until: float) -> TCPStore:
        address, port = self._launch.address, self._launch.port
        while True:
            try:
                return connect(address, port)
            except (OSError, DistError) as error:
                self._check()
                if time.monotonic() > until:
                    raise NotTogether(
                        f"node 0 did not answer at {address}:{port} within {self._launch.join_timeout:g} s: is it "
                        "started there, with the same MASTER_ADDR and MASTER_PORT, and does a firewall keep the port "
                        "shut?"
                    ) from error
            time.sleep(_POLL_S)

    def _wait_for_all(self, store: TCPStore, until: float) -> None:
        missing = list(range(self._launch.nodes))
        while missing := [rank for rank in missing if not store.check([f"node/{rank}"])]:
            self._check()
            if time.monotonic() > until:
                raise NotTogether(
                    f"node {', '.join(map(str, missing))} did not join {self._launch.address}:{store.port} within "
                    f"{self._launch.join_timeout:g} s: see what was printed there; NNODES, MASTER_ADDR and MASTER_PORT "
                    "must be the same on all nodes"
                )
            time.sleep(_POLL_S)


class Launcher:
    """This node's launcher: starts of its processes, one after the other, until one ends well or for good."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.name = launch, uuid.uuid4().hex
        self.signals: list[int] = []  # received so far
        self._passed_on = 0
        self._told_at = 0.0

    def run(self) -> int:
        """Return the exit code of this node.

        Raises:
            NotTogether: See `OneAddress`.
        """
        # What the agent reports is what the processes have said themselves.
        logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
        logging.getLogger("torch.distributed.elastic").propagate = False
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._received)
        for restart in range(self.launch.restarts + 1):
            os.environ["LAUNCH_RESTARTS"] = str(restart)
            code = self._start()
            if code == 0 or code in FINAL or self.signals:
                break
            if restart < self.launch.restarts:
                of = f"restart {restart + 1} of {self.launch.restarts}"
                print(f"a process ended with code {code}: {of}", file=sys.stderr, flush=True)
        return code

    def _start(self) -> int:
        """Run the processes once."""
        with tempfile.TemporaryDirectory(prefix="volo_launch_", ignore_cleanup_errors=True) as scratch:
            told = Path(scratch, "told")  # where ranks that end note what they say, so that others don't repeat it
            told.touch()
            os.environ |= {"LAUNCH_TOLD": str(told), "LAUNCH_PID": str(os.getpid())}
            try:
                result = self._run_agent(self._agent(self.launch.log_dir or scratch))
            except ToldToEnd:
                return self._told_to_end()
        code = telling_code([failure.exitcode for failure in result.failures.values()])  # as they were seen
        # A process that was not yet there to handle the signal it got.
        return self._told_to_end() if self.signals and code == 128 + self.signals[0] else code

    def _agent(self, log_dir: str) -> LocalElasticAgent:
        launch = self.launch
        spec = WorkerSpec(
            role="default",
            local_world_size=launch.processes,
            rdzv_handler=OneAddress(launch, self.name, self._check),
            entrypoint=sys.executable,
            args=("-u", *launch.program),
            max_restarts=0,
            monitor_interval=_POLL_S,
        )
        logs = DefaultLogsSpecs(log_dir, tee=Std.ALL if launch.prefix else Std.NONE)
        return LocalElasticAgent(spec, logs, exit_barrier_timeout=_END_S, log_line_prefix_template=launch.prefix)

    def _run_agent(self, agent: LocalElasticAgent) -> RunResult:
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(agent.run)
            while not running.done():
                wait([running], timeout=_POLL_S)
                processes = [worker.id for worker in agent.get_worker_group().workers]
                while all(processes) and self._passed_on < len(self.signals):
                    _send(processes, self.signals[self._passed_on])
                    self._passed_on += 1
                if self.signals and time.monotonic() > self._told_at + self.launch.patience:
                    _send(processes, signal.SIGKILL)
            return running.result()

    def _received(self, number: int, frame: FrameType | None) -> None:
        self._told_at = self._told_at if self.signals else time.monotonic()
        self.signals.append(number)

    def _check(self) -> None:
        if self.signals:
            raise ToldToEnd

    def _told_to_end(self) -> int:
        return 130 if self.signals[0] == signal.SIGINT else 85


def _send(processes: Iterable[int], number: int) -> None:
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
