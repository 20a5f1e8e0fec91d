"""Ranks of `volo label`, each a process forked from one that has loaded the program and nothing else: what tests leave
behind in theirs, threads above all, is not forked."""

import faulthandler
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess as Process
from pathlib import Path

from torch import Tensor

from tests.conftest import LIMIT, free_port, wait_until
from tlt.labels.annotate import Annotation, Annotator
from volo import cli
from volo.commands import generate_label as generate_label  # so that a rank has it when it starts

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


def start(command: list[str], ranks: int = 1, writes: int | None = None, shifted: bool = False) -> list[Process]:
    """Start the command as `ranks` processes, which log to OUT.log.

    Args:
        writes: Each kills itself half-way through its write of this number into an archive's row.
        shifted: The values depend on the whole batch, as the last bits of many networks do; but visibly so.
    """
    port = free_port()
    processes = [_FORKS.Process(target=_rank, args=(command, n, ranks, port, writes, shifted)) for n in range(ranks)]
    for process in processes:
        process.start()
    return list(processes)


def end(command: list[str], processes: Sequence[Process]) -> list[int | None]:
    """Wait for the ends of the processes that run the command, and return their exit codes."""
    wait_until(lambda: not any(process.is_alive() for process in processes), Path(f"{command[1]}.log").read_text)
    return [process.exitcode for process in processes]


def _rank(command: list[str], number: int, ranks: int, port: int, writes: int | None, shifted: bool) -> None:
    for descriptor in (1, 2):
        os.dup2(os.open(f"{command[1]}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.dump_traceback_later(0.9 * LIMIT, file=2)
    if ranks > 1:
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {key: str(value) for key, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    countdown, pwrite, label = itertools.count(-1 if writes is None else writes, -1), os.pwrite, Annotator.__call__

    def dying_pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if next(countdown):
            return pwrite(descriptor, data, offset)
        pwrite(descriptor, data[: len(data) // 2], offset)
        return os.kill(os.getpid(), signal.SIGKILL) or 0

    def shifted_values(self: Annotator, images: Tensor) -> Annotation:
        annotation = label(self, images)
        return annotation._replace(values=annotation.values + images.mean().half())

    os.pwrite = dying_pwrite  # type: ignore[assignment]
    if shifted:
        Annotator.__call__ = shifted_values  # type: ignore[method-assign]
    os._exit(cli.run("label", command))
