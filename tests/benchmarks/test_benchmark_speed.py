"""benchmark.py train, infer and --all: peers are peers, an arm that fails is told, and the arithmetic."""

from __future__ import annotations

import ast
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from benchmarks import all as whole
from benchmarks import candidates, comparison, profile, targets, timing
from benchmarks.candidates import TimmVolo
from benchmarks.comparison import CandidateRow, Results
from benchmarks.flags_benchmark import parse_benchmark
from benchmarks.speed import infer, train
from benchmarks.targets import EXPERIMENTS, Experiment, Target
from benchmarks.timing import Timing
from volo import cli
from volo.config.args import parse_train, train_parser
from volo.config.flag_rules import check_train

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
SECONDS = {"ours": (0.25, 0.2, 0.4), "timm": (1.0, 1.0, 1.0)}
QUICK = "--device cpu --rounds 1 --warm-up 1 --json"
SMALL = f"--model volo_test --img-size 64 -b 2 {QUICK}"


def triton_error(name: str, *args: Any) -> Any:
    """One of Triton's errors, none of which is a RuntimeError; a look-alike where there is no Triton."""
    try:
        from triton.compiler import errors as compiler
        from triton.runtime import errors as runtime
    except ImportError:
        return type(name, (Exception,), {})(f"out of resource: {args[-1]}" if name == "OutOfResources" else args[-1])
    return getattr(compiler if name == "CompilationError" else runtime, name)(*args)


def called(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    assert cli.run("benchmark", line.split()) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def arm(found: dict[str, Any], name: str) -> dict[str, Any]:
    return dict(targets.row_of(found, name))


def test_timms_peer_is_its_forward_train_with_the_class_head(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = timm.create_model("volo_d1_224", img_size=64, num_classes=7).train()
    net.mix_token, net.beta = True, 1.0
    images, box = torch.randn(2, 3, 64, 64), (1, 0, 4, 2)
    monkeypatch.setattr("timm.models.volo.rand_bbox", lambda *size, scale=1: box)
    cls_token, tokens, _ = net.forward_train(images)
    logits, own = TimmVolo(net)(images, dense=True, mix_box=torch.tensor(box, dtype=torch.int32))
    torch.testing.assert_close(own, tokens)
    torch.testing.assert_close(logits, net.head(cls_token))
    with torch.no_grad():
        torch.testing.assert_close(TimmVolo(net.eval())(images), net(images))


def test_train_times_ours_and_timm_from_one_start(capsys: pytest.CaptureFixture[str]) -> None:
    found = called(capsys, f"train --model volo_d1 --img-size 32 -b 2 --drop-path 0.1 --peer timm {QUICK}")
    assert [row["arm"] for row in found["arms"]] == ["ours", "timm"]
    for row in found["arms"]:
        assert row["not_measured"] is None and row["images/s"] > 0
        assert set(row["seconds_per_image_of"]) == {"data", "forward", "backward", "optimizer"}
        assert row["peak_bytes_per_image"]["forward"] > 0
    ours, peer = found["arms"]
    assert peer["ours/arm"] == pytest.approx(ours["images/s"] / peer["images/s"])
    assert peer["flops_per_image"] == ours["flops_per_image"] > 0


def test_a_peer_with_other_weights_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    build = candidates.build_bare

    def damaged(arm: candidates.Candidate, first: nn.Module) -> Any:
        model = build(arm, first)
        if arm.name == "reference":
            with torch.no_grad():
                model.aux_head.bias[0] += 0.1
        return model

    for module in (train, infer):
        monkeypatch.setattr(module, "build_bare", damaged)
        assert cli.run("benchmark", [module.__name__.rpartition(".")[2], *f"{SMALL} --peer reference".split()]) == 2
        error = capsys.readouterr().err
        assert "arm reference is not timed: from the same weights" in error and error.count("\n") == 1


@pytest.mark.parametrize("wrong", ["ours", "reference"])
@pytest.mark.parametrize("precision", ["--torchcompile eager", "--amp --amp-dtype bfloat16"])
def test_what_is_timed_is_what_is_compared(
    wrong: str, precision: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that computes something else once it is compiled is not timed."""
    prepared = candidates.compiled

    def damaged(arm: candidates.Candidate, model: nn.Module) -> Callable[..., Any]:
        function = prepared(arm, model)

        def larger(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            return tuple(1.2 * each for each in found) if isinstance(found, tuple) else 1.2 * found

        return larger if arm.name == wrong else function

    for module in (train, infer):
        monkeypatch.setattr(module, "compiled", damaged)
        line = f"{SMALL} {precision} --peer reference"
        assert cli.run("benchmark", [module.__name__.rpartition(".")[2], *line.split()]) == 2
        assert f"arm {wrong} is not timed: from the same weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    "broken,error,reason",
    [
        ("reference", RuntimeError("no kernel for this\nand much more"), "no kernel for this"),
        (
            "ours",
            triton_error("CompilationError", "x = y", ast.parse("x = y").body[0], "no y"),
            "CompilationError: no y",
        ),
        ("ours", triton_error("OutOfResources", 300, 200, "registers"), "OutOfResources: out of resource: registers"),
        ("reference", triton_error("PTXASError", "\nfatal: sm_1\n"), "PTXASError: fatal: sm_1"),
    ],
)
def test_a_candidate_that_fails_is_told_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str, error: Exception, reason: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    compiled = train.compiled
    monkeypatch.setattr(train, "compiled", lambda arm, model: fail if arm.name == broken else compiled(arm, model))
    line = f"train {SMALL} --peer reference"
    found = called(capsys, line)
    other = {"ours": "reference", "reference": "ours"}[broken]
    assert arm(found, broken)["not_measured"].startswith(reason) and arm(found, other)["images/s"] > 0
    assert f"| {broken} | not measured: {reason}" in "\n".join(comparison.table(found))
    monkeypatch.setattr(train, "compiled", lambda arm, model: fail)
    assert cli.run("benchmark", line.split()) == 2
    assert f"--model volo_test can't be measured here: {reason}" in capsys.readouterr().err


def test_each_candidate_is_told_as_soon_as_it_was_timed_and_all_after_their_turns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run("benchmark", f"train {SMALL} --peer reference".split()) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [[row["arm"] for row in found["arms"]] for found in told] == [["ours"], *[["ours", "reference"]] * 2]
    assert [found["rounds"] for found in told] == [0, 0, 1]
    assert all(row["images/s"] > 0 for found in told for row in found["arms"])


def test_a_profile_tells_where_the_time_of_a_step_goes(capsys: pytest.CaptureFixture[str]) -> None:
    found = called(capsys, f"train {SMALL} --drop-path 0.1 --profile --peer")
    facts = found["profile"]
    assert [row["arm"] for row in found["arms"]] == ["ours"]
    assert sum(row["ms"] for row in facts["classes"].values()) == pytest.approx(facts["busy_ms"])
    assert {"matrix products", "convolution", "normalisation"} < set(facts["classes"])
    assert 30 < len(facts["kernels"]) <= 60 and facts["batch_ms"] >= facts["host_ms"] > 0
    assert "| matrix products | " in "\n".join(comparison.table(found))


@pytest.mark.parametrize(
    "kernel,kind",
    [
        ("outlook_backward_logits", "outlook attention"),
        ("triton_per_fused_native_layer_norm_convolution_3", "compiled: fused passes and sums"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("sm90_xmma_dgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwc", "convolution"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer and gradient norms"),
        ("void at::native::vectorized_gather_kernel<16, long>", "sorting, gathers, random numbers"),
        ("Memcpy DtoD (Device -> Device)", "copies and fills"),
        ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>", "element by element"),
        ("aten::addmm", "matrix products"),
        ("aten::mul", "element by element"),
        ("something_new", "other"),
    ],
)
def test_kernels_by_class(kernel: str, kind: str) -> None:
    assert profile.class_of(kernel) == kind


def test_work_that_subset_skips_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"train --model volo_test --img-size 64 -b 4 --drop-path 0.9 --drop-path-mode subset --peer mask {QUICK}"
    found = called(capsys, line)
    whole_work, done = (arm(found, name)["flops_per_image"] for name in ("mask", "ours"))
    assert done < 0.97 * whole_work


def test_a_bfloat16_copy_computes_and_the_peer_has_autocast(capsys: pytest.CaptureFixture[str]) -> None:
    found = called(capsys, f"train {SMALL} --model-dtype bfloat16 --drop-path 0.1 --peer amp")
    assert [row["dtype"] for row in found["arms"]] == ["bfloat16", "bfloat16"]
    line = "train --model volo_d1 --img-size 32 -b 2 --model-dtype bfloat16 --peer timm amp"
    arms = candidates.candidates_of(parse_benchmark(line.split()))
    assert [(each.name, each.flags.model_dtype, each.flags.amp) for each in arms] == [
        ("ours", "bfloat16", False),
        ("timm", "float32", True),
        ("timm-bfloat16", "bfloat16", False),
        ("amp", "float32", True),
    ]
    case = train._Case(arms[0], CPU)
    for each in (arms[0], arms[2]):
        step = case.step(each)
        assert {p.dtype for p in step.called.parameters()} == {torch.float32, torch.bfloat16}
        assert {p.dtype for p in step.parameters} == {torch.float32}


def test_images_of_a_folder_are_loaded_in_the_step(
    make_dataset: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"train {SMALL} --peer reference --data {make_dataset()} --amp --amp-dtype bfloat16"
    found = called(capsys, line)
    assert arm(found, "ours")["seconds_per_image_of"]["data"] > 0 and arm(found, "ours")["dtype"] == "bfloat16"
    ours = candidates.candidates_of(parse_benchmark(line.split()))[0]
    made_up = candidates.candidates_of(parse_benchmark(f"train {SMALL} --peer reference".split()))[0]
    for each, again in ((ours, False), (made_up, True)):  # made-up batches come again, an epoch's are new
        batches = train._Case(each, CPU).step(each).batches
        first, _, third = (next(batches).images for _ in range(3))
        assert torch.equal(first, third) == again


def test_infer_folds_ours_and_leaves_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"infer --model volo_d1 --img-size 32 -b 2 --peer timm unfolded {QUICK}"
    args = parse_benchmark(line.split())
    ours, _, unfolded = candidates.candidates_of(args)
    first = candidates.build_first(ours).eval()
    norms = [
        sum(isinstance(m, nn.BatchNorm2d) for m in infer.evaluated(each, first, CPU).modules())
        for each in (ours, unfolded)
    ]
    assert norms == [0, 3]
    found = called(capsys, line)
    assert [row["arm"] for row in found["arms"]] == ["ours", "timm", "unfolded"]
    assert all(row["images/s"] > 0 for row in found["arms"])


def test_utilisation_and_ratio_by_hand() -> None:
    ours = CandidateRow("ours", torch.float32, flops=3e9, wall=Timing(0.5, 0.4, 0.6))
    peer = CandidateRow("timm", torch.bfloat16, flops=3e9, wall=Timing(1.5, 1.4, 1.6))
    found = Results("cpu", "step", [ours, peer], {torch.float32: 60e9, torch.bfloat16: 20e9}, [])
    assert found.ratio("timm") == pytest.approx(3)
    told = comparison.as_json(Namespace(model="", batch_size=1, rounds=1, steps=1, warm_up=1), found)
    assert targets.faster("timm", "ours")(told) == pytest.approx(1 / 3) and targets.speed("timm")(told) == 1 / 1.5
    assert found.utilisation(ours) == pytest.approx(0.1) and found.utilisation(peer) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("rounds", "told"),
    [((1.4, 1.5, 1.65), "3.00x (2.80-3.00)"), ((0.9, 1.5, 1.65), "machine busy (1.80-3.00)"), ((), "3.00x")],
)
def test_a_ratio_has_its_range_over_the_rounds(rounds: tuple[float, ...], told: str) -> None:
    ours = CandidateRow("ours", torch.float32, wall=Timing(0.5, 0.5, 0.55, (0.5, 0.5, 0.55)[: len(rounds)]))
    peer = CandidateRow("timm", torch.float32, wall=Timing(1.5, 1, 2, rounds))
    row = replace(ours, cpu=ours.wall, start=0.0), replace(peer, cpu=peer.wall, start=0.0)
    found = Results("cpu", "step", list(row), {torch.float32: 60e9}, [])
    args = Namespace(model="", batch_size=1, rounds=3, steps=1, warm_up=1)
    assert f"| {told} |" in comparison.table(comparison.as_json(args, found))[-1]


def test_parts_add_up_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([10.0, 11.0, 14.0, 100.0, 100.5, 101.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    parts = timing.Phases(CPU)
    for _ in range(2):
        parts.start()
        parts.mark("forward")
        parts.mark("backward")
    assert parts.take() == {"forward": 1.5, "backward": 3.5} and parts.take() == {}


@pytest.mark.parametrize(
    "line,message",
    [
        ("train --peer eager", "--peer eager is ours without --torchcompile"),
        ("train --peer amp --amp", "--peer amp is ours without --model-dtype bfloat16"),
        ("train --peer timm --amp --model-dtype bfloat16", "--amp and --model-dtype bfloat16 both set the precision"),
        ("train --model lvvit_t --peer timm", "--peer timm is timm's VOLO D1 to D5, of which lvvit_t is none"),
        (
            "infer --model volo_test --peer timm-compile",
            "--peer timm is timm's VOLO D1 to D5, of which volo_test is none",
        ),
        ("train --amp-dtype bfloat16", "--amp-dtype bfloat16 has no effect without --amp"),
        ("train --workers 2", "--workers 2 has no effect without --data DIR"),
        ("train --model volo_d", "--model volo_d: no such model; did you mean"),
        ("--all --only d1 --device cpu", "--only d1: on this device there are outlook, d1-fp32"),
        ("--all --part 1 --only d1 --device cpu", "--only d1: on this device there are tests, d5-224, d1-224, outlook"),
        ("--all --part 5", "invalid choice: '5'"),
        ("--all --peer reference", "invalid choice: 'reference'"),
    ],
)
def test_mistakes_are_told_in_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("benchmark", line.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "experiment",
    [*EXPERIMENTS["cpu"], *EXPERIMENTS["cuda"], *map(targets.rehearsed, EXPERIMENTS["cuda"])],
    ids=lambda e: f"{e.name}-{e.part}",
)
def test_every_experiment_is_a_command_line(experiment: Experiment) -> None:
    _, program, *words = shlex.split(whole.command_of(experiment, "cpu", "timm-compile"))
    if program == "train.py":
        check_train(parse_train(words), train_parser().flags)
    elif program == "benchmark.py":
        args = parse_benchmark(words)
        if args.command in ("train", "infer"):
            there = {each.name.removesuffix(candidates.BFLOAT16) for each in candidates.candidates_of(args)}
            assert there == {"ours", *experiment.peers} and all(there >= set(t.candidates) for t in experiment.targets)
    else:
        assert (ROOT / program).is_file()


def test_what_has_to_be_measured_first_has_its_time() -> None:
    for part in "1234":
        rows = [each for each in EXPERIMENTS["cuda"] if each.part == part]
        limited = [each.seconds for each in rows if each.seconds < math.inf]
        assert rows and sum(limited) <= 60 * whole._PART_MINUTES
        assert not limited or all(each.seconds < math.inf for each in rows[: len(limited)])
    assert all(each.part for each in EXPERIMENTS["cuda"])


@pytest.fixture
def experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose process prints what was found, and one that the program itself refuses."""
    ours, peer = (
        CandidateRow(name, torch.float32, wall=Timing(*t), cpu=Timing(*t), start=1.0) for name, t in SECONDS.items()
    )
    found = Results("cpu", "step", [ours, replace(peer, missing="no compiler", wall=None)], {torch.float32: 1.0}, [])
    case = Namespace(model="volo_test", batch_size=2, rounds=1, steps=1, warm_up=1)
    told = json.dumps(comparison.as_json(case, found))
    # "slow" tells how far it has come, and comes to no end.
    program = f"import sys, time\nif 'volo_test' in sys.argv: print({told!r}, flush=True)\n"
    program += "if '99' in sys.argv: print('{half a l', end='', flush=True), time.sleep(900)\n"
    program += f"if 'volo_test' in sys.argv: sys.exit()\n{whole._PROGRAM}"
    monkeypatch.setattr(whole, "_PROGRAM", program)
    speed = targets.speed("ours")
    low, high = Target("low", 2, "/s", speed), Target("high", 5, "/s", speed)
    rows_of_fine = (low, high, targets._ratio("ours", "timm", 1, "ratio"))
    rows = (
        Experiment("fine", "train --model volo_test", rows_of_fine),
        Experiment("wrong", "train --modle volo_d1", (Target("none", 1, "x", speed),)),
        Experiment("slow", "train --model volo_test -b 99", rows_of_fine, seconds=3),
    )
    monkeypatch.setattr(whole, "EXPERIMENTS", {"cpu": rows, "cuda": (Experiment("gpu", "", rows[0].targets[:1]),)})


def test_all_tells_reached_missed_and_why_not(
    experiments: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--all", "--device", "cpu", "--output", str(tmp_path / "x")]
    assert cli.run("benchmark", line) == 0
    told = capsys.readouterr().out
    assert told == (tmp_path / "x/benchmark.md").read_text()
    found = json.loads((tmp_path / "x/benchmark.json").read_text())
    low, high, ratio, none, *slow, gpu = found["targets"]
    assert (low["verdict"], high["verdict"]) == ("reached", "missed") and low["measured"] == high["measured"] == 4
    assert ratio["verdict"] == "not measured: timm: no compiler"
    assert none["verdict"].startswith("not measured: ")
    assert "unknown flag --modle, did you mean --model?" in none["verdict"]
    assert gpu["verdict"] == "not measured: no GPU here"
    # Its rows stand, though it was stopped.
    assert slow[0]["measured"] == 4 and slow[0]["verdict"].startswith("reached; but it was stopped after ")
    assert slow[2]["verdict"] == "not measured: timm: no compiler"
    assert told.count("| ours | 4 | 500.0 (400.0-800.0) |") == 2
    assert "| low | >= 2/s | 4/s | reached |" in told and "### fine" in told
    assert "| ours | 4 | 500.0 (400.0-800.0) |" in told and "| timm | not measured: no compiler |" in told


def test_what_was_measured_stands_when_all_is_ended(
    experiments: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    process, write = whole._process, whole.write

    def watched(*args: Any) -> Any:
        started.append((child := process(*args)).pid)
        return child

    def ended(args: Namespace, outcomes: list[whole.Outcome]) -> None:
        write(args, outcomes)
        if any(each.found for each in outcomes):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(whole, "_process", watched)
    monkeypatch.setattr(whole, "write", ended)
    before = signal.getsignal(signal.SIGTERM)
    line = ["--all", "--device", "cpu", "--only", "wrong", "slow", "--output", str(tmp_path)]
    assert cli.run("benchmark", line) == 130 and signal.getsignal(signal.SIGTERM) is before
    told = (tmp_path / "benchmark.md").read_text()
    assert "| low | >= 2/s | 4/s | reached; but it was still running when this was written |" in told
    assert "| ours | 4 | 500.0 (400.0-800.0) |" in told and "did you mean --model?" in told
    assert "did you mean --model?" in (tmp_path / "benchmark.log").read_text()
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_test_that_fails_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: needs one"]\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_one.py").write_text(
        textwrap.dedent("""
            import pytest
            @pytest.mark.gpu
            @pytest.mark.parametrize("value", [1, 2, 3])
            def test_gpu(value):
                if value == 3: pytest.skip("no")
                assert value == 1, "two | much"
            def test_cpu(): raise AssertionError("is not run")
        """)
    )
    (tmp_path / "tests/test_two.py").write_text("# mark.gpu\nimport nowhere\n")
    (tmp_path / "tests/test_three.py").write_text("import nowhere\n")
    program = f"from pathlib import Path\nfrom benchmarks import tests\ntests._ROOT = Path({str(tmp_path)!r})\n"
    program += "import sys; sys.argv[0] = 'x'; from volo.cli import run; sys.exit(run('benchmark'))"
    words = [sys.executable, "-c", program, "tests", "--device", "cpu", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    *_, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert (last["passed"], last["skipped"], len(last["failed"])) == (1, 1, 2)
    assert "two | much" in last["failed"]["tests/test_one.py::test_gpu[2]"]
    assert "No module named 'nowhere'" in last["failed"]["tests/test_two.py"]
    assert "two / much" in "\n".join(whole.shown_of(last)) and targets._failing(last) == 2


def test_make_runs_the_parts_one_by_one() -> None:
    line = ["make", "-n", "benchmark-gpu", "PYTHON=python3", "DEVICE=cpu", "OUT=there"]
    for more, parts in (([], "1 2 3 4"), (["PART=2"], "2")):
        told = subprocess.run([*line, *more], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert f"for part in {parts};" in told and '--device cpu --output "there"' in told


def test_all_without_time_says_so(experiments: None, capsys: pytest.CaptureFixture[str]) -> None:
    planned = whole.Outcome(whole.EXPERIMENTS["cpu"][0], "python benchmark.py train")
    with tempfile.TemporaryFile() as log:
        late = whole.perform(planned, 3.0, -1.0, log, lambda outcome: None)
    assert late.reason == "the 3 minutes of --minutes are over"
    assert cli.run("benchmark", ["--all", "--device", "cpu", "--minutes", "1e-6", "--only", "fine"]) == 0
    out = capsys.readouterr().out
    assert out.count("1e-06 minutes of --minutes are over") >= 2 and "GPU" not in out.split("| what |")[1]


def test_outlook_is_the_quickest_of_ours_against_timms() -> None:
    def row(name: str, seconds: float | None) -> dict[str, Any]:
        reason = "no compiler" if seconds is None else None
        return {"arm": name, "wall_seconds": {"forward + backward": {"median": seconds}}, "not_measured": reason}

    rows = [row("windows", 2.0), row("ours, compiled", 1.0), row("timm", 3.0), row("timm, compiled", None)]
    found = {"cases": [{"shape": [8, 28, 28, 384], "arms": []}, {"shape": [8, 28, 28, 192], "arms": rows}]}
    assert targets._outlook(192, "timm")(found) == 3 and targets._outlook(192, "timm, compiled")(found) is None


def test_a_number_at_most() -> None:
    target = Target("memory", 190, " MiB", targets.memory("ours"), most=True)
    found = {"arms": [{"arm": "ours", "peak_bytes_per_image": {"forward": 180 * 2**20}}]}
    outcome = whole.Outcome(Experiment("x", "", (target,)), "x", 1.0, found)
    assert whole.measured(target, outcome) == (180, "reached") and target.verdict(191) == "missed"
    lines = whole.report(
        Namespace(command_line="benchmark.py --all", part=None), [whole.Outcome(outcome.experiment, "", 0, found)]
    )
    assert "| memory | <= 190 MiB | 180 MiB | reached |" in lines
