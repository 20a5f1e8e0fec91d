"""Two processes against one: the same losses, the same images, each validation image once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.conftest import QUICK, Call, Make, launch, metrics

# 40 images, 8 an update. A larger rate without warm-up would amplify rounding beyond any tolerance.
FLAGS = f"{QUICK} --epochs 2 --lr 2e-4 --token-label --freeze-bn --no-mix-token --drop-path 0"


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("", "-b 4"),
        ("--model test_vit4", "-b 4"),
        pytest.param("", "--tensor-parallel 2", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one_with_the_same_global_batch(
    call: Call, make_dataset: Make, make_labels: Make, tmp_path: Path, model: str, more: str
) -> None:
    data = make_dataset(train=40, validation=7, size=(50, 40))
    flags = f"{FLAGS} {model} --output {tmp_path} --token-label-data {make_labels(data)}"
    assert call("train", f"{data} {flags} --experiment one").code == 0
    out = launch(2, f"{flags} {more} --experiment two", data)
    one, two = (metrics(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 10
    for name in ("loss", "cls_loss", "dense_loss", "grad_norm", "lr"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in one], rel=2e-5, abs=1e-5), name
    # 7 images on 2 ranks in batches of 4: nothing twice, nothing left out.
    assert "over 7 images" in out
    evaluations = [metrics(tmp_path / name, "epoch")[-1] for name in ("one", "two")]
    assert [each["eval_images"] for each in evaluations] == [7, 7] and evaluations[1]["images"] == 40
    assert evaluations[1]["eval_loss"] == pytest.approx(evaluations[0]["eval_loss"], abs=1e-5)
