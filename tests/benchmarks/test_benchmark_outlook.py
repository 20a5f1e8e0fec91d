"""benchmark.py outlook: every arm does the same work, an arm that does not is caught, and what is counted."""

from __future__ import annotations

import json
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.speed.outlook import BOTH, FORWARD, AttentionCase
from volo import cli
from volo.kernels import KERNELS, windows

LINE = "outlook -b 2 --shapes 5x4x8x2 --rounds 1 --device cpu --json"


def called(capsys: pytest.CaptureFixture[str], flags: str) -> list[dict[str, Any]]:
    assert cli.run("benchmark", f"{LINE} {flags}".split()) == 0, capsys.readouterr().err
    cases: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    return cases


def check(case: dict[str, Any], names: set[str]) -> None:
    arms = {arm["arm"]: arm for arm in case["arms"]}
    assert set(arms) == {*KERNELS, *names}
    for name in {"windows", "reference", *names}:
        assert arms[name]["not_measured"] is None
        assert 0 < arms[name]["error"] < (1e-5 if case["dtype"] == "float32" else 2e-2)
        assert arms[name]["wall_seconds"][BOTH]["median"] > 0
    assert arms["timm"]["timm/arm"] == {FORWARD: 1, BOTH: 1}


@pytest.mark.parametrize("layer", ["", "--layer"])
def test_all_arms_are_compared_and_timed(layer: str, capsys: pytest.CaptureFixture[str]) -> None:
    cases = called(capsys, f"--no-compile --dtypes float32 bfloat16 {layer}")
    assert [(case["dtype"], case["layer"]) for case in cases] == [("float32", bool(layer)), ("bfloat16", bool(layer))]
    for case in cases:
        check(case, {"timm"})


def test_compiled_arms_are_compared_and_timed_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    check(called(capsys, "--dtypes bfloat16")[0], {"timm", "ours, compiled", "timm, compiled"})


def test_an_arm_that_computes_something_else_is_no_peer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = windows.outlook_attention
    monkeypatch.setattr(windows, "outlook_attention", lambda v, logits, *rest: right(v, logits * 1.001, *rest))
    assert cli.run("benchmark", [*LINE.split(), "--no-compile"]) == 2
    assert "windows is no peer: it is off by" in capsys.readouterr().err


def test_an_arm_that_cannot_run_is_told_in_its_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "why_unsupported", lambda *_: "is at rest")
    arms = {arm["arm"]: arm for arm in called(capsys, "--no-compile --dtypes float32")[0]["arms"]}
    assert "is at rest" in arms["windows"]["not_measured"] and arms["timm"]["not_measured"] is None
    assert cli.run("benchmark", [*LINE.replace("--json", "--no-compile").split()]) == 0
    assert "| windows | not measured: --outlook-kernel windows: is at rest" in capsys.readouterr().out


def test_the_floor_counts_what_has_to_move_once() -> None:
    case = AttentionCase.parse("28x28x192x6", 8, "bfloat16", False)
    windows_and_heads = 8 * 14 * 14 * 6
    assert case.floor_bytes(BOTH) == 2 * windows_and_heads * 883  # 4 pixels of 32 values five times, 81 logits thrice
    assert case.floor_bytes(FORWARD) == 2 * windows_and_heads * (2 * 128 + 81)
    odd = AttentionCase.parse("5x3x4x1", 1, "float32", False)
    assert odd.floor_bytes(FORWARD) == 4 * (2 * 15 * 4 + 3 * 2 * 81)


@pytest.mark.parametrize("shape", ["28x28x192", "28x28x190x6", "0x28x192x6", "axbxcxd"])
def test_a_wrong_shape_is_told_in_one_line(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("benchmark", ["outlook", "--shapes", shape]) == 2
    error = capsys.readouterr().err
    assert f"--shapes {shape}: give HEIGHTxWIDTHxCHANNELSxHEADS" in error and error.count("\n") == 1


def test_low_precision_is_autocasts_as_in_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    right = windows.outlook_attention

    def watched(v: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), v.dtype))
        return right(v, *rest)

    monkeypatch.setattr(windows, "outlook_attention", watched)
    called(capsys, "--no-compile --dtypes float32 bfloat16")
    assert set(seen) == {(False, torch.float32), (True, torch.bfloat16)}
