"""What benchmarks share: turns, ratios within a round, rows that are written at once, CPU time; make benchmark-gpu."""

import json
import multiprocessing
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import rounds, run
from benchmarks.arms import arms_of
from benchmarks.program import parse_benchmark
from benchmarks.rounds import Range, Rows
from benchmarks.step import DROP_PATH
from volo.config.args import TRAIN

ROOT = Path(__file__).resolve().parents[2]


def test_rounds_rotate_their_order_and_skip_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    clock = [0.0]
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: clock[0])

    def work(name: str, seconds: list[float]) -> int:
        clock[0] += seconds[len(done) // 2]
        done.append(name)
        return 10

    works = {"a": lambda: work("a", [9, 1, 2]), "b": lambda: work("b", [9, 4, 3])}
    found = rounds.in_turns(works, 2)
    assert "".join(done) == "ab" + "ba" + "ab"
    assert found["a"].wall == pytest.approx([0.1, 0.2]) and found["b"].wall == pytest.approx([0.4, 0.3])
    assert rounds.speedup(found["a"].wall, found["b"].wall) == pytest.approx((2.75, 1.5, 4.0))
    assert str(Range.of([1, 3, 2], 10)) == "20 (10-30)"


def test_a_row_is_printed_and_appended_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows"
    rows = Rows(Namespace(command_line="benchmark.py x", output=str(file)), ("arm", "ms"))
    first, rule = capsys.readouterr().out.splitlines()[-2:]
    assert (first, rule) == ("| arm | ms |", "|---|---|")
    rows.write({"arm": "ours", "ms": Range(2.0, 1.0, 3.0), "more": 5})
    assert capsys.readouterr().out == "| ours | 2 (1-3) |\n"
    conditions, row = map(json.loads, file.read_text().splitlines())
    assert row == {"arm": "ours", "ms": [2.0, 1.0, 3.0], "more": 5}
    assert {"day", "commit", "CPU", "GPU", "torch", "timm"} < conditions["conditions"].keys()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux has clocks of other processes")
def test_cpu_time_is_that_of_living_children_too(monkeypatch: pytest.MonkeyPatch) -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        monkeypatch.setattr(multiprocessing, "active_children", lambda: [child])
        assert child.stdout and child.stdout.readline() == b"done\n"
        assert rounds.cpu_seconds() - time.process_time() > 0.49
        child.communicate(b"\n")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_make_measures_a_gpu_in_calls_of_ten_minutes(device: str) -> None:
    """Each line is parsed, and its arms and programs are made up as the benchmark does first."""
    line = ["make", "-n", "benchmark-gpu", "PYTHON=python3", "OUT=there", "TIMM=there", f"DEVICE={device}"]
    printed = subprocess.check_output(line, cwd=ROOT, text=True).replace("\\\n", "")
    found = re.findall(r"^timeout --signal=INT (\d+) python3 (.*)", printed, re.MULTILINE)
    assert found[0][1].startswith("-m pytest -m gpu ")
    limits, measured = [int(limit) for limit, _ in found], []
    per_call = [limits[0], sum(limits[1:4]), limits[4], sum(limits[5:])]
    assert per_call == pytest.approx([590] * 4, abs=5) if device == "cuda" else limits == 7 * [590]
    for _, words in found[1:]:
        args = parse_benchmark(words.removeprefix("benchmark.py ").split())
        assert (args.device, args.output) == (device, f"there/{args.command}.jsonl")
        if args.command == "step":
            (model,) = args.model
            names = [a.name for a in arms_of(args, model, batch_size=args.batch_size, drop_path=DROP_PATH.get(model))]
        else:
            model, programs = args.model, run.commands(args, "images", "labels", device == "cuda")
            names = [*programs]
            for words in (own for name, own in programs.items() if name != run.TIMM):
                assert TRAIN.parse(words[2:]).torchcompile == ("inductor" if device == "cuda" else None)
        measured.append((model, args.img_size, args.batch_size, len(names)))
        assert device == "cpu" or names[0] == "timm" or "launched" in names
    if device == "cuda":
        steps = [
            ("volo_d1", None, 256, 4),
            ("lvvit_s", None, 256, 3),
            ("volo_d5", 512, 16, 2),
            ("volo_d5", None, 96, 4),
        ]
        assert measured == [*steps, ("volo_d1", 224, 256, 3), ("vit_small_patch16_224", 224, 256, 2)]
