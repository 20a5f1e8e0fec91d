"""A run that is interrupted anywhere and resumed ends in the bits and records of one that was not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import interrupted_train
from tests.commands.conftest import QUICK, ROOT, launch, metrics, spent_in
from tests.conftest import LIMIT, python_path
from tests.same_records import without_times
from tests.train.small_run import tensors
from tlt.io.weights import peek_checkpoint, read_checkpoint
from tlt.tools import cli as tlt_cli
from volo.commands import run_start
from volo.record.confusion import CLASSES, COUNTS

# Everything that could be lost: BatchNorm, MixToken, stochastic depth, RandAugment, accumulation, average, intervals.
FLAGS = f"{QUICK} --lr 1e-3 --epochs 2 --token-label --drop-path 0.2 --model-ema --log-interval 2"


def assert_same_state(whole: Path, cut: Path) -> None:
    one, two = (read_checkpoint(run / "last.pth.tar") for run in (whole, cut))
    for key in ("state_dict", "state_dict_ema", "optimizer"):
        pairs = list(zip(tensors(one[key]), tensors(two[key]), strict=True))
        assert len(pairs) > 20 and all(torch.equal(a, b) for a, b in pairs), key
    assert one["update"] == two["update"]


def assert_same(whole: Path, cut: Path) -> None:
    assert_same_state(whole, cut)
    one, two = (peek_checkpoint(run / "last.pth.tar") for run in (whole, cut))
    assert one["scores"] == two["scores"]
    for name in ("metrics.jsonl", "summary.csv"):
        assert without_times(cut / name) == without_times(whole / name), name
    for name in (CLASSES, COUNTS):  # of the best epoch, wherever the run was interrupted
        assert (cut / name).read_text() == (whole / name).read_text(), name


def test_fault_11_resumes_with_other_workers_and_shards(call, make_dataset, make_labels, tmp_path, stop_at):
    data, packed = make_dataset(train=21), tmp_path / "packed"
    labels = make_labels(data)
    assert tlt_cli.main(["pack-images", str(data), str(packed), "--labels", str(labels), "--workers", "1"]) == 0
    flags = f"{FLAGS} -b 3 --grad-accum-steps 2 --amp --checkpoint-sync --drop-path-mode subset --output {tmp_path}"
    flags += " --resume auto --experiment"
    folder, shards = f"{data} --token-label-data {labels}", f"{packed} --token-label-data {packed}"
    assert call("train", f"{flags} whole {folder}").code == 0
    stop_at({1, 4, 6})  # 4: after the first epoch's last update, before it is validated
    lives = [f"{folder} -j 2", f"{shards} -j 2", f"{folder} -j 1", f"{shards} -j 0"]
    ends = [call("train", f"{flags} cut {life}") for life in lives]
    assert [end.code for end in ends] == [130, 130, 130, 0], ends
    spent = spent_in(tmp_path / "cut")
    assert spent.restarts == 3 and spent.parts["done twice"] == 0 < spent.parts["away"]
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        "",
        "--model-dtype bfloat16 -b 2 --grad-accum-steps 2",
        "--shard 2 --clip-grad 1 -b 2 --grad-accum-steps 2",
        "--tensor-parallel 2 --clip-grad 1",
        "--train-img-sizes 16 32 --train-batch-sizes 4 2 --train-size-schedule progressive",
    ],
)
def test_fault_11_interrupted_on_two_ranks(make_dataset, make_labels, tmp_path, more):
    """Within an epoch the ranks have other running statistics, in the average too, and other sums of losses."""
    data = make_dataset(train=24)
    flags = f"{FLAGS} -b 4 {more} --dist-bn reduce --token-label-data {make_labels(data)} --resume auto"
    flags += f" --output {tmp_path}"
    launch(2, f"{flags} --experiment whole", data)
    driver = str(Path(interrupted_train.__file__))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", driver, "2"]
    env = {**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    command += [str(data), *flags.split(), "--experiment", "cut"]
    stopped = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert "exitcode  : 130" in stopped.stderr, stopped.stderr
    assert "0 epochs, 2 updates done" in launch(2, f"{flags} --experiment cut", data)
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_fault_13_two_ranks_keep_the_global_batch_of_one(call, make_dataset, tmp_path):
    data = make_dataset(train=24)
    flags = f"{QUICK} --lr-base 0.1 --freeze-bn --output {tmp_path} --resume auto -b 4 --experiment"
    assert call("train", f"{data} --grad-accum-steps 2 {flags} whole --epochs 2").code == 0
    assert call("train", f"{data} --grad-accum-steps 2 {flags} run --epochs 1").code == 0
    out = launch(2, f"--grad-accum-steps 2 {flags} run --epochs 2", data)
    assert "1 processes before, 2 now: 1 accumulation steps, not 2, keep the global batch of 8" in out
    assert "global batch 8 = 4 per device x 2 x 1 accumulation steps; 3 updates an epoch" in out
    rows = (metrics(tmp_path / name) for name in ("whole", "run"))
    whole, run = ({row["update"]: row["lr"] for row in each if "lr" in row} for each in rows)
    assert [run[update] for update in (4, 5, 6)] == [whole[update] for update in (4, 5, 6)]


def test_ranks_with_different_checkpoints_do_not_wait(call, trained_run, tmp_path, monkeypatch):
    real = run_start.from_all
    monkeypatch.setattr(run_start, "from_all", lambda own: [own, [0, 1]] if isinstance(own, list) else real(own))
    flags = f"{trained_run.data} {QUICK} --epochs 3 --model-ema --output {tmp_path} --experiment run"
    ended = call("train", flags, "--resume", trained_run.run / "last.pth.tar")
    assert ended.code == 2 and "ranks read it at updates 1 and 4: it is being written to" in ended.err
