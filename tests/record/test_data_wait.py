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

from tests.commands.conftest import QUICK
from tests.conftest import wait_until
from volo import cli
from volo.record import slowdown as pace
from volo.record.slowdown import CpuClock, Feed, Seen, advice

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
        ({"on_gpu": False, "workers": 8}, {"busy_cpus": 8.0}, "use --data-backend dali-cpu", ""),
        ({"on_gpu": False, "workers": 8, "backend": "dali-cpu"}, {"busy_cpus": 8.0}, "the 8 CPUs of this rank are", ""),
        ({"on_gpu": False, "workers": 20, "backend": "dali-cpu"}, {"busy_cpus": 8.0}, "lower --workers (20) to the 8",
         ""),
        ({}, {"megapixels": 12.0}, "decoding 12.0 megapixels per image", "raise --workers (4) to 8"),
        ({"source": "other"}, {"megapixels": 12.0}, "raise --workers (4) to 8", "decode on the GPU"),
        ({"on_gpu": False}, {"busy_cpus": 1.7}, "raise --workers (4) to 8", "use --data-backend dali-cpu"),
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
        told = advice(replace(FEED, image_size=size), replace(SEEN, megapixels=3.0))
        assert f"(tlt pack-images DATA OUT --max-side {side})" in told


def test_more_workers_need_room_in_shared_memory() -> None:
    # 2 ranks x 4 more workers x 2 batches x 64 images x 3 x 224 x 224 bytes
    needed = 2 * 4 * 2 * 64 * 3 * 224 * 224
    assert "/dev/shm" not in advice(FEED, replace(SEEN, free_shared_memory=needed))
    assert "takes 0.2 GB more of /dev/shm, where 0.1 GB are free" in advice(
        FEED, replace(SEEN, free_shared_memory=10**8)
    )
    assert "/dev/shm" not in advice(replace(FEED, in_processes=False), replace(SEEN, free_shared_memory=0))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpus_are_counted_from_look_to_look() -> None:
    work = "import time\nfor line in iter(input, 'end'):\n  end = time.process_time() + 0.3\n"
    work += "  while time.process_time() < end: pass\n  print(flush=True)"
    clock, looked = CpuClock(), time.monotonic()
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        for _ in range(2):
            worker.stdin.write(b"work\n")
            worker.stdin.flush()
            worker.stdout.readline()
            last, looked = looked, time.monotonic()
            busy = clock.look([worker.pid])
            assert busy is not None and 0.25 / (time.monotonic() - last) <= busy <= 1.1
        ever = CpuClock().look([worker.pid])
        assert ever is not None
        wait_until(lambda: time.sleep(0.2) or (clock.look([worker.pid]) or 0.0) < ever / 2)
        worker.communicate(b"end\n")
    assert clock.look([]) is None and clock.look([2**22 + 1]) is None


def test_waiting_for_a_cpu_is_no_waiting_for_storage(tmp_path: Path) -> None:
    (tmp_path / "7" / "task" / "7").mkdir(parents=True)
    (tmp_path / "7" / "task" / "8").mkdir()
    (tmp_path / "uptime").write_text("110.00 3.0")
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "7" / "stat").write_text("7 (a) b) R" + " 0" * 18 + f" {100 * ticks} 0")
    (tmp_path / "7" / "task" / "7" / "schedstat").write_text("2000000000 3000000000 12")
    (tmp_path / "7" / "task" / "8" / "schedstat").write_text("1000000000 0 2")
    assert CpuClock(tmp_path).look([7]) == pytest.approx(0.6)


def test_a_run_that_waits_is_told_what_to_do(
    make_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "WAIT_SHARE", 0.0)
    monkeypatch.setattr(pace, "WAIT_SECONDS", 0.0)
    assert cli.run("train", f"{make_dataset()} {QUICK} --epochs 1 --output {tmp_path} --experiment run".split()) == 0
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (wait,) = (event for event in events if event["kind"] == "data-wait")
    assert wait["advice"].startswith("raise --workers (0) to ")
    assert f"of the step: {wait['advice']}" in (tmp_path / "run" / "log.txt").read_text()
