"""`train.py --compat`: what it records, what it resumes, what it leaves on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.commands.conftest import QUICK, Ended, metrics
from tlt.data.batch import Batch
from tlt.upstream.rows import ROWS
from volo.train.criterion import Mixed, StepKey, TokenLabelCriterion

Call = Callable[..., Ended]


def test_upstream_runs_is_recorded_and_resumes_to_the_same_bits(
    call: Call,
    make_dataset: Callable[..., Path],
    make_labels: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boxes: list[list[int]] = []
    draw = TokenLabelCriterion.draw

    def watched(self: TokenLabelCriterion, batch: Batch, step: StepKey) -> Mixed:
        mixed = draw(self, batch, step)
        assert mixed.box is not None
        boxes.append(mixed.box.tolist())
        return mixed

    monkeypatch.setattr(TokenLabelCriterion, "draw", watched)
    data = make_dataset(size=(60, 36))
    labels = make_labels(data, grid=(6, 8))
    flags = f"{data} {QUICK} --img-size 64 -b 4 --grad-accum-steps 2 --lr 1e-3 --epochs 2 --token-label"
    flags += f" --output {tmp_path} --token-label-data {labels}"
    whole = call("train", flags, "--compat", "upstream", "--experiment", "whole")
    assert whole.code == 0, whole.err
    rows = [row for row in ROWS if row != "untrained-dense-head"]
    assert f"--compat: {', '.join(rows)} (nothing to change: untrained-dense-head)" in whole.out
    settings = yaml.safe_load((tmp_path / "whole" / "args.yaml").read_text())
    assert (settings["compat"], settings["aug_order"], settings["uncovered"]) == (rows, "published", "uniform")
    first = torch.load(tmp_path / "whole" / "checkpoint-0.pth.tar", weights_only=True)
    recorded = {"compat": rows, "aug_order": "published", "uncovered": "uniform", "label_tail": "zero"}
    assert first["model_config"]["labels"] == recorded and first["args"]["compat"] == rows

    generator, expected = np.random.RandomState(42), []
    for _ in range(8):  # 2 epochs of 2 updates of 2 micro-batches, on a grid of 4 x 4 tokens
        half = int(4 * np.sqrt(1 - generator.beta(1, 1))) // 2
        row, column = generator.randint(4), generator.randint(4)
        edges = [max(row - half, 0), max(column - half, 0), min(row + half, 4), min(column + half, 4)]
        expected.append(edges)
    assert boxes == expected

    # A resumed run goes on with the boxes, from the settings that were written down.
    again = (
        f"-c {tmp_path / 'whole' / 'args.yaml'} --experiment again --resume {tmp_path / 'whole/checkpoint-0.pth.tar'}"
    )
    resumed = call("train", again, "--output", tmp_path)
    assert resumed.code == 0, resumed.err
    assert boxes[8:] == expected[4:]
    one, two = (torch.load(tmp_path / name / "last.pth.tar", weights_only=True) for name in ("whole", "again"))
    assert all(torch.equal(one["state_dict"][name], two["state_dict"][name]) for name in one["state_dict"])
    other = call(
        "train", flags, "--compat", "label-crop", "--experiment", "other", "--resume",
        tmp_path / "whole" / "checkpoint-0.pth.tar", "--dry-run",
    )  # fmt: skip
    assert f"compat: {rows!r} before, ['label-crop'] now" in other.out, other.err
    assert call("train", flags, "--experiment", "plain").code == 0
    # A row that the data workers see to: the same images and boxes, other labels.
    assert call("train", flags, "--compat", "label-scale", "--experiment", "scale").code == 0
    whole_loss, plain_loss, scale_loss = (metrics(tmp_path / name)[0]["loss"] for name in ("whole", "plain", "scale"))
    assert len({whole_loss, plain_loss, scale_loss}) == 3
    config = torch.load(tmp_path / "plain" / "last.pth.tar", weights_only=True)["model_config"]
    assert config["labels"] == {"compat": [], "aug_order": "timm", "uncovered": "ignore", "label_tail": "zero"}


def test_the_untrained_dense_head_stays_on(
    call: Call, make_dataset: Callable[..., Path], make_labels: Callable[..., Path], tmp_path: Path
) -> None:
    data = make_dataset()
    flags = f"{data} {QUICK} --lr 1e-3 --epochs 1 --token-label --dense-weight 0 --weight-decay 0.5 --output {tmp_path}"
    flags += f" --token-label-data {make_labels(data)}"
    found = {}
    for name, more in (("off", ""), ("on", "--compat untrained-dense-head")):
        ended = call("train", f"{flags} {more} --experiment {name}")
        assert ended.code == 0, ended.err
        checkpoint = torch.load(tmp_path / name / "last.pth.tar", weights_only=True)
        found[name] = checkpoint["state_dict"], checkpoint["model_config"]["dense_head"]
    (off, head_off), (on, head_on) = found["off"], found["on"]
    assert (head_off, head_on) == (False, True)
    # The same training of everything else; weight decay alone has shrunk the head.
    assert all(torch.equal(off[name], on[name]) for name in off if not name.startswith("aux_head"))
    shrunk = on["aux_head.weight"] / off["aux_head.weight"]
    assert shrunk.max() < 1 and torch.allclose(shrunk, shrunk.mean(), atol=1e-4)
    outcomes = [call("validate", f"{data} --checkpoint {tmp_path / name / 'last.pth.tar'} -j 0") for name in found]
    assert [ended.code for ended in outcomes] == [0, 0], outcomes[1].err
    losses = [json.loads(line)["loss"] for ended in outcomes for line in ended.out.splitlines() if line[:1] == "{"]
    assert len(losses) == 2 and losses[0] != losses[1]
