"""Starts this node's processes by torch's elastic agent (what torchrun is), and ends with one exit code.

torch's own rendezvous listen at all addresses of a machine. `OneAddress` listens at one, loopback for a run on one
machine; the nodes meet in its store, and later their ranks.

The agent would answer a signal by ending the processes and forget how they ended. So signals are passed on to the
processes, which save and end by themselves.
"""

from __future__ import annotations

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

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from volo.cluster.distributed import LEFT, RankLost, connect, meet, serve, start_of

# Done; bad input, divergence, full disk, machines that aren't fit: the same would happen again; told to end.
FINAL = (0, 2, 3, 4, 6, 85, 130)
_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
_SAME_S = 1.0  # one warning may come several times
_END_S = 60  # for which a node that is done waits for the others


class OneAddress(StaticTCPRendezvous):
    """torch's rendezvous of numbered nodes, but at one address alone, with a line where they don't come together."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Return once all nodes are there. Raises RankLost if one does not come in time, UserError if two have one
        number, or the port is in use."""
        address, port, until = self.master_addr, self.master_port, time.monotonic() + self.timeout.total_seconds()
        store = serve(address, port) if self.rank == 0 else connect(address, port, until, "node")
        meet(store, "node", self.rank, self.world_size, until, self.run_id)
        self.run_id = store.get("node/0").decode()  # the run of all nodes has the name of node 0's launcher
        self._store, self.master_port = store, store.port  # where the ranks meet, too
        return super().next_rendezvous()

    def close(self, restart: int) -> None:
        """Tell ranks of other nodes that wait for those of this one that it has left; node 0 may have left before."""
        with suppress(DistError):
            assert self._store is not None
            start_of(self._store, self.run_id, restart).set(LEFT, "")


@dataclass
class Launcher:
    """This node's launcher: starts of its processes, one after the other, until one ends well or for good."""

    processes: int
    program: Sequence[str]  # a Python file and its flags
    log_dir: str = ""
    master_addr: str = "127.0.0.1"  # where the store of node 0 listens
    master_port: int = 0  # any that is free
    nnodes: int = 1
    node_rank: int = 0
    max_restarts: int = 0
    shutdown_timeout: int = 300
    join_timeout: int = 60
    name: str = field(default_factory=lambda: f"volo-{uuid.uuid4().hex[:12]}")  # unlike that of any other launcher
    _signal: int = 0  # the first that has come
    _since: float = 0.0  # when it came
    _agent: LocalElasticAgent | None = None

    def run(self) -> int:
        """Return the exit code of this node. Raises UserError if the nodes don't come together; see `OneAddress`."""
        # What the agent reports is what the processes have said themselves.
        logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
        logging.getLogger("torch.distributed.elastic").propagate = False
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # by the agent; the others are handled here
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._received)
        try:
            code, restart = self._start(0), 1
            while restart <= self.max_restarts and code not in FINAL and not self._signal:
                of = f"restart {restart} of {self.max_restarts}"
                print(f"a process ended with code {code}: {of}", file=sys.stderr, flush=True)
                code, restart = self._start(restart), restart + 1
        except KeyboardInterrupt:  # there were no processes yet
            code = 128 + self._signal
        if self._signal and code in (128 + self._signal, 128 + signal.SIGKILL):  # no process heard it, or soon enough
            return 130 if self._signal == signal.SIGINT else 85
        return code

    def _start(self, restart: int) -> int:
        """Run the processes once."""
        prefix = f"[{socket.gethostname()}:${{rank}}] " if self.log_dir or self.nnodes > 1 else None
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
            logs = DefaultLogsSpecs(self.log_dir or scratch, tee=Std.ALL if prefix else Std.NONE)
            self._agent = LocalElasticAgent(spec, logs, exit_barrier_timeout=_END_S, log_line_prefix_template=prefix)
            result, self._agent = self._agent.run(), None
        if result.failures:
            rendezvous.close(restart)
        return telling_code([failure.exitcode for failure in result.failures.values()])  # as they were seen

    def _received(self, number: int, frame: FrameType | None) -> None:
        if not self._signal:
            self._signal, self._since = number, time.monotonic()
        processes = [worker.id for worker in self._agent.get_worker_group().workers] if self._agent else []
        if not processes or not all(processes):  # there are none yet
            raise KeyboardInterrupt
        _send(processes, number)
        # Whoever is inside of C++ code does not hear a second signal.
        second = time.monotonic() > self._since + _SAME_S
        timer = threading.Timer(_SAME_S if second else self.shutdown_timeout, _send, (processes, signal.SIGKILL))
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
    telling = [code for code in codes if code > 0 and code not in (RankLost.exit_code, 85, 130)]
    code = [*telling, *codes, 0][0]
    return code if code >= 0 else 128 - code
