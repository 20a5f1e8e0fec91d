"""The published recipes: every header's command parses and gives the published learning rate."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from volo.engine.args import parse_train
from volo.engine.schedule import LrSchedule, resolve_lr

ROOT = Path(__file__).parents[2]


class Recipe(NamedTuple):
    """What the papers and the published READMEs say; rates for training from scratch are for `base_size` images."""

    model: str
    size: int
    batch: int
    rate: float
    drop_path: float
    epochs: int = 310
    base_size: int = 1024
    top1: str = ""


FROM_SCRATCH = {
    "volo_d1_224": Recipe("volo_d1", 224, 128, 1.6e-3, 0.1, top1="84.2 %"),
    "volo_d2_224": Recipe("volo_d2", 224, 128, 1e-3, 0.2, top1="85.2 %"),
    "volo_d3_224": Recipe("volo_d3", 224, 128, 1e-3, 0.5, top1="85.4 %"),
    "volo_d4_224": Recipe("volo_d4", 224, 128, 1e-3, 0.5, top1="85.7 %"),
    # Published as an absolute rate for 8 x 44 images.
    "volo_d5_224": Recipe("volo_d5", 224, 44, 1e-4, 0.75, base_size=352, top1="86.1 %"),
    "lvvit_s_224": Recipe("lvvit_s", 224, 128, 1.6e-3, 0.1, top1="83.3 %"),
    "lvvit_m_224": Recipe("lvvit_m", 224, 128, 1.6e-3, 0.2, top1="84.0 %"),
    "lvvit_l_224": Recipe("lvvit_l", 224, 128, 1e-3, 0.3, top1="not published"),
}
FINE_TUNED = {
    "volo_d1_384": Recipe("volo_d1", 384, 64, 8e-6, 0.1, 40, top1="85.2 %"),
    "volo_d2_384": Recipe("volo_d2", 384, 48, 8e-6, 0.2, 40, top1="86.0 %"),
    "volo_d3_448": Recipe("volo_d3", 448, 30, 8e-6, 0.5, 40, top1="86.3 %"),
    "volo_d4_448": Recipe("volo_d4", 448, 16, 8e-6, 0.5, 40, top1="86.8 %"),
    "volo_d5_448": Recipe("volo_d5", 448, 8, 2.3e-5, 0.75, 40, top1="87.0 %"),
    "volo_d5_512": Recipe("volo_d5", 512, 4, 2.3e-5, 0.75, 40, top1="87.1 %"),
    "lvvit_s_384": Recipe("lvvit_s", 384, 64, 5e-6, 0.1, 40, top1="84.4 %"),
}


def header_command(name: str) -> tuple[int, list[str], str]:
    """GPUs, arguments of train.py and text of the header of configs/NAME.yaml."""
    lines = (ROOT / "configs" / f"{name}.yaml").read_text().splitlines()
    header = "\n".join(line[1:].strip() for line in lines if line.startswith("#"))
    match = re.search(r"\./distributed_train\.sh (\d+) ((?:.*\\\n)*.*)", header)
    assert match is not None
    return int(match[1]), shlex.split(match[2].replace("\\\n", " ")), header


def test_every_recipe_is_in_the_tables() -> None:
    assert {path.stem for path in (ROOT / "configs").iterdir()} == {*FROM_SCRATCH, *FINE_TUNED}


@pytest.mark.parametrize("name", [*FROM_SCRATCH, *FINE_TUNED])
def test_the_headers_command_gives_the_published_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    expected = {**FROM_SCRATCH, **FINE_TUNED}[name]
    gpus, argv, header = header_command(name)
    args = parse_train(argv)
    assert args.notes == [] and args.config == f"configs/{name}.yaml"
    assert (args.model, args.img_size, args.batch_size, args.drop_path) == expected[:3] + (expected.drop_path,)
    assert args.token_label_size == expected.size // 16
    assert args.token_label and args.token_label_data and args.amp and args.opt == "adamw"
    assert f"Top-1:    {expected.top1}" in header and "Hardware:" in header and "Source:" in header

    global_batch = gpus * args.batch_size
    lr, _ = resolve_lr(args, global_batch)
    scratch = name in FROM_SCRATCH
    assert lr == pytest.approx(expected.rate * (global_batch / expected.base_size if scratch else 1))
    assert bool(args.finetune) is not scratch
    assert args.weight_decay == (0.05 if scratch else 1e-8)
    assert args.ground_truth is (name.startswith("volo") and not scratch)
    schedule = LrSchedule(args, lr, updates_per_epoch=1)
    assert schedule.total_epochs == expected.epochs
    assert max(schedule(t) for t in range(args.warmup_epochs, expected.epochs)) <= lr


@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_the_rate_follows_the_batch(name: str) -> None:
    args = parse_train(["-c", str(ROOT / "configs" / f"{name}.yaml"), "/data"])
    assert resolve_lr(args, 64)[0] == pytest.approx(resolve_lr(args, 256)[0] / 4)


def test_lv_vit_differs_from_the_defaults_as_published() -> None:
    for name in FROM_SCRATCH:
        args = parse_train(["-c", str(ROOT / "configs" / f"{name}.yaml"), "/data", "--token-label-data", "/labels"])
        lv_vit = name.startswith("lvvit")
        assert args.warmup_epochs == (5 if lv_vit else 20)
        assert args.dense_weight == (1.0 if lv_vit else 0.5)
        assert args.model_ema is lv_vit
        assert args.aa == ("rand-n3-m9-mstd0.5-inc1" if name == "lvvit_l_224" else "rand-m9-mstd0.5-inc1")
