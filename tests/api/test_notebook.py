"""The notebook runs from top to bottom, and what it shows was shown by the code that stands in it."""

import json
import math
from types import SimpleNamespace
from typing import Any

import matplotlib
import pytest
import torch

from tests.commands.conftest import ROOT

FILE = ROOT / "examples" / "token_labels.ipynb"
CELLS: list[dict[str, Any]] = [c for c in json.loads(FILE.read_text())["cells"] if c["cell_type"] == "code"]
IMAGES = 900  # of 1,797
QUICKER = {"EPOCHS = 4": "EPOCHS = 1", "--warmup-epochs 1": "--warmup-epochs 0"}


def test_it_is_small_and_was_saved_after_a_whole_run() -> None:
    assert FILE.stat().st_size < 300_000
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == "".join("".join(cell["source"]) for cell in CELLS).count("\nshow(") + 1
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]


def test_its_cells_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    scans = datasets.load_digits()
    few = SimpleNamespace(images=scans.images[:IMAGES], target=scans.target[:IMAGES])
    monkeypatch.setattr(datasets, "load_digits", lambda: few)
    monkeypatch.chdir(FILE.parent)  # a cell changes it
    monkeypatch.syspath_prepend(str(ROOT))
    backend = matplotlib.get_backend()
    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in CELLS:
        text = "".join(cell["source"])
        for saved, quicker in QUICKER.items():
            text = text.replace(saved, quicker)
        exec(compile(text, FILE.name, "exec"), names)
    matplotlib.pyplot.close("all")
    matplotlib.use(backend)
    told = capsys.readouterr().out
    assert f"wrote {IMAGES} scans" in told and f"of {IMAGES * 4 // 5} images" in told
    losses = torch.tensor(names["losses"])
    assert losses.shape == (math.ceil(IMAGES * 4 / 5 / 32), 2) and losses.isfinite().all() and (losses > 0).all()
    assert names["tokens"].shape == (6, 4, 4, 10)
