"""Programs called from another program that has made the process group, as Ray Train and notebooks do."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.commands.conftest import QUICK, ROOT, Make, Running, metrics

# Trains in the group, in a thread as Ray does, then fails: the group and the process are the caller's.
WORKER = """
import sys, threading
import torch.distributed as dist
rank, meeting, output, flags = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
from volo import cli
codes = []
def work():
    for _ in range(2):
        codes.append(cli.run("train", [*flags.split(), "--output", output, "--experiment", "one"]))
thread = threading.Thread(target=work)
thread.start()
thread.join()
dist.barrier()
print("codes", codes, flush=True)
dist.destroy_process_group()
"""


def test_a_group_of_two_trains_as_one_run_and_stays(make_dataset: Make, tmp_path: Path) -> None:
    flags = f"{make_dataset(train=32)} {QUICK} --epochs 1 --bind none"
    command = [sys.executable, "-c", WORKER]
    where = [str(tmp_path / "meeting"), str(tmp_path), flags]
    ranks = [Running([*command, str(rank), *where], PYTHONPATH=str(ROOT)) for rank in range(2)]
    assert all(rank.end() == 0 and "codes [0, 2]" in rank.output for rank in ranks), [rank.output for rank in ranks]
    assert ranks[0].output.count("global batch 16 = 8 per device x 2 x 1") == 1
    assert len(metrics(tmp_path / "one")) == 2  # updates of 16 of the 32 images
