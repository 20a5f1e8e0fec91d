"""Reads label maps by image index from any kind of store, checks them against the data, and handles bad ones."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tlt.errors import MachineFault, UserError, one_of
from tlt.io.names import Names
from tlt.io.output_folder import META_NAME
from tlt.io.text import first_difference, lookalikes, printable, some_names
from tlt.label_map import FULL_AREA, NO_AREA, Area, LabelMap, centre_square
from tlt.labels.archive import ArchiveReader
from tlt.labels.label_info import AREAS, Agreement, LabelInfo
from tlt.labels.rows import RowReader
from tlt.labels.shards import ShardReader, shard_folder
from tlt.labels.tree import TreeReader, usual_label_name

BAD_LABEL_POLICIES = ("stop", "skip", "uniform")


class Reader(Protocol):
    """Reads the label maps of a list of images. Trees of files, archives and tar shards have a reader each."""

    root: str
    missing: set[int]  # indices of images without a map

    @property
    def info(self) -> LabelInfo | None:
        """What is recorded about the maps; None for a published tree, which records nothing."""

    def read(self, index: int) -> LabelMap:
        """Return the map of image `index`, which is not missing, as stored; its area is not used, `info.area` is. Raise
        UserError if it is damaged. Data workers may be forks of a process that has called this."""

    def source(self, index: int) -> str:
        """Return where the map of image `index` is, or should be, for messages."""

    def identity(self) -> bytes:
        """Return a text from which, with shape and area, a checkpoint recognises these labels: their description, in
        which an archive has a checksum of the labels. A tree adds a hash of some of its files."""

    def extra(self) -> list[str]:
        """Return the names of the labels that belong to none of the images."""


def open_labels(
    path: str | Path,
    names: Sequence[str],
    area: str | None = None,
    num_classes: int | None = None,
    bad_label: str = "stop",
    class_names: Sequence[str] | None = None,
    label_tail: str = "zero",
    on_progress: Callable[[str, int], None] | None = None,
) -> "LabelStore":
    """Open the labels of a list of images: an archive (`volo label`), shards (`tlt pack-images`), or a tree of
    published files. Raise UserError if the labels were made for other classes, all are missing, or `"exact"` needs a
    log-sum-exp that they lack; with `"stop"` also if one is missing.

    Args:
        path: The folder of the maps.
        names: Image paths relative to the image folder, in index order.
        area: The part of the images that the maps cover, `"full"` or `"center"`. None: as recorded, else full.
        num_classes: Class ids must be below it. None takes the recorded number, if there is one.
        bad_label: What to do if a map is missing or unusable. `"stop"`: raise an error. `"skip"`: use a map that covers
            nothing, so the image is trained on its class alone. `"uniform"`: all classes are equally likely.
        class_names: The data set's class names, to compare with the recorded ones.
        label_tail: The classes that a cell does not list. `"zero"`: their logit is 0, as published; of shares, they
            have none, and the listed ones sum to 1. `"exact"`: together they have the probability that the annotator
            gave them (`relative_to_tail`), or the share that is left.
        on_progress: As in `tlt.data.sources.folder.FolderListing`.
    """
    one_of("--bad-label", bad_label, BAD_LABEL_POLICIES)
    one_of("--token-label-area", area, (None, *AREAS))
    one_of("--label-tail", label_tail, ("zero", "exact"))
    packed = names if isinstance(names, Names) else Names(names)
    reader: Reader
    if any(os.path.isfile(os.path.join(path, name)) for name in (META_NAME, "values.npy")):  # may be incomplete
        reader = ArchiveReader(os.fspath(path), packed)
    elif (shards := shard_folder(path)) is not None:
        reader = ShardReader(shards, packed)
    else:
        reader = TreeReader(os.fspath(path), packed, num_classes, on_progress)
    root = printable(reader.root)
    warnings = list[str]()
    if reader.info is not None:
        check_label_classes(reader.info, f"token labels {root}", num_classes, class_names)
        num_classes = num_classes or reader.info.num_classes
        if area not in (None, reader.info.area):
            warnings.append(f"the area {area} overrides {reader.info.area}, which {root} records")
    warnings += check_missing(reader, packed, bad_label)
    info = reader.info or _info_of_first_map(reader, len(names), num_classes, bad_label)
    exact_tail = label_tail == "exact"
    if exact_tail and not (info.log_sum_exp or info.shares):
        raise UserError(f"--label-tail exact: {root} has no log-sum-exp: make an archive with `volo label`")
    if exact_tail and not num_classes:
        raise UserError(f"--label-tail exact: {root} does not say how many classes there are: give --num-classes")
    return LabelStore(reader, packed, info, area or info.area, num_classes, bad_label, exact_tail, warnings)


@dataclass
class LabelStore:
    """The label maps of a list of images; a `tlt.data.dataset.LabelReader`."""

    reader: Reader  # reads the stored maps
    names: Names  # image paths relative to the image folder, in index order
    info: LabelInfo  # the description that all maps share
    area: str | Area  # the part of the images that the maps cover
    num_classes: int | None  # see `open_labels`
    bad_label: str  # see `open_labels`
    exact_tail: bool  # whether the classes that a cell does not list have their exact probability
    warnings: list[str]  # warnings of one line each, which rank 0 prints once
    _faults: list[tuple[str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(k, h, w) of every map."""
        return self.info.shape

    def identity(self) -> str:
        """Return the sha256 from which a checkpoint recognises these labels."""
        return hashlib.sha256(repr((self.shape, self.area)).encode() + self.reader.identity()).hexdigest()

    def read(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        """Return the map of image `index`, of shape `self.shape`. The size of the image is needed if the maps cover its
        centred square. Raise UserError if the map is unusable and `bad_label` is `"stop"`, and MachineFault, whatever
        it is, if the map can't be read because of the machine."""
        try:
            if index not in self.reader.missing:
                label_map = self.load(index, width, height)
                if label_map.shape == self.shape:
                    return label_map
                raise UserError(
                    f"{label_map.source}: shape (k, h, w) = {label_map.shape}, but the others' is {self.shape}; "
                    "make it again with the others' settings"
                )
        except UserError as error:
            if self.bad_label == "stop" or isinstance(error, MachineFault):
                raise
            self._faults.append((self.names[index], str(error)))
        area = FULL_AREA if self.bad_label == "uniform" else NO_AREA
        return LabelMap.unknown(self.shape, area, self.info.shares)

    def load(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        """Return the map of image `index`, which is not missing. Raise UserError if it is unusable."""
        label_map = self.reader.read(index).validate(self.num_classes)
        values = label_map.values
        lse = label_map.log_sum_exp
        if label_map.void is not None:
            if not self.exact_tail:
                values = values / np.where((total := values.sum(0)) > 0, total, 1)
        elif self.exact_tail:
            assert self.num_classes
            if lse is None or not np.isfinite(lse).all():
                raise UserError(f"{label_map.source}: a log-sum-exp is missing or not finite; make this label again")
            values = relative_to_tail(torch.from_numpy(values), torch.from_numpy(lse), self.num_classes).numpy()
        area = FULL_AREA if self.area == "full" else self.area
        if isinstance(area, str):  # the centre
            if not width or not height:
                raise ValueError("maps of the centred square can only be placed with the size of the source image")
            area = centre_square(width, height)
        return LabelMap(values, label_map.ids, area, label_map.source, void=label_map.void)

    def take_faults(self) -> list[tuple[str, str]]:
        """Return (image, reason) for each map that `read` replaced since the last call."""
        faults = self._faults
        self._faults = []
        return faults


def relative_to_tail(values: torch.Tensor, log_sum_exp: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Subtract from the listed logits (..., k, h, w) the logit of the classes that their cell does not list
    (`--label-tail exact`). Return float32 logits; if all `num_classes` are listed, the unchanged values.

    Published targets assume logit 0 for unlisted classes. The log-sum-exp (LSE) of all the annotator's logits tells how
    probable they are together. We give each of them the same logit, t = log((exp(LSE) - sum of exp(listed)) / (C - k)),
    so that listed classes have exactly the annotator's probabilities. Shifting all logits does not change a softmax, so
    we subtract t: unlisted classes then have logit 0, as the code that makes targets expects.

    A tail probability too small for float32 (rounding may even make it negative) counts as half the last digit of the
    log-sum-exp (..., h, w): probabilities are exact to about 1e-7 times that, and logits stay finite.
    """
    k = values.shape[-3]
    if k >= num_classes:
        return values.float()
    total = log_sum_exp.double()
    last_digit = 2.0**-24 * total.abs().clamp(min=1)
    share = torch.maximum(-torch.expm1(values.double().logsumexp(-3) - total), last_digit)
    tail = total + torch.log(share / (num_classes - k))
    return (values.double() - tail.unsqueeze(-3)).float()


def sampled_agreement(labels: LabelStore, classes: np.ndarray, sample: int) -> Agreement:
    """Count how often the maps of a sample of images name the images' `classes` (N,), without unusable maps."""
    tally = Agreement()
    for index in sorted({number * len(labels) // sample for number in range(sample)} - labels.reader.missing):
        with suppress(UserError):  # training reports or counts it
            tally.add(int(classes[index]), labels.reader.read(index).validate(labels.num_classes))
    return tally


def check_label_classes(info: LabelInfo, where: str, count: int | None, class_names: Sequence[str] | None) -> None:
    """Raise UserError if the labels have other classes than the model, or others or fewer than the class folders."""
    if count and info.num_classes and count != info.num_classes:
        raise UserError(
            f"{where} has labels of {info.num_classes} classes, but the model has {count}: give "
            f"--num-classes {info.num_classes} or make labels with an annotator for {count} classes"
        )
    if count and info.max_id is not None and info.max_id >= count:
        raise UserError(
            f"{where} has class ids up to {info.max_id}, which are not in 0..{count - 1} (--num-classes {count}); "
            "were these labels made for other classes?"
        )
    if class_names is None or info.transfer:
        return
    if info.class_names in (None, list(class_names)) and len(class_names) <= (info.num_classes or len(class_names)):
        return
    difference = first_difference(info.class_names or list(class_names)[: info.num_classes], class_names)
    raise UserError(f"{where} was made for other class folders ({difference}); make labels for this data set")


def check_missing(
    reader: Reader | RowReader[Any], names: Names, bad_label: str, one: str = "label", made_with: str = "volo label"
) -> list[str]:
    """Return warnings of images without a row or label. Raise UserError if all are missing, or if any is and
    `bad_label` is "stop"."""
    skipped = set(reader.info.skipped) if reader.info is not None else set()
    missing = [index for index in sorted(reader.missing) if names[index] not in skipped]
    if not missing:
        return []
    all_of_them = f"{one.removesuffix('s')}s"
    text = (
        f"{len(missing)} of {len(names)} images have no {one} in {printable(reader.root)}, the first is "
        f"{printable(names[missing[0]])} (looked for {reader.source(missing[0])})"
    )
    if len(reader.missing) == len(names):
        held = reader.extra()
        hint = f": there are {some_names(held)}{lookalikes(map(usual_label_name, names), map(usual_label_name, held))}"
        raise UserError(f"{text}; these {all_of_them} are of another data set, or not complete{hint}")
    if bad_label == "stop":
        raise UserError(f"{text}; make {all_of_them} with {made_with}, or use --bad-label skip if some may be missing")
    return [f"{text}; --bad-label {bad_label}"]


def _info_of_first_map(reader: Reader, count: int, num_classes: int | None, bad_label: str) -> LabelInfo:
    """Return a description made from the first usable map, for a store that records none."""
    for index in (row for row in range(count) if row not in reader.missing):
        try:
            k, h, w = reader.read(index).validate(num_classes).shape
            return LabelInfo(k, (h, w))
        except UserError as error:
            if bad_label == "stop" or isinstance(error, MachineFault):
                raise
    raise UserError(f"token labels {printable(reader.root)}: not one of its label files can be used")
