"""`--kd-model-name`: frozen teachers whose logits or features the student learns (`tlt.distill`).

A teacher sees the student's batch. If it sees another size (`--kd-size`) or the whole image (`--kd-view whole`), a
loader of its own makes its batches; they contain the same images, because data are a function of (seed, epoch, index).
What a stored teacher (`volo features`) gives is part of the student's batch.
"""

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from tlt.api import Loader
from tlt.data.augment.plan import INTERPOLATIONS
from tlt.data.batch import Batch
from tlt.data.size_schedule import SizeSchedule
from tlt.data.sources.source import ImageSource
from tlt.distill import DistillLoss, DistillLosses, TeacherTargets, with_projector
from tlt.io.files import blamed_on
from tlt.kinds import KINDS
from tlt.labels.features import FeatureStore, open_features
from tlt.models.fit_weights import Classes
from tlt.teacher import FeatureTeacher, StoredTeacher, Teacher
from volo.checkpoint.model_config import own_names
from volo.cluster.distributed import World
from volo.config.checkpoint_files import BEST, ENDINGS, LAST, holds_features
from volo.config.rules import other_sizes, teachers_of
from volo.config.settings_train import TrainSettings
from volo.record.logger import Logger
from volo.train.data import sizes_of, train_loader
from volo.train.model import TimmModel, compiler_of, place_model
from volo.train.precision import check_convolutions, compute_dtype
from volo.train.trained_model import TrainedModel, load_frozen


class DeviceTimer:
    """Adds up how long the device works on blocks of code, without waiting for it."""

    def __init__(self) -> None:
        self.pending = deque[tuple[torch.cuda.Event, torch.cuda.Event]]()  # begin and end of each unfinished block
        self._seconds = 0.0

    @contextmanager
    def measured(self, device: torch.device) -> Iterator[None]:
        """Measure a block of code."""
        if device.type != "cuda":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self.pending.append((begin, end))
        self._add_finished()

    def take(self) -> float:
        """Return the seconds since the last call. This waits for the device."""
        if self.pending:
            self.pending[-1][1].synchronize()
        self._add_finished()
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def _add_finished(self) -> None:
        """Add up the blocks that the device has finished, in order. Waits for nothing."""
        while self.pending and self.pending[0][1].query():
            begin, end = self.pending.popleft()
            self._seconds += begin.elapsed_time(end) / 1000


@dataclass
class Distillation:
    """The teachers of a run, and their losses.

    Attributes:
        names: Names of the teachers in the records, all different.
        views: For each teacher, the loader of its images; None if it sees the student's images, or is stored.
        learns_features: Whether the student learns more than logits: then it returns its features, too.
        class_names: Names of the classes of the teachers' logits, as far as they are known.
        stores: The features of stored teachers.
    """

    checksum: str
    losses: DistillLosses
    names: Sequence[str]
    views: Sequence[Loader | None]
    learns_features: bool
    class_names: list[str] = field(default_factory=list)
    stores: Sequence[FeatureStore] = ()
    timer: DeviceTimer = field(default_factory=DeviceTimer)
    _seen: dict[Loader | None, Batch] = field(default_factory=dict)  # for each loader, its part of the current batch

    @property
    def computes(self) -> bool:
        """Whether a teacher is a network that runs in each step."""
        return len(self.stores) < len(self.names)

    def paired(self, batches: Iterator[Batch], *where: Any) -> Iterator[Batch]:
        """Yield the batches of a loader's `epoch(*where)`, and load the teachers' views of each."""
        loaders = [loader for loader in dict.fromkeys(self.views) if loader is not None]
        for batch, *views in zip(batches, *(loader.epoch(*where) for loader in loaders), strict=True):
            self._seen = dict(zip(loaders, views, strict=True))
            yield batch

    def lessons(self, batch: Batch, images: Tensor) -> list[TeacherTargets]:
        """Return each teacher's targets for a batch, whose `images` Mixup or CutMix may have mixed."""
        with self.timer.measured(images.device) if self.computes else nullcontext():
            return self.losses.lesson(batch, [self._seen.get(view) for view in self.views], images)

    def summary_line(self, seconds: float) -> str:
        """Return a line about the teachers' share of `seconds`, the time since the last call. Waits for the device."""
        spent = self.timer.take()
        label = "teachers" if len(self.names) > 1 else "teacher"
        return f"{label}: {spent:.1f} s, {100 * spent / max(seconds, 1e-9):.0f} % of the epoch's training"


def load_distillation(
    settings: TrainSettings,
    student: TimmModel,
    data_config: dict[str, Any],
    images: ImageSource,
    world: World,
    logger: Logger,
) -> Distillation:
    """Load the teachers that the flags name, log them, and add projectors to the student, which is on the CPU, for its
    images of `data_config` (input_size, mean, std). Raise UserError if a teacher does not exist or can't be fetched,
    can't take such images, or has no tokens or other classes than the student."""
    names_of_classes = [] if settings.teachers.kd_only else images.class_names  # without labels, those of the teacher
    whose = f"--model {settings.network.model}"
    channels, *size = data_config["input_size"]
    rows = teachers_of(settings.teachers)
    kinds = [row.kind for row in rows]
    dense_losses = [row.dense_loss for row in rows]
    names = _names_in_records([row.model for row in rows])
    schedule = sizes_of(settings, (size[0], size[1]))
    loaded = list[_Loaded]()
    loaders = dict[Any, Loader]()
    for row, name in zip(rows, names, strict=True):
        if holds_features(row.model):
            loaded.append(_open_stored(row.model, images, settings.labels.maps.bad_label, logger))
            continue
        hw = list(row.size or size)
        whole = row.view == "whole"
        sized = data_config | {"input_size": (channels, *hw)}
        with blamed_on(f"--kd-model-name {row.model}", "can't teach", "name another, or another --kd-size"):
            classes = names_of_classes, student.num_classes, f"{whose} has {student.num_classes}"
            with torch.random.fork_rng(devices=[]):  # projectors begin alike, whether teachers are built or stored
                teacher, digest, trained = _load_teacher(settings, row.model, row.kind, sized, world, classes)
            if KINDS[row.kind].of_classes:
                names_of_classes = names_of_classes or own_names(trained.config, ())
        millions = sum(p.numel() for p in teacher.model.parameters()) / 1e6
        one_of = f", {row.kind}s, weight {row.weight:g}: {name}" if len(kinds) > 1 else ""
        size_text = f"{millions:.2f} M parameters, {hw[0]} x {hw[1]} px"
        logger.line(*(f"teacher {row.model}: {line}" for line in trained.notes))
        logger.line(f"teacher {row.model} ({digest[:12]}): {size_text}{one_of}")
        view = _View(whole, (hw[0], hw[1]), trained.data_config["interpolation"] if whole else None)
        if (whole or hw != size or schedule) and view not in loaders:
            loaders[view] = train_loader(_of_view(settings, view, schedule), images, None, sized, world)
        loaded.append(_Loaded(teacher, digest, view=loaders.get(view)))
    teachers = [each.teacher for each in loaded]
    lesson = " and ".join(f"{kind}s" for kind in dict.fromkeys(kinds))
    with blamed_on(f"{whose} can't learn {lesson}", "from these teachers", "name others (--kd-model-name)"):
        learns_features = not all(KINDS[kind].of_classes for kind in kinds)
        if learns_features or len(kinds) > 1:
            with_projector(student, teachers, (size[0], size[1]), kinds, dense_losses)
        options: dict[str, Any] = {"kind": kinds, "dense_loss": dense_losses, "drop": settings.teachers.kd_drop}
        options |= {"temperature": [row.temperature for row in rows], "weight": [row.weight for row in rows]}
        losses = DistillLoss.of(student, (size[0], size[1]), teachers, other_sizes(settings.sizes), **options)
    views = [each.view for each in loaded]
    stores = [each.store for each in loaded if each.store is not None]
    digest = " ".join(each.digest for each in loaded)
    return Distillation(digest, losses, names, views, learns_features, names_of_classes, stores)


class _Loaded(NamedTuple):
    """A teacher, the checksum of its weights or features, and the loader of its images or the store of its features."""

    teacher: Teacher
    digest: str
    view: Loader | None = None
    store: FeatureStore | None = None


def _open_stored(path: str, images: ImageSource, bad_label: str, logger: Logger) -> _Loaded:
    """Return a stored teacher of these images, and log it. Raise UserError if it is of other images, incomplete or
    damaged."""
    with blamed_on(f"--kd-model-name {path}"):
        store = open_features(path, images.paths, bad_label)
    made_by = store.info.teacher
    size = " x ".join(map(str, made_by.get("input_size", [])[1:]))
    logger.line(f"teacher {path}: stored features of {made_by.get('model')} at {size} px, {store.info.text}")
    logger.line(*(f"warning: {warning}" for warning in store.warnings))
    return _Loaded(StoredTeacher(store), hashlib.sha256(store.identity()).hexdigest(), store=store)


class _View(NamedTuple):
    """What a teacher sees: whole images or crops, of which size (H, W), and resized how; None as the student's are."""

    whole: bool
    size: tuple[int, int]
    interpolation: str | None


def _of_view(settings: TrainSettings, view: _View, schedule: SizeSchedule | None) -> TrainSettings:
    """Return the settings of a loader for a teacher: it sees images of this size, or whole ones, which are resized as
    in its own validation, in the same batches as the student, however many image sizes that has."""
    kind = view.interpolation if view.interpolation in INTERPOLATIONS else settings.augment.train_interpolation
    no_aug = view.whole or settings.augment.no_aug
    seen = settings.decide("other flags", no_aug=no_aug, train_interpolation=kind, compat=None)
    if schedule is None:
        return seen
    sizes = [list(view.size)] * len(schedule.sizes)
    return seen.decide("other flags", train_img_sizes=sizes, train_batch_sizes=schedule.batch_sizes)


def _load_teacher(
    settings: TrainSettings,
    name: str,
    kind: str,
    data_config: dict[str, Any],
    world: World,
    classes: tuple[Classes, int, str],
) -> tuple[FeatureTeacher, str, TrainedModel]:
    """Return a teacher for images of this input_size, the checksum of its weights, and how it was trained."""
    path = name if name.endswith(ENDINGS) and not timm.is_model(name) else None
    taught = classes if KINDS[kind].of_classes else None
    trained = load_frozen(None if path else name, path, data_config["input_size"], (), taught, False)
    model = trained.model
    model.pretrained_cfg = model.pretrained_cfg | {key: trained.data_config[key] for key in ("mean", "std")}
    digest = checksum(model)
    model = place_model(model, settings.precision.channels_last, world)
    dtype = None if compute_dtype(settings.precision.mixed, world.device) is None else torch.bfloat16
    input_size = data_config["input_size"]
    trained.notes += check_convolutions(model, input_size, dtype, world.device)
    pixels = data_config["mean"], data_config["std"]
    teacher = FeatureTeacher(model, input_size[1:], *pixels, dtype, compiler_of(settings).features(model))
    teacher(torch.zeros(2, *input_size, device=world.device), kind)
    if KINDS[kind].of_places:
        _ = teacher.tokens  # raises here, where the teacher is blamed and not the student
    return teacher, digest, trained


def _names_in_records(models: Sequence[str]) -> list[str]:
    """Return the names of models, or of the runs or files of their weights; they are numbered if two are equal."""
    paths = [Path(name) for name in models]
    names = [path.absolute().parent.name if path.name in (LAST, BEST) else path.name for path in paths]
    return names if len({*names}) == len(names) else [f"{number}-{name}" for number, name in enumerate(names, 1)]


def checksum(model: nn.Module) -> str:
    """Return the SHA-256 of a model's weights and their names."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
