"""What the launch scripts read from the environment, and the mistakes that they explain."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LIMIT
from volo.cluster.launch import Launch, described

ROOT = Path(__file__).resolve().parents[3]
# 198.51.100.0/24 is kept for examples: no machine has such an address.
TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "198.51.100.7"}
PREFIX = f"[{socket.gethostname()}:${{rank}}] "
SRUN = {"SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "2"}


def run(program: str, environment: dict[str, str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run a launch script with 2 processes and nothing but `environment` set."""
    command = [str(ROOT / f"distributed_{program}.sh"), "2", "/data", "--model", "volo_d1", "--output", "with space"]
    clean = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "DRY_RUN": "1"}
    env = {**clean, **environment, **more}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)


def test_a_dry_run_prints_what_torchrun_would_be_told() -> None:
    ended = run("train", TWO | {"LOG_DIR": "l"})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (
        f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --nnodes=2 --node-rank=1 "
        "--master-addr=198.51.100.7 --master-port=29500 --max-restarts 0 --tee 3 --log-dir l "
        f"{ROOT}/train.py /data --model volo_d1 --output 'with space'\n"
    )
    assert f"--standalone --max-restarts 0 {ROOT}/generate_label.py" in run("generate_label", {}).stdout


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"nodes": 1, "address": "127.0.0.1", "port": 0, "patience": 300, "prefix": None}),
        ({"MAX_RESTARTS": "3", "SHUTDOWN_TIMEOUT": "60"}, {"restarts": 3, "patience": 60}),
        ({"LOG_DIR": "l", "RUN_ID": "d1"}, {"log_dir": "l", "run_id": "d1", "prefix": PREFIX}),
        (TWO, {"nodes": 2, "node_rank": 1, "address": "198.51.100.7", "join_timeout": 60, "prefix": PREFIX}),
        (TWO | {"MASTER_PORT": "21000", "JOIN_TIMEOUT": "20"}, {"port": 21000, "join_timeout": 20}),
        (TWO | {"MASTER_ADDR": "2001:db8::7"}, {"address": "2001:db8::7"}),
        ({**TWO, **SRUN, "NNODES": "3", "NODE_RANK": ""}, {"nodes": 3, "node_rank": 2}),
    ],
)
def test_the_environment_is_heeded(environment: dict[str, str], expected: dict[str, object]) -> None:
    launch = described(2, ["train.py"], {"DRY_RUN": "1", **environment})
    assert isinstance(launch, Launch)
    assert {name: getattr(launch, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"NNODES": "two"}, "NNODES=two"),
        ({"NNODES": "2"}, "NODE_RANK"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1, but NNODES is 1"),
        (TWO | {"NODE_RANK": "2"}, "NODE_RANK=2, but NNODES=2: nodes are numbered from 0 to 1"),
        (TWO | {"NODE_RANK": "-1"}, "NODE_RANK=-1"),
        ({**TWO, "NODE_RANK": "", "SLURM_NODEID": "1"}, "NODE_RANK"),  # a batch script has this one, too
        ({**TWO, **SRUN, "NODE_RANK": ""}, "SLURM_NODEID=2, but NNODES=2"),
        (TWO | {"MASTER_ADDR": ""}, "needs MASTER_ADDR"),
        (TWO | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR=localhost is 127.0.0.1"),
        (TWO | {"MASTER_ADDR": "127.0.1.1"}, "MASTER_ADDR=127.0.1.1"),
        (TWO | {"MASTER_ADDR": "0.0.0.0"}, "MASTER_ADDR=0.0.0.0"),
        (TWO | {"MASTER_ADDR": "::1"}, "MASTER_ADDR=::1"),
        (TWO | {"MASTER_ADDR": "nowhere.invalid"}, "can't resolve"),
        (TWO | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
        (TWO | {"RUN_ID": "a/b"}, "RUN_ID=a/b"),
        (TWO | {"JOIN_TIMEOUT": "0"}, "JOIN_TIMEOUT=0"),
        ({"SHUTDOWN_TIMEOUT": "5s"}, "SHUTDOWN_TIMEOUT=5s"),
        ({"MAX_RESTARTS": "some"}, "MAX_RESTARTS=some"),
        (TWO | {"MAX_RESTARTS": "1"}, "MAX_RESTARTS=1: started by hand, several nodes"),
        (
            TWO | {"NODE_RANK": "0", "DRY_RUN": ""},
            "MASTER_ADDR=198.51.100.7 (198.51.100.7) is not an address of this machine",
        ),
        ({"LOG_DIR": "/proc/none", "DRY_RUN": ""}, "LOG_DIR=/proc/none"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_variable(environment: dict[str, str], named: str) -> None:
    ended = run("train", environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ") and named in line
