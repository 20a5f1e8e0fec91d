"""Label maps by image index, from any kind of store: checked against the data, with a policy for bad ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from tlt.errors import MachineFault, UserError, one_of
from tlt.io.names import Names
from tlt.io.text import first_difference, lookalikes, printable, some_names
from tlt.label_map import FULL_AREA, NO_AREA, Area, LabelMap, centre_square
from tlt.labels.archive import META_NAME, ArchiveReader
from tlt.labels.label_info import AREAS, Agreement, LabelInfo
from tlt.labels.shards import ShardReader, shard_folder
from tlt.labels.tree import TreeReader, usual_label_name

BAD_LABEL_POLICIES = ("stop", "skip", "uniform")


class Reader(Protocol):
    """Reads the label maps of a list of images from a tree of files, an archive, or tar shards.

    Attributes:
        missing: Images without a map.
        info: None for a published tree, which records nothing about its maps.
    """

    root: str
    missing: set[int]

    @property
    def info(self) -> LabelInfo | None: ...

    def read(self, index: int) -> LabelMap:
        """The map of image `index`, which is not missing, as it is stored. Raises UserError if it is damaged."""

    def source(self, index: int) -> str:
        """Where the map of image `index` is, or was looked for, for messages."""

    def identity(self) -> bytes:
        """What a checkpoint compares to recognise these labels, besides shape and area: the text that describes them.
        An archive's text has a checksum of its labels; a tree adds the contents of some of its files."""

    def extra(self) -> list[str]:
        """Labels that belong to none of the images."""


def open_labels(
    path: str | Path,
    names: Sequence[str],
    area: str | None = None,
    num_classes: int | None = None,
    bad_label: str = "stop",
    class_names: Sequence[str] | None = None,
    label_tail: str = "zero",
    on_progress: Callable[[str, int], None] | None = None,
) -> LabelStore:
    """The labels of a list of images: out of an archive (`volo label`), of shards (`tlt pack-images`), or of a tree of
    published files.

    Args:
        path: Where the maps are.
        names: Image paths relative to the image folder, in row order.
        area: `"full"` or `"center"`, what part of the images the maps cover (None: as recorded, else full).
        num_classes: Class ids must be below it; None: below the number that is recorded, if there is one.
        bad_label: What a missing or unusable map means. `"stop"`: an error. `"skip"`: a map that covers nothing, so
            that the image is trained on its class alone. `"uniform"`: every class equally likely everywhere.
        class_names: Compared with the recorded class names, if there are any.
        label_tail: The logit of classes that a cell doesn't list. `"zero"`: 0, as published. `"exact"`: such that they
            have the share that the annotator gave them (`relative_to_tail`).
        on_progress: As in `tlt.data.sources.folder.FolderListing`.

    Raises:
        UserError: The labels were made for other classes, all are missing, or there is no log-sum-exp that `"exact"`
            needs; with `"stop"` also if any is missing.
    """
    one_of("--bad-label", bad_label, BAD_LABEL_POLICIES)
    one_of("--token-label-area", area, (None, *AREAS))
    one_of("--label-tail", label_tail, ("zero", "exact"))
    packed = names if isinstance(names, Names) else Names(names)
    reader: Reader
    if any(os.path.isfile(os.path.join(path, name)) for name in (META_NAME, "values.npy")):  # complete or not
        reader = ArchiveReader(os.fspath(path), packed)
    elif (shards := shard_folder(path)) is not None:
        reader = ShardReader(shards, packed)
    else:
        reader = TreeReader(os.fspath(path), packed, num_classes, on_progress)
    root, warnings = printable(reader.root), list[str]()
    if reader.info is not None:
        _check_classes(reader.info, f"token labels {root}", num_classes, class_names)
        num_classes = num_classes or reader.info.num_classes
        if area not in (None, reader.info.area):
            warnings.append(f"the area {area} overrides {reader.info.area}, which {root} records")
    warnings += _check_missing(reader, packed, bad_label)
    info = reader.info or _info_of_first_map(reader, len(names), num_classes, bad_label)
    if label_tail != "zero" and not (info.log_sum_exp and num_classes):
        lacks = "does not say how many classes there are: give --num-classes"
        raise UserError(
            f"--label-tail {label_tail}: {root} "
            + (lacks if info.log_sum_exp else "has no log-sum-exp: make an archive with `volo label`")
        )
    return LabelStore(reader, packed, info, area or info.area, num_classes, bad_label, label_tail != "zero", warnings)


@dataclass
class LabelStore:
    """The label maps of a list of images; a `tlt.data.dataset.LabelReader`.

    Attributes:
        reader: Where the maps are.
        names: Image paths relative to the image folder, in row order.
        info: What the maps have in common.
        area: What part of the images the maps cover.
        num_classes, bad_label: As of `open_labels`.
        exact_tail: Whether classes that a cell doesn't list have their exact share.
        warnings: One line each, for rank 0 to print once.
    """

    reader: Reader
    names: Names
    info: LabelInfo
    area: str | Area
    num_classes: int | None
    bad_label: str
    exact_tail: bool
    warnings: list[str]
    _faults: list[tuple[str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(k, h, w) of every map."""
        return self.info.shape

    def identity(self) -> str:
        """The sha256 by which a checkpoint recognises these labels."""
        return hashlib.sha256(repr((self.shape, self.area)).encode() + self.reader.identity()).hexdigest()

    def read(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        """The map of image `index`, of shape `self.shape`.

        Args:
            width, height: Size of the source image, needed where the maps cover its centred square.

        Raises:
            UserError: The map is unusable and the policy is `"stop"`.
            MachineFault: It can't be read because of the machine, whatever the policy.
        """
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
        return LabelMap.unknown(self.shape, FULL_AREA if self.bad_label == "uniform" else NO_AREA)

    def load(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        """The map of image `index`, which is not missing, whatever the policy. Raises UserError."""
        label_map = self.reader.read(index).validate(self.num_classes)
        values, lse = label_map.values, label_map.log_sum_exp
        if self.exact_tail:
            assert self.num_classes
            if lse is None or not np.isfinite(lse).all():
                raise UserError(f"{label_map.source}: a log-sum-exp is missing or not finite; make this label again")
            values = relative_to_tail(torch.from_numpy(values), torch.from_numpy(lse), self.num_classes).numpy()
        area = FULL_AREA if self.area == "full" else self.area
        if isinstance(area, str):  # the centre
            if not width or not height:
                raise ValueError("maps of the centred square can only be placed with the size of the source image")
            area = centre_square(width, height)
        return LabelMap(values, label_map.ids, area, label_map.source)

    def take_faults(self) -> list[tuple[str, str]]:
        """(image, reason) of the maps replaced by `read` since the last call."""
        faults, self._faults = self._faults, []
        return faults


def relative_to_tail(values: torch.Tensor, log_sum_exp: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Listed logits less the mean logit of the classes that their cell does not list (`--label-tail exact`).

    Published targets take the logits of those classes to be 0. With the log-sum-exp (LSE) of all the annotator's logits
    their true share is known: each gets the same logit, t = log((exp(LSE) - sum of exp(listed)) / (C - k)), so that
    listed classes have the annotator's own probabilities. A softmax doesn't change if all logits are shifted: with t
    subtracted from the listed ones, the others have 0, as the code that makes targets expects.

    A tail share too small for float32 (rounding may even make it negative) counts as half the last digit
    of the log-sum-exp: probabilities are right to about 1e-7 times that, and logits stay finite.

    Args:
        values: (..., k, h, w), of different classes in a cell.
        log_sum_exp: (..., h, w) float32.
        num_classes: C.

    Returns:
        (..., k, h, w) float32. Where all classes are listed there is no tail, and the values are as they were.
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
    """How often the maps of a sample of the images name their `classes` (N,); unusable maps are left out."""
    tally = Agreement()
    for index in sorted({number * len(labels) // sample for number in range(sample)} - labels.reader.missing):
        with suppress(UserError):  # an error, or counted, when it is trained on
            tally.add(int(classes[index]), labels.reader.read(index).validate(labels.num_classes))
    return tally


def _check_classes(info: LabelInfo, where: str, asked: int | None, class_names: Sequence[str] | None) -> None:
    """Raise UserError if the labels are of other classes than `asked` for, or than the class folders."""
    if asked and info.num_classes and asked != info.num_classes:
        raise UserError(
            f"{where} has labels of {info.num_classes} classes, but the model has {asked}: give "
            f"--num-classes {info.num_classes} or make labels with an annotator for {asked} classes"
        )
    if asked and info.max_id is not None and info.max_id >= asked:
        raise UserError(
            f"{where} has class ids up to {info.max_id}, which are not in 0..{asked - 1} (--num-classes {asked}); "
            "were these labels made for other classes?"
        )
    if class_names is None or info.transfer or info.class_names in (None, list(class_names)):
        return
    difference = first_difference(info.class_names or [], class_names)
    raise UserError(f"{where} was made for other class folders ({difference}); make labels for this data set")


def _check_missing(reader: Reader, names: Names, bad_label: str) -> list[str]:
    """Warnings of missing labels. Raises UserError: all are missing, or any, and the policy is to stop."""
    known = set(reader.info.skipped) if reader.info is not None else set()
    missing = [index for index in sorted(reader.missing) if names[index] not in known]
    if not missing:
        return []
    text = (
        f"{len(missing)} of {len(names)} images have no label in {printable(reader.root)}, the first is "
        f"{printable(names[missing[0]])} (looked for {reader.source(missing[0])})"
    )
    if len(reader.missing) == len(names):
        held = reader.extra()
        hint = f": there are {some_names(held)}{lookalikes(map(usual_label_name, names), map(usual_label_name, held))}"
        raise UserError(f"{text}; these labels are of another data set, or not complete{hint}")
    if bad_label == "stop":
        raise UserError(f"{text}; make labels with volo label, or use --bad-label skip if some may be missing")
    return [f"{text}; --bad-label {bad_label}"]


def _info_of_first_map(reader: Reader, count: int, num_classes: int | None, bad_label: str) -> LabelInfo:
    """What the first usable map says, for a store that records nothing."""
    for index in (row for row in range(count) if row not in reader.missing):
        try:
            k, h, w = reader.read(index).validate(num_classes).shape
            return LabelInfo(k, (h, w))
        except UserError as error:
            if bad_label == "stop" or isinstance(error, MachineFault):
                raise
    raise UserError(f"token labels {printable(reader.root)}: not one of its label files can be used")
