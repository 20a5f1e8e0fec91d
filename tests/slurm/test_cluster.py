"""Jobs on a real Slurm cluster: what becomes of them, and that they end in the weights of one that nobody disturbed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import digest, held
from tests.hosts.conftest import NET
from tests.slurm.conftest import FLAGS, Cluster

pytestmark = pytest.mark.slurm
Begin = Callable[..., str]
Whole = tuple[str, str]


def events(cluster: Cluster, experiment: str, kind: str) -> list[dict[str, object]]:
    lines = (cluster.runs / experiment / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def check_resumed(cluster: Cluster, experiment: str) -> None:
    """It went on once, from what it had saved, and has ended in the weights of the run that nobody disturbed."""
    (path,) = [event["path"] for event in events(cluster, experiment, "resume") if event["path"]]
    assert str(path).endswith("last.pth.tar")
    assert digest(cluster.runs / experiment) == digest(cluster.runs / "whole")


def test_two_nodes_whose_names_are_loopback_train_together(cluster: Cluster, whole: Whole) -> None:
    (start,) = events(cluster, "whole", "start")
    assert start["world_size"] == 2 and start["hosts"] == {"node1": 1, "node2": 1}
    job, _ = whole
    log = cluster.log(job)
    assert f"rank 0 is at {NET}.11, port 200" in log
    assert f"== {job}-node1.log" in log and f"== {job}-node2.log" in log
    hosts = cluster.run("srun", "-w", "node3", "getent", "ahostsv4", "node3")
    assert "127.0.1.1" in hosts and NET not in hosts


def test_ranks_of_srun_meet_and_print_a_mistake_once(cluster: Cluster, tmp_path: Path) -> None:
    # Steps as they are in a container with enroot's hook differ in a few variables more.
    for hook in ("", "export WORLD_SIZE=$SLURM_NTASKS RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; "):
        train = f"{sys.executable} train.py {cluster.data} {FLAGS} --output {tmp_path} --experiment"
        step = ["srun", "-N2", "--ntasks-per-node=2", "--overcommit", "bash", "-c"]
        out = cluster.run(*step, f"{hook}{train} one{len(hook)} -b 2 --epochs 1")
        assert "global batch 8 = 2 per device x 4" in out and "done: 5 updates" in out
        out = cluster.run(*step, f"{hook}{train} two --no-such-flag 2>&1 || true")
        assert out.count("error: unknown flag --no-such-flag") == 1, out  # these nodes have one /tmp


def test_fine_tuning_follows_pretraining_on_staged_data(cluster: Cluster, whole: Whole) -> None:
    pretraining, fine_tuning = whole
    cluster.ended(fine_tuning)
    log = cluster.log(fine_tuning)
    for node in ("node1", "node2"):
        assert f"{node}: data staged in" in cluster.log(pretraining)
        assert f"{node}: data are staged in" in log
    assert "/whole/model_best.pth.tar" in log and "before fine-tuning:" in log


def test_time_limit_requeues_to_the_same_weights(cluster: Cluster, begin: Begin, whole: Whole, tmp_path: Path) -> None:
    job = begin("pretrain", options="-N 2 --signal=B:USR1@60", EXPERIMENT="limited", **held(tmp_path, at=8))
    cluster.read_until(job, "epoch 1 [2/5]")
    hours, minutes, _ = map(int, cluster.job(job)["RunTime"].split(":"))
    # The warning comes within a minute, the limit a minute or more after it.
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={hours * 60 + minutes + 2}")
    cluster.read_until(job, '"reason": "stopped by SIGUSR1"')
    cluster.read_until(job, f"job {job} goes back into the queue")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert cluster.ended(job)["Restarts"] == "1"
    check_resumed(cluster, "limited")


@pytest.mark.parametrize(("at", "reached"), [(0, "rank.sh"), (12, "epoch 1 [3/5]")])
def test_preempted_job_goes_on(
    cluster: Cluster, begin: Begin, whole: Whole, tmp_path: Path, at: int, reached: str
) -> None:
    job = begin("pretrain", EXPERIMENT=f"preempted-{at}", **held(tmp_path, at=at))
    cluster.read_until(job, reached)
    higher = "sbatch --parsable --partition=high --nodes=3 --exclusive --output=/dev/null --wrap=true"
    cluster.ended(cluster.run(*higher.split()))
    assert cluster.ended(job)["Restarts"] == "1"
    if at > 0:  # else it comes back though it had nothing to save
        assert '"reason": "stopped by SIGTERM"' in cluster.log(job)
        check_resumed(cluster, f"preempted-{at}")


def test_job_of_a_dead_node_goes_on_elsewhere(cluster: Cluster, begin: Begin, whole: Whole, tmp_path: Path) -> None:
    job = begin("pretrain", EXPERIMENT="moved", **held(tmp_path, at=28))
    cluster.read_until(job, "epoch 2 [2/5]")
    cluster.kill("node2")
    try:
        ended = cluster.ended(job)
        assert (ended["Restarts"], ended["NodeList"]) == ("1", "node[1,3]")
        assert [event["hosts"] for event in events(cluster, "moved", "start")][1] == {"node1": 1, "node3": 1}
        assert digest(cluster.runs / "moved") == digest(cluster.runs / "whole")
    finally:
        cluster.revive("node2")
