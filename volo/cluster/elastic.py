"""Starts this node's processes with torch's elastic agent, as torchrun does, and returns one exit code.

torch's own rendezvous listens at all addresses of a machine. `OneAddress` listens at one address, which is loopback if
the run is on one machine. First the nodes, later the ranks, meet in its key-value store.

On a signal, the agent would end the processes and lose their exit codes. So the launcher passes signals on to the
processes, which save and end by themselves.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from volo.cluster.distributed import LEFT, RankLost, connect, meet, serve, start_of

# Success; bad input, divergence, full disk, unfit machines and a wrong rank, which a restart can't mend; stopped by a
# signal.
FINAL = (0, 2, 3, 4, 6, 7, 85, 130)
_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
_SAME_S = 1.0  # seconds within which several signals count as one
_END_S = 60  # seconds for which a node that has finished waits for the others
_LOST_S = 8  # seconds that processes get to end after another one has failed, as in a save that hangs


class OneAddress(StaticTCPRendezvous):
    """torch's rendezvous of numbered nodes that listens at one address and explains in a line why nodes don't meet."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Return when all nodes are there. Raises RankLost if a node does not come in time, UserError if two nodes have
        the same number or the port is in use."""
        address = self.master_addr
        port = self.master_port
        until = time.monotonic() + self.timeout.total_seconds()
        store = serve(address, port) if self.rank == 0 else connect(address, port, until, "node")
        meet(store, "node", self.rank, self.world_size, until, self.run_id)
        self.run_id = store.get("node/0").decode()  # all nodes use the run id of node 0's launcher
        self._store = store  # the ranks will meet in the same store
        self.master_port = store.port
        return super().next_rendezvous()

    def close(self, restart: int) -> None:
        """Tell the ranks of other nodes, which may wait for this node's ranks, that it has left; node 0 may be gone."""
        with suppress(DistError):
            assert self._store is not None
            start_of(self._store, self.run_id, restart).set(LEFT, "")


class Agent(LocalElasticAgent):
    """torch's agent, which itself gives processes 30 s to end after another one was lost."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close = context.close

        def close_soon(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            lost = any(failure.exitcode not in FINAL for failure in context._failures.values())
            close(death_sig, _LOST_S if lost else timeout)

        context.close = close_soon
        return started


@dataclass
class Launcher:
    """This node's launcher. It starts the processes, again after failures, until they succeed or can't be restarted."""

    processes: int
    program: Sequence[str]  # path of a Python file, then its flags
    master_addr: str = "127.0.0.1"  # address at which node 0's store listens
    master_port: int = 0  # 0 takes any free port
    nnodes: int = 1
    node_rank: int = 0
    max_restarts: int = 0
    shutdown_timeout: int = 300
    join_timeout: int = 60
    name: str = field(default_factory=lambda: f"volo-{uuid.uuid4().hex[:12]}")  # run id, unique to this launcher
    _signal: int = 0  # number of the first signal that came
    _since: float = 0.0  # monotonic time at which it came, in seconds
    _agent: Agent | None = None

    def run(self) -> int:
        """Return the exit code of this node. Raises UserError if the nodes don't come together; see `OneAddress`."""
        # The agent's log is silenced, because it repeats what the processes have printed.
        logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
        logging.getLogger("torch.distributed.elastic").propagate = False
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the agent handles this one; we handle the others
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._received)
        try:
            code = self._start(0)
            restart = 1
            while restart <= self.max_restarts and code not in FINAL and not self._signal:
                message = f"a process ended with code {code}: restart {restart} of {self.max_restarts}"
                print(message, file=sys.stderr, flush=True)
                code = self._start(restart)
                restart = restart + 1
        except KeyboardInterrupt:  # a signal came before there were processes
            code = 128 + self._signal
        if self._signal and code in (128 + self._signal, 128 + signal.SIGKILL):  # the processes couldn't save in time
            return 130 if self._signal == signal.SIGINT else 85
        return code

    def _start(self, restart: int) -> int:
        """Start the processes once, wait for them, and return one exit code."""
        prefix = f"[{socket.gethostname()}:${{rank}}] " if self.nnodes > 1 else None
        where = self.master_addr, self.master_port, self.node_rank, self.nnodes
        with tempfile.TemporaryDirectory(prefix="volo_launch_", ignore_cleanup_errors=True) as scratch:
            os.environ |= {"LAUNCH_PID": str(os.getpid()), "LAUNCH_RESTARTS": str(restart)}
            rendezvous = OneAddress(*where, self.name, self.join_timeout)
            spec = WorkerSpec(
                role="default",
                local_world_size=self.processes,
                rdzv_handler=rendezvous,
                entrypoint=sys.executable,
                args=("-u", *self.program),
                max_restarts=0,
                monitor_interval=0.1,
            )
            logs = DefaultLogsSpecs(scratch, tee=Std.ALL if prefix else Std.NONE)
            self._agent = Agent(spec, logs, exit_barrier_timeout=_END_S, log_line_prefix_template=prefix)
            result = self._agent.run()
            self._agent = None
        if result.failures:
            rendezvous.close(restart)
        return telling_code([failure.exitcode for failure in result.failures.values()])  # in the order they were seen

    def _received(self, number: int, frame: FrameType | None) -> None:
        if not self._signal:
            self._since = time.monotonic()  # before the number: another signal may come in between
            self._signal = number
        processes = [worker.id for worker in self._agent.get_worker_group().workers] if self._agent else []
        if not processes or not all(processes):  # the processes don't exist yet
            raise KeyboardInterrupt
        _send(processes, number)
        # A process that is inside C++ code doesn't react to a second signal, so SIGKILL follows.
        second = time.monotonic() > self._since + _SAME_S
        timer = threading.Timer(_SAME_S if second else self.shutdown_timeout, _send, (processes, signal.SIGKILL))
        timer.daemon = True  # otherwise the launcher would wait for this timer before it ends
        timer.start()


def _send(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def telling_code(codes: Sequence[int]) -> int:
    """Return the exit code, as a shell gives it, that best explains why processes failed.

    `codes` are the exit codes in order of failure; a negative one is a signal's number. A process that failed by itself
    counts before one that lost another rank, received a signal, or was killed after another process had failed.
    """
    telling = [code for code in codes if code > 0 and code not in (RankLost.exit_code, 85, 130)]
    code = [*telling, *codes, 0][0]
    return code if code >= 0 else 128 - code
