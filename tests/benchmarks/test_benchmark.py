"""benchmark.py: its command line, what it counts as memory, and that both forms of the loss are one loss."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import timm
import torch

from benchmarks.feed import startup
from benchmarks.flags_benchmark import COMMANDS
from benchmarks.memory import peak_of
from tlt.errors import UserError
from volo import cli

ROOT = Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")


@pytest.mark.parametrize("line", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(line: list[str]) -> None:
    code = (
        f"import sys\nsys.argv = [__file__ := 'benchmark.py', *{line!r}]\nfrom volo.cli import run\n"
        "try:\n    run('benchmark')\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('HEAVY', sorted({'torch', 'timm', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout and line[0].strip("-") in done.stdout


@pytest.mark.parametrize(
    "line,message",
    [
        ("", "the following arguments are required: command"),
        ("los", "invalid choice: 'los'"),
        ("loss --num-clases 5", "unknown flag --num-clases, did you mean --num-classes?"),
        ("loss --top-k 6 --num-classes 5", "--top-k 6 is more than --num-classes 5"),
        ("labels --top-k 6 --num-classes 5", "--top-k 6 is more than --num-classes 5"),
        ("augmentation --aa rand-m9-foo", "foo"),
        ("loss --batch-size 0", "--batch-size: 0 is out of range"),
        ("alignment --size 224 100", "--size 224 100: tokens are 16 x 16 pixels, give multiples of 16"),
        ("alignment --shapes 500", "--shapes 500: give WIDTHxHEIGHT in pixels"),
    ],
)
def test_mistakes_are_told_in_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("benchmark", line.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@LINUX
def test_peak_does_not_count_garbage_of_before() -> None:
    def work() -> float:
        gc.collect()
        return torch.ones(2**24).sum().item()  # 64 MiB

    ring: list[object] = [torch.ones(2**26)]  # 256 MiB that only the collector frees
    ring.append(ring)
    del ring
    assert 60 * 2**20 < peak_of(work, torch.device("cpu"))[1] < 72 * 2**20


@LINUX
def test_peak_counts_memory_that_malloc_had_at_hand() -> None:
    pieces = [torch.ones(2**14) for _ in range(3000)]  # 188 MiB of the heap, which a pinned end keeps resident
    end = torch.ones(2**10)
    del pieces
    result, peak = peak_of(lambda: torch.ones(2**24).sum().item(), torch.device("cpu"))  # 64 MiB
    assert result == 2**24 and 60 * 2**20 < peak < 72 * 2**20
    assert end[0] == 1


@LINUX
def test_peak_counts_what_was_freed_again_and_not_what_was_there() -> None:
    before = torch.ones(2**23)  # 32 MiB

    def work() -> float:
        return torch.ones(2**24).sum().item() + before[0].item()  # 64 MiB

    torch.ones(2**26)  # 256 MiB that are gone when the measurement starts
    work()
    result, peak = peak_of(work, torch.device("cpu"))
    assert result == 2**24 + 1 and 60 * 2**20 < peak < 72 * 2**20


@LINUX
def test_loss_compares_both_forms_of_one_loss(capsys: pytest.CaptureFixture[str]) -> None:
    line = "loss -b 24 --grid 6 6 --num-classes 3000 --map-size 7 7 --device cpu --repeats 1"
    assert cli.run("benchmark", [*line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    dense, sparse = found["dense"], found["sparse"]
    assert dense["value"] == pytest.approx(sparse["value"], rel=1e-5)
    logits = 24 * 37 * 3000 * 4
    # Two copies of the targets at least, while they are made; the sparse form has groups of images alone.
    assert dense["work_bytes"] > 2 * logits and sparse["work_bytes"] < logits
    assert sparse["all_bytes"] - sparse["work_bytes"] == 2 * logits
    assert found["dense/sparse"]["work"] == pytest.approx(dense["work_bytes"] / sparse["work_bytes"])


@LINUX
def test_activations_take_what_is_predicted() -> None:
    line = "activations --model volo_d0 --img-size 64 -b 16 --device cpu --json"
    # In a process of its own: what it does to malloc stays.
    command = [sys.executable, str(ROOT / "benchmark.py"), *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["recomputed"]
    assert all(0.85 < row["ratio"] < 1.15 for row in rows.values()), rows
    assert rows["everything"]["measured"] < rows["nothing"]["measured"]


@pytest.mark.parametrize("more", ["", "--no-ema"])
def test_checkpoint_tells_both_ways_of_saving_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    line = f"checkpoint --model volo_test --repeats 2 --device cpu --json --output {tmp_path} {more}"
    assert cli.run("benchmark", line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    tensors = sum(value.numel() for value in timm.create_model("volo_test").state_dict().values()) * 4
    copies = 3 if more else 4  # weights, two moments, average
    assert found["bytes"] == pytest.approx(copies * tensors, rel=0.3)
    assert all(found[name] > 0 for name in ("synchronous_blocked", "asynchronous_blocked", "verified"))
    assert not list(tmp_path.iterdir())


def test_checkpoint_in_a_directory_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("benchmark", ["checkpoint", "--model", "volo_test", "--output", "nowhere"]) == 2
    assert "--output nowhere is not a directory" in capsys.readouterr().err


def test_alignment_prints_ours_and_the_published_error(capsys: pytest.CaptureFixture[str]) -> None:
    line = "alignment --images 2 --crops 50 --size 96 96 --shapes 100x75 --area center"
    assert cli.run("benchmark", [*line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    overlap, pixels = found["overlap"]["100x75"], found["pixels"]["100x75"]
    assert overlap["ours"] > 0.97 and overlap["published"] < 0.7
    for ways in pixels.values():
        assert ways["ours"]["mean"] < 0.2 and ways["ours"]["lost"] == 0
        assert ways["published"]["mean"] > 2
    assert cli.run("benchmark", line.split()) == 0
    assert "100x75    TranslateXRel" in capsys.readouterr().out


@LINUX
def test_startup_measures_every_way_to_find_the_same_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    startup.make_data(tmp_path, 60, 7)
    ours, indexed, torchvisions, timms = (work(str(tmp_path))() for work in list(startup.CANDIDATES.values())[:4])
    names = [f"{tmp_path}/train/{name}" for name in ours.paths]  # type: ignore[attr-defined]
    assert len(names) == 60 and indexed.paths == ours.paths  # type: ignore[attr-defined]
    assert indexed.sizes is not None and indexed.warnings == []  # type: ignore[attr-defined]
    assert names == [path for path, _ in timms.samples]  # type: ignore[attr-defined]
    assert sorted(names) == sorted(path for path, _ in torchvisions.samples)  # type: ignore[attr-defined]

    class Here(ThreadPoolExecutor):
        def __init__(self, workers: int, context: object) -> None:
            super().__init__(workers)

    monkeypatch.setattr(startup, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(startup, "PROGRAMS", {"a program": lambda root: [sys.executable, "-c", "print('loss 1.0')"]})
    monkeypatch.setattr(startup, "_DROP_CACHES", tmp_path / "drop")
    ended = cli.run(
        "benchmark",
        ["startup", "--images", "30", "--classes", "3", "--rounds", "1", "--directory", str(tmp_path), "--cold"],
    )
    rows = capsys.readouterr().out.splitlines()[3:]
    names = [*startup.CANDIDATES, "a program", "a program, cold"]
    assert ended == 0 and [row.split("  ")[1].strip() for row in map(str.strip, rows)] == names
    assert all(row.strip().startswith("30 ") for row in rows) and (tmp_path / "drop").read_text() == "3"
    assert {path.name for path in tmp_path.iterdir()} == {"0.jpg", "train", "train.index", "labels", "val", "drop"}


def test_startup_waits_for_the_first_update_of_both_programs(tmp_path: Path) -> None:
    startup.make_data(tmp_path, 8, 2)
    for command in startup.PROGRAMS.values():
        assert startup.seconds_to_first_update(command(str(tmp_path))) > 0
    with pytest.raises(UserError, match="-c ended before its first update: no more"):
        startup.seconds_to_first_update([sys.executable, "-c", "print('no more')"])
