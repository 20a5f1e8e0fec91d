"""Jobs on a real Slurm cluster: what becomes of them, and that they end in the weights of one that nobody disturbed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import held
from tests.slurm.conftest import FLAGS, Cluster, Whole

pytestmark = pytest.mark.slurm
Begin = Callable[..., str]


def events(cluster: Cluster, experiment: str, kind: str) -> list[dict[str, object]]:
    lines = (cluster.scratch / "runs" / experiment / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def take_all_nodes(cluster: Cluster) -> None:
    """A job of higher priority, from its start to its end."""
    options = "--partition=high --nodes=3 --exclusive --output=/dev/null --wrap=true"
    cluster.ended(cluster.run("sbatch", "--parsable", *options.split()))


def test_two_nodes_train_together_though_their_names_resolve_to_loopback(cluster: Cluster, whole: Whole) -> None:
    (start,) = events(cluster, "whole", "start")
    assert start["world_size"] == 2 and start["hosts"] == {"node1": 1, "node2": 1}
    log = cluster.log(whole.job)
    assert "rank 0 is at 10.87.3.11, port 200" in log
    assert f"== {whole.job}-node1.log" in log and f"== {whole.job}-node2.log" in log
    hosts = cluster.run("srun", "-w", "node3", "getent", "ahostsv4", "node3")
    assert "127.0.1.1" in hosts and "10.87.3." not in hosts


def test_fine_tuning_follows_the_pretraining_on_data_staged_on_each_node(cluster: Cluster, whole: Whole) -> None:
    cluster.ended(whole.fine_tuning)
    for node in ("node1", "node2"):
        assert f"{node}: data staged in" in cluster.log(whole.job)
        assert f"{node}: data are staged in" in cluster.log(whole.fine_tuning)
    assert "/whole/model_best.pth.tar" in cluster.log(whole.fine_tuning)
    assert "before fine-tuning:" in cluster.log(whole.fine_tuning)


def test_the_time_limit_saves_requeues_and_resumes_to_the_same_weights(
    cluster: Cluster, begin: Begin, whole: Whole, tmp_path: Path
) -> None:
    job = begin("pretrain", options="-N 2 --signal=B:USR1@60", EXPERIMENT="limited", **held(tmp_path, at=8))
    cluster.read_until(job, "epoch 1 [2/5]")
    hours, minutes, _ = map(int, cluster.job(job)["RunTime"].split(":"))
    # The warning comes within a minute, the limit a minute or more after it.
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={hours * 60 + minutes + 2}")
    cluster.read_until(job, '"reason": "stopped by SIGUSR1"')
    cluster.read_until(job, f"job {job} goes back into the queue")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert cluster.ended(job)["Restarts"] == "1"
    (resumed,) = [event for event in events(cluster, "limited", "resume") if event["path"]]
    assert str(resumed["path"]).endswith("last.pth.tar")
    assert cluster.weights("limited") == whole.weights


def test_a_job_of_higher_priority_takes_the_nodes_and_the_run_goes_on_after_it(
    cluster: Cluster, begin: Begin, whole: Whole, tmp_path: Path
) -> None:
    job = begin("pretrain", EXPERIMENT="preempted", **held(tmp_path, at=12))
    cluster.read_until(job, "epoch 1 [3/5]")
    take_all_nodes(cluster)
    cluster.read_until(job, '"reason": "stopped by SIGTERM"')
    assert cluster.ended(job)["Restarts"] == "1"
    assert cluster.weights("preempted") == whole.weights


def test_a_job_that_is_preempted_before_it_has_begun_to_train_comes_back(
    cluster: Cluster, begin: Begin, tmp_path: Path
) -> None:
    job = begin("pretrain", f"{FLAGS} --epochs 1", EXPERIMENT="early", **held(tmp_path, at=0))
    cluster.read_until(job, "rank.sh")
    take_all_nodes(cluster)
    assert cluster.ended(job)["Restarts"] == "1"


def test_the_job_of_a_dead_node_goes_on_on_the_spare_one(
    cluster: Cluster, begin: Begin, whole: Whole, tmp_path: Path
) -> None:
    job = begin("pretrain", EXPERIMENT="moved", **held(tmp_path, at=28))
    cluster.read_until(job, "epoch 2 [2/5]")
    cluster.kill("node2")
    try:
        ended = cluster.ended(job)
        assert (ended["Restarts"], ended["NodeList"]) == ("1", "node[1,3]")
        assert [event["hosts"] for event in events(cluster, "moved", "start")][1] == {"node1": 1, "node3": 1}
        assert cluster.weights("moved") == whole.weights
    finally:
        cluster.revive("node2")


def test_what_is_cancelled_stays_away(cluster: Cluster, begin: Begin, tmp_path: Path) -> None:
    job = begin("pretrain", EXPERIMENT="cancelled", **held(tmp_path, at=8))
    cluster.read_until(job, "epoch 1 [2/5]")
    cluster.run("scancel", job)
    cluster.ended(job, "CANCELLED")
    cluster.read_until(job, "stopped by SIGTERM")
    cluster.wait(job, "CANCELLED")
    assert cluster.job(job)["Restarts"] == "0"


def test_a_missing_image_ends_the_job_in_one_line(cluster: Cluster, begin: Begin) -> None:
    job = begin("pretrain", CONTAINER_IMAGE="/images/none.sqsh")
    assert cluster.ended(job, "FAILED")["ExitCode"] == "2:0"
    assert cluster.log(job).splitlines()[1:] == [
        "error: CONTAINER_IMAGE=/images/none.sqsh cannot be read: see docker/ for how to make it"
    ]
