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
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from tlt.errors import UserError
from volo.cluster.launch import Launch
from volo.cluster.store import connect, meet, serve

LOST = 5
# Bad input, divergence, full disk, machines that aren't fit: the same would happen again; or told to end.
FINAL = (2, 3, 4, 6, 85, 130)
_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
_POLL_S = 0.1
_SAME_S = 1.0  # one warning may come several times
_END_S = 60  # for which a node that is done waits for the others


class NotTogether(UserError):
    """Nodes don't come; the processes are not started."""

    exit_code = LOST


class ToldToEnd(Exception):
    """A signal came before there were processes to pass it on to."""


class OneAddress(StaticTCPRendezvous):
    """torch's rendezvous of numbered nodes, but at one address alone, and with a line where they don't come together.

    Args:
        name: Of this launcher, unlike all others.
    """

    def __init__(self, launch: Launch, name: str) -> None:
        where = launch.master_addr, launch.master_port, launch.node_rank, launch.nnodes
        super().__init__(*where, name, launch.join_timeout)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return once all nodes are there.

        Raises:
            NotTogether: One does not come in time.
            UserError: Two have one number, or the port is in use.
        """
        seconds = self.timeout.total_seconds()
        until, within = time.monotonic() + seconds, f"{self.master_addr}:{self.master_port} within {seconds:.0f} s"
        store = self._serve() if self.rank == 0 else connect(self.master_addr, self.master_port, until)
        if store is None:
            raise NotTogether(
                f"node 0 did not answer at {within}: is it started there, with the same MASTER_ADDR and MASTER_PORT, "
                "and does a firewall keep the port shut?"
            )
        if store.compare_set(f"node/{self.rank}", "", self.run_id).decode() != self.run_id:
            raise UserError(f"another machine has joined as NODE_RANK {self.rank}, too: each needs its own")
        if missing := meet(store, self.rank, self.world_size, until):
            raise NotTogether(
                f"node {', '.join(map(str, missing))} did not join {within}: see what was printed there; NNODES, "
                "MASTER_ADDR and MASTER_PORT must be the same on all nodes"
            )
        self.run_id = store.get("node/0").decode()  # the run of all nodes has the name of node 0's launcher
        self._store, self.master_port = store, store.port  # where the ranks meet, too
        return super().next_rendezvous()

    def _serve(self) -> TCPStore:
        try:
            return serve(self.master_addr, self.master_port)
        except OSError as error:
            where = f"{self.master_addr}, port {self.master_port} ({error.strerror})"
            remedy = "node 0 is the one that has MASTER_ADDR; where another run uses the port, choose a MASTER_PORT"
            raise UserError(f"can't listen at {where}: {remedy}") from error


class Launcher:
    """This node's launcher: starts of its processes, one after the other, until one ends well or for good."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.name = launch, f"volo-{uuid.uuid4().hex[:12]}"
        self.signals: list[int] = []  # that have come so far
        self._since = 0.0  # when the first one came
        self._at_once = False  # a second one has come
        self._agent: LocalElasticAgent | None = None

    def run(self) -> int:
        """Return the exit code of this node.

        Raises:
            UserError: The nodes don't come together; see `OneAddress`.
        """
        # What the agent reports is what the processes have said themselves.
        logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
        logging.getLogger("torch.distributed.elastic").propagate = False
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # by the agent; the others are handled here
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._received)
        try:
            restart, code = 0, self._start(0)
            while restart < self.launch.max_restarts and code != 0 and code not in FINAL and not self.signals:
                restart += 1
                of = f"restart {restart} of {self.launch.max_restarts}"
                print(f"a process ended with code {code}: {of}", file=sys.stderr, flush=True)
                code = self._start(restart)
        except ToldToEnd:
            code = 128 + self.signals[0]
        return self._after_signals(code) if self.signals else code

    def _start(self, restart: int) -> int:
        """Run the processes once."""
        launch = self.launch
        with tempfile.TemporaryDirectory(prefix="volo_launch_", ignore_cleanup_errors=True) as scratch:
            told = Path(scratch, "told")  # where ranks that end note what they say, so that others don't repeat it
            told.touch()
            os.environ |= {"LAUNCH_TOLD": str(told), "LAUNCH_PID": str(os.getpid()), "LAUNCH_RESTARTS": str(restart)}
            spec = WorkerSpec(
                role="default",
                local_world_size=launch.processes,
                rdzv_handler=OneAddress(launch, self.name),
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
        return telling_code([failure.exitcode for failure in result.failures.values()])  # as they were seen

    def _received(self, number: int, frame: FrameType | None) -> None:
        self._since = self._since if self.signals else time.monotonic()
        self.signals.append(number)
        processes = [worker.id for worker in self._agent.get_worker_group().workers] if self._agent else []
        if not processes or not all(processes):  # there are none yet
            raise ToldToEnd
        self._at_once |= time.monotonic() > self._since + _SAME_S
        _send(processes, number)
        # Whoever is inside of C++ code does not hear a second signal.
        after = _SAME_S if self._at_once else self.launch.shutdown_timeout
        timer = threading.Timer(after, _send, (processes, signal.SIGKILL))
        timer.daemon = True  # or the launcher would end no sooner
        timer.start()

    def _after_signals(self, code: int) -> int:
        """Return the launcher's code after signals, where that of the processes is this one."""
        number = self.signals[0]
        if self._at_once and code in (128 + number, 128 + signal.SIGKILL):
            return 128 + number
        if code == 128 + number:  # a process that was not yet there to handle it
            return 130 if number == signal.SIGINT else 85
        return code


def _send(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def telling_code(codes: Sequence[int]) -> int:
    """Return a shell's exit code for processes that failed with these codes, in this order; negative: by a signal.

    One that lost another process, or was killed or told to end after another one had failed, doesn't tell why where
    another one does.
    """
    telling = [code for code in codes if code > 0 and code not in (LOST, 85, 130)]
    code = [*telling, *codes, 0][0]
    return code if code >= 0 else 128 - code
