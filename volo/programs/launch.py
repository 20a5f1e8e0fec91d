"""torchrun as a run needs it: no traceback of its own, the exit code passed on, signals passed on, restarts that help.

    python volo/programs/launch.py [flags of torchrun] train.py [flags]

SIGTERM, SIGINT and SIGUSR1 go to the processes, which save and end by themselves, however long that takes; torchrun
would kill them after 30 s and forget their exit code. MAX_RESTARTS=N starts them again, up to N times, when one was
lost (`--max-restarts` would also start those again that were told to end). It is run as a file, so that starting the
processes doesn't import the models first.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
# Bad input, divergence, a full disk: the same would happen again. 85 and 130: told to end.
_FINAL = (2, 3, 4, 85, 130)
_LOST = 5


class Launcher:
    """Runs torchrun in a thread, where it can't take the signals for itself."""

    def __init__(self, argv: list[str], restarts: int) -> None:
        self.argv, self.restarts = argv, restarts
        self.told_to_end = False

    def run(self) -> int:
        """Return 0, or the exit code of the process that failed first."""
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        # The processes of one launch know their run directory by this.
        os.environ["LAUNCH_ID"] = uuid.uuid4().hex
        # Or with gloo the restarted processes of `--max-restarts` read the addresses of the dead ones.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        for start in range(self.restarts + 1):
            os.environ["LAUNCH_RESTARTS"] = str(start)
            code = self._start()
            if code == 0 or code in _FINAL or self.told_to_end or start == self.restarts:
                break
            print(f"a process ended with code {code}: restart {start + 1} of {self.restarts}", file=sys.stderr)
        return code

    def _start(self) -> int:
        codes = [1]

        def torchrun() -> None:
            codes[0] = _exit_code(self.argv)

        thread = threading.Thread(target=torchrun)
        thread.start()
        thread.join()
        return codes[0]

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.told_to_end = True
        for pid in _children():
            os.kill(pid, number)


def _exit_code(argv: list[str]) -> int:
    try:
        main(argv)
    except ChildFailedError as error:
        # One that lost another process, or was killed for it, doesn't tell why where another one does.
        failure = min(
            error.failures.values(), key=lambda each: (each.exitcode == _LOST or each.exitcode < 0, each.timestamp)
        )
        # A process that was killed has its signal as a negative number; shells add 128.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


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


def launch(argv: list[str]) -> int:
    """Run torchrun with `argv`; return the exit code."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    return Launcher(argv, int(os.environ.get("MAX_RESTARTS") or 0)).run()


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
