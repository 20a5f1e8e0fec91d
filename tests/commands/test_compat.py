"""`train.py --compat`: what it records, what it resumes, and which runs of older versions it refuses to go on with."""

from pathlib import Path

import torch
import yaml

from tests.commands.conftest import QUICK, Call, Make, TrainedRun, metrics, same_weights
from tlt.upstream import ROWS


def test_upstream_resumes_to_the_same_bits(call: Call, make_dataset: Make, make_labels: Make, tmp_path: Path) -> None:
    data = make_dataset(size=(60, 36))
    labels = make_labels(data, grid=(6, 8))
    flags = f"{data} {QUICK} --img-size 64 -b 4 --grad-accum-steps 2 --lr 1e-3 --epochs 2 --token-label"
    flags += f" --output {tmp_path} --token-label-data {labels}"
    whole = call("train", flags, "--compat", "upstream", "--experiment", "whole")
    assert whole.code == 0, whole.err
    rows = list(ROWS)
    assert f"--compat: {', '.join(rows)}" in whole.out
    settings = yaml.safe_load((tmp_path / "whole" / "args.yaml").read_text())
    assert (settings["compat"], settings["uncovered"]) == (rows, "uniform")
    checkpoint = tmp_path / "whole" / "checkpoint-0.pth.tar"
    first = torch.load(checkpoint, weights_only=True)
    assert first["model_config"]["labels"] == {"compat": rows, "uncovered": "uniform", "label_tail": "zero"}

    resumed = call(
        "train", f"-c {tmp_path / 'whole' / 'args.yaml'} --experiment again --resume {checkpoint} --output {tmp_path}"
    )
    assert resumed.code == 0, resumed.err
    same_weights(*(tmp_path / name / "last.pth.tar" for name in ("whole", "again")))
    other = call("train", f"{flags} --compat label-crop --experiment other --resume {checkpoint} --dry-run")
    assert f"compat: {rows!r} before, ['label-crop'] now" in other.out, other.err
    assert call("train", f"{flags} --experiment plain --epochs 1 --val-interval 9").code == 0
    assert metrics(tmp_path / "plain")[0]["loss"] != metrics(tmp_path / "whole")[0]["loss"]


def test_older_runs_go_on_unless_they_need_what_is_gone(call: Call, trained_run: TrainedRun, tmp_path: Path) -> None:
    saved, old = torch.load(trained_run.run / "last.pth.tar", weights_only=True), tmp_path / "old.pth.tar"
    line = f"{trained_run.data} {QUICK} --model-ema --epochs 3 --output {tmp_path} --resume {old} --dry-run"
    for compat, gone in (("label-crop uncovered", ""), ("label-crop half-ids", "half-ids"), ("aug-order", "aug-order")):
        torch.save(saved | {"args": saved["args"] | {"compat": compat.split()}}, old)
        ended, told = call("train", line), f"--compat {gone}, which this version has no more (docs/parity.md)"
        assert ended.refused(told) if gone else ended.code == 0, ended
