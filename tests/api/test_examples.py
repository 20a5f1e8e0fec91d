"""The example programs train as `volo train` does: the same weights, for the same seed, images and labels. And the
notebook runs from top to bottom, and what it shows was shown by the code that stands in it."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import pytest
import torch

from tests.commands.conftest import QUICK, ROOT, metrics
from tests.conftest import free_port, module_of
from volo import cli

OPTIONS: dict[str, Any] = {"size": (64, 64), "epochs": 2, "batch_size": 8, "workers": 0}
QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


@pytest.fixture
def data(make_dataset: Callable[..., Path]) -> Path:
    return make_dataset(train=20)  # the last batch of an epoch has 4 images


@pytest.fixture
def labels(data: Path, make_labels: Callable[..., Path]) -> Path:
    return make_labels(data)


def trained(name: str, data: Path, labels: Path, output: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights that `volo train` makes of a model, dense head included, and its losses."""
    flags = QUICK.replace("--model volo_test --img-size 32", f"--model {name} --img-size 64 --sched constant --lr 1e-3")
    run = f"--epochs 2 --device cpu --output {output} --experiment run --token-label --token-label-data {labels}"
    assert cli.run("train", [str(data), *flags.split(), *run.split()]) == 0
    saved = torch.load(output / "run" / "last.pth.tar", weights_only=True)
    return saved["state_dict"] | saved.get("dense_head", {}), [each["loss"] for each in metrics(output / "run")]


@pytest.mark.parametrize(
    ("package", "program", "name"),
    [
        ("torch", "plain_pytorch", "test_resnet"),
        ("torch", "plain_pytorch", "lvvit_test"),
        ("accelerate", "accelerate_loop", "lvvit_test"),
        ("lightning", "lightning_module", "lvvit_test"),
        ("ray.train", "ray_loop", "lvvit_test"),
    ],
)
def test_weights_are_those_of_volo_train(package, program, name, data, labels, tmp_path, capsys):
    pytest.importorskip(package)
    more = {"lightning_module": {"trainer": QUIET}, "ray_loop": {"storage": str(tmp_path)}}.get(program, {})
    made = module_of(ROOT / "examples" / f"{program}.py").train(str(data), str(labels), name=name, **OPTIONS, **more)
    printed = capsys.readouterr().out
    weights, losses = trained(name, data, labels, tmp_path)
    torch.testing.assert_close(made if isinstance(made, dict) else made.state_dict(), weights, rtol=1e-5, atol=1e-6)
    assert package != "torch" or f"update 0: loss {losses[0]:.4f} " in printed


_ONE_PROCESS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from deepspeed_loop import train
torch.save(train(sys.argv[2], sys.argv[3], "lvvit_test", (64, 64), 2, 8, 0, stage=int(sys.argv[4])), sys.argv[5])
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed(stage, data, labels, tmp_path):
    pytest.importorskip("deepspeed")
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    saved = tmp_path / "weights.pth"
    arguments = [ROOT / "examples", data, labels, stage, saved]
    ended = subprocess.run(
        [sys.executable, "-c", _ONE_PROCESS, *map(str, arguments)], env=env, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    weights = torch.load(saved, weights_only=True)
    # Rounding decides the direction in which AdamW moves weights of the smallest gradients, by up to 1e-3 a step: the
    # difference is that of all weights, which move by some percent.
    expected = trained("lvvit_test", data, labels, tmp_path)[0]
    assert weights.keys() == expected.keys()
    mine, theirs = (torch.cat([each[name].double().flatten() for name in expected]) for each in (weights, expected))
    assert (mine - theirs).norm() < 1e-4 * theirs.norm()


FILE = ROOT / "examples" / "token_labels.ipynb"
CELLS: list[dict[str, Any]] = [c for c in json.loads(FILE.read_text())["cells"] if c["cell_type"] == "code"]
IMAGES = 900  # of 1,797
QUICKER = {"EPOCHS = 4": "EPOCHS = 1", "--warmup-epochs 1": "--warmup-epochs 0"}


def test_it_is_small_and_was_saved_after_a_whole_run():
    assert FILE.stat().st_size < 300_000
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == "".join("".join(cell["source"]) for cell in CELLS).count("\nshow(") + 1
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]


def test_its_cells_run(monkeypatch, capsys):
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
    printed = capsys.readouterr().out
    assert f"wrote {IMAGES} scans" in printed and f"of {IMAGES * 4 // 5} images" in printed
    losses = torch.tensor(names["losses"])
    assert losses.shape == (math.ceil(IMAGES * 4 / 5 / 32), 2) and losses.isfinite().all() and (losses > 0).all()
    assert names["tokens"].shape == (6, 4, 4, 10)
