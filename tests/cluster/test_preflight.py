"""The preflight: made-up nodes, and ranks of this machine, some of which pretend to be on other ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.conftest import Running
from tests.commands.conftest import nothing_left_running as nothing_left_running  # a fixture
from tests.conftest import free_port
from volo import cli
from volo.cluster import preflight
from volo.cluster.preflight import Node, examine_node, find_problems
from volo.config.settings_tools import PREFLIGHT

MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version: 12\n"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (dvs)\n"
MACHINE = {
    "proc/driver/nvidia/version": MODULE,
    "proc/self/limits": "Max open files  1024  4096  files\nMax locked memory  unlimited  unlimited  bytes\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "sys/class/infiniband/mlx5_0/ports/2/state": "1: DOWN\n",
    "dev/shm/used": "",
    "data/train/class0/image": "",
    "data/image.sqsh": "12345",
}
LOCKED = {"proc/self/limits": "Max locked memory  65536  65536  bytes\n"}


def made_up(root: Path, flags: str = "", **files: str) -> Node:
    """What is found on the machine below `root`, which is made of MACHINE and `files`; ROOT in flags stands for it."""
    for name, text in {**MACHINE, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    args = PREFLIGHT.parse(["--shm-gb", "0", *flags.replace("ROOT", str(root)).split()])
    return examine_node(args.fitness, "n1", list(range(8)), None, root)


def test_a_made_up_machine_is_read(tmp_path):
    node = made_up(tmp_path, "--data ROOT/data ROOT/data/image.sqsh --output ROOT/new/run --free-gb 0")
    assert node.problems == [] and node.memlock_gb is None and not (tmp_path / "new").exists()
    assert node.equal["driver"] == "580.95.05" and node.equal["GPUs"] == "none"
    assert node.equal["card mlx5_0:1"] == "ACTIVE at 400 Gb/s" and node.equal["card mlx5_0:2"] == "DOWN"
    assert node.equal[f"size of {tmp_path}/data"] == "2" and node.equal[f"size of {tmp_path}/data/image.sqsh"] == "5"
    disk = int(subprocess.check_output(["df", "--output=avail", "-B1", tmp_path], text=True).split()[1]) / 1e9
    assert node.free_gb == pytest.approx(disk, abs=0.5) and node.shm_gb == pytest.approx(disk, abs=0.5)
    other = {"proc/driver/nvidia/version": OPEN_MODULE, "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"}
    node = made_up(tmp_path, **other, **LOCKED)
    assert node.equal["driver"] == "575.57.08" and node.problems == []  # locked memory matters to active cards alone


LACKS: dict[str, tuple[str, dict[str, str], str]] = {
    "output": ("--output ROOT/data/image.sqsh/run", {}, "can't write to --output (Not a directory): mount"),
    "disk": ("--output ROOT --free-gb 1e9", {}, "GB free for checkpoints, --free-gb 1e+09: make room"),
    "shm": ("--shm-gb 1e9", {}, "GB free, 8 ranks want 8e+09: enlarge it"),
    "memlock": ("", LOCKED, "a process may lock 6.55e-05 GB of memory, too little for InfiniBand: unlimited in"),
}


@pytest.mark.parametrize("what", LACKS)
def test_what_a_node_lacks_is_told_with_its_remedy(what, tmp_path):
    flags, files, message = LACKS[what]
    (problem,) = made_up(tmp_path, flags, **files).problems
    assert message.replace("ROOT", str(tmp_path)) in problem


def test_a_node_that_differs_is_named():
    equal_parts = [{"driver": "580", "card mlx5_0:1": "UP"}] * 2 + [{"driver": "580"}]
    nodes = [Node(f"n{i}", [i], equal, 96, 500.0, None, 900.0) for i, equal in enumerate(equal_parts, 1)]
    (problem,) = find_problems(nodes, None, None)
    assert problem.startswith("card mlx5_0:1: UP on n1, n2; none on n3: look at it")


def test_ranks_not_hearing_each_other_named(monkeypatch, capsys):
    def fails(*_: object) -> float:
        raise RuntimeError("NCCL error: unhandled system error\nmore")

    monkeypatch.setattr(preflight, "examine", fails)
    assert cli.run("preflight", []) == 6
    assert "the all-reduce fails (NCCL error: unhandled system error): NCCL_DEBUG" in capsys.readouterr().err
    assert cli.run("preflight", ["--min-bandwidth", "1"]) == 2
    assert "--min-bandwidth has no effect with one process" in capsys.readouterr().err


PRETENDING = """
__file__ = "volo"  # a program, which imports no more than it needs
import os, socket, sys, torch
host = os.environ["PRETENDED"]
socket.gethostname = lambda: host
torch.cuda.device_count, torch.cuda.get_device_name = lambda: int(host[1]), lambda number: "H100"
from volo.cli import run
sys.exit(run("preflight", sys.argv[1:]))
"""


def test_ranks_of_hosts_that_differ_end_with_one_code(tmp_path):
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    flags = f"--device cpu --shm-gb 0.001 --data {tmp_path}/none --min-bandwidth 9999".split()
    command = [sys.executable, "-c", PRETENDING, *flags]
    runs = [Running(command, RANK=str(rank), PRETENDED=host, **meeting) for rank, host in enumerate(["n1", "n1", "n2"])]
    assert [run.end() for run in runs] == [6, 6, 6], runs[0].output
    assert not any("fit" in run.output for run in runs[1:])
    *_, one, two, _, gpus, data, slow, verdict = runs[0].output.splitlines()
    assert one.split()[:2] == ["n1", "2"] and float(one.split()[-1]) > 0
    assert two.split()[:2] == ["n2", "1"] and two.split()[-1] == "-"  # a rank alone has nothing to reduce
    assert gpus.startswith("GPUs: 1 x H100 on n1; 2 x H100 on n2: look for a failed GPU")
    assert data.startswith(f"n1, n2: can't read {tmp_path}/none (No such file or directory): mount it there")
    assert slow.startswith("all ranks: the all-reduce reaches ") and verdict == "not fit: 3 problems"
