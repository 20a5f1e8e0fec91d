"""Processes of train.py, to be killed: forks of this one, which has imported torch before.

A fork is a process of its own that runs train.py from its first line on; it starts in a tenth of the time.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from matplotlib import pyplot  # noqa: F401  (or every fork would import it)

import volo.commands.train  # noqa: F401
from tests.commands.conftest import ROOT
from tests.conftest import free_port

APART = 0.05  # at most so many seconds lie between the deaths of two ranks


class Life:
    """The processes of one start."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids

    def codes(self) -> list[int] | None:
        """Exit codes, when all have ended."""
        if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in self.pids):
            return None
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def kill(self, generator: random.Random) -> None:
        """As a node that goes down: all processes, one after the other. Returns when they are gone."""
        generator.shuffle(self.pids)
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if pid != self.pids[-1]:
                time.sleep(generator.uniform(0.0, APART))
        for pid in self.pids:
            os.waitpid(pid, 0)


def start_forks(flags: list[str], ranks: int, log: Path) -> Life:
    """Start train.py in a fork per rank."""
    envs: list[dict[str, str]] = [{}]
    if ranks > 1:
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        envs = [{**master, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return Life([_fork(flags, env, log) for env in envs])


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
