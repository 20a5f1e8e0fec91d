"""Starts the processes of one node: one exit code, signals with patience, restarts that help.

    python volo/commands/launch.py [flags, as torchrun's] train.py [flags]

`volo/commands/launch_command.py` composes the flags; this is run as a file, so that starting the processes doesn't
import the models first.

It does what torchrun does, and its processes find torchrun's variables, but
- SIGTERM, SIGINT and SIGUSR1 go to the processes, which save and end by themselves, however long that takes; torchrun
  would kill them and forget their exit code;
- MAX_RESTARTS=N starts them again, up to N times, when one was lost, and not when they were told to end;
- when one has failed the others get TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds to end (30), where torchrun gives 30;
- ranks are numbered by --node-rank, and the launchers of all nodes agree on start, end and exit code
  (`volo.cluster.nodes`); what comes from the network is never unpickled.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from ast import literal_eval
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from types import FrameType
from typing import IO

from torch.distributed.elastic.multiprocessing.tail_log import TailLog

if __name__ == "__main__":  # run as a file: the rest is found from the root
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from volo.cluster.nodes import FINAL, LOST, LaunchError, Node, Nodes, Start  # noqa: E402
from volo.cluster.run_store import SECRET  # noqa: E402

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.1
_OUT, _ERR = 1, 2  # bits of --tee


class Processes:
    """The processes of one start on this node.

    Args:
        patience: Seconds that the others get to end by themselves after one has failed.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._all: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], env: Mapping[str, str], out: IO[bytes] | None, error: IO[bytes] | None
    ) -> None:
        """Start a process; it inherits the launcher's standard output and error where there is no file for them."""
        # A session of its own: Ctrl-C reaches the launcher alone, which passes it on.
        process = subprocess.Popen(command, env=env, stdout=out, stderr=error, start_new_session=True)
        self._all.append(process)

    def wait(self) -> int:
        """Return the exit code of the process that failed first, of those that can tell why; 0 if none has failed."""
        running, codes, deadline = list(self._all), list[int](), float("inf")
        while running:
            time.sleep(_POLL_S)
            ended = [process for process in running if process.poll() is not None]
            running = [process for process in running if process not in ended]
            codes += [process.returncode for process in ended]
            if any(codes) and deadline == float("inf"):
                deadline = time.monotonic() + self._patience
                for process in running:
                    process.send_signal(signal.SIGCONT)  # one that was stopped would not hear what it is told
                    process.terminate()
            if time.monotonic() > deadline:
                self.kill()
        return first_failure(codes)

    def signal(self, number: int) -> None:
        """Send a signal to all that still run."""
        for process in self._all:
            process.send_signal(number)

    def kill(self) -> None:
        """Kill all that still run; any thread may call this."""
        self.signal(signal.SIGKILL)


def first_failure(codes: Sequence[int]) -> int:
    """Return a shell's exit code for processes that ended with these codes, in this order; negative: by a signal.

    One that lost another process, or was killed for it, doesn't tell why where another one does.
    """
    code = min(filter(None, codes), key=lambda each: each == LOST or each < 0, default=0)
    return code if code >= 0 else 128 - code


class Launcher:
    """This node's launcher.

    Args:
        args: The flags; see `parse`.
        restarts: How often the processes may be started again.
        patience: Seconds; see `Processes`.
    """

    def __init__(self, args: argparse.Namespace, restarts: int, patience: float) -> None:
        self.args, self.restarts, self.patience = args, restarts, patience
        self.signal: int | None = None
        self.processes: Processes | None = None
        own = Node(socket.gethostname(), args.local_addr, args.nproc_per_node, restarts)
        where = (args.master_addr, args.master_port)
        self.nodes = Nodes(
            args.node_rank, args.nnodes, where, args.rdzv_id, args.join_timeout, own, lambda: self.signal, self._kill
        )

    def run(self) -> int:
        """Return the exit code of all nodes."""
        for number in _FORWARDED:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._forward)
        try:
            code = self._run()
        except LaunchError as error:
            print(f"error: {error}", file=sys.stderr)
            code = error.code
        if not self.nodes.leave():
            sys.stderr.flush()
            os._exit(code)  # a thread inside of a store aborts Python's way out
        return code

    def _run(self) -> int:
        for number in range(self.restarts + 1):
            code, again = self.nodes.agree(number, *self._start(self.nodes.join(number)))
            if code == 0 or code in FINAL or not again:
                break
            print(f"a process ended with code {code}: restart {number + 1} of {self.restarts}", file=sys.stderr)
        return code

    def _start(self, start: Start) -> tuple[int, str]:
        """Run the processes once; return their exit code, and what they said of it."""
        with tempfile.TemporaryDirectory(prefix="volo_launch_", ignore_cleanup_errors=True) as scratch:
            told = Path(scratch, "told")  # where ranks that end note what they say, so that others don't repeat it
            told.touch()
            environments = [
                {**os.environ, **self._variables(start, local_rank), "LAUNCH_TOLD": str(told)}
                for local_rank in range(self.args.nproc_per_node)
            ]
            logs = Logs(environments, self.args.tee, Path(self.args.log_dir or scratch))
            try:
                self.processes = processes = Processes(self.patience)
                for environment, files in zip(environments, logs.files, strict=True):
                    processes.start([sys.executable, "-u", self.args.program, *self.args.flags], environment, *files)
                if self.signal is not None:  # it came while the processes were started, to some of them
                    processes.signal(self.signal)
                code = processes.wait()
            finally:
                self._kill()  # where one could not be started
                logs.close()
            return code, "; ".join(map(literal_eval, told.read_text().splitlines()))

    def _variables(self, start: Start, local_rank: int) -> dict[str, str]:
        """Return the variables that torchrun would set for a process, and ours."""
        numbers = {
            "RANK": start.first_rank + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": start.world_size,
            "LOCAL_WORLD_SIZE": self.args.nproc_per_node,
            "GROUP_RANK": self.args.node_rank,
            "GROUP_WORLD_SIZE": self.args.nnodes,
            "ROLE_RANK": start.first_rank + local_rank,
            "ROLE_WORLD_SIZE": start.world_size,
            "MASTER_PORT": self.nodes.port,
            "LAUNCH_RESTARTS": start.number,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }
        return {name: str(number) for name, number in numbers.items()} | {
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.nodes.address,
            "LAUNCH_ID": start.launch,
            "TORCHELASTIC_RUN_ID": f"{self.args.rdzv_id}.{start.number}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launchers' store is there: rank 0 makes none
        }

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if self.processes is not None:
            self.processes.signal(number)

    def _kill(self) -> None:
        if self.processes is not None:
            self.processes.kill()


class Logs:
    """What processes print, in files that are followed on the console, each line with its prefix.

    Args:
        tee: Which streams: bit 1 the output, bit 2 the errors; 0: none, they go to the console as they are.
        directory: Of the files RUN_ID.START-rankR.{out,err}.
    """

    def __init__(self, environments: Sequence[Mapping[str, str]], tee: int, directory: Path) -> None:
        self._followed: list[TailLog] = []
        streams = []
        for bit, suffix, console in ((_OUT, "out", sys.stdout), (_ERR, "err", sys.stderr)):
            names = [f"{env['TORCHELASTIC_RUN_ID']}-rank{env['RANK']}.{suffix}" for env in environments]
            streams.append([open(directory / name, "wb") if tee & bit else None for name in names])  # noqa: SIM115
            if tee & bit:
                paths = {local: str(directory / name) for local, name in enumerate(names)}
                prefixes = {local: _prefix(environment) for local, environment in enumerate(environments)}
                self._followed.append(TailLog("rank", paths, console, prefixes).start())
        self.files = list(zip(*streams, strict=True))

    def close(self) -> None:
        """Print what is left; the processes have ended."""
        for file in (file for pair in self.files for file in pair if file is not None):
            file.close()
        for followed in self._followed:
            followed.stop()


def _prefix(environment: Mapping[str, str]) -> str:
    template = environment.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or "[rank ${rank}] "
    names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "role_name": "ROLE_NAME"}
    return Template(template).safe_substitute({name: environment[variable] for name, variable in names.items()})


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the launcher's flags, which are torchrun's, up to the program's file; what follows are its own."""
    parser = argparse.ArgumentParser(prog="launch.py", allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument("--nnodes", type=int, default=1)
    nodes.add_argument("--standalone", action="store_const", dest="nnodes", const=1, help="a single node")
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1", help="IP address of node 0")
    parser.add_argument("--master-port", type=int, default=0, help="port of node 0; 0: any, for a single node")
    parser.add_argument("--join-timeout", type=float, default=60, help="seconds until all nodes must be there")
    parser.add_argument("--local-addr", default="127.0.0.1", help="this node's own IP address")
    parser.add_argument("--rdzv-id", default="volo", help="name of the run, the same on all nodes")
    parser.add_argument("--tee", type=int, default=0, help="1: output, 2: errors, 3: both also into files")
    parser.add_argument("--log-dir", help="of these files, which are removed without it")
    parser.add_argument("program")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def launch(argv: Sequence[str]) -> int:
    """Run the processes that `argv` describes; return the exit code."""
    args = parse(argv)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # also into a pipe: a line when it comes
    if args.nnodes == 1:
        os.environ.setdefault(SECRET, secrets.token_hex(32))
    patience = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 30)
    return Launcher(args, int(os.environ.get("MAX_RESTARTS") or 0), patience).run()


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
