"""Two processes against one: the same losses, the same images, each validation image once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.commands.conftest import QUICK, ROOT, Ended, launch, metrics

CPU = torch.device("cpu")
# 40 images, 8 an update: 20 updates. A larger rate without warm-up would amplify rounding beyond any tolerance.
FLAGS = f"{QUICK} --epochs 4 --lr 2e-4 --token-label"


@pytest.fixture
def dataset(make_dataset: Callable[..., Path], make_labels: Callable[..., Path]) -> tuple[Path, Path]:
    data = make_dataset(train=40, validation=7, size=(50, 40))
    return data, make_labels(data)


_LISTED = """
import os
scandir = os.scandir
def listing(path="."):
    with open({!r}, "ab") as file:
        file.write(os.environ.get("RANK", "").encode() + b" " + os.fsencode(path) + b"\\n")
    return scandir(path)
os.scandir = listing
"""


def test_the_first_rank_of_a_host_alone_lists_images_and_labels(
    dataset: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_LISTED.format(str(tmp_path / "listed")))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    data, labels = dataset
    launch(2, f"{FLAGS} --epochs 1 -b 4 --output {tmp_path} --token-label-data {labels}", data)
    folders = [folder for root in (data / "train", labels) for folder in root.iterdir() if folder.is_dir()]
    listed = (tmp_path / "listed").read_text().splitlines()
    assert len(folders) == 8
    for folder in folders:
        assert [line for line in listed if line.endswith(f" {folder}")] == [f"0 {folder}"]


def test_two_ranks_equal_one_with_the_same_global_batch(
    call: Callable[..., Ended], dataset: tuple[Path, Path], tmp_path: Path
) -> None:
    data, labels = dataset
    flags = f"{FLAGS} --freeze-bn --no-mix-token --drop-path 0 --output {tmp_path} --token-label-data {labels}"
    assert call("train", f"{data} {flags} --experiment one").code == 0
    out = launch(2, f"{flags} -b 4 --experiment two", data)
    one, two = (metrics(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 20
    for name in ("loss", "cls_loss", "dense_loss"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in one], abs=1e-5), name
    # 7 images on 2 ranks in batches of 4: nothing twice, nothing left out.
    assert "over 7 images" in out
    told = launch(2, f"{flags} --tensor-parallel 2 --experiment shared", data)
    assert "8 per 2 devices x 1" in told and parameters(told) == parameters(out)
    shared = metrics(tmp_path / "shared")
    for name in ("loss", "grad_norm", "lr"):
        assert [r[name] for r in shared] == pytest.approx([r[name] for r in one], rel=2e-5, abs=1e-5), name
    evaluations = [metrics(tmp_path / name, "epoch")[-1] for name in ("one", "two", "shared")]
    assert {each["eval_images"] for each in evaluations} == {7} and evaluations[2]["images"] == 40
    assert [each["eval_loss"] for each in evaluations] == pytest.approx([evaluations[0]["eval_loss"]] * 3, abs=1e-5)


def parameters(told: str) -> list[str]:
    return re.findall(r"[\d.]+ M parameters", told)


def test_a_mistake_ends_all_processes_with_its_line_and_exit_code(dataset: tuple[Path, Path]) -> None:
    out = launch(2, f"{FLAGS} --model volo_d9", dataset[0], code=2)
    assert len(re.findall(r"^\[rank [01]\] error: --model volo_d9", out, re.MULTILINE)) == 1 and "Traceback" not in out


def test_gradients_in_bfloat16_move_the_weights_by_their_rounding(dataset: tuple[Path, Path], tmp_path: Path) -> None:
    """With what gets in the way of DDP's hooks: accumulation, recomputed activations, a class head without a loss."""
    data, labels = dataset
    flags = f"{QUICK} -b 2 --grad-accum-steps 2 --grad-checkpointing --cls-weight 0 --epochs 1 --lr 1e-4 --opt sgd"
    flags += f" --token-label --token-label-data {labels} --output {tmp_path} --experiment"
    launch(2, f"{flags} exact", data)
    launch(2, f"{flags} rounded --grad-compression bf16", data)
    exact, rounded = (torch.load(tmp_path / run / "last.pth.tar", weights_only=True) for run in ("exact", "rounded"))
    assert (exact["args"]["grad_compression"], rounded["args"]["grad_compression"]) == ("none", "bf16")
    one, two = (metrics(tmp_path / run) for run in ("exact", "rounded"))
    assert two[0]["loss"] == one[0]["loss"] and two[0]["grad_norm"] != one[0]["grad_norm"]
    assert [r["grad_norm"] for r in two] == pytest.approx([r["grad_norm"] for r in one], rel=0.01)
