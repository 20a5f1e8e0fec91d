"""Label maps by image index, from any kind of store: checked against the data, with a policy for bad ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from tlt.errors import MachineFault, UserError
from tlt.io.names import Names
from tlt.io.text import printable
from tlt.label_map import FULL_AREA, NO_AREA, Area, LabelMap, centre_square
from tlt.labels.archive import ArchiveReader, is_archive
from tlt.labels.label_files import LabelMatches
from tlt.labels.label_info import AREAS, LabelInfo
from tlt.labels.shards import ShardReader, shard_folder
from tlt.labels.tail import relative_to_tail
from tlt.labels.tree import TreeReader

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
        """Where the map of image `index` is, for messages."""

    def usual_label(self, name: str) -> str:
        """The label file that is looked for first for an image."""

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
    found: Callable[[str, int], None] | None = None,
    matches: LabelMatches | None = None,
) -> LabelStore:
    """The labels of a list of images: out of an archive (`tlt pack`), of shards (`tlt pack-images`), or of a tree of
    published files.

    Args:
        path: Where the maps are.
        names: Image paths relative to the image folder, in row order.
        found: As in `tlt.data.sources.folder_listing.list_folder`.
        matches: Of a tree, as `TreeReader` has them, if they are known already.
        The others: as `LabelStore`.

    Raises:
        UserError: The labels can't be used, as far as that can be known before they are read.
    """
    packed = names if isinstance(names, Names) else Names(names)
    reader: Reader
    if is_archive(path):
        reader = ArchiveReader(os.fspath(path), packed)
    elif (shards := shard_folder(path)) is not None:
        reader = ShardReader(shards, packed)
    else:
        reader = TreeReader(os.fspath(path), packed, num_classes, found, matches)
    return LabelStore(reader, packed, area, num_classes, bad_label, class_names, label_tail)


class LabelStore:
    """The label maps of a list of images; `tlt.data.dataset.LabelReader` by `read` and `take_faults`.

    Args:
        reader: Where the maps are.
        names: Image paths relative to the image folder, in row order.
        area: `"full"` or `"center"`, what part of the images the maps cover (None: as recorded, else full).
        num_classes: Class ids must be below it; None: below the number that is recorded, if there is one.
        bad_label: What a missing or unusable map means. `"stop"`: an error. `"skip"`: a map that covers nothing, so
            that the image is trained on its class alone. `"uniform"`: every class equally likely everywhere.
        class_names: Compared with the recorded class names, if there are any.
        label_tail: The logit of classes that a cell doesn't list. `"zero"`: 0, as published. `"exact"`: such that they
            have the share that the annotator gave them (`tlt.labels.tail`).

    Attributes:
        info: What the maps have in common.
        area: What part of the images the maps cover.
        warnings: One line each, for rank 0 to print once.

    Raises:
        UserError: The labels were made for other classes, all are missing, or there is no log-sum-exp that `"exact"`
            needs; with `"stop"` also if any is missing.
    """

    def __init__(
        self,
        reader: Reader,
        names: Names,
        area: str | None = None,
        num_classes: int | None = None,
        bad_label: str = "stop",
        class_names: Sequence[str] | None = None,
        label_tail: str = "zero",
    ) -> None:
        if bad_label not in BAD_LABEL_POLICIES:
            raise UserError(f"--bad-label {bad_label} is none of {', '.join(BAD_LABEL_POLICIES)}")
        self.reader, self.root = reader, reader.root
        self.num_classes, self.bad_label = num_classes, bad_label
        self.warnings: list[str] = []
        self._names = names
        self._faults: list[tuple[str, str]] = []
        if reader.info is not None:
            self._check_classes(reader.info, class_names)
            self.num_classes = num_classes or reader.info.num_classes
        self._refuse_missing()
        self.info = reader.info or self._info_of_first_map()
        self.area = self._resolve_area(area)
        self._tail_classes = self._classes_of_tail(label_tail)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(k, h, w) of every map."""
        return self.info.shape

    def source(self, index: int) -> str:
        """Where the map of image `index` is, for messages."""
        return self.reader.source(index)

    def identity(self) -> bytes:
        """What a checkpoint compares to recognise these labels, besides shape and area."""
        return self.reader.identity()

    def missing(self) -> list[int]:
        """Images without a map."""
        return sorted(self.reader.missing)

    def read(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        """The map of image `index`, of shape `self.shape`.

        Args:
            width, height: Size of the source image, needed where the maps cover its centred square.

        Raises:
            UserError: The map is unusable and the policy is `"stop"`.
            MachineFault: It can't be read because of the machine, whatever the policy.
        """
        if index in self.reader.missing:
            return self._replacement()
        try:
            label_map = self.load(index, width, height)
            if label_map.shape != self.shape:
                raise UserError(
                    f"{label_map.source}: shape (k, h, w) = {label_map.shape}, but the tree's is {self.shape}; "
                    "make it again with the others' settings"
                )
        except UserError as error:
            if self.bad_label == "stop" or isinstance(error, MachineFault):
                raise
            self._faults.append((self._names[index], str(error)))
            return self._replacement()
        return label_map

    def load(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        """The map of image `index`, which is not missing, whatever the policy. Raises UserError."""
        found = self.reader.read(index).validate(self.num_classes)
        values = self._relative_to_tail(found) if self._tail_classes else found.values
        return LabelMap(values, found.ids, self.area_of(width, height), found.source)

    def area_of(self, width: int | None, height: int | None) -> Area:
        """The share of an image of this size that its map covers."""
        if not isinstance(self.area, str):
            return self.area
        if self.area == "full":
            return FULL_AREA
        if not width or not height:
            raise ValueError("maps of the centred square can only be placed with the size of the source image")
        return centre_square(width, height)

    def take_faults(self) -> list[tuple[str, str]]:
        """(image, reason) of the maps replaced by `read` since the last call."""
        found, self._faults = self._faults, []
        return found

    def _replacement(self) -> LabelMap:
        return LabelMap.unknown(self.shape, FULL_AREA if self.bad_label == "uniform" else NO_AREA)

    def _resolve_area(self, asked: str | None) -> str | Area:
        recorded = self.info.area
        if asked is not None and asked not in AREAS:
            raise UserError(f"--token-label-area {asked} is none of {', '.join(AREAS)}")
        if asked is not None and self.reader.info is not None and asked != recorded:
            self.warnings.append(
                f"--token-label-area {asked} overrides {recorded}, which {printable(self.root)} records"
            )
        return asked or recorded

    def _check_classes(self, info: LabelInfo, class_names: Sequence[str] | None) -> None:
        where, asked = f"--token-label-data {printable(self.root)}", self.num_classes
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
        assert info.class_names is not None
        pairs = enumerate(zip(info.class_names, class_names, strict=False))
        first = next((f"class {i} is {printable(a)} there, {printable(b)} here" for i, (a, b) in pairs if a != b), "")
        counts = f"{len(info.class_names)} classes there, {len(class_names)} here"
        raise UserError(f"{where} was made for other class folders ({first or counts}); make labels for this data set")

    def _classes_of_tail(self, label_tail: str) -> int:
        """The number of classes for `"exact"`, 0 for `"zero"`."""
        if label_tail == "zero":
            return 0
        shown = f"--label-tail {label_tail}: {printable(self.root)}"
        if not self.info.log_sum_exp:
            raise UserError(f"{shown} has no log-sum-exp: make labels with `generate_label.py --format archive`")
        if not self.num_classes:
            raise UserError(f"{shown} does not say how many classes there are: give --num-classes")
        return self.num_classes

    def _relative_to_tail(self, label_map: LabelMap) -> np.ndarray:
        log_sum_exp = label_map.log_sum_exp
        if log_sum_exp is None or not np.isfinite(log_sum_exp).all():
            raise UserError(f"{label_map.source}: a log-sum-exp is missing or not finite; make this label again")
        both = torch.from_numpy(label_map.values), torch.from_numpy(log_sum_exp)
        return relative_to_tail(*both, self._tail_classes).numpy()

    def _refuse_missing(self) -> None:
        names, info = self._names, self.reader.info
        known = set(info.skipped) if info is not None else set()
        missing = [names[index] for index in self.missing() if names[index] not in known]
        if not missing:
            return
        text = (
            f"{len(missing)} of {len(names)} images have no label in {printable(self.root)}, the first is "
            f"{printable(missing[0])} (looked for {printable(self.reader.usual_label(missing[0]))})"
        )
        if len(missing) == len(names):
            raise UserError(f"{text}; these labels are of another data set, or not complete")
        if self.bad_label == "stop" or len(self.reader.missing) == len(names):
            raise UserError(
                f"{text}; make labels with generate_label.py, or use --bad-label skip if some may be missing"
            )
        self.warnings.append(f"{text}; --bad-label {self.bad_label}")

    def _info_of_first_map(self) -> LabelInfo:
        """What the first usable map says, for a store that records nothing."""
        for index in range(len(self)):
            if index in self.reader.missing:
                continue
            try:
                k, h, w = self.reader.read(index).validate(self.num_classes).shape
            except UserError as error:
                if self.bad_label == "stop" or isinstance(error, MachineFault):
                    raise
            else:
                return LabelInfo(k, (h, w))
        raise UserError(f"--token-label-data {printable(self.root)}: not one of its label files can be used")
