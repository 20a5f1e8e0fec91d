"""The launcher with a program that ends as it is told: of one node, and of two, here on one machine."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT, Running, children
from tests.conftest import free_port, wait_until
from volo.cluster.elastic import telling_code

# Ends with the code that is in the file RANK.START beside it, and tells what it was given.
PROGRAM = """
import json, os, pathlib, signal, sys, time
here, env = pathlib.Path(__file__).parent, os.environ
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "LAUNCH_ID")
me = f"{env['RANK']}.{env['LAUNCH_RESTARTS']}"
(here / f"{me}.json").write_text(json.dumps({name: env[name] for name in names}))
print("on stdout", flush=True)
print("on stderr", file=sys.stderr, flush=True)
if (here / "deaf").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / f"{me}.ready").touch()
while (here / "waits").exists():
    time.sleep(0.05)
ends = here / f"{me}.ends"
code = int(ends.read_text()) if ends.exists() else 0
os.kill(os.getpid(), signal.SIGKILL) if code < 0 else sys.exit(code)
"""
# What volo/commands/launch.py does, at an address that it refuses for several nodes.
NODE = """
import sys
from volo.cluster.elastic import Launcher, NotTogether
from volo.cluster.launch import Launch
node, nodes, processes, port, logs, program = sys.argv[1:]
launch = Launch(int(processes), (program,), "job", 0, 300, logs, "[here:${rank}] ", int(nodes), int(node),
                port=int(port), join_timeout=int(__import__("os").environ.get("JOIN", 60)))
try:
    sys.exit(Launcher(launch).run())
except NotTogether as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.code)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


@pytest.fixture
def alone(program: Path) -> Callable[..., Running]:
    """`alone(processes, **environment)`: one node."""
    command = [sys.executable, str(ROOT / "volo" / "commands" / "launch.py")]
    return lambda processes, **env: Running([*command, str(processes), str(program)], **env)


@pytest.fixture
def nodes(program: Path) -> Callable[..., list[Running]]:
    """`nodes([(node, processes), ...], of, **environment)`: these of so many nodes."""
    port = str(free_port())

    def start(processes: list[tuple[int, int]], of: int = 2, **env: str) -> list[Running]:
        where = [port, str(program.parent / "logs"), str(program)]
        return [
            Running([sys.executable, "-c", NODE, str(node), str(of), str(count), *where], PYTHONPATH=str(ROOT), **env)
            for node, count in processes
        ]

    return start


def told(directory: Path) -> dict[str, dict[str, str]]:
    """What each process was given, by rank and start."""
    return {file.stem: json.loads(file.read_text()) for file in directory.glob("*.json")}


def test_nodes_number_their_ranks_in_order_and_their_lines_have_prefixes(
    nodes: Callable[..., list[Running]], tmp_path: Path
) -> None:
    runs = nodes([(1, 2), (0, 1)])
    assert [run.end() for run in runs] == [0, 0], "\n".join(run.output for run in runs)
    given = told(tmp_path)
    assert [given[f"{rank}.0"]["LOCAL_RANK"] for rank in range(3)] == ["0", "0", "1"]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"]) for one in given.values()} == {("3", "127.0.0.1")}
    assert len({one["LAUNCH_ID"] for one in given.values()}) == 1
    for run, ranks in zip(runs, ([1, 2], [0]), strict=True):
        for rank in range(3):
            for stream in ("stdout", "stderr"):
                assert (f"[here:{rank}] on {stream}\n" in run.output) == (rank in ranks)
    logs = [file.read_text() for file in (tmp_path / "logs").rglob("job_*/attempt_0/*/std???.log")]
    assert sorted(logs) == ["on stderr\n"] * 3 + ["on stdout\n"] * 3


@pytest.mark.parametrize(("code", "starts"), [("-9", 2), ("1", 2), ("3", 1), ("85", 1)])
def test_processes_start_again_unless_the_same_would_happen_again(
    alone: Callable[..., Running], tmp_path: Path, code: str, starts: int
) -> None:
    (tmp_path / "1.0.ends").write_text(code)
    run = alone(2, MAX_RESTARTS="3")
    assert run.end() == (0 if starts == 2 else int(code)), run.output
    assert {name.split(".")[1] for name in told(tmp_path)} == set(map(str, range(starts)))
    assert run.output.count("restart 1 of 3") == starts - 1
    assert len({one["LAUNCH_ID"] for one in told(tmp_path).values()}) == 1


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((5, 3, 5), 3),
        ((5, -9), 5),
        ((-9, 5), 137),
        ((-9, 85), 137),
        ((85, -15), 85),
        ((130, -9), 130),
        ((2, 85), 2),
        ((), 0),
    ],
)
def test_the_code_is_that_of_the_process_that_knows_why(codes: tuple[int, ...], expected: int) -> None:
    assert telling_code(codes) == expected


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


def test_a_mistake_of_several_ranks_is_told_once(alone: Callable[..., Running], program: Path) -> None:
    program.write_text(MISTAKEN)
    run = alone(3, PYTHONPATH=str(ROOT))
    assert run.end() == 2, run.output
    assert len(re.findall(r"\[rank [012]\] error: no such model\n", run.output)) == 1
    assert len(run.output.splitlines()) == 1  # nothing of torch's


def test_nothing_stays_behind_in_the_temporary_directory(alone: Callable[..., Running], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    run = alone(1, TMPDIR=str(scratch))
    assert run.end() == 0, run.output
    assert not [*scratch.iterdir()]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 85),
        (signal.SIGUSR1, 85),
        pytest.param(
            signal.SIGHUP,
            85,
            marks=pytest.mark.skipif(
                signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="these tests run by nohup"
            ),
        ),
        (signal.SIGINT, 130),
    ],
)
def test_a_signal_before_a_process_can_handle_it_asks_for_another_start(
    alone: Callable[..., Running], tmp_path: Path, number: int, code: int
) -> None:
    (tmp_path / "waits").touch()
    run = alone(2)
    wait_until(lambda: len([*tmp_path.glob("*.ready")]) == 2, lambda: run.output)
    assert run.end(number) == code, run.output
    assert not children(run.process.pid)


def test_processes_that_do_not_end_are_killed_after_the_shutdown_timeout(
    alone: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "waits").touch()
    (tmp_path / "deaf").touch()
    run = alone(2, SHUTDOWN_TIMEOUT="1")
    wait_until(lambda: len([*tmp_path.glob("*.ready")]) == 2, lambda: run.output)
    assert run.end(signal.SIGTERM) == 137, run.output


def test_a_node_that_does_not_come_is_named(nodes: Callable[..., list[Running]], tmp_path: Path) -> None:
    (first,) = nodes([(0, 1)], of=3, JOIN="2")
    assert first.end() == 5
    assert re.fullmatch(r"error: node 1, 2 did not join 127.0.0.1:\d+ within 2 s: .*\n", first.output)
    (second,) = nodes([(1, 1)], JOIN="2")
    assert second.end() == 5
    assert re.fullmatch(r"error: node 0 did not answer at 127.0.0.1:\d+ within 2 s: .*\n", second.output)
    assert not told(tmp_path)


def test_twins_and_a_port_in_use_are_told_and_waiting_can_be_broken_off(nodes: Callable[..., list[Running]]) -> None:
    runs = nodes([(0, 1), (0, 1)], of=3)
    wait_until(lambda: any(run.process.poll() is not None for run in runs), lambda: runs[0].output + runs[1].output)
    refused, waiting = sorted(runs, key=lambda run: run.process.poll() is None)
    assert refused.end() == 2 and "choose a MASTER_PORT" in refused.output.replace("Choose", "choose")
    twins = nodes([(1, 1), (1, 1)], of=3)
    wait_until(lambda: any(run.process.poll() is not None for run in twins), lambda: twins[0].output)
    told = min(twins, key=lambda run: run.process.poll() is None)
    assert told.end() == 2 and "another machine has joined as NODE_RANK 1" in told.output
    assert waiting.end(signal.SIGTERM) == 85 and "Traceback" not in waiting.output


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process that its parent has ended")
def test_processes_are_told_when_their_launcher_is_killed(alone: Callable[..., Running], program: Path) -> None:
    told = "from volo.cluster.ranks import end_with_launcher; import os\nend_with_launcher(os.environ)\n"
    program.write_text(told + PROGRAM)
    (program.parent / "waits").touch()
    run = alone(2, PYTHONPATH=str(ROOT))
    wait_until(lambda: len([*program.parent.glob("*.ready")]) == 2, lambda: run.output)
    ranks = children(run.process.pid)
    assert len(ranks) == 2 and run.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not any(os.path.exists(f"/proc/{rank}") for rank in ranks))
