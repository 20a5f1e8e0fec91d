"""Processes of train.py, to be killed: forks of this one, which has imported torch before, or starts of their own.

A fork is a process of its own that runs train.py from its first line on; it starts in a tenth of the time.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from matplotlib import pyplot  # noqa: F401  (or every fork would import it)

import volo.commands.train  # noqa: F401
from tests.commands.conftest import ROOT, children, ended
from tests.conftest import free_port, wait_until

APART = 0.05  # at most so many seconds lie between the deaths of two ranks


class Life:
    """The processes of one start."""

    def __init__(self, pids: list[int], launcher: subprocess.Popen[bytes] | None = None) -> None:
        self.pids, self.launcher = pids, launcher

    def codes(self) -> list[int] | None:
        """Exit codes, when all have ended."""
        if self.launcher is not None:
            code = self.launcher.poll()
            return None if code is None else [code]
        if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in self.pids):
            return None
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def kill(self, generator: random.Random) -> None:
        """As a node that goes down: all processes, one after the other. Returns when they are gone."""
        if self.launcher is not None:
            os.kill(self.launcher.pid, signal.SIGSTOP)  # it shall start no more of them
            self.pids = [*children(self.launcher.pid), self.launcher.pid]
        generator.shuffle(self.pids)
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if pid != self.pids[-1]:
                time.sleep(generator.uniform(0.0, APART))
        if self.launcher is None:
            for pid in self.pids:
                os.waitpid(pid, 0)
            return
        self.launcher.wait()
        wait_until(lambda: all(map(ended, self.pids)))


def start_forks(flags: list[str], ranks: int, log: Path) -> Life:
    """Start train.py in a fork per rank."""
    envs: list[dict[str, str]] = [{}]
    if ranks > 1:
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        envs = [{**master, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return Life([_fork(flags, env, log) for env in envs])


def start_program(flags: list[str], ranks: int, log: Path) -> Life:
    """Start train.py, by distributed_train.sh where there are several ranks."""
    program = [sys.executable, str(ROOT / "train.py")]
    if ranks > 1:
        program = [str(ROOT / "distributed_train.sh"), str(ranks)]
    env = {**os.environ, "PYTHON": sys.executable}
    with log.open("ab") as out:
        process = subprocess.Popen([*program, *flags], stdout=out, stderr=out, env=env, start_new_session=True)
    return Life([process.pid], process)


def _fork(flags: list[str], env: dict[str, str], log: Path) -> int:
    if pid := os.fork():
        return pid
    code: Any = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(env)
        sys.argv = [str(ROOT / "train.py"), *flags]
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code or 0)
