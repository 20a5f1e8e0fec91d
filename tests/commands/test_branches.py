"""One trunk at a constant rate, several lengths: milestones, a run that stops early, branches with their own decay."""

import json
from pathlib import Path

import pytest

from tests.commands.conftest import QUICK, metrics
from tests.commands.test_exact_resume import assert_same_state
from tests.conftest import write_dataset
from tests.same_records import without_times
from tlt.io.weights import peek_checkpoint
from volo import cli
from volo.checkpoint.resume import newest_checkpoint

# Two updates an epoch; the warm-up is one epoch, the decay of N epochs takes the last two.
FLAGS = f"{QUICK} --warmup-epochs 1 --lr 1e-3 --sched wsd --sched-on-updates --decay-epochs 2 --drop-path 0.2"


def files(run: Path) -> set[str]:
    return {path.name.removesuffix(".pth.tar") for path in run.glob("*.pth.tar")}


@pytest.mark.slow
def test_two_branches_end_as_runs_of_their_lengths(call, make_dataset, tmp_path, stop_at):
    flags = f"{make_dataset()} {FLAGS} --model-ema --model-ema-decay 0.9 --output {tmp_path}"
    trunk, recipe = tmp_path / "trunk", f"{flags} --save-epochs 2 4 --checkpoint-hist 1 --experiment trunk"
    assert call("train", f"{flags} --epochs 4 --experiment whole").code == 0
    # A trunk whose decay is never reached is stopped, goes on, and is interrupted in its stable phase.
    first = call("train", f"{recipe} --epochs 8 --stop-epoch 2 --val-interval 9")
    assert first.code == 0 and "--stop-epoch 2 of 8: --resume auto without it goes on" in first.out, first
    assert files(trunk) == {"last", "model_best", "checkpoint-1", "milestone-2"}
    assert ["eval_top1" in record for record in metrics(trunk, "epoch")] == [False, True]
    stop_at({7})
    assert call("train", f"{recipe} --epochs 8 --stop-epoch 4 --resume auto").code == 130
    assert call("train", f"{recipe} --epochs 8 --stop-epoch 4 --resume auto").code == 0
    again = call("train", f"{recipe} --epochs 8 --stop-epoch 4 --resume auto")
    assert again.code == 0 and "nothing is trained" in again.out
    assert files(trunk) >= {"milestone-2", "milestone-4"} and len(files(trunk)) <= 5
    assert [peek_checkpoint(trunk / f"milestone-{n}.pth.tar")["update"] for n in (2, 4)] == [4, 8]
    assert all(record["lr"] == 1e-3 for record in metrics(trunk) if record["epoch"])
    before = {path: path.stat().st_mtime_ns for path in trunk.iterdir()}

    # The shorter branch, interrupted where its decay begins and within it, ends as the run of four epochs.
    # A job that Slurm requeues has one command for all its starts, the first of which may end before it saves anything.
    branch = f"{flags} --epochs 4 --experiment short --branch {trunk}/milestone-2.pth.tar --resume auto"
    (tmp_path / "short").mkdir()
    begins = f"a branch of {trunk}/milestone-2.pth.tar: epochs 3 to 4 of 4 go to {tmp_path}/short"
    looked = call("train", f"{branch} --dry-run").out
    assert begins in looked and f"start: a branch in {tmp_path}/short from {trunk}/milestone-2.pth.tar: --b" in looked
    for update in (5, 8):
        stop_at({update})
        ended = call("train", branch)
        assert ended.code == 130 and (begins in ended.out) == (update == 5)
    assert call("train", f"{branch} --no-resume-opt").code == 0  # which counts where the branch begins
    assert_same_state(tmp_path / "whole", tmp_path / "short")
    whole, short = (
        [line for line in without_times(tmp_path / run / "metrics.jsonl") if '"train"' in line]
        for run in ("whole", "short")
    )
    assert short == whole[4:] and len(short) == 4
    # The longer one, without a name, has a directory of its own.
    longer = call("train", f"{flags} --epochs 6 --resume {trunk}/milestone-4.pth.tar --patience 9")
    (run,) = tmp_path.glob("*-volo_test-32")
    assert longer.code == 0 and f"a branch of {trunk}/milestone-4.pth.tar: epochs 5 to 6 of 6 go to {run}" in longer.out
    assert "before the branch" not in longer.out
    assert [row["epoch"] for row in metrics(run, "epoch")] == [4, 5]
    assert {path: path.stat().st_mtime_ns for path in trunk.iterdir()} == before
    told = call("report", f"{run}").out
    assert f"branch   of {trunk}/milestone-4.pth.tar, with 8 updates done" in told
    assert "branch   of" not in call("report", f"{trunk} --quick").out
    # A milestone is a checkpoint like any other, also where it is the only one left.
    rows = call("validate", f"{tmp_path}/data --checkpoint {trunk} --all -j 0").out
    assert {Path(json.loads(line)["checkpoint"]).name for line in rows.splitlines() if line[0] == "{"} == {
        f"{name}.pth.tar" for name in files(trunk)
    }
    for name in files(trunk) - {"milestone-2", "milestone-4"}:
        (trunk / f"{name}.pth.tar").unlink()
    assert newest_checkpoint(trunk).path == trunk / "milestone-4.pth.tar"
    # Who names the trunk goes back in it: later milestones are set aside.
    back = f"{recipe} --epochs 8 --stop-epoch 2 --resume {trunk}/milestone-2.pth.tar"
    assert call("train", back).code == 0
    assert files(trunk) == {"last", "milestone-2", "checkpoint-1", "model_best", "superseded-milestone-4"}


@pytest.fixture(scope="module")
def milestone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of three epochs, one update each, after two of them."""
    root = tmp_path_factory.mktemp("trunk")
    data = write_dataset(root / "data", train=8)
    flags = f"{data} {QUICK} --epochs 3 --sched wsd --save-epochs 2 --val-interval 9 --output {root} --experiment run"
    assert cli.run("train", flags.split()) == 0
    return root / "run" / "milestone-2.pth.tar"


RESUME, BRANCH = "--resume {}", "--branch {} --resume auto"  # tests/checkpoint/test_start.py: both begin the same


@pytest.mark.parametrize(
    ("begin", "flags", "told"),
    [
        (BRANCH, "--epochs 1", "--epochs 1: {} is of 2 epochs, the run has 1: nothing is left to train"),
        (RESUME, "--epochs 2", "--epochs 2: {} is of 2 epochs, the run has 2: nothing is left to train"),
        (BRANCH, "--epochs 4 --model lvvit_t", "checkpoint is volo_test, --model is lvvit_t: {}"),
        (RESUME, "--epochs 4 --sched wsd --decay-epochs 5", "--decay-epochs 5: the decay takes at least one epoch"),
        (BRANCH, "--epochs 4 --warmup-epochs 4 --sched wsd", "--warmup-epochs 4, --decay-epochs 0.2: the decay takes"),
        (
            RESUME,
            "--epochs 2 --sched wsd",
            "--sched wsd with --epochs 2, --warmup-epochs 0, --decay-epochs 0.2: the decay",
        ),
        (BRANCH, "--epochs 4 --sched rsqrt --decay-epochs 1", "--decay-epochs 1: --lr-stable-timescale is missing"),
        (RESUME, "--epochs 4 --stop-epoch 5", "--stop-epoch 5: the run has 4 epochs"),
        (
            BRANCH,
            "--epochs 4 --stop-epoch 2",
            "--stop-epoch 2: {} is of 2 epochs, the run has 2: nothing is left to train",
        ),
        (
            RESUME,
            "--epochs 4 --stop-epoch 1",
            "--stop-epoch 1: {} is of 2 epochs, the run has 1: nothing is left to train",
        ),
    ],
)
def test_what_no_branch_can_be(call, milestone, tmp_path, begin, flags, told):
    begin = begin.format(milestone)
    ended = call("train", f"{milestone.parents[1]}/data {QUICK} {flags} --output {tmp_path} {begin}")
    assert ended.refused(told.format(milestone)), ended
    assert not [*tmp_path.iterdir()]


def test_a_run_that_begins_after_its_end_leaves_nothing(call, milestone, tmp_path):
    command = f"{milestone.parents[1]}/data {QUICK} --epochs 4 --stop-epoch 2 --start-epoch 3 --output {tmp_path}"
    assert call("train", command).refused("--start-epoch 3: the run has epochs 0 to 1 (--stop-epoch)")
    assert not [*tmp_path.iterdir()]


def test_a_trunk_is_asked_for_no_milestone_beyond_its_end(call, milestone, tmp_path):
    command = f"{milestone.parents[1]}/data {QUICK} --epochs 4 --save-epochs 3 5 --output {tmp_path}"
    assert call("train", command).refused("--save-epochs 5: the run has 4 epochs")
    branch = call("train", f"{command} --experiment b --resume {milestone} --sched wsd --decay-epochs 3")
    assert branch.code == 0 and files(tmp_path / "b") >= {"milestone-3", "last"}
    assert "the decay begins at epoch 1, before the branch: the rate is " in branch.out
    # What it wrote, and a kill before the second name was there, are made good.
    (tmp_path / "b" / "milestone-3.pth.tar").unlink()
    again = f"{milestone.parents[1]}/data {QUICK} --epochs 4 --save-epochs 4 --experiment b --output {tmp_path}"
    assert call("train", f"{again} --resume auto").code == 0 and "milestone-4" in files(tmp_path / "b")
    never = call("train", f"{again.replace('epochs 4 --exp', 'epochs 4 50 --exp')} --resume auto")
    assert never.code == 0 and "warning: --save-epochs 50: the run has 4 epochs" in never.out


@pytest.mark.slow
def test_a_rate_that_jumps_where_a_decay_had_begun_is_told(call, milestone, tmp_path):
    data = f"{milestone.parents[1]}/data {QUICK} --sched wsd --output {tmp_path}"
    assert call("train", f"{data} --epochs 4 --decay-epochs 3 --save-epochs 2 3 --experiment trunk").ok()
    jumps = "warning: the learning rate jumps from "
    within = call("train", f"{data} --epochs 8 --decay-epochs 2 --resume {tmp_path}/trunk/milestone-3.pth.tar").ok()
    assert jumps in within.out and "a milestone (--save-epochs), goes on without a jump" in within.out
    longer = call("train", f"{data} --epochs 6 --decay-epochs 1 --resume auto --experiment trunk").ok()
    assert jumps in longer.out and "to 1.25e-05" in longer.out
    stable = call("train", f"{data} --epochs 6 --decay-epochs 2 --resume {tmp_path}/trunk/milestone-2.pth.tar").ok()
    again = call("train", f"{data} --epochs 6 --decay-epochs 1 --resume auto --experiment trunk").ok()
    assert jumps not in stable.out + again.out
