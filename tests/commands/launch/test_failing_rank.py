"""One rank of several fails, or is told to stop, wherever the others are: all end, and the exit code says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tests.commands.conftest import QUICK, ROOT, UPDATES, Running
from tests.commands.launch import failing_rank
from tests.conftest import LIMIT, free_port
from tlt.errors import UserError
from volo import cli

CASES = [
    ("exception", 1, 1, "RuntimeError: somebody's own code"),
    ("nan", 1, 3, "] error: the gradients of 3 steps in a row"),  # by either rank
    ("data at the end", 1, 2, "[rank 1] error: the storage is gone"),
    ("signal in the last update", 1, 85, "[rank 0] stopped because another rank had to"),
]


@pytest.mark.parametrize(("fault", "rank", "code", "told"), CASES, ids=[f"{case[0]}, rank {case[1]}" for case in CASES])
def test_fault_53_all_ranks_end_and_the_code_is_that_of_the_one_that_failed(
    make_dataset: Callable[..., Path], tmp_path: Path, fault: str, rank: int, code: int, told: str
) -> None:
    data = make_dataset(train=8 * UPDATES, validation=8)
    flags = f"{QUICK} -b 4 --epochs 9 --lr 1e-3 --skip-nonfinite 2 --output {tmp_path} --experiment run"
    launcher = [sys.executable, str(ROOT / "volo/commands/launch.py"), "2"]
    driver = [str(Path(failing_rank.__file__)), fault, str(rank), str(data)]
    run = Running([*launcher, *driver, *flags.split(), "--dist-timeout", "20"], PYTHONPATH=str(ROOT))
    assert run.end() == code, run.output
    assert run.output.count(told) == 1
    saved = torch.load(tmp_path / "run" / "last.pth.tar", weights_only=True)
    # Where all have stopped together the last update is saved, else what there was.
    assert saved["update"] == (2 * UPDATES if code in (2, 85) else UPDATES)
    assert "hung" not in run.output


def test_a_rank_that_is_ended_while_it_tells_its_mistake_tells_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mistake(UserError):
        def __str__(self) -> str:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            return "no such model"

    def refuse(argv: object) -> NoReturn:
        raise Mistake

    monkeypatch.setitem(cli.COMMANDS, "train", cli.COMMANDS["train"]._replace(parse=refuse))
    assert (cli.run("train", []), capsys.readouterr().err) == (2, "error: no such model\n")


# Two ranks per end, forked from a process that has imported all. The last that Python runs leaves gloo's threads with
# tensors to free, for which they wait for Python: on a busy machine every collective may leave that behind.
_ENDS = """
import atexit, os, sys, time
from argparse import Namespace
import torch
import torch.distributed as dist
from tlt.errors import UserError
from volo.cluster.distributed import init_world
from volo.commands.console import run_program

class Closed:
    sleep = staticmethod(time.sleep)
    def __del__(self):
        self.sleep(0.05)  # lets other threads run, as what closes a file does

closed = Closed()
ends = {"defect": RuntimeError("a defect"), "mistake": UserError("a mistake"), "keyboard": KeyboardInterrupt(),
        "pipe": BrokenPipeError()}

def late():
    sys.setswitchinterval(1000)
    for _ in range(8):
        dist.all_reduce(torch.zeros(()), async_op=True)
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        pass

def run(args):
    init_world("cpu")
    atexit.register(late)
    raise ends[args.end]

def rank(number, end, port):
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sys.exit(run_program(lambda argv: Namespace(end=end), "__main__", ["--debug"]))

for end, port in zip(ends, sys.argv[1:]):
    pids = [os.fork() or rank(number, end, port) for number in (0, 1)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(end, *codes, flush=True)
"""


def test_a_rank_whose_process_group_stands_is_not_aborted_by_a_thread_of_torch(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(_ENDS)
    ports = [str(free_port()) for _ in range(4)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "ends.py"), *ports]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.splitlines() == ["defect 1 1", "mistake 1 1", "keyboard 130 130", "pipe 141 141"], done.stderr
    assert "terminate called" not in done.stderr
