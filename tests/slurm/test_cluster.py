"""Jobs on a real Slurm cluster on this machine, where root and Debian's packages are: a controller and node1 to node3.
What becomes of the jobs, and that they end in the weights of one that nobody disturbed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which

import pytest

from tests.commands.conftest import QUICK, ROOT, digest, held, spent_in, storage
from tests.conftest import LIMIT, wait_until, write_dataset
from tests.hosts.conftest import NET, Host, network

FLAGS = f"{QUICK} -b 4 --epochs 3 --lr 1e-3"  # 40 images: 5 updates an epoch on two ranks
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
_SBIN = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=ctl({controller})
SlurmUser=root
SlurmdUser=root
# A requeued job waits until the old start's credentials have expired: 2 minutes, also if less than 5 s are asked for.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=30
MessageTimeout=10
KillWait=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,batch_sched_delay=1
NodeName=DEFAULT RealMemory=4000 State=UNKNOWN
{nodes}
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """The cluster that runs, and what was submitted to it; all that jobs write goes to `scratch`."""

    def __init__(self, scratch: Path, folder: Path, controller: Host, *nodes: Host) -> None:
        self.folder, self.controller, self.nodes = folder, controller, {node.name: node for node in nodes}
        self.scratch, self.runs, self.data = scratch, scratch / "runs", write_dataset(scratch / "data", train=40)
        self.env = {"DATA": str(self.data), "OUTPUT": str(self.runs), "LOGS": str(scratch / "logs")}
        self.env |= {"CONFIG": "", "PROCESSES": "1", "PREFLIGHT": "0", "PYTHON": sys.executable}  # no recipe
        self.env |= {"OMP_NUM_THREADS": "1", "SLURM_CONF": str(folder / "slurm.conf"), **storage(scratch, "pass")}
        for host in (controller, *nodes):
            others = [f"{other.address} {other.name}" for other in (controller, *nodes) if other is not host]
            host.names.write_text("\n".join([host.names.read_text(), *others, ""]))
        unlike = "NodeName={0.name} NodeAddr={0.address} CPUs={1}"
        kinds = [unlike.format(node, 5 - node.number) for node in nodes]
        text = _CONFIGURATION.format(folder=folder, controller=controller.address, nodes="\n".join(kinds))
        (folder / "slurm.conf").write_text(text)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        folder.chmod(0o755)
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        self._begin(controller, "munged", "--force", f"--socket={folder}/munge.sock", *files)
        self._begin(controller, "slurmctld", "-i")
        for name in self.nodes:
            self.revive(name)

    def _begin(self, host: Host, *command: str) -> None:
        """Start a daemon there. It keeps no output of this process open."""
        with (self.folder / f"{host.name}.out").open("a") as out:
            env = _SBIN | self.env
            subprocess.run(host.inside(*command), env=env, stdout=out, stderr=out, check=True, timeout=LIMIT)

    def run(self, *command: str, **env: str) -> str:
        words = ["nsenter", f"--net=/run/netns/{self.controller.namespace}", *command]
        env = {**os.environ, **self.env, **env}
        ended = subprocess.run(words, env=env, cwd=ROOT, text=True, capture_output=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def submit(self, script: str, flags: str = FLAGS, options: str = "-N 2", **env: str) -> str:
        """Submit slurm/SCRIPT.sbatch; return the job's number."""
        words = [f"--output={self.scratch}/%j.log", "--gpus-per-node=0", *options.split(), f"slurm/{script}.sbatch"]
        return self.run("sbatch", "--parsable", *words, *flags.split(), **env)

    def job(self, number: str) -> dict[str, str]:
        text = self.run("scontrol", "show", "job", "-o", number)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait(self, number: str, *states: str) -> dict[str, str]:
        def reached() -> dict[str, str]:
            job = self.job(number)
            return job if job["JobState"] in states else {}

        return wait_until(reached, lambda: f"{states} of {self.job(number)}\n{self.log(number)}")

    def ended(self, number: str, state: str = "COMPLETED") -> dict[str, str]:
        job = self.wait(number, *ENDS)
        assert job["JobState"] == state, self.log(number)
        return job

    def read_until(self, number: str, text: str) -> None:
        wait_until(lambda: text in self.log(number), lambda: f"{text!r} in\n{self.log(number)}")

    def log(self, number: str) -> str:
        """All that a job has printed, of its script and of its nodes."""
        files = [self.scratch / f"{number}.log", *sorted((self.scratch / "logs").glob(f"{number}-*.log"))]
        return "\n".join(f"== {file.name}\n{file.read_text()}" for file in files if file.exists())

    def kill(self, node: str) -> None:
        """As a power cut: nothing is sent any more, then all of its processes are gone."""
        self.nodes[node].cable("down")
        self.nodes[node].kill()

    def revive(self, node: str) -> None:
        """Start a node, and wait until jobs can use it."""
        self.nodes[node].cable("up")
        (self.folder / node).mkdir(exist_ok=True)
        self._begin(self.nodes[node], "slurmd", "-N", node)
        state = ("sinfo", "-h", "-n", node, "-p", "low", "-o", "%t")
        wait_until(lambda: self.run(*state) == "idle", lambda: self.run("sinfo", "-N"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster; it ends with the tests, however they end."""
    if os.geteuid() != 0 or which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("needs root and Debian's packages of Slurm: `make test-slurm` installs them")
    scratch = tmp_path_factory.mktemp("slurm")
    with network(["ctl", "node1", "node2", "node3"], scratch / "cluster") as hosts:
        yield Cluster(scratch, scratch / "cluster", *hosts)


@pytest.fixture(scope="session")
def whole(cluster: Cluster) -> tuple[str, str]:
    """The jobs of a run that nobody disturbed, on data staged on each node from a tar, and of its fine-tuning."""
    archive = cluster.scratch / "data.tar"
    subprocess.run(["tar", "-cf", archive, "-C", cluster.data.parent, cluster.data.name], check=True)
    staging = {"DATA": str(archive), "STAGE_TO": str(cluster.scratch / "cluster" / "disk")}
    job = cluster.submit("pretrain", EXPERIMENT="whole", PREFLIGHT="1", **staging)
    staging["FINETUNE"] = str(cluster.runs / "whole" / "model_best.pth.tar")
    options = f"-N 2 --dependency=afterok:{job} --kill-on-invalid-dep=yes"
    fine = cluster.submit("finetune", f"{FLAGS} --epochs 1 --img-size 48", options, EXPERIMENT="fine", **staging)
    assert cluster.job(fine)["Reason"] == "Dependency"
    cluster.ended(job)
    return job, fine


@pytest.fixture
def begin(cluster: Cluster) -> Iterator[Callable[..., str]]:
    """`begin("pretrain", ...)` as Cluster.submit; whatever is left of the jobs after the test is cancelled."""
    numbers: list[str] = []

    def begin(*words: str, **named: str) -> str:
        numbers.append(cluster.submit(*words, **named))
        return numbers[-1]

    yield begin
    for number in numbers:
        cluster.run("scancel", number)
        cluster.wait(number, *ENDS)


pytestmark = pytest.mark.slurm
Whole = tuple[str, str]


def events(cluster: Cluster, experiment: str, kind: str) -> list[dict[str, object]]:
    lines = (cluster.runs / experiment / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def check_resumed(cluster: Cluster, experiment: str) -> None:
    """It went on once, from what it had saved, and has ended in the weights of the run that nobody disturbed."""
    (path,) = [event["path"] for event in events(cluster, experiment, "resume") if event["path"]]
    assert str(path).endswith("last.pth.tar")
    spent = spent_in(cluster.runs / experiment)
    assert spent.restarts == 1 and 0 < spent.queue == spent.parts["away"]
    assert digest(cluster.runs / experiment) == digest(cluster.runs / "whole")


def test_two_nodes_whose_names_are_loopback_train_together(cluster, whole):
    (start,) = events(cluster, "whole", "start")
    assert start["world_size"] == 2 and start["hosts"] == {"node1": 1, "node2": 1}
    job, _ = whole
    log = cluster.log(job)
    assert f"rank 0 is at {NET}.11, port 200" in log
    assert f"== {job}-node1.log" in log and f"== {job}-node2.log" in log
    hosts = cluster.run("srun", "-w", "node3", "getent", "ahostsv4", "node3")
    assert "127.0.1.1" in hosts and NET not in hosts


def test_ranks_of_srun_meet_and_print_a_mistake_once(cluster, tmp_path):
    # Steps as they are in a container with enroot's hook differ in a few variables more.
    for hook in ("", "export WORLD_SIZE=$SLURM_NTASKS RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; "):
        train = f"{sys.executable} train.py {cluster.data} {FLAGS} --output {tmp_path} --experiment"
        step = ["srun", "-N2", "--ntasks-per-node=2", "--overcommit", "bash", "-c"]
        out = cluster.run(*step, f"{hook}{train} one{len(hook)} -b 2 --epochs 1")
        assert "global batch 8 = 2 per device x 4" in out and "done: 5 updates" in out
        out = cluster.run(*step, f"{hook}{train} two --no-such-flag 2>&1 || true")
        assert out.count("error: unknown flag --no-such-flag") == 1, out  # these nodes have one /tmp


def test_fine_tuning_follows_pretraining_on_staged_data(cluster, whole):
    pretraining, fine_tuning = whole
    cluster.ended(fine_tuning)
    log = cluster.log(fine_tuning)
    for node in ("node1", "node2"):
        assert f"{node}: data staged in" in cluster.log(pretraining)
        assert f"{node}: data are staged in" in log
    assert "/whole/model_best.pth.tar" in log and "before fine-tuning:" in log


def test_time_limit_requeues_to_the_same_weights(cluster, begin, whole, tmp_path):
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
def test_preempted_job_goes_on(cluster, begin, whole, tmp_path, at, reached):
    job = begin("pretrain", EXPERIMENT=f"preempted-{at}", **held(tmp_path, at=at))
    cluster.read_until(job, reached)
    higher = "sbatch --parsable --partition=high --nodes=3 --exclusive --output=/dev/null --wrap=true"
    cluster.ended(cluster.run(*higher.split()))
    assert cluster.ended(job)["Restarts"] == "1"
    if at > 0:  # else it comes back though it had nothing to save
        assert '"reason": "stopped by SIGTERM"' in cluster.log(job)
        check_resumed(cluster, f"preempted-{at}")


def test_job_of_a_dead_node_goes_on_elsewhere(cluster, begin, whole, tmp_path):
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


def test_job_of_a_range_of_nodes_goes_on_with_those_left(cluster, begin, tmp_path):
    """With the same images in its updates: three batches of four, then four of three."""
    job = begin("pretrain", options="-N 2-3", EXPERIMENT="fewer", **held(tmp_path, at=17))
    cluster.read_until(job, "epoch 2 [1/4]")
    cluster.kill("node2")
    try:
        ended = cluster.ended(job)
        assert (ended["Restarts"], ended["NodeList"]) == ("1", "node[1,3]")
        kept = "3 processes before, 2 now: 2 accumulation steps, not 1, of batches of 3 images, not 4, keep the global"
        assert kept in cluster.log(job)
        lines = (cluster.runs / "fewer" / "metrics.jsonl").read_text().splitlines()
        updates = [record for record in map(json.loads, lines) if "update" in record]
        assert [record["images"] for record in updates][:3] == [record["images"] for record in updates][4:7]
    finally:
        cluster.revive("node2")
