"""macOS and Windows: a process imports everything and trains without what only Linux, or only Unix, has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.commands.conftest import QUICK, ROOT, metrics
from tests.conftest import LIMIT
from tlt.errors import UserError
from volo.cluster.distributed import choose_device

# Other packages are loaded first, once: they have ways of their own on these systems, which this one does not show.
HIDDEN = """
import builtins, faulthandler, io, json, multiprocessing, os, signal, subprocess, sys
import filelock, matplotlib.pyplot, timm, torch, torch._dynamo, torchvision, tqdm, yaml
for system in ("macOS", "Windows"):
    sys.stdout.flush()
    if not os.fork():
        sys.argv += ["--experiment", system]
        break
    if status := os.wait()[1]:
        sys.exit(f"{system}: {os.waitstatus_to_exitcode(status)}")
else:
    sys.exit()
def gone(path):
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc/", "/sys/"))
def hiding(function):
    def wrapped(path, *more, **named):
        if gone(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *more, **named)
    return wrapped
builtins.open, io.open = hiding(open), hiding(io.open)
for name in ("listdir", "readlink", "open", "stat", "scandir"):
    setattr(os, name, hiding(getattr(os, name)))
missing = ["sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fadvise", "setns", "unshare"]
if system == "Windows":
    missing += ["pread", "pwrite", "geteuid", "getuid", "sysconf", "O_CLOEXEC", "O_NONBLOCK", "getloadavg"]
    filelock.FileLock = filelock.SoftFileLock  # the lock of Windows is not there, the one of Unix needs O_NONBLOCK
    sys.modules["fcntl"] = sys.modules["resource"] = sys.modules["pwd"] = None
    for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGSTOP", "SIGCONT", "SIGKILL", "setitimer"):
        delattr(signal, name)
    del faulthandler.register
for name in missing:
    if hasattr(os, name):
        delattr(os, name)
import tlt, tlt.labels.store, tlt.loss, tlt.models, volo, volo.models
from volo.commands.console import run_program
from volo import cli
sys.exit(cli.run("train", [*sys.argv[1:], "--epochs", "1"]) or cli.run("train", [*sys.argv[1:], "--resume", "auto"]))
"""


def test_train_runs_in_one_process(
    make_dataset: Callable[..., Path], make_labels: Callable[..., Path], tmp_path: Path
) -> None:
    data = make_dataset()
    flags = f"{QUICK} --token-label --token-label-data {make_labels(data)} --output {tmp_path} --epochs 2"
    command = [sys.executable, "-c", HIDDEN, str(data), *flags.split()]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    for system in ("macOS", "Windows"):
        assert [record["update"] for record in metrics(tmp_path / system)] == [1, 2, 3, 4], system


def test_an_accelerator_is_taken_where_torch_offers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--device mps"):
        choose_device("mps", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert choose_device("xpu", 0).type == "xpu"
    with pytest.raises(UserError, match="--device mps: of cpu, cuda"):
        choose_device("mps", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="several processes"):
        choose_device("xpu", 0)
