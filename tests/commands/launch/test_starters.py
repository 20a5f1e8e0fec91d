"""Whoever starts the ranks: two of them train as one, whatever others on the machine try; a group that another program
has made is used; and a run that torchrun starts again after a fault goes on in its directory, without `--resume`."""

import base64
import json
import os
import pickle
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from tests.checkpoint.test_weights import Payload
from tests.commands.conftest import QUICK, ROOT, Running, environment, metrics, start, storage
from tests.conftest import python_path
from volo.record.confusion import ANSWERS
from volo.record.run_directory import run_of_launch


def listening(pids: list[int]) -> set[str]:
    """The TCP addresses, in hexadecimal, at which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # A running program may close a file between the listing and this line; a listening socket it keeps.
            with suppress(FileNotFoundError):
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.add(fields[1].partition(":")[0])
    return addresses


def interfere(run: Running, harmed: Path) -> None:
    """What another user of the machine could do meanwhile; nothing is to listen to other machines, or be unpickled."""
    ranks = run.ranks()
    assert listening([run.process.pid, *ranks.values()]) <= {"0100007F", "0" * 24 + "01000000"}  # loopback
    rank_environment = environment(ranks[0])
    store = TCPStore(rank_environment["MASTER_ADDR"], int(rank_environment["MASTER_PORT"]), None, False)
    keys = store.list_keys()
    assert len(keys) > 0
    harm = pickle.dumps(Payload(harmed)).decode("latin-1")
    for key in keys:
        for value in (base64.b64encode(harm.encode("latin-1")).decode(), "", '{"id": 1}', harm):
            store.set(key, value)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("volo_test", "-b 4"),
        pytest.param("test_vit4", "-b 4", marks=pytest.mark.slow),
        pytest.param("volo_test", "--tensor-parallel 2", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one_with_the_same_global_batch(call, make_dataset, make_labels, tmp_path, model, more):
    data = make_dataset(train=40, validation=7, size=(50, 40))  # 8 images an update
    # A larger rate without warm-up would amplify rounding beyond any tolerance.
    flags = f"{QUICK} --epochs 2 --lr 2e-4 --token-label --no-mix-token --drop-path 0 --model {model}"
    flags += " --freeze-bn" if model == "volo_test" else ""  # the other one has none
    flags += f" --output {tmp_path} --token-label-data {make_labels(data)}"
    assert call("train", f"{data} {flags} --experiment one").code == 0
    go_on = tmp_path / "go on"
    waits = f"'/train/' in str(path) and next(number) >= 20 and not os.path.exists({str(go_on)!r})"
    slowed = storage(tmp_path, f"while {waits}: time.sleep(0.05)")
    run = start(f"{flags} {more} --experiment two", data, processes=2, **slowed)
    run.read_until("epoch 1 [2/5]")
    interfere(run, tmp_path / "harmed")
    go_on.touch()
    assert run.end() == 0 and not (tmp_path / "harmed").exists(), run.output
    one, two = (metrics(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 10
    for name in ("loss", "cls_loss", "dense_loss", "grad_norm", "lr"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in one], rel=2e-5, abs=1e-5), name
    # 7 images on 2 ranks in batches of 4: nothing twice, nothing left out.
    assert "over 7 images" in run.output
    evaluations = [metrics(tmp_path / name, "epoch")[-1] for name in ("one", "two")]
    assert [evaluation["eval_images"] for evaluation in evaluations] == [7, 7] and evaluations[1]["images"] == 40
    assert evaluations[1]["eval_loss"] == pytest.approx(evaluations[0]["eval_loss"], abs=1e-5)
    answers = [np.load(tmp_path / name / ANSWERS)["answers"] for name in ("one", "two")]
    assert answers[0].shape == (2, 7) and answers[1] == pytest.approx(answers[0], abs=1e-4)


# What Ray Train and notebooks do: trains in their group, in a thread as Ray does, then fails: the group and the process
# are the caller's. A thread of gloo that outlives the group aborts Python's end, rarely, when its last work is freed.
WORKER = """
import os, sys, threading
from pathlib import Path
import torch.distributed as dist
import volo.commands.train
from volo import cli
meeting, output, flags = sys.argv[1:]
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
codes = []
def work():
    for _ in range(2):
        codes.append(cli.run("train", [*flags.split(), "--output", output, "--experiment", "one"]))
thread = threading.Thread(target=work)
thread.start()
thread.join()
dist.barrier()
dist.destroy_process_group()
threads = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
print("codes", codes, sum("gloo" in name for name in threads), "threads of gloo", flush=True)
sys.exit(rank == 0 and os.wait()[1])
"""


def test_a_group_of_two_trains_as_one_run_and_stays(make_dataset, tmp_path):
    flags = f"{make_dataset(train=32)} {QUICK} --epochs 1 --bind none"
    where = [str(tmp_path / "meeting"), str(tmp_path), flags]
    both = Running([sys.executable, "-c", WORKER, *where], PYTHONPATH=python_path(ROOT))
    assert both.end() == 0 and both.output.count("codes [0, 2] 0 threads of gloo") == 2, both.output
    assert both.output.count("global batch 16 = 8 per device x 2 x 1") == 1
    assert len(metrics(tmp_path / "one")) == 2  # updates of 16 of the 32 images


@pytest.mark.parametrize("run_id", ["none", "mine"])  # torchrun's is "none" where none is given
def test_a_restart_goes_on_with_the_run_of_its_launch_alone(call, data, tmp_path, monkeypatch, run_id):
    named = "" if run_id == "none" else "--experiment sweep/a"
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": run_id}.items():
        monkeypatch.setenv(name, value)
    for restarts in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        files = [*(tmp_path / "out").rglob("last.pth.tar")]
        again = f"--resume {files[0]} --no-resume-opt" if files else ""  # which counted at the first start
        line = f"{data} {QUICK} --lr 1e-3 --output {tmp_path / 'out'} {named} --epochs {restarts + 1} {again}"
        ended = call("train", line).ok()
    assert "1 epochs, 2 updates done" in ended.out
    assert {int(state["step"]) for state in torch.load(files[0])["optimizer"]["state"].values()} == {4}
    assert "start: a run that its launcher has started again in " in ended.out
    (record,) = (tmp_path / "out").rglob("run.json")
    assert not named or record.parent == tmp_path / "out" / "sweep/a"
    if not named:
        starts = json.loads(record.read_text())
        for listing in (starts, [starts[0] | {"launch": "another"}, starts[0]]):  # the newest start counts
            record.write_text(json.dumps(listing))
            assert run_of_launch(tmp_path / "out", "", None) == record.parent
        for launched in ("another", "none", None):
            record.write_text(json.dumps([starts[0] | {"launch": launched}]))
            assert run_of_launch(tmp_path / "out", "", None) is None
