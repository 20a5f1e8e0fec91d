"""Training on the annotator's own word: the exact tail of its labels, or the annotator itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import timm
import torch

from tests.programs.conftest import QUICK, Ended


def test_the_exact_tail_is_trained_on_and_recorded(
    call: Callable[..., Ended], make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    data = make_dataset()
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), tmp_path / "w.pth")
    flags = "--model resnet10t --num-classes 4 --img-size 64 -j 0 --device cpu --top-k 2"
    for form in ("archive", "tree"):
        made = call(
            "generate_label", f"{data} {tmp_path / form} --checkpoint {tmp_path / 'w.pth'} --format {form} {flags}"
        )
        assert made.code == 0, made.err
    train = f"{data} {QUICK} --epochs 1 --token-label --output {tmp_path} --token-label-data"
    losses = []
    for name in ("zero", "exact"):
        ended = call("train", f"{train} {tmp_path / 'archive'} --label-tail {name} --experiment {name}")
        assert ended.code == 0, ended.err
        checkpoint = torch.load(tmp_path / name / "last.pth.tar", weights_only=False)
        assert checkpoint["args"]["label_tail"] == name
        losses.append((tmp_path / name / "metrics.jsonl").read_text().split('"loss": ')[1].split(",")[0])
    assert losses[0] != losses[1]
    ended = call("train", f"{train} {tmp_path / 'tree'} --label-tail exact --experiment no")
    assert ended.code == 2 and "no archive with log-sum-exp" in ended.err and ended.err.count("\n") == 1
    ended = call("train", f"{data} {QUICK} --token-label --label-tail exact")
    assert ended.code == 2 and "--label-tail exact has no effect without --token-label-data" in ended.err
