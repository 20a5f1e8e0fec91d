"""The launcher with a program that ends as it is told: of one node, and of several, here on one machine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT, Running, children
from tests.conftest import LIMIT, free_port, python_path, wait_until
from tlt.errors import UserError
from volo.cluster.elastic import OneAddress, telling_code
from volo.commands.launch import described

# Ends with the code that is in the file RANK.START beside it, and tells what it was given.
PROGRAM = """
import json, os, pathlib, signal, sys, time
here, env = pathlib.Path(__file__).parent, os.environ
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
me = f"{env['RANK']}.{env['LAUNCH_RESTARTS']}"
(here / f"{me}.json").write_text(json.dumps({name: env[name] for name in names}))
for stream in ("stdout", "stderr"):  # in one write each: under -u, `print` makes two
    getattr(sys, stream).write(f"on {stream}\\n")
if (here / "deaf").exists():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
(here / f"{me}.ready").touch()
while (here / "waits").exists():
    time.sleep(0.05)
ends = here / f"{me}.ends"
code = int(ends.read_text()) if ends.exists() else 0
os.kill(os.getpid(), signal.SIGKILL) if code < 0 else sys.exit(code)
"""
# What volo/commands/launch.py does, at an address that it refuses for several nodes.
NODE = """
__file__ = "volo"  # a program, which imports no more than it needs
import sys
from volo.cluster.elastic import Launcher
port, program, node, processes = sys.argv[1:]
sys.exit(Launcher(int(processes), (program,), "127.0.0.1", int(port), 2, int(node), join_timeout=600).run())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


@pytest.fixture
def alone(program: Path) -> Callable[..., Running]:
    """`alone(processes, **environment)`: one node."""
    launcher = str(ROOT / "volo/commands/launch.py")
    return lambda processes, **env: Running([sys.executable, launcher, str(processes), str(program)], **env)


@pytest.fixture
def nodes(program: Path) -> Callable[..., list[Running]]:
    """`nodes([(node, processes), ...])`: these of two nodes."""
    command = [sys.executable, "-c", NODE, str(free_port()), str(program)]

    def start(processes: list[tuple[int, int]]) -> list[Running]:
        env = {"PYTHONPATH": python_path(ROOT), "TMPDIR": str(program.parent)}
        return [Running([*command, str(node), str(count)], **env) for node, count in processes]

    return start


def environments_of(directory: Path) -> dict[str, dict[str, str]]:
    """What each process was given, by rank and start."""
    return {file.stem: json.loads(file.read_text()) for file in directory.glob("*.json")}


def test_nodes_number_ranks_in_order_and_prefix_lines(nodes, tmp_path):
    runs = nodes([(1, 2), (0, 1)])
    assert [run.end() for run in runs] == [0, 0], "\n".join(run.output for run in runs)
    environments = environments_of(tmp_path)
    assert [environments[f"{rank}.0"]["LOCAL_RANK"] for rank in range(3)] == ["0", "0", "1"]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"]) for one in environments.values()} == {("3", "127.0.0.1")}
    assert len({one["TORCHELASTIC_RUN_ID"] for one in environments.values()}) == 1
    for run, ranks in zip(runs, ([1, 2], [0]), strict=True):
        for rank in range(3):
            for stream in ("stdout", "stderr"):
                assert (f"[{socket.gethostname()}:{rank}] on {stream}\n" in run.output) == (rank in ranks)


@pytest.mark.parametrize(("code", "starts"), [("-9", 2), ("3", 1)])
def test_processes_restart_unless_it_is_futile(alone, tmp_path, code, starts):
    (tmp_path / "1.0.ends").write_text(code)
    (tmp_path / "scratch").mkdir()
    run = alone(2, MAX_RESTARTS="3", TMPDIR=str(tmp_path / "scratch"))
    assert run.end() == (0 if starts == 2 else int(code)), run.output
    assert {name.split(".")[1] for name in environments_of(tmp_path)} == set(map(str, range(starts)))
    assert run.output.count("restart 1 of 3") == starts - 1
    assert not [*(tmp_path / "scratch").iterdir()]
    assert len({one["TORCHELASTIC_RUN_ID"] for one in environments_of(tmp_path).values()}) == 1


def test_the_code_is_that_of_the_process_that_knows_why():
    cases = {(5, 3, 5): 3, (5, -9): 5, (-9, 5): 137, (-9, 85): 137, (85, -15): 85, (130, -9): 130, (2, 85): 2, (): 0}
    assert {codes: telling_code(codes) for codes in cases} == cases


WRITING = """
__file__ = "volo"
import sys
from volo.commands.console import run_program
def parse(argv):
    print("a", "b")
    print("a", "c", file=sys.stderr)
    raise SystemExit
run_program(parse, "none")
"""


def test_lines_are_whole_behind_their_prefixes():
    writes, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps one write apart from the next
    with other:
        subprocess.run([sys.executable, "-u", "-c", WRITING], stdout=other, stderr=other, cwd=ROOT, timeout=LIMIT)
    with writes:
        writes.settimeout(LIMIT)
        assert [*iter(lambda: writes.recv(1000), b"")] == [b"a b\n", b"a c\n"]


@pytest.mark.parametrize("names", ["SLURM_PROCID SLURM_STEP_NUM_TASKS", "RANK WORLD_SIZE", "our launcher"])
def test_a_mistake_is_told_once_in_each_launch_whoever_starts_it(tmp_path, names):
    program, by_ours = [str(ROOT / "train.py"), "--no-such-flag"], names == "our launcher"
    for _ in range(1 if by_ours else 2):  # such as by the same shell
        envs = [{"TMPDIR": str(tmp_path), **dict(zip(names.split(), (rank, "2"), strict=True))} for rank in "01"]
        launcher = [str(ROOT / "volo/commands/launch.py"), "2"] if by_ours else []
        started = [Running([sys.executable, *launcher, *program], **env) for env in ([{}] if by_ours else envs)]
        assert {run.end() for run in started} == {2}
        output = "".join(run.output for run in started)  # nothing of torch's
        assert re.fullmatch(r"\[rank [01]\] error: unknown flag --no-such-flag.*\n", output)


def waiting(alone: Callable[..., Running], tmp_path: Path, **env: str) -> Running:
    """A launcher whose two processes have begun, and wait."""
    (tmp_path / "waits").touch()
    run = alone(2, **env)
    wait_until(lambda: len([*tmp_path.glob("*.ready")]) == 2, lambda: run.output)
    return run


def test_signal_before_handlers_asks_for_another_start(alone, tmp_path):
    run = waiting(alone, tmp_path)
    assert run.end(signal.SIGUSR1) == 85, run.output
    assert not children(run.process.pid)


@pytest.mark.parametrize("signals", [1, 2])
def test_processes_that_hang_are_killed_at_shutdown(alone, tmp_path, signals):
    (tmp_path / "deaf").touch()
    run = waiting(alone, tmp_path, SHUTDOWN_TIMEOUT="1" if signals == 1 else "9999")
    run.process.send_signal(signal.SIGINT)
    if signals == 2:
        time.sleep(1.5)  # what comes within a second is the same warning
        run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output


def test_nodes_that_do_not_come_together_say_why():
    port = free_port()

    def come(number: int, seconds: int = 2) -> str:
        with pytest.raises(UserError) as error:
            OneAddress("127.0.0.1", port, number, 3, f"volo-{uuid.uuid4()}", seconds).next_rendezvous()
        return f"{error.value.exit_code}: {error.value}"

    assert come(1, seconds=1).startswith(f"5: node 0 did not answer at 127.0.0.1:{port} in time: ")
    with ThreadPoolExecutor() as pool:  # node 2 does not come, and two take the numbers 0 and 1
        messages = sorted(pool.map(come, (0, 0, 1, 1)))
    assert messages[0].startswith("2: another machine has joined as node 1, too")
    assert messages[1].startswith(f"2: can't listen at 127.0.0.1, port {port} (Address already in use")
    for line in messages[2:]:  # node 0 may have ended before the other one asks who is missing
        assert re.match("5: node (2|0) did not come in time: see what was printed there", line)
    assert any("node 2 " in line for line in messages[2:])


def test_waiting_for_other_nodes_can_be_broken_off(nodes, tmp_path):
    (waiting,) = nodes([(0, 1)])
    wait_until(lambda: [*tmp_path.glob("volo_launch_*")], lambda: waiting.output)
    assert waiting.end(signal.SIGTERM) == 85 and waiting.output == "" and not environments_of(tmp_path)


TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "198.51.100.7"}  # an address for examples


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"NNODES": "two"}, "NNODES=two: a whole number from 1 on is needed"),
        ({"NNODES": "2"}, "NODE_RANK=: NNODES=2 needs a number from 0 to 1, 0 on the node that has MASTER_ADDR"),
        (TWO | {"NODE_RANK": "2"}, "NODE_RANK=2: NNODES=2 needs a number from 0 to 1"),
        (TWO | {"MASTER_ADDR": ""}, "MASTER_ADDR= is no address on .*: give the IP address of node 0"),
        (TWO | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR=localhost is (127.0.0.1|::1) on .*: give the IP address"),
        (TWO | {"MAX_RESTARTS": "1"}, "MAX_RESTARTS: started by hand, several nodes"),
        ({"LOG_DIR": "logs"}, "LOG_DIR is no longer read: torchrun --log-dir"),
    ],
)
def test_a_mistake_names_the_variable(environment, named):
    with pytest.raises(UserError, match=named):
        described(environment)


def test_mistakes_are_one_line_and_dry_run_prints_commands():
    def run(program: str, **env: str) -> tuple[int, str, str]:
        command = [str(ROOT / program), "2", "/data", "--output", "with space"]
        env = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, **env}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
        return done.returncode, done.stdout, done.stderr

    for name in ("train", "generate_label"):
        expected = f"2 processes: {sys.executable} {ROOT}/{name}.py /data --output 'with space'\n"
        assert run(f"distributed_{name}.sh", DRY_RUN="1") == (0, expected, "")
    code, out, err = run("distributed_train.sh", **TWO | {"NODE_RANK": "0"})
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: can't listen at 198.51.100.7, port 29500")
