"""What a run that waits for data is advised, and what the advice rests on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.programs.conftest import QUICK
from volo import cli
from volo.engine import pace
from volo.engine.data_wait import Feed, Seen, advice, busy_cpus, cpus_of_rank

FEED = Feed(
    workers=4,
    cpus=8,
    ranks=2,
    backend="torchvision",
    source="folder",
    on_gpu=True,
    image_size=(224, 224),
    batch_size=64,
)
SEEN = Seen(megapixels=0.2, busy_cpus=3.9, free_shared_memory=10**10)


@pytest.mark.parametrize(
    ("feed", "seen", "first", "second"),
    [
        ({"workers": 0}, {"busy_cpus": None}, "raise --workers (0) to 7: this rank has 8 CPUs", ""),
        ({}, {}, "raise --workers (4) to 8: this rank has 8 CPUs", "decode on the GPU (--data-backend dali-gpu)"),
        ({}, {"busy_cpus": None}, "raise --workers (4) to 8", "decode on the GPU"),
        ({"backend": "pil", "workers": 8}, {"busy_cpus": 7.0}, "use --data-backend torchvision", "decode on the GPU"),
        ({"backend": "dali-gpu", "workers": 8}, {"busy_cpus": None}, "the 8 CPUs of this rank are busy", ""),
        ({"on_gpu": False, "workers": 8}, {"busy_cpus": 8.0}, "the 8 CPUs of this rank are busy", ""),
        ({"on_gpu": False, "workers": 20}, {"busy_cpus": 8.0}, "lower --workers (20) to the 8 CPUs", ""),
        ({}, {"megapixels": 12.0}, "decoding 12.0 megapixels per image", "raise --workers (4) to 8"),
        ({"source": "other"}, {"megapixels": 12.0}, "raise --workers (4) to 8", "decode on the GPU"),
        ({}, {"busy_cpus": 0.8}, "the workers wait for storage (0.8 of 4 CPUs busy): read shards (tlt pack-images)",
         "raise --workers (4) to 16"),
        ({"source": "shards", "workers": 16}, {"busy_cpus": 2.0},
         "the workers wait for storage (2.0 of 8 CPUs busy): put the shards on a disk of this machine", ""),
    ],
)  # fmt: skip
def test_advice_names_what_is_left_to_do(
    feed: dict[str, object], seen: dict[str, object], first: str, second: str
) -> None:
    told = advice(replace(FEED, **feed), replace(SEEN, **seen))  # type: ignore[arg-type]
    one, _, other = told.partition("; or ")
    assert one.startswith(first) and other.startswith(second) and bool(other) == bool(second) and "\n" not in told


def test_files_are_made_no_smaller_than_training_needs() -> None:
    for size, side in (((224, 224), 512), ((448, 384), 896)):
        assert f"--max-side {side})" in advice(replace(FEED, image_size=size), replace(SEEN, megapixels=3.0))


def test_more_workers_need_room_in_shared_memory() -> None:
    # 2 ranks x 4 more workers x 2 batches x 64 images x 3 x 224 x 224 bytes
    needed = 2 * 4 * 2 * 64 * 3 * 224 * 224
    assert "/dev/shm" not in advice(FEED, replace(SEEN, free_shared_memory=needed))
    assert "takes 0.2 GB more of /dev/shm, where 0.1 GB are free" in advice(
        FEED, replace(SEEN, free_shared_memory=10**8)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_busy_cpus_are_those_that_the_kernel_counted() -> None:
    spin = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    begun = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as spinning:
        assert spinning.stdout is not None
        spinning.stdout.readline()
        busy, twice = busy_cpus([spinning.pid]), busy_cpus([spinning.pid] * 2)
        age = time.monotonic() - begun
        spinning.communicate(b"\n")
    assert busy is not None and twice is not None
    assert 0.45 / (age + 0.05) <= busy <= 1.1 and 1.5 * busy < twice <= 2.2
    assert busy_cpus([]) is None and busy_cpus([2**22 + 1]) is None


def test_cpus_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = {0: 16, os.getppid(): 16}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(masks[process])), raising=False)
    assert cpus_of_rank(16, 1) == 16 and cpus_of_rank(16, 4) == 4 and cpus_of_rank(16, 32) == 1
    assert cpus_of_rank(6.0, 2) == 3  # of the cgroup's quota
    masks[0] = 4  # of the 16 that the launcher has
    assert cpus_of_rank(4, 4) == 4


def test_a_run_that_waits_is_told_what_to_do(
    make_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "WAIT_SHARE", 0.0)
    assert cli.train(f"{make_dataset()} {QUICK} --epochs 1 --output {tmp_path} --experiment run".split()) == 0
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (wait,) = (event for event in events if event["kind"] == "data-wait")
    assert wait["advice"].startswith("raise --workers (0) to ")
    assert f"of the step: {wait['advice']}" in (tmp_path / "run" / "log.txt").read_text()
