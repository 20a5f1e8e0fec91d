"""What a stored teacher costs: steps without a teacher, with stored features, and with the teacher itself; and reading
and writing the features.

    python benchmark.py features --model volo_d0 --teacher vit_small_patch16_224 --img-size 224 -b 8

Steps, of which each round times one of every arm, are those of `benchmark.py step`. The teacher has random weights,
which cost what others do, and sees the student's crops where it runs in the step. Rows are read at random, from the
page cache and after it was dropped; writing is timed against the teacher alone, which sees the same images.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import timm
import torch

from benchmarks import arms
from benchmarks.arms import Arm
from benchmarks.rounds import BenchmarkSettings, Measuring, Range, Rows, in_turns, speedup, synchronize
from benchmarks.step import TrainStep
from tlt.data.backends.synthetic import synthetic_folder
from tlt.data.sources.source import ImageSource
from tlt.labels.features import DTYPES, FeatureInfo, FeatureStore, FeatureWriter, open_features
from tlt.teacher import FeatureTeacher
from volo.cluster.distributed import World, choose_device
from volo.commands.archive_job import ArchiveJob
from volo.commands.features import feature_rows
from volo.config import value_types as t
from volo.config.fields import Group, flag, group
from volo.config.settings_data import Loading
from volo.train.architecture import requested_by
from volo.train.criterion import make_criterion
from volo.train.data import open_labels, train_loader
from volo.train.distillation import load_distillation
from volo.train.model import data_config_of
from volo.train.step_graph import use_own_stream

COLUMNS = ("what", "arm", "rounds", "images/s", "without is, times", "CPU ms an image", "KB an image", "note")
_CLASSES = 10


class Models(Group):
    """Model"""

    model: t.Name = flag("volo_d0", "student")
    teacher: t.Name = flag("vit_small_patch16_224", "any timm model with a map")
    img_size: t.Positive = flag(224, "image side in px, of student and teacher")
    batch_size: t.Positive = flag(8, "images", also="-b")
    images: t.Positive = flag(64, "images whose features are stored")


class Flags(BenchmarkSettings):
    """The settings of `benchmark.py features`."""

    models: Models = group(Models)
    measuring: Measuring = group(Measuring)


def run(settings: Flags) -> None:
    """Store the features, and measure steps, reading and writing."""
    models = settings.models
    device = choose_device(settings.measuring.device, 0)
    use_own_stream(device)
    rows = Rows(settings, COLUMNS)
    folder = synthetic_folder(models.images, _CLASSES)
    with tempfile.TemporaryDirectory() as root:
        weights = Path(root, "teacher.pth.tar")
        network = timm.create_model(models.teacher, num_classes=_CLASSES, img_size=models.img_size)
        side = [models.img_size] * 2
        config = {"name": models.teacher, "kwargs": {}, "num_classes": _CLASSES, "img_size": side, "in_chans": 3}
        torch.save({"state_dict": network.state_dict(), "model_config": config}, weights)
        teacher = FeatureTeacher(network.to(device), (side[0], side[1]))
        stored = {f"stored, {dtype}": Path(root, dtype) for dtype in DTYPES}
        for dtype, out in zip(DTYPES, stored.values(), strict=True):
            _store(teacher, folder, out, dtype, models.batch_size, device)
        _time_steps(settings, rows, {"without": "", "teacher": str(weights)} | stored, folder, device)
        for name, out in stored.items():
            _time_reading(settings, rows, name, open_features(out, folder.paths))
        _time_writing(settings, rows, teacher, folder, Path(root), device)


def _job(teacher: FeatureTeacher, folder: ImageSource, out: Path, batch_size: int, device: torch.device) -> ArchiveJob:
    config = {"input_size": (3, *teacher.img_size), "crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bicubic"}
    trained: Any = SimpleNamespace(data_config=config | {"mean": [0.5] * 3, "std": [0.5] * 3})
    loading = Loading(data_backend="synthetic", workers=0)
    return ArchiveJob(trained, folder, loading, batch_size, World(0, 0, 1, device), str(out), "features", "stored")


def _store(
    teacher: FeatureTeacher, folder: ImageSource, out: Path, dtype: str, batch_size: int, device: torch.device
) -> None:
    """Write an archive as `volo features` does."""
    grid, area, channels = teacher.tokens
    writer = FeatureWriter(out, FeatureInfo(grid, channels, dtype, area), folder.paths)
    job = _job(teacher, folder, out, batch_size, device)
    job.write(writer, range(len(folder)), partial(feature_rows, teacher, None, dtype), writer.write_row)
    writer.finish()


def _time_steps(
    settings: Flags, rows: Rows, teachers: dict[str, Any], folder: ImageSource, device: torch.device
) -> None:
    batch_size = settings.models.batch_size
    steps = {name: _step(settings, str(teacher), folder, device) for name, teacher in teachers.items()}

    def work(step: TrainStep, count: int = 1) -> int:
        for _ in range(count):
            step()
        synchronize(device)
        return batch_size * count

    for step in steps.values():
        work(step, step.launched_first + 1)
    works = {name: partial(work, step) for name, step in steps.items()}
    _measure(settings, rows, "step", works, lambda name: {"note": steps[name].note})


def _measure(
    settings: Flags,
    rows: Rows,
    what: str,
    works: Mapping[str, Callable[[], int]],
    more: Callable[[str], dict[str, Any]],
) -> None:
    """Do the works in turns, and write a row of each, with `more` facts of it."""
    timings = in_turns(works, settings.measuring.rounds)
    for name, (wall, cpu) in timings.items():
        row = {"what": what, "arm": name, "rounds": settings.measuring.rounds, "images/s": 1 / Range.of(wall).median}
        if name != "without" and "without" in timings:
            row["without is, times"] = speedup(timings["without"].wall, wall)
        rows.write(row | {"CPU ms an image": Range.of(cpu, 1e3)} | more(name))


def _step(settings: Flags, teacher: str, folder: ImageSource, device: torch.device) -> TrainStep:
    models = settings.models
    taught = {"kd_model_name": [teacher], "kd_distill_type": ["token"]} if teacher else {}
    arm = Arm("ours", arms.train_settings(settings, models.model, num_classes=_CLASSES, **taught))
    ours = arm.settings
    model = arms.build(arm, arms.build_first(arm), device)
    data_config = data_config_of(requested_by(ours), model)
    world, logger = World(0, 0, 1, device), SimpleNamespace(line=lambda *_: None)
    made: Any = logger
    distillation = load_distillation(ours, model, data_config, folder, world, made) if teacher else None
    criterion = make_criterion(ours, model, data_config["input_size"][1:])
    labels, _ = open_labels("synthetic", ours.labels.maps, folder, _CLASSES, synthetic=True)
    features = distillation.stores if distillation else ()
    batches = list(islice(train_loader(ours, folder, labels, data_config, world, features).epoch(0), 2))
    synchronize(device)
    return TrainStep(arm, model, criterion, batches, device, distillation)


def _time_reading(settings: Flags, rows: Rows, name: str, store: FeatureStore) -> None:
    count = len(store.names)
    order = np.random.default_rng(0).permutation(count).tolist()

    def read(cold: bool) -> int:
        for file in Path(store.root).glob("*.npy") if cold else ():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for first in range(0, count, settings.models.batch_size):
            store.batch(order[first : first + settings.models.batch_size])
        return count

    works = {f"{name}, cold cache": partial(read, True), f"{name}, warm cache": partial(read, False)}
    _measure(settings, rows, "read", works, lambda _: {"KB an image": store.info.row_bytes / 1e3})


def _time_writing(
    settings: Flags, rows: Rows, teacher: FeatureTeacher, folder: ImageSource, root: Path, device: torch.device
) -> None:
    batch_size = settings.models.batch_size
    outs = (root / f"written{number}" for number in range(settings.measuring.rounds + 1))

    def alone() -> int:
        for batch in _job(teacher, folder, root, batch_size, device).loader(range(len(folder))):
            teacher(batch.images).cpu()
        return len(folder)

    def written() -> int:
        _store(teacher, folder, next(outs), DTYPES[0], batch_size, device)
        return len(folder)

    _measure(settings, rows, "write", {"without": alone, f"stored, {DTYPES[0]}": written}, lambda _: {})
