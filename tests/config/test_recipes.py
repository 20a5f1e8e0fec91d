"""The published recipes: every header's command parses and gives the published learning rate."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import timm

from tests.train.small_run import schedule_of
from volo.config.rules import teachers_of
from volo.config.settings_train import TrainSettings
from volo.config.train import TRAIN
from volo.train.schedule import resolve_lr

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
    "volo_d1_224_wsd": Recipe("volo_d1", 224, 128, 1.6e-3, 0.1, 300, top1="not run at this size"),
    "volo_d1_224_progressive": Recipe("volo_d1", 224, 128, 1.6e-3, 0.1, top1="not run at this size"),
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
    "volo_d5_512": Recipe("volo_d5", 512, 4, 2.3e-5, 0.5, 40, top1="87.1 %"),
    "lvvit_s_384": Recipe("lvvit_s", 384, 64, 5e-6, 0.1, 40, top1="84.4 %"),
}


class OfOthers(NamedTuple):
    """What another system published: images per update, optimizer, peak rate, epochs, and a figure of its table."""

    batch: int
    opt: str
    rate: float
    epochs: int
    told: str
    nodes: int = 1
    images: int = 1_281_167


OF_OTHERS = {
    "vit_b16_224": OfOthers(4096, "adamw", 3e-3, 304, "7,129 images/s, 15.0 h"),
    "vit_b16_384": OfOthers(512, "momentum", 3e-3, 8, "1,841 images/s, 1.5 h"),
    "vit_b16_224_adafactor": OfOthers(4096, "adafactorbv", 3e-3, 304, "arXiv:2106.04560"),
    "vit_b16_224_lamb": OfOthers(32768, "lamb", 1.8e-2, 300, "78.58 h"),
    "vit_b32_224_lamb": OfOthers(32768, "lamb", 1.8e-2, 300, "14.58 h"),
    "vit_l32_224_lamb": OfOthers(32768, "lamb", 1.8e-2, 300, "37.83 h"),
    "vit_b16_azure": OfOthers(1024, "adamw", 1e-3, 310, "1,507 images/s by InfiniBand", nodes=4),
    "vit_b16_cifar10": OfOthers(8704, "momentum", 0.03, 333, "2,000 updates of 8,704 images", images=50_000),
}


@pytest.fixture(autouse=True)
def in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def header_command(name: str, *more: str) -> tuple[int, TrainSettings, str]:
    """GPUs, arguments of train.py (with `more` flags) and text of the header of configs/NAME.yaml."""
    lines = (ROOT / "configs" / f"{name}.yaml").read_text().splitlines()
    header = "\n".join(line[1:].strip() for line in lines if line.startswith("#"))
    match = re.search(r"\./distributed_train\.sh (\d+) ((?:.*\\\n)*.*)", header)
    assert match is not None and "Source:" in header
    args = TRAIN.parse([*shlex.split(match[2].replace("\\\n", " ")), *more])
    assert args.notes == () and args.run.config == f"configs/{name}.yaml"
    return int(match[1]), args, header


def test_every_recipe_is_in_the_tables():
    own = {*FROM_SCRATCH, *FINE_TUNED, "finetune_small", "scratch_small", "vit_s16_224_two_teachers"}
    assert {path.stem for path in (ROOT / "configs").iterdir()} == own | OF_OTHERS.keys()


@pytest.mark.parametrize("name", OF_OTHERS)
def test_the_headers_command_gives_the_run_of_another_system(name):
    expected = OF_OTHERS[name]
    gpus, args, header = header_command(name)
    assert expected.told in header and "Top-1:" in header
    global_batch = expected.nodes * gpus * args.images.batch_size * args.optim.grad_accum_steps
    lr, _ = resolve_lr(args.schedule, global_batch)
    assert (global_batch, args.optim.opt, lr) == (expected.batch, expected.opt, expected.rate)
    assert bool(args.network.finetune) == (name in ("vit_b16_384", "vit_b16_cifar10"))
    updates = -(-expected.images // global_batch)
    schedule = schedule_of(args, lr, updates)
    rates = [schedule(update) for update in range(0, schedule.total_updates, updates)]
    assert len(rates) == expected.epochs and max(rates) == pytest.approx(lr, rel=0.02)
    # The rate falls from its peak, whatever the warm-up takes.
    warm_up = args.schedule.warmup_epochs
    peak = warm_up if args.schedule.warmup_prefix or not warm_up else None
    assert peak is None or rates[peak] == lr and sorted(rates[:peak]) == rates[:peak]
    assert sorted(rates[expected.epochs // 2 :], reverse=True) == rates[expected.epochs // 2 :]


def test_the_recipe_from_nothing_names_its_model():
    gpus, args, header = header_command("scratch_small")
    assert gpus == 1 and "Hardware:" in header and timm.is_model(args.network.model) and args.images.pixels.img_size
    assert not (args.labels.token_label or args.network.pretrained or args.network.finetune)


def test_the_recipe_for_fine_tuning_asks_for_weights():
    line = ["data", "-c", "finetune_small", "--model", "volo_d1"]
    assert "--pretrained or --finetune" in TRAIN.parse(line).notes[0]
    assert not TRAIN.parse([*line, "--pretrained"]).notes


def test_few_images_are_fine_tuned_by_the_headers_command():
    gpus, args, header = header_command("finetune_small")
    assert gpus == 1 and "Hardware:" in header
    assert (args.images.batch_size, args.images.val_fraction) == (16, 0.1)
    assert (args.network.finetune, args.labels.token_label) == ("/path/to/weights", False)
    assert resolve_lr(args.schedule, 16)[0] == 5e-4
    schedule = schedule_of(args, 5e-4, updates_per_epoch=4)
    assert schedule.total_epochs == 60 and 4.8e-4 < max(schedule(t) for t in range(240)) <= 5e-4
    assert schedule(1) != schedule(2), "the rate changes at every update"


@pytest.mark.parametrize("name", [*FROM_SCRATCH, *FINE_TUNED])
def test_the_headers_command_gives_the_published_run(name):
    expected = {**FROM_SCRATCH, **FINE_TUNED}[name]
    gpus, args, header = header_command(name)
    names = ("model", "img_size", "batch_size", "drop_path", "token_label_size")
    assert [args[each] for each in names] == [*expected[:3], expected.drop_path, expected.size // 16]
    assert args.labels.token_label and args.labels.token_label_data
    assert args.precision.mixed.amp and args.optim.opt == "adamw"
    assert f"Top-1:    {expected.top1}" in header and "Hardware:" in header
    global_batch = gpus * args.images.batch_size
    lr, _ = resolve_lr(args.schedule, global_batch)
    scratch = name in FROM_SCRATCH
    assert lr == pytest.approx(expected.rate * (global_batch / expected.base_size if scratch else 1))
    assert bool(args.network.finetune) is not scratch
    assert args.optim.weight_decay == (0.05 if scratch else 1e-8)
    assert args.labels.ground_truth is (name.startswith("volo") and not scratch)
    schedule = schedule_of(args, lr, updates_per_epoch=1)
    assert schedule.total_epochs == expected.epochs
    assert max(schedule(t) for t in range(args.schedule.warmup_epochs, expected.epochs)) <= lr
    if scratch:
        lv_vit = name.startswith("lvvit")
        settings = (args.ema.model_ema, args.labels.dense_weight, args.schedule.warmup_epochs)
        assert settings == ((True, 1.0, 5) if lv_vit else (False, 0.5, 20))
        assert args.augment.aa == ("rand-n3-m9-mstd0.5-inc1" if name == "lvvit_l_224" else "rand-m9-mstd0.5-inc1")


def test_trunk_and_branches_share_a_rate_until_the_decay():
    _, args, header = header_command("volo_d1_224_wsd")
    branches = [shlex.split(line) for line in re.findall(r"^--experiment .*", header, re.MULTILINE)]
    trunk, *others = (schedule_of(header_command("volo_d1_224_wsd", *more)[1], 1.0, 2) for more in [[], *branches])
    for branch, epochs in zip(others, args.checkpoints.save_epochs, strict=True):
        assert branch.decay_begins == 2 * epochs and f"milestone-{epochs}.pth.tar" in header
        assert [branch(t) for t in range(2 * epochs)] == [trunk(t) for t in range(2 * epochs)]
        assert branch.total_epochs == epochs * 5 / 4 and branch(2 * branch.total_epochs - 1) < 0.03


def test_a_student_has_two_unlike_teachers():
    gpus, args, header = header_command("vit_s16_224_two_teachers")
    assert gpus * args.images.batch_size == 1024 and resolve_lr(args.schedule, 1024)[0] == 1e-3
    assert header.count("not run at this size") == 1
    teachers = teachers_of(args.teachers)
    assert all(timm.is_model(teacher.model) for teacher in teachers)
    assert [(teacher.kind, teacher.weight) for teacher in teachers] == [("token", 1.0), ("logit", 0.5)]
