"""How benchmark.py is called in this process."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
from timm.models.volo import _create_volo

from benchmarks.program import parse_benchmark
from volo.commands.console import run_program

Measure = Callable[..., list[dict[str, Any]]]


def benchmark(line: str) -> int:
    return run_program(parse_benchmark, "benchmarks.program", line.split())


@pytest.fixture(autouse=True)
def small_volo_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm has the peer of volo_test, too."""
    sizes = {"layers": (1, 1, 1, 1), "embed_dims": (32, 64, 64, 64), "num_heads": (2, 4, 4, 4)}
    small = partial(_create_volo, "volo_d1_224", **sizes, mlp_ratio=2.0, stem_hidden_dim=16)
    monkeypatch.setitem(timm.models._registry._model_entrypoints, "volo_test_224", small)


@pytest.fixture
def measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Measure:
    """Return `measure(line, code=0)`: run a command and return the rows of `--output`."""

    def measured(line: str, code: int = 0) -> list[dict[str, Any]]:
        file = tmp_path / "rows.jsonl"
        file.unlink(missing_ok=True)
        assert benchmark(f"{line} --output {file}") == code, capsys.readouterr().err
        first, *rows = map(json.loads, file.read_text().splitlines())
        assert first["conditions"]["command"].startswith(f"benchmark.py {line}")
        return rows

    return measured
