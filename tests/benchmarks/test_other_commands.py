"""What benchmarks share (turns, ratios, rows that are written at once, CPU time; make benchmark-gpu), and benchmark.py
outlook, data and run: what is compared does the same work."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

import tlt
from benchmarks import ablation, data, restart, rounds, run, step
from benchmarks.arms import arms_of, train_settings
from benchmarks.data import BATCHES, CROPS
from benchmarks.program import parse_benchmark
from benchmarks.rounds import Range, Rows
from tlt.errors import UserError
from volo import cli
from volo.config.train import TRAIN
from volo.kernels import KERNELS

ROOT = Path(__file__).resolve().parents[2]


def test_rounds_rotate_their_order_and_skip_the_first(monkeypatch):
    done: list[str] = []
    clock = [0.0]
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: clock[0])

    def work(name: str, seconds: list[float]) -> int:
        clock[0] += seconds[len(done) // 2]
        done.append(name)
        return 10

    works = {"a": lambda: work("a", [9, 1, 2]), "b": lambda: work("b", [9, 4, 3])}
    result = rounds.in_turns(works, 2)
    assert "".join(done) == "ab" + "ba" + "ab"
    assert result["a"].wall == pytest.approx([0.1, 0.2]) and result["b"].wall == pytest.approx([0.4, 0.3])
    assert rounds.speedup(result["a"].wall, result["b"].wall) == pytest.approx((2.75, 1.5, 4.0))
    assert str(Range.of([1, 3, 2], 10)) == "20 (10-30)"
    assert str(Range(-1.5, -3, 0)) == "-1.5 (-3 to 0)"


def test_a_row_is_printed_and_appended_at_once(tmp_path, capsys):
    file = tmp_path / "rows"
    rows = Rows(ablation.Flags(command_line="benchmark.py x", output=str(file)), ("arm", "ms"))
    first, rule = capsys.readouterr().out.splitlines()[-2:]
    assert (first, rule) == ("| arm | ms |", "|---|---|")
    rows.write({"arm": "ours", "ms": Range(2.0, 1.0, 3.0), "more": 5})
    assert capsys.readouterr().out == "| ours | 2 (1-3) |\n"
    conditions, row = map(json.loads, file.read_text().splitlines())
    assert row == {"arm": "ours", "ms": [2.0, 1.0, 3.0], "more": 5}
    assert {"day", "commit", "CPU", "GPU", "torch", "timm"} < conditions["conditions"].keys()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_make_measures_a_gpu_in_calls_of_ten_minutes(device):
    """Each line is parsed, and its arms and programs are made up as the benchmark does first."""
    line = ["make", "-n", "benchmark-gpu", "PYTHON=python3", "OUT=there", "TIMM=there", f"DEVICE={device}"]
    printed = subprocess.check_output(line, cwd=ROOT, text=True).replace("\\\n", "")
    result = re.findall(r"^timeout --signal=INT (\d+) python3 (.*)", printed, re.MULTILINE)
    assert result[0][1].startswith("-m pytest -m gpu ")
    limits = [int(limit) for limit, _ in result]
    per_call = [limits[0], sum(limits[1:4]), limits[4], sum(limits[5:])]
    assert per_call == pytest.approx([590] * 4, abs=5) if device == "cuda" else limits == 7 * [590]
    for _, words in result[1:]:
        settings = parse_benchmark(words.removeprefix("benchmark.py ").split())
        command = type(settings).__module__.rpartition(".")[2]
        assert (settings["device"], settings["output"]) == (device, f"there/{command}.jsonl")
        model = settings["model"]
        if isinstance(settings, step.Flags):
            (model,) = model
            drop_path = step.DROP_PATH.get(model)
            ours = train_settings(settings, model, batch_size=settings.models.batch_size, drop_path=drop_path)
            names = [arm.name for arm in arms_of(ours, settings.peers.peer)]
        else:
            assert isinstance(settings, run.Flags)
            programs = run.commands(settings.programs, "images", "labels", device == "cuda")
            names = [*programs]
            for words in (own for name, own in programs.items() if name != run.TIMM):
                compiler = TRAIN.parse(words[2:]).precision.compilation.torchcompile
                assert compiler == ("inductor" if device == "cuda" else None)
        assert device == "cpu" or names[0] == "timm" or "launched" in names


OUTLOOK = "outlook -b 2 --model volo_d1 --cells 5 --rounds 2 --device cpu --no-compile"


def test_outlook_checks_and_times_every_kernel_and_timms(measure):
    rows = measure(OUTLOOK)
    assert {row["arm"] for row in rows} == {*KERNELS, "timm"}
    timed = [row for row in rows if "note" not in row]
    assert [row["arm"] for row in timed] == ["timm", "windows", "reference"] * 2
    assert all(row["off by"] < (1e-5 if row["type"] == "float32" else 2e-2) for row in timed)
    assert all(row["x timm"] == [1, 1, 1] for row in timed if row["arm"] == "timm")


def test_outlook_times_no_wrong_kernel(measure, monkeypatch, capsys):
    right = KERNELS["windows"]
    wrong = right._replace(compute=lambda v, logits, *rest: right.compute(v, logits * 1.001, *rest))
    monkeypatch.setitem(KERNELS, "windows", wrong)
    rows = measure(f"{OUTLOOK} --dtypes float32", code=2)
    assert "arm windows computes something else from the same numbers: off are output by" in capsys.readouterr().err
    assert "windows" not in {row["arm"] for row in rows if "ms" in row}


@pytest.mark.parametrize("part", [CROPS, BATCHES])
def test_all_loaders_make_the_same_images(tmp_path, part):
    # Nothing random is left but the order, so that what the loaders make can be compared.
    config = tlt.AugmentConfig((32, 24), (1.0, 1.0), (1.25, 1.25), 0.0, 0.0, None, None, "bilinear", reprob=0.0)
    data.make_images(tmp_path / "train", 6, (50, 40))
    images = tlt.open_images(str(tmp_path), "train")
    loading = data.Loading(images, data.make_labels(tmp_path, images.paths), config, 3, 0, torch.device("cpu"))
    made = {name: torch.cat(list(loading.ours(part, name)())) for name in ("torchvision", "pil")}
    made["timm"] = torch.cat(list(loading.timm(part)()))
    assert made["pil"].dtype == made["timm"].dtype == (torch.uint8 if part == CROPS else torch.float32)
    for name, result in made.items():
        apart = (result[:, None].double() - made["torchvision"][None].double()).abs().amax((2, 3, 4))
        nearest, which = apart.min(1)
        assert nearest.max() <= (2 if part == CROPS else 2 / 255 / 0.22), name
        assert sorted(which.tolist()) == list(range(6)), name


def test_data_times_both_parts_with_and_without_workers(measure):
    line = "data --images 6 --image-size 60 48 --img-size 24 -b 3 --rounds 1 --workers 1 --device cpu"
    rows = measure(f"{line} --backend torchvision dali-gpu")
    missing = [row for row in rows if "note" in row]
    assert len(missing) == 4 and all("dali-gpu" in row["note"] for row in missing)
    timed = {(row["augmentation"], row["workers"], row["part"], row["loader"]) for row in rows if "note" not in row}
    recipes, loaders = ("crop + flip", "rand-m9-mstd0.5-inc1, erasing"), ("timm", "torchvision")
    assert timed == {*product(recipes, (0, 1), (CROPS, BATCHES), loaders)}
    assert all(row["CPU ms an image"][0] > 0 for row in rows if "note" not in row)


# The last lines of two epochs of timm's train.py (timm 1.0.31), and the first of the second one.
TIMMS_LOG = """
Train: 0 [   3/4 (100%)]  Loss: 8.27 (7.36)  Time: 0.376s,   10.63/s  (1.915s,    2.09/s)  LR: 1.250e-02  Data: 0.000 (0.004)
Train: 1 [   0/4 ( 25%)]  Loss: 8.41 (8.41)  Time: 10.992s,    0.36/s  (10.992s,    0.36/s)  LR: 6.250e-03  Data: 0.004 (0.004)
Train: 1 [   3/4 (100%)]  Loss: 4.42 (7.01)  Time: 1.227s,    3.26/s  (7.990s,    0.50/s)  LR: 6.250e-03  Data: 0.000 (1.598)
"""  # noqa: E501


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_features_times_steps_reading_and_writing(measure, device):
    line = "features --model volo_test --teacher test_vit --img-size 32 --images 4 -b 2 --rounds 1"
    rows = measure(f"{line} --device {device}")
    stored = ["stored, int8", "stored, float16"]
    notes = {row["arm"]: row["note"] for row in rows if row["what"] == "step"}
    assert [*notes] == ["without", "teacher", *stored]
    if device == "cuda":  # a teacher in the step prevents the graph, a stored one does not
        assert [arm for arm, note in notes.items() if note] == ["teacher"] and "--kd-model-name" in notes["teacher"]
    assert [row["arm"] for row in rows if row["what"] == "read"] == [
        f"{name}, {cache} cache" for name in stored for cache in ("cold", "warm")
    ]
    assert [row["arm"] for row in rows if row["what"] == "write"] == ["without", "stored, int8"]
    assert all(row["rounds"] == 1 and row["images/s"] for row in rows)


def test_run_times_the_last_epoch_of_both(measure, tmp_path, monkeypatch):
    """timm's answers with its log; ours are entered in this process."""
    (tmp_path / "train.py").write_text(f"print({TIMMS_LOG!r})")
    started, log_of = [], run._log_of

    def ours(words: list[str]) -> str:
        started.append(words[1:])
        if words[1] == str(tmp_path / "train.py"):
            return log_of(words)
        return str(cli.run("train", words[2:]))

    monkeypatch.setattr(run, "_log_of", ours)
    line = f"run --timm {tmp_path} --model volo_test --img-size 64 -b 2 --workers 0 --device cpu"
    rows = measure(f"{line} --images 2 --copies 2 --image-size 60 48 --epochs 1")
    assert [row["arm"] for row in rows] == ["timm", "ours", "ours, token labels"]
    assert rows[0]["images/s"] == 0.5 and rows[0]["data wait, %"] == pytest.approx(20)
    for row in rows[1:]:
        assert row["x timm"] == pytest.approx(row["images/s"] / 0.5) and 0 <= row["data wait, %"] <= 100
    assert [words[0] for words in started] == [str(tmp_path / "train.py"), *2 * [str(ROOT / "train.py")]]
    assert ["--token-label" in words for words in started] == [False, False, True]


def test_run_tells_of_a_program_that_fails(measure, tmp_path):
    (tmp_path / "train.py").write_text("import sys; sys.exit('no such model')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "commands", lambda *_: {"timm": [sys.executable, str(tmp_path / "train.py")]})
        rows = measure(f"run --timm {tmp_path} --data-dir {tmp_path} --device cpu")
    assert [row["note"] for row in rows] == ["not measured: exit code 1: no such model"]


_SAVES = """
import json, os, sys, time
from pathlib import Path
run = Path(sys.argv[1]); run.mkdir(exist_ok=True)
with (run / "events.jsonl").open("a") as file:
    print(json.dumps({"kind": "start", "pid": os.getpid()}), file=file)
    for step in (1, 2):  # more than one save may be there when it is looked for
        spent = {"step": step, "of": sys.argv[2]}
        print(json.dumps({"kind": "checkpoint", "pid": os.getpid(), "spent": spent}), file=file)
time.sleep(600)
"""


def test_a_start_is_measured_until_its_first_save(tmp_path):
    events = tmp_path / "run" / "events.jsonl"
    for start in "ab":  # killed as soon as it has saved
        command = [sys.executable, "-c", _SAVES, str(tmp_path / "run"), start]
        assert restart._first_update(command, dict(os.environ), events) == {"step": 1, "of": start}
    with pytest.raises(UserError, match="train.py has ended: ZeroDivisionError"):
        restart._first_update([sys.executable, "-c", "1 / 0"], {}, tmp_path / "other" / "events.jsonl")
    made = Path(restart._made(tmp_path / "data", 2003))
    assert [len([*(made / split).glob("n*/*.JPEG")]) for split in ("train", "val")] == [2003, 1000]
    assert len([*(made / "train" / "n00000002").iterdir()]) == 3
