"""torchrun as a run needs it: no traceback of its own, the exit code passed on, signals passed on, restarts that help.

    python volo/commands/launch.py [flags of torchrun] train.py [flags]

`volo/commands/launch_command.py` composes the flags; it is run as a file, so that starting the processes doesn't
import the models first.

SIGTERM, SIGINT and SIGUSR1 go to the processes, which save and end by themselves, however long that takes; torchrun
would kill them and forget their exit code. MAX_RESTARTS=N starts them again, up to N times, when one was lost
(`--max-restarts` would also start those again that were told to end).

The launchers of all nodes (`--rdzv-backend nodes`; `--standalone`: there is one) watch each other through a store on
node 0, in which their processes meet, too. They start together, and when one's processes have ended all agree on what
that means: one exit code, and whether to start again. torchrun's own c10d rendezvous unpickles what anybody has put
into a store that listens on all interfaces; it would number the nodes by their addresses as text, 10.0.0.10 before
10.0.0.9, wherever NODE_RANK 0 is, and kill the processes of a node that has lost node 0 before their watchdog has told
why.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from argparse import Namespace
from ast import literal_eval
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest, PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

if __name__ == "__main__":  # run as a file: the rest is found from the root
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from volo.cluster.run_store import BEGUN, SECRET, SignedStore, connect, knock, serve, start_scope  # noqa: E402

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
# Bad input, divergence, a full disk: the same would happen again. 85 and 130: told to end.
_FINAL = (2, 3, 4, 85, 130)
_LOST = 5
_EXCHANGE_S = 0.5
_SILENT_S = 20.0  # without a sign of life a node is gone


class Failure(Exception):
    """The launch ends here, with this exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass
class Node:
    """What a launcher tells the others."""

    id: str
    host: str
    address: str
    restarts: int
    tick: int = 0  # alive if this moves
    joined: int = -1  # the start that it is ready for
    ended: list[int] = field(default_factory=list)  # exit code of each start
    signal: int | None = None  # that told it to end
    said: str = ""  # by those processes
    left: bool = False
    seen: float = 0.0  # here, when the tick last moved

    def __str__(self) -> str:
        return f"{self.host}, {self.address}"


class Nodes:
    """This launcher among those of all nodes.

    Raises:
        Failure: From every method: others are missing or gone, or this one was told to end.
    """

    def __init__(self, args: Namespace, restarts: int, told_to_end: Callable[[], int | None]) -> None:
        if args.standalone:
            args.rdzv_conf, args.nnodes, args.rdzv_endpoint = "rank=0,join_timeout=60", "1", "127.0.0.1:0"
            os.environ.setdefault(SECRET, secrets.token_hex(32))
        conf = dict(pair.split("=") for pair in args.rdzv_conf.split(","))
        self.rank, self.count, self.patience = int(conf["rank"]), int(args.nnodes), float(conf["join_timeout"])
        address, _, port = args.rdzv_endpoint.rpartition(":")
        self.address, self.port = address.strip("[]"), int(port)
        self.run_id, self.told_to_end = args.rdzv_id, told_to_end
        self.own = Node(uuid.uuid4().hex, socket.gethostname(), args.local_addr, restarts)
        self.known: dict[int, Node] = {}
        self.store: TCPStore | None = None
        self._not_begun = ""  # why
        self._twin = False
        self._store_gone = False
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def join(self, start: int) -> str:
        """Wait until every node is ready for this start; return what node 0 calls the launch."""
        begun = time.monotonic()
        self.own.joined = start
        if self.store is None:
            self.store = self._connect(begun + self.patience)
            self._thread = threading.Thread(target=self._exchange, args=(self.store.clone(),), daemon=True)
            self._thread.start()
        while missing := [rank for rank in range(self.count) if not self._has_joined(rank, start)]:
            self._check(missing[0])
            waited = time.monotonic() - begun
            nodes = list(self.known.items())
            for rank, node in nodes:
                if node.left and node.signal:
                    raise Failure(128 + node.signal, f"{self._name(rank)} got {signal.Signals(node.signal).name}")
            if waited > self.patience or self._store_gone or any(node.left for _, node in nodes):
                raise Failure(_LOST, self._missing(missing, waited))
            time.sleep(0.1)
        return self.known[0].id

    def agree(self, start: int, code: int, said: str) -> tuple[int, bool]:
        """Tell the others how this node's processes have ended; return the exit code of all, and whether all go on."""
        self.own.signal = self.told_to_end()
        if self._not_begun and self.own.signal is None:
            print(f"the run has not begun: {self._not_begun}", file=sys.stderr)
            code, self._not_begun = _LOST, ""
        self.own.said = said or f"its processes have ended with code {code}"
        self.own.ended.append(code)
        while waiting := [rank for rank in range(self.count) if not self._has_ended(rank, start)]:
            if any(self._is_gone(rank) for rank in waiting):
                break
            if self.own.signal is None:
                self._check(waiting[0])
            time.sleep(0.1)
        gone = [rank for rank in waiting if self._is_gone(rank)]
        for rank in gone:
            print(f"{self._name(rank)} is gone: its launcher has ended, or machine or network failed", file=sys.stderr)
        nodes = [*self.known.values(), self.own]
        codes = [node.ended[start] for node in nodes if len(node.ended) > start] + [_LOST for _ in gone]
        again = not gone and all(node.signal is None for node in nodes) and start < min(n.restarts for n in nodes)
        # One that lost another process, or was killed, doesn't tell why where another one does.
        failed = [code for code in codes if code]
        return min(failed, key=lambda each: (each == _LOST, each > 128 and each not in _FINAL), default=0), again

    def leave(self) -> bool:
        """Say goodbye; node 0 takes the store along, so it waits for the others. False: the store does not answer."""
        self.own.left, self.own.signal = True, self.own.signal or self.told_to_end()
        if self._thread is None:
            return True
        deadline, said = time.monotonic() + 5, self.own.tick + 2
        while time.monotonic() < deadline and self._thread.is_alive():
            others = [rank for rank in list(self.known) if rank != self.rank]
            if self.own.tick >= said and (self.rank > 0 or all(map(self._is_gone, others))):
                break
            time.sleep(0.1)
        self._leaving.set()
        self._thread.join(2)
        return not self._thread.is_alive()

    def _connect(self, deadline: float) -> TCPStore:
        where = f"{self.address}:{self.port}"
        while self.rank > 0:
            with suppress(OSError):
                knock(self.address, self.port)
                break
            self._check(0)
            if time.monotonic() > deadline:
                raise Failure(
                    _LOST,
                    f"node 0 did not answer at {where} within {self.patience:g} s: is it started there, with the same "
                    "MASTER_ADDR and MASTER_PORT, and does a firewall keep the port shut?",
                )
            time.sleep(0.5)
        try:
            if self.rank > 0:
                return connect(self.address, self.port)
            if not os.environ.get(SECRET):
                print(f"warning: no {SECRET}: whoever reaches port {self.port} can disturb this run", file=sys.stderr)
            store = serve(self.address, self.port)
        except DistError as error:
            raise Failure(_LOST, f"node 0 broke off the connection at {where}") from error
        except OSError as error:
            remedy = "another run uses it? Choose a MASTER_PORT"
            raise Failure(2, f"can't listen on port {self.port} ({error.strerror}): {remedy}") from error
        self.port = store.port
        return store

    def _exchange(self, store: TCPStore) -> None:
        """Tell and hear; never in the main thread, as a store whose host is gone may not answer at all."""
        signed, keys = SignedStore(store, self.run_id), [f"{self.run_id}/{rank}" for rank in range(self.count)]
        with suppress(DistError):
            while not self._leaving.wait(_EXCHANGE_S if self.own.tick else 0):
                there = signed.get(keys[self.rank]) if self.own.tick else None
                self._twin = self._twin or there is not None and there["id"] != self.own.id
                self.own.tick += 1
                signed.set(keys[self.rank], asdict(self.own))
                for rank, key in enumerate(keys):
                    if told := signed.get(key):
                        self._hear(rank, Node(**told))
                self._end_what_cannot_begin(store)
            return
        self._store_gone = True

    def _end_what_cannot_begin(self, store: TCPStore) -> None:
        """Kill this node's processes where they wait for those of a node that have ended already: nothing is lost."""
        start = self.own.joined
        failed = [
            (rank, node) for rank, node in self.known.items() if self._has_ended(rank, start) and node.ended[start]
        ]
        if not failed or len(self.own.ended) > start or store.check([f"{start_scope()}/{BEGUN}"]):
            return
        self._not_begun = "; ".join(f"{self._name(rank)}: {node.said}" for rank, node in failed)
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _hear(self, rank: int, node: Node) -> None:
        before = self.known.get(rank)
        moved = before is None or before.tick != node.tick or before.id != node.id
        self.known[rank] = replace(node, seen=time.monotonic() if moved or before is None else before.seen)

    def _has_joined(self, rank: int, start: int) -> bool:
        return rank in self.known and self.known[rank].joined >= start and not self._is_gone(rank)

    def _has_ended(self, rank: int, start: int) -> bool:
        return rank in self.known and len(self.known[rank].ended) > start

    def _is_gone(self, rank: int) -> bool:
        """Whether a node that was there has left, or gives no sign of life."""
        node = self.known[rank]
        silent = time.monotonic() - node.seen > _SILENT_S or rank == 0 and self._store_gone
        return rank != self.rank and (node.left or silent)

    def _check(self, awaited: int) -> None:
        number = self.told_to_end()
        if number is not None:
            raise Failure(128 + number, f"{signal.Signals(number).name} while waiting for node {awaited}")
        if self._twin:
            raise Failure(2, f"another machine has joined as NODE_RANK {self.rank}, too: each needs its own")

    def _missing(self, missing: list[int], waited: float) -> str:
        names = ", ".join(map(self._name, missing))
        return (
            f"{names} did not join {self.address}:{self.port} within {waited:.0f} s: see what was printed there; "
            f"NNODES, MASTER_ADDR, MASTER_PORT, RUN_ID and {SECRET} must be the same on all nodes"
        )

    def _name(self, rank: int) -> str:
        return f"node {rank} ({self.known[rank]})" if rank in self.known else f"node {rank}"


class NodesInOrder(StaticTCPRendezvous):
    """Group ranks as NODE_RANK says; the processes are told of the launchers' store."""

    def __init__(self, nodes: Nodes, params: RendezvousParameters) -> None:
        super().__init__(nodes.address, nodes.port, nodes.rank, nodes.count, params.run_id, timeout=60)
        self.nodes, self.local_addr = nodes, params.local_addr

    def get_backend(self) -> str:
        return "nodes"

    def next_rendezvous(self) -> RendezvousInfo:
        assert self.nodes.store is not None
        store = PrefixStore(f"{self.run_id}/torchrun", self.nodes.store)
        where = RendezvousStoreInfo(self.nodes.address, self.nodes.port)
        return RendezvousInfo(store, self.rank, self.world_size, where)


class RankLogs(DefaultLogsSpecs):
    """With `--tee` a pair of files for each rank and start, in `--log-dir`; nothing else outlives the launch."""

    def __init__(self, scratch: str, args: Namespace) -> None:
        super().__init__(scratch)
        self.directory = Path(args.log_dir or scratch) if args.tee != "0" else None

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        dest = super().reify(envs)
        if self.directory is None:
            return dest
        names = {local: f"{env['TORCHELASTIC_RUN_ID']}-rank{env['RANK']}" for local, env in envs.items()}
        out, err = (
            {local: str(self.directory / f"{name}.{end}") for local, name in names.items()} for end in ("out", "err")
        )
        return replace(dest, stdouts=out, stderrs=err, tee_stdouts=out, tee_stderrs=err)


class Launcher:
    """Runs torchrun in a thread, where it can't take the signals for itself (and needs no --signals-to-handle)."""

    def __init__(self, argv: Sequence[str], restarts: int) -> None:
        self.args, self.restarts = parse_args(list(argv)), restarts
        self.signal: int | None = None
        self.nodes = Nodes(self.args, restarts, lambda: self.signal)
        self.args.standalone, self.args.rdzv_backend = False, "nodes"
        rendezvous_handler_registry.register("nodes", partial(NodesInOrder, self.nodes))
        # Nodes.agree is the barrier; torchrun's waits 300 s for a node whose processes have failed.
        SimpleElasticAgent._exit_barrier = lambda agent: None  # type: ignore[method-assign]

    def run(self) -> int:
        """Return 0, or the exit code of the process that failed first."""
        for number in _FORWARDED:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._forward)
        try:
            code = self._run()
        except Failure as failure:
            print(f"error: {failure}", file=sys.stderr)
            code = failure.code
        if not self.nodes.leave():
            sys.stderr.flush()
            os._exit(code)  # a thread inside of a store aborts Python's way out
        return code

    def _run(self) -> int:
        for start in range(self.restarts + 1):
            # The processes of one launch know their run directory by this.
            os.environ["LAUNCH_ID"] = self.nodes.join(start)
            os.environ["LAUNCH_RESTARTS"] = str(start)
            code, again = self.nodes.agree(start, *self._start(start))
            if code == 0 or code in _FINAL or not again:
                break
            print(f"a process ended with code {code}: restart {start + 1} of {self.restarts}", file=sys.stderr)
        return code

    def _start(self, start: int) -> tuple[int, str]:
        ended = [(1, "")]

        def torchrun() -> None:
            ended[0] = _torchrun(self.args, start)

        thread = threading.Thread(target=torchrun)
        thread.start()
        thread.join()
        return ended[0]

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for pid in _children():
            os.kill(pid, number)


def _torchrun(args: Namespace, start: int) -> tuple[int, str]:
    """Start the processes once and wait for them; return their exit code, and what they said of it."""
    named = Namespace(**vars(args) | {"rdzv_id": f"{args.rdzv_id}.{start}"})
    scratch = tempfile.mkdtemp(prefix="volo_launch_")
    told = Path(scratch, "told")  # where ranks that end note what they say, so that others don't repeat it
    try:
        told.touch()
        os.environ["LAUNCH_TOLD"] = str(told)
        config, program, flags = config_from_args(named)
        config.logs_specs = RankLogs(scratch, args)
        elastic_launch(config=config, entrypoint=program)(*flags)
    except ChildFailedError as error:
        return _exit_code(error), "; ".join(map(literal_eval, told.read_text().splitlines()))
    except DistError as error:
        print(f"the connection to node 0 is gone: {error}", file=sys.stderr)
        return _LOST, ""
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0, ""


def _exit_code(error: ChildFailedError) -> int:
    # One that lost another process, or was killed for it, doesn't tell why where another one does.
    failure = min(
        error.failures.values(), key=lambda each: (each.exitcode == _LOST or each.exitcode < 0, each.timestamp)
    )
    # A process that was killed has its signal as a negative number; shells add 128.
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _children() -> list[int]:
    """Processes that this one has started (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has just ended
        if parent == os.getpid():
            found.append(int(stat.parent.name))
    return found


def _be_patient(seconds: int) -> None:
    """Let processes take so long to end after another one has failed.

    Where torchrun has --shutdown-timeout (2.9 has not), that is only for when torchrun itself gets a signal; after a
    failure it kills what is left after 30 s.
    """
    close = PContext.close

    def patient(self: PContext, death_sig: Any = None, timeout: int = seconds) -> None:
        for pid in self.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # one that was stopped would not hear what it is told
        close(self, death_sig, seconds)

    PContext.close = patient  # type: ignore[method-assign]


def launch(argv: Sequence[str]) -> int:
    """Run torchrun with `argv`; return the exit code."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    _be_patient(int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 30))
    return Launcher(argv, int(os.environ.get("MAX_RESTARTS") or 0)).run()


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
