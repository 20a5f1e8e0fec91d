"""The launchers of several nodes, here on one machine, with a program that ends as it is told."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT, Running
from tests.conftest import LIMIT, free_port

# Ends with the code that is in the file RANK.START beside it, and tells what it was given.
PROGRAM = """
import json, os, pathlib, signal, sys, time
here, env = pathlib.Path(__file__).parent, os.environ
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LAUNCH_ID", "LAUNCH_RESTARTS")
me = f"{env['RANK']}.{env['LAUNCH_RESTARTS']}"
(here / f"{me}.json").write_text(json.dumps({name: env[name] for name in names}))
print("on stdout", flush=True)
print("on stderr", file=sys.stderr, flush=True)
ends = here / f"{me}.ends"
if (here / "slow").exists():
    def save(number, frame):
        time.sleep(float((here / "slow").read_text()))
        (here / f"{me}.saved").touch()
        sys.exit(85)
    signal.signal(signal.SIGTERM, save)
    (here / f"{me}.ready").touch()
    while not ends.exists() or not all((here / f"{rank}.0.ready").exists() for rank in (0, 1)):
        time.sleep(0.05)
after = here / f"{me}.after"  # the name of a process that has to end first
while after.exists() and not (here / f"{after.read_text()}.over").exists():
    time.sleep(0.01)
(here / f"{me}.over").touch()
code = int(ends.read_text()) if ends.exists() else 0
os.kill(os.getpid(), signal.SIGKILL) if code < 0 else sys.exit(code)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., list[Running]]:
    """`start(*processes, of=None, join_timeout=60, **environment)`: a launcher per node, with so many processes."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(ROOT / "volo" / "commands" / "launch.py"), "--tee", "3", "--log-dir", str(tmp_path)]
    where = f"--master-addr 127.0.0.1 --master-port {free_port()}"

    def start(*processes: int, of: int = 0, join_timeout: int = 60, **env: str) -> list[Running]:
        count = of or len(processes)
        env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[here:${rank}] "
        env["RUN_SECRET"] = "of this run"
        begun = []
        for node, local in enumerate(processes):
            several = f"--nnodes {count} --node-rank {node} {where} --join-timeout {join_timeout}"
            flags = f"{several if count > 1 else '--standalone'} --nproc-per-node {local} --rdzv-id job"
            begun.append(Running([*command, *flags.split(), str(program)], **env))
        return begun

    return start


def told(directory: Path) -> dict[str, dict[str, str]]:
    """What each process was given, by rank and start."""
    return {file.stem: json.loads(file.read_text()) for file in directory.glob("*.json")}


def test_nodes_number_their_ranks_in_order_and_start_again_together(
    start: Callable[..., list[Running]], tmp_path: Path
) -> None:
    (tmp_path / "2.0.ends").write_text("-9")
    nodes = start(1, 2, MAX_RESTARTS="3")
    assert [node.end() for node in nodes] == [0, 0], "\n".join(node.output for node in nodes)
    given = told(tmp_path)
    assert set(given) == {f"{rank}.{start}" for rank in range(3) for start in range(2)}
    assert [given[f"{rank}.0"]["LOCAL_RANK"] for rank in range(3)] == ["0", "0", "1"]
    assert {one["WORLD_SIZE"] for one in given.values()} == {"3"}
    assert {one["MASTER_ADDR"] for one in given.values()} == {"127.0.0.1"}
    assert len({one["LAUNCH_ID"] for one in given.values()}) == 1
    # All ranks of all starts meet at the launchers' store, where LAUNCH_RESTARTS tells them apart.
    assert len({one["MASTER_PORT"] for one in given.values()}) == 1
    for node, ranks in zip(nodes, ([0], [1, 2]), strict=True):
        assert node.output.count("a process ended with code 137: restart 1 of 3") == 1
        for rank in range(3):
            assert (f"[here:{rank}] on stdout" in node.output) == (rank in ranks)
    assert (tmp_path / "job.0-rank2.out").read_text() == (tmp_path / "job.1-rank2.out").read_text() == "on stdout\n"
    assert (tmp_path / "job.1-rank0.err").read_text() == "on stderr\n"


def test_the_code_that_says_most_is_that_of_all_nodes_and_final_for_all(
    start: Callable[..., list[Running]], tmp_path: Path
) -> None:
    (tmp_path / "0.0.ends").write_text("5")
    (tmp_path / "1.0.ends").write_text("3")
    (tmp_path / "0.0.after").write_text("1.0")  # else node 1's may be killed: the run has not begun
    nodes = start(1, 1, MAX_RESTARTS="3")
    assert [node.end() for node in nodes] == [3, 3], "\n".join(node.output for node in nodes)
    assert set(told(tmp_path)) == {"0.0", "1.0"}


@pytest.mark.parametrize(("patience", "saving"), [(1, LIMIT), (LIMIT, 2)])
def test_a_process_has_the_shutdown_timeout_to_save_after_another_failed(
    start: Callable[..., list[Running]], tmp_path: Path, patience: float, saving: float
) -> None:
    (tmp_path / "slow").write_text(str(saving))
    (tmp_path / "1.0.ends").write_text("1")
    (node,) = start(2, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=f"{patience:.0f}")
    assert node.end() == 1, node.output
    assert (tmp_path / "0.0.saved").exists() == (saving < patience)


# Meets the others where all have the same to tell.
MISTAKEN = """
import os, pathlib, sys, time
import tlt.data.sources.folder
from tlt.errors import UserError
from volo.commands.console import run_program
def parse(argv):
    rank, here = os.environ["RANK"], pathlib.Path(__file__).parent
    (here / f"{rank}.here").touch()
    while len([*here.glob("*.here")]) < 3:
        time.sleep(0.01)
    raise UserError("no such model")
sys.exit(run_program(parse, "none"))
"""


def test_a_mistake_of_several_ranks_is_told_once(start: Callable[..., list[Running]], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MISTAKEN)
    (node,) = start(3, PYTHONPATH=str(ROOT))
    assert node.end() == 2, node.output
    assert len(re.findall(r"\[rank [012]\] error: no such model\n", node.output)) == 1


def test_nothing_stays_behind_in_the_temporary_directory(start: Callable[..., list[Running]], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (node,) = start(1, TMPDIR=str(scratch))
    assert node.end() == 0, node.output
    assert not [*scratch.iterdir()]


def test_a_node_that_does_not_come_is_named(start: Callable[..., list[Running]], tmp_path: Path) -> None:
    (node,) = start(1, of=2, join_timeout=1)
    assert node.end() == 5
    (line,) = node.output.splitlines()
    assert line.startswith("error: node 1 did not join 127.0.0.1:") and " within 1 s" in line
    assert not told(tmp_path)
