"""What a node does when node 0 asks: report, get its processes ready, measure.

Bandwidth is measured by processes of their own, one per GPU, which are killed when they take too long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from volo.cluster.placement import make_plan, variables
from volo.cluster.preflight.channel import Answer, Task
from volo.cluster.preflight.node_report import node_report
from volo.cluster.preflight.rendezvous import Rendezvous
from volo.cluster.topology import read_machine

_START_S = 240.0  # all nodes may read torch from the same file system at the same time
_SLACK_S = 3.0  # the process's own timeout comes first, because its error says more


class LocalNode:
    """This node. Its processes start when it is made, so that they are ready when they are needed, and end with it
    as a context.

    Args:
        own_address: This node's address on the way to node 0.
        store: Address and port of the store on node 0.
    """

    def __init__(self, args: Namespace, rendezvous: Rendezvous, own_address: str, store: tuple[str, int]) -> None:
        self._rank, self._own_address = rendezvous.rank, own_address
        self._paths, self._output = [*args.data, *([args.image] if args.image else [])], args.output
        gpus = torch.cuda.device_count()
        self.processes = args.processes or gpus or 1
        self.backend = "nccl" if gpus else "gloo"
        self.measures = not args.no_bandwidth and rendezvous.nodes * self.processes > 1
        file, (address, port) = Path(__file__).with_name("worker.py"), store
        command = [sys.executable, str(file), address, str(port), "cuda" if gpus else "cpu"]
        self._workers = [
            WorkerProcess([*command, str(local_rank)], {"OMP_NUM_THREADS": "1", **os.environ, **added})
            for local_rank, added in enumerate(network_variables(rendezvous, self.processes) if self.measures else ())
        ]

    def __enter__(self) -> LocalNode:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def perform(self, task: Task) -> Answer:
        """Do "report" (returns a NodeReport as a dict), "ready" (returns what went wrong, or "") or "measure"."""
        if task["do"] == "report":
            report = node_report(self._rank, self._own_address, self._paths, self._output)
            return {**asdict(report), "processes": self.processes}
        with ThreadPoolExecutor(len(self._workers)) as pool:
            if task["do"] == "ready":
                return next(filter(None, pool.map(WorkerProcess.ready, self._workers)), "")
            return _slowest(list(pool.map(WorkerProcess.perform, self._workers, self._tasks(task))))

    def _tasks(self, task: Task) -> list[Task]:
        """Return what each process does in an all-reduce of `task["nodes"]` nodes, of which this is `task["index"]`."""
        count = len(self._workers)
        shared = {"prefix": task["prefix"], "size": task["nodes"] * count, "seconds": task["seconds"]}
        return [{**shared, "rank": task["index"] * count + i} for i in range(count)]


def _slowest(answers: list[Answer]) -> Answer:
    """Return {"error": text} if a process failed, else {"bandwidth": GB/s} of the slowest."""
    failed = [answer for answer in answers if "error" in answer]
    return failed[0] if failed else min(answers, key=lambda answer: answer["bandwidth"])


def network_variables(rendezvous: Rendezvous, processes: int) -> list[dict[str, str]]:
    """Return cards and interface of each process, as `--bind auto` names them to a run's ranks; the user's own stay."""
    if rendezvous.nodes == 1:  # no other machine has to be let in
        return [{"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}] * processes
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": str(rendezvous.nodes * processes)}
    plan = make_plan(read_machine(), "auto", None, processes, env)
    return [variables(plan, local_rank, env)[0] for local_rank in range(processes)]


class WorkerProcess:
    """A process that measures (`worker.py`); it is started again when it had to be killed."""

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self._command, self._env = command, env
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  (the process outlives any block here)
        self._start()

    def _start(self) -> None:
        self._errors.truncate(0)
        self._process: subprocess.Popen[str] | None = subprocess.Popen(
            self._command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._is_ready = False

    def ready(self) -> str:
        """Wait until the process is ready; return what went wrong, or an empty text."""
        if self._process is None:
            self._start()
        if self._is_ready:
            return ""
        answer = self._exchange(None, _START_S)
        self._is_ready = "ready" in answer
        return str(answer.get("error", ""))

    def perform(self, task: Task) -> dict[str, Any]:
        """Return the answer to a task, or an "error"."""
        error = self.ready()
        return {"error": error} if error else self._exchange(task, task["seconds"] + _SLACK_S)

    def _exchange(self, task: Task | None, seconds: float) -> dict[str, Any]:
        """Give the process a task, if any, and return the next line that it writes; kill it after `seconds`."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        killer = threading.Timer(seconds, process.kill)
        killer.start()
        try:
            if task is not None:
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            killer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.end()
        self._errors.seek(0)
        last_lines = [text.strip() for text in self._errors if text.strip()][-1:]
        return {"error": last_lines[0] if last_lines else f"no answer within {seconds:g} s"}

    def end(self) -> None:
        """Kill the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
