"""The batch scripts with made-up srun, scontrol and getent: the exact commands, mistakes, requeueing, staging."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from shutil import make_archive
from typing import NamedTuple

import pytest

from tests.commands.conftest import QUICK, ROOT
from tests.conftest import LIMIT, write_dataset
from volo import cli

PROGRAMS = {
    "srun": """
{ printf 'srun'; printf ' %s' "$@"; echo; } >> "$FAKE/steps"
given='^(MASTER_ADDR|MASTER_PORT|REQUEUE_MARKER|PYTHON)='
env | grep -E "$given" | sort > "$FAKE/env"
case "$*" in *"$ON"*) exec bash -c "$DO" srun "$@" ;; esac
""",
    "scontrol": """
case "$1 $2" in
  "show hostnames") eval "printf '%s\\n' $(sed 's/\\[\\(.*\\)-\\(.*\\)\\]/{\\1..\\2}/' <<<"$3")" ;;
  "show config") echo "SlurmctldTimeout = 120 sec"; echo "SlurmdTimeout = 300 sec" ;;
  "show job") echo "JobId=$4 JobState=$STATE Reason=None PreemptTime=$PREEMPTED ExcNodeList=$EXCLUDED" ;;
  requeue* | update* | release*) echo "$@" >> "$FAKE/asked"; exit "$REFUSED" ;;
esac
""",
    "getent": """[ "$2" = node2 ] && echo "10.0.0.12 STREAM node2" """,
    "ip": """[ "$*" = "-4 -o route get 10.0.0.12" ] && echo "10.0.0.12 dev eth0 src 10.0.0.11 uid 0" """,
    "sleep": "",
}
DONE = "echo done > $REQUEUE_MARKER.state"
# What srun does with one task, and pyxis with an image in which the package is installed.
RUNS = """
for flag; do case "$flag" in --container-workdir=* | --chdir=*) cd "${flag#*=}" ;; --*) ;; *) break ;; esac; shift; done
exec "$@"
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    steps: list[str]


class FakeSlurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, script in PROGRAMS.items():
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!/bin/bash\n{script}")
            program.chmod(0o755)
        (folder / "data" / "train").mkdir(parents=True)
        (folder / "d5.pth.tar").touch()
        self.env = {"PATH": f"{folder}/bin:/usr/bin:/bin", "VIRTUAL_ENV": "/venv", "FAKE": str(folder)}
        self.env |= {"ON": "rank.sh", "DO": DONE, "STATE": "RUNNING", "PREEMPTED": "None", "REFUSED": "0"}
        self.env["EXCLUDED"] = "(null)"
        self.env |= {"SLURM_JOB_ID": "12345", "SLURM_JOB_NAME": "pretrain", "SLURM_JOB_NODELIST": "node[1-5]"}
        self.env |= {"SLURM_JOB_NUM_NODES": "5", "SLURM_GPUS_ON_NODE": "8"}
        places = {"DATA": "data", "OUTPUT": "runs", "LOGS": "logs", "FINETUNE": "d5.pth.tar"}
        self.env |= {name: str(folder / place) for name, place in places.items()}

    def run(self, script: str, *flags: str, warned_at: str = "", root: Path = ROOT, **env: str) -> Ended:
        """Run a batch script below `root`, and warn it of its time limit as soon as it has printed something."""
        env = {**self.env, "SLURM_SUBMIT_DIR": str(root), **env}
        command, pipe = ["bash", str(root / "slurm" / script), *flags], subprocess.PIPE
        how = {"stdout": pipe, "stderr": pipe, "text": True, "cwd": "/", "start_new_session": True}
        with subprocess.Popen(command, env=env, **how) as job:
            limit = threading.Timer(LIMIT, os.killpg, (job.pid, signal.SIGKILL))  # its steps too
            limit.start()
            if warned_at:
                assert job.stdout is not None and any(warned_at in line for line in job.stdout)
                job.send_signal(signal.SIGUSR1)
            out, err = job.communicate()
            limit.cancel()
        return Ended(job.returncode, out, err, self.lines("steps"))

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path)


def test_d5_is_fine_tuned_at_512_px_on_one_node(slurm):
    one = {"SLURM_JOB_NODELIST": "node3", "SLURM_JOB_NUM_NODES": "1", "PREFLIGHT": "0"}
    (step,) = slurm.run("finetune.sbatch", **one).steps
    assert "--ntasks=8 --ntasks-per-node=8 " in step
    assert f"slurm/rank.sh -- {slurm.folder}/data -c configs/volo_d5_512.yaml --finetune {slurm.folder}/d5" in step


def test_a_branch_is_begun_by_every_start_of_a_job(slurm):
    trunk, image = slurm.folder / "trunk" / "milestone-8.pth.tar", slurm.folder / "volo.sqsh"
    image.touch()
    ended = slurm.run("pretrain.sbatch", BRANCH=str(trunk), CONTAINER_IMAGE=str(image))
    assert ended.code == 0 and f"--branch {trunk} --output" in ended.out and "--resume auto" in ended.out
    assert f"{trunk.parent}:{trunk.parent}" in ended.out


def test_d3_is_pretrained_on_five_nodes_with_data_staged(slurm):
    """What a job prints, and the environment of its last step. UPDATE_GOLDEN=1 writes the file anew."""
    image, golden = slurm.folder / "volo.sqsh", Path(__file__).with_name("pretrain_container.txt")
    image.touch()
    more = {"CONTAINER_MOUNTS": "/etc/x:/etc/x:ro", "NCCL_DEBUG": "WARN", "STAGE_TO": "/raid", "LABELS": "/data/labels"}
    ended = slurm.run("pretrain.sbatch", "--model", "volo_d3", CONTAINER_IMAGE=str(image), **more)
    assert (ended.code, ended.err) == (0, "")
    assert not [*(slurm.folder / "logs").iterdir()]  # markers are gone
    printed = "\n".join([ended.out.rstrip(), "", *slurm.lines("env"), ""])
    printed = printed.replace(str(slurm.folder), "/TMP").replace(str(ROOT), "/REPO").replace(" --", " \\\n  --")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(printed)
    assert printed == golden.read_text()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"DATA": "/none"}, "DATA=/none cannot be read"),
        ({"SLURM_GPUS_ON_NODE": ""}, "PROCESSES is not set, and Slurm gave this job no GPUs"),
        ({"CONFIG": "configs/none.yaml"}, "no recipe configs/none.yaml"),
        ({"CONTAINER_IMAGE": "none.sqsh"}, f"CONTAINER_IMAGE={ROOT}/none.sqsh cannot be read"),
        ({"SLURM_SUBMIT_DIR": "/usr"}, "REPO=/usr is no checkout of this project"),
        ({"FINETUNE": "/none.pth"}, "FINETUNE=/none.pth cannot be read"),
        ({"SLURM_JOB_NODELIST": "node[8-9]"}, "the address of this node was not found: set MASTER_ADDR to one"),
    ],
)
def test_a_mistake_is_one_line_before_any_step(slurm, env, message):
    ended = slurm.run("finetune.sbatch", **env)
    assert (ended.code, ended.steps) == (2, [])
    assert ended.err.splitlines()[-1].startswith(f"error: {message}") and slurm.lines("asked") == []


@pytest.mark.parametrize(
    ("image", "flags", "code", "message"),
    [
        ("", "--no-such-flag", 2, "error: unknown flag --no-such-flag"),
        ("volo.sqsh", "--no-such-flag", 2, "error: unknown flag --no-such-flag"),
        pytest.param("volo.sqsh", f"{QUICK} --epochs 1", 0, "done: 2 updates", marks=pytest.mark.slow),
    ],
)
def test_scripts_of_volo_slurm_train_in_place(slurm, image, flags, code, message):
    assert cli.run("slurm", [str(slurm.folder / "jobs")]) == 0
    data = write_dataset(slurm.folder / "images")
    one = {"SLURM_JOB_NODELIST": "node3", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "", "PROCESSES": "1"}
    env = {**one, "DATA": str(data), "CONFIG": "", "DO": RUNS, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    (slurm.folder / "volo.sqsh").touch()
    env |= {"CONTAINER_IMAGE": image and str(slurm.folder / image), "PREFLIGHT": "0" if code else "1"}
    ended = slurm.run("pretrain.sbatch", *flags.split(), root=slurm.folder / "jobs", **env)
    assert ended.code == code and message in ended.out + ended.err, ended.out + ended.err


def test_the_address_may_be_given(slurm):
    address = {"SLURM_JOB_NODELIST": "node[8-9]", "MASTER_ADDR": "10.9.9.9"}
    assert "rank 0 is at 10.9.9.9, port 24690\n" in slurm.run("pretrain.sbatch", **address).out


BEGUN = "echo begun > $REQUEUE_MARKER.state"
MARKED = "echo '{}' > $REQUEUE_MARKER; exit "


@pytest.mark.parametrize(
    ("do", "env", "asked"),
    [
        (f"{MARKED} 1", {}, True),  # torchrun's own code, or that of a process that was killed meanwhile
        (f"{MARKED} 85", {"STATE": "CANCELLED"}, False),
        ("exit 143", {"PREEMPTED": "2026-01-01T10:00:00"}, True),  # before there was anything to save
        ("exit 143", {}, False),
        ("exit 1", {"PREEMPTED": "2026-01-01T10:00:00"}, False),
    ],
)
def test_the_marker_decides_about_a_requeue(slurm, do, env, asked):
    marker = slurm.folder / "logs" / "12345-requeue"
    marker.parent.mkdir()
    marker.write_text("of an earlier start\n")
    ended = slurm.run("pretrain.sbatch", DO=do, **env)
    assert slurm.lines("asked") == (["requeue 12345"] if asked else [])
    assert ended.code == int(do.split()[-1]) and not marker.exists()


def test_nodes_that_are_wrong_are_left_out(slurm):
    do = """echo '{"reason": "x", "update": 4, "exclude": "node2,node4"}' > $REQUEUE_MARKER; exit 7"""
    for before, excluded in (("(null)", "node2,node4"), ("node9", "node9,node2,node4")):
        assert slurm.run("pretrain.sbatch", DO=do, EXCLUDED=before).code == 7
        asked = slurm.lines("asked")[-3:]
        assert asked == ["requeuehold 12345", f"update JobId=12345 ExcNodeList={excluded}", "release 12345"]


@pytest.mark.parametrize(
    ("step", "do", "code"),
    [
        ("stage.sh", "echo begun; exec /bin/sleep 20", 138),  # no training is started after it
        # An image that is being unpacked hears no warning; a TERM ends it, which here is sent at once.
        ("rank.sh", "trap '' USR1; echo begun; exec /bin/sleep 600", 143),
    ],
)
def test_warning_before_training_ends_the_step_and_requeues(slurm, step, do, code):
    staged = {"STAGE_TO": "/raid"} if step == "stage.sh" else {}
    ended = slurm.run("pretrain.sbatch", warned_at="begun", ON=step, DO=do, **staged)
    assert (ended.code, len(ended.steps), slurm.lines("asked")) == (code, 1, ["requeue 12345"])


def test_a_warning_while_a_step_starts_reaches_it(slurm):
    hook = slurm.folder / "hook"  # bash reads this first, and signals the job before it knows the step's process
    sends = "[[ $BASH_COMMAND != _running=*! ]] || kill -USR1 $$"
    hook.write_text(f"[[ $0 != *.sbatch ]] || {{ set -T; trap '{sends}' DEBUG; }}")
    ended = slurm.run("pretrain.sbatch", DO="exec /bin/sleep 5", BASH_ENV=str(hook))
    assert ended.code in (138, 143) and slurm.lines("asked") == ["requeue 12345"]  # 143: its shell was not yet ready


def test_time_limit_below_the_start_ends_the_second_job(slurm):
    def warned(update: int | None) -> tuple[str, int]:
        saved = "" if update is None else f"""echo '{{"reason": "x", "update": {update}}}' > $REQUEUE_MARKER; """
        do = f"trap 'n=1' USR1; {BEGUN}; echo begun; until [ $n ]; do /bin/sleep 0.05; done; {saved}exit 85"
        return slurm.run("pretrain.sbatch", warned_at="begun", DO=do).err, len(slurm.lines("asked"))

    assert [warned(update)[1] for update in (None, 40, None)] == [1, 2, 3]
    error, asked = warned(40)
    assert asked == 3 and "two starts in a row before they had done an update: ask for more (--time)" in error


def test_step_that_ends_well_untrained_is_a_failure(slurm):
    for do in ("exit 0", BEGUN):
        ended = slurm.run("pretrain.sbatch", DO=do)
        assert ended.code == 1 and "the training has not said that it is done: see" in ended.err


def stage(source: str | Path, target: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"}
    (target.parent / ".staging-7" / "left").mkdir(parents=True, exist_ok=True)  # by a start that was killed
    command = [ROOT / "slurm" / "stage.sh", source, target]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)


@pytest.mark.parametrize("packed", ["", "data", "."])
def test_a_folder_or_a_tar_is_staged_once(tmp_path, packed):
    data, target = write_dataset(tmp_path / "data"), tmp_path / "raid" / "data-1"
    parent = data if packed == "." else tmp_path
    source = make_archive(str(tmp_path / "packed"), "tar", parent, packed) if packed else data
    assert stage(source, target).returncode == 0
    assert sorted(os.listdir(target)) == ["train", "validation"] and os.listdir(tmp_path / "raid") == ["data-1"]
    (target / "kept").touch()
    assert "data are staged" in stage(source, target).stdout and (target / "kept").exists()


def test_data_that_changed_anywhere_are_staged_again(slurm):
    file = slurm.folder / "data" / "train" / "c0" / "1.jpg"
    changes: list[Callable[[], object]] = [
        lambda: (file.parent.mkdir(parents=True), file.write_bytes(b"1")),
        lambda: file.parent.with_name("c1").mkdir(),
        lambda: os.utime(file, ns=(1, 1)),
        lambda: file.with_name("2.jpg").write_bytes(b"2"),
        lambda: file.rename(file.with_name("3.jpg")),
        lambda: os.utime(slurm.folder / "data", (0, 0)),  # which is no change of what it holds
    ]
    named = []
    for change in changes:
        change()
        steps = slurm.run("pretrain.sbatch", STAGE_TO="/raid").steps
        named.append([step for step in steps if "stage.sh" in step][-1].split()[-1])
    assert len({*named}) == 5 and named[-2] == named[-1] and all(name.startswith("/raid/data-") for name in named)


def test_cut_tar_or_folder_without_train_is_not_staged(tmp_path):
    data, raid = write_dataset(tmp_path / "data"), tmp_path / "raid"
    cut = Path(make_archive(str(tmp_path / "cut"), "tar", tmp_path, "data"))
    between = Path(make_archive(str(tmp_path / "between"), "tar", tmp_path, "data"))
    cut.write_bytes(cut.read_bytes()[:-20000])
    entries = len(between.read_bytes().rstrip(b"\0"))
    between.write_bytes(between.read_bytes()[: -(-entries // 512) * 512])  # without the blocks that end it
    not_whole = f"could not be brought to {raid}"
    joined = tmp_path / "joined.tar"
    joined.write_bytes(2 * Path(make_archive(str(tmp_path / "whole"), "tar", tmp_path, "data")).read_bytes())
    packed = tmp_path / "joined.tar.gz"
    packed.write_bytes(gzip.compress(joined.read_bytes()))
    cases = [*((source, not_whole) for source in (cut, between, joined, packed)), (data / "train", "has no train/")]
    for source, message in cases:
        ended = stage(source, raid / "data-1")
        assert ended.returncode == 2 and os.listdir(raid) == []
        assert ended.stderr.splitlines()[-1].startswith(f"error: {os.uname().nodename}: DATA={source} {message}")
