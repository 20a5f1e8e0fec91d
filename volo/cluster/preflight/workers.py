"""The processes that measure bandwidth on one node, one per GPU. They are killed when they take too long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

_START_S = 240.0  # torch is read from a file system that all nodes may be reading it from
_SLACK_S = 3.0  # the process's own timeout comes first, and tells more


class Worker:
    """One process, started again when it had to be killed."""

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self._command, self._env = command, env
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  (the process outlives any block here)
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Start the process; it says by itself when it is ready."""
        self._errors.truncate(0)
        self._process = subprocess.Popen(
            self._command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._is_ready = False

    def ready(self) -> str:
        """Wait until it is ready; return what went wrong, or nothing."""
        if self._process is None:
            self.start()
        if not self._is_ready:
            answer = self._exchange(None, _START_S)
            self._is_ready = "ready" in answer
            return answer.get("error", "")
        return ""

    def do(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a task, or an "error"."""
        error = self.ready()
        return {"error": error} if error else self._exchange(task, task["seconds"] + _SLACK_S)

    def _exchange(self, task: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        """Give it a task, if any, and return the line that it says next."""
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
        return {"error": self._last_words() or f"no answer within {seconds:g} s"}

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1] if lines else ""

    def end(self) -> None:
        """Kill the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class Workers:
    """All of a node.

    Args:
        store: Address and port of the store on node 0.
        environments: What each process gets besides this one's environment.
    """

    def __init__(self, device_type: str, store: tuple[str, int], environments: Sequence[Mapping[str, str]]) -> None:
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), store[0], str(store[1]), device_type]
        self._workers = [
            Worker([*command, str(rank)], {"OMP_NUM_THREADS": "1", **os.environ, **added})
            for rank, added in enumerate(environments)
        ]

    def end(self) -> None:
        """Kill all of them."""
        for worker in self._workers:
            worker.end()

    def ready(self) -> str:
        """Wait for all of them; return what went wrong, or nothing."""
        with ThreadPoolExecutor(len(self._workers)) as pool:
            return next(filter(None, pool.map(Worker.ready, self._workers)), "")

    def measure(self, prefix: str, index: int, nodes: int, seconds: float) -> dict[str, Any]:
        """Take part in an all-reduce of `nodes` nodes, of which this is number `index`; the slowest process's answer.

        Returns:
            {"bandwidth": GB/s} or {"error": text}.
        """
        count = len(self._workers)
        tasks = [
            {"prefix": prefix, "rank": index * count + i, "size": nodes * count, "seconds": seconds}
            for i in range(count)
        ]
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(Worker.do, self._workers, tasks))
        failed = [answer for answer in answers if "error" in answer]
        return failed[0] if failed else min(answers, key=lambda answer: answer["bandwidth"])
