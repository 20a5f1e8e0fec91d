"""Label maps by image index, from any kind of store: checked against the data, with a policy for bad ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import get_ident

import numpy as np
import torch

from tlt.errors import MachineFault, UserError
from tlt.io.names import Names
from tlt.io.text import printable
from tlt.label_map import FULL_AREA, NO_AREA, Area, LabelMap, centre_square
from tlt.labels.archive import ArchiveReader, is_archive
from tlt.labels.label_files import LabelMatches
from tlt.labels.metadata import AREAS, TreeMetadata
from tlt.labels.records import Reader, Record, relative_to_tail
from tlt.labels.shards import ShardReader, shard_folder
from tlt.labels.tree import TreeReader

BAD_LABEL_POLICIES = ("stop", "skip", "uniform")
_ASPECT_TOLERANCE = 0.02  # between the image a label was made of and the image now, which may have been made smaller


def open_labels(
    path: str | Path,
    names: Sequence[str],
    area: str | None = None,
    num_classes: int | None = None,
    bad_label: str = "stop",
    class_names: Sequence[str] | None = None,
    published_names: bool = False,
    label_tail: str = "zero",
    found: Callable[[str, int], None] | None = None,
    matches: LabelMatches | None = None,
) -> LabelStore:
    """The labels of a list of images: out of an archive (`tlt pack`), of shards (`tlt pack-images`), or of a tree of
    published files.

    Args:
        path: Where the maps are.
        names: Image paths relative to the image folder, in row order.
        published_names: Find labels by the published rule alone (`tlt.labels.label_files.published_label_name`).
        found: As in `tlt.data.sources.folder_listing.list_folder`.
        matches: Of a tree, as `TreeReader` has them, if they are known already.
        The others: as `LabelStore`.

    Raises:
        UserError: The labels can't be used, as far as that can be known before they are read.
    """
    packed = names if isinstance(names, Names) else Names(names)
    reader: Reader
    if is_archive(path):
        reader = ArchiveReader(os.fspath(path), packed, published_names)
    elif (shards := shard_folder(path)) is None:
        reader = TreeReader(os.fspath(path), packed, num_classes, published_names, found, matches)
    elif published_names:
        raise UserError(
            f"--compat label-names: --token-label-data {printable(shards)} are shards, where each label has its "
            "image; leave it out"
        )
    else:
        reader = ShardReader(shards, packed)
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
            have the share that the annotator gave them (`tlt.labels.records`).

    Attributes:
        metadata: How the maps were made, or None.
        area: What part of the images the maps cover.
        shape: (k, h, w) of every map.
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
        self._faults: dict[int, list[tuple[str, str]]] = {}  # by thread
        form = reader.form
        said = None if form is None else form.labels_json
        self.metadata = None if said is None else TreeMetadata.parse(said, f"{self.root}: labels.json")
        self._check_classes(class_names)
        if self.num_classes is None and self.metadata is not None:
            self.num_classes = self.metadata.num_classes
        self._tail_classes = self._classes_of_tail(label_tail)
        self._area_asked = area is not None
        self.area = self._resolve_area(area, "full" if form is None else form.area)
        self._refuse_missing()
        self.shape = self._first_shape() if form is None else form.shape

    def __len__(self) -> int:
        return len(self._names)

    @property
    def has_log_sum_exp(self) -> bool:
        """Whether the log-sum-exp of all the annotator's logits is recorded."""
        return self.reader.form is not None and self.reader.form.log_sum_exp

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
                    f"{self.source(index)}: shape (k, h, w) = {label_map.shape}, but the tree's is {self.shape}; "
                    "make it again with the others' settings"
                )
        except UserError as error:
            if self.bad_label == "stop" or isinstance(error, MachineFault):
                raise
            self._faults.setdefault(get_ident(), []).append((self._names[index], str(error)))
            return self._replacement()
        return label_map

    def load(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        """The map of image `index`, which is not missing, whatever the policy. Raises UserError."""
        record = self.reader.record(index)
        values = record.values
        if self._tail_classes:
            values = self._relative_to_tail(index, record)
        if width and height and record.size is not None:
            self._compare_size(index, record.size.tolist(), width, height)
        if record.area is None or self._area_asked or record.area[0] <= -1:
            area = self.area_of(width, height)
        else:
            x0, y0, x1, y1 = record.area.tolist()
            area = (x0, y0, x1, y1)
        return LabelMap(values.copy(), record.ids.astype(np.int32), area, self.source(index)).validate(self.num_classes)

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
        """(image, reason) of the maps replaced by `read` since the last call, in this thread."""
        return self._faults.pop(get_ident(), [])

    def _replacement(self) -> LabelMap:
        return LabelMap.unknown(self.shape, FULL_AREA if self.bad_label == "uniform" else NO_AREA)

    def _resolve_area(self, asked: str | None, recorded: str | Area) -> str | Area:
        if asked is not None and asked not in AREAS:
            raise UserError(f"--token-label-area {asked} is none of {', '.join(AREAS)}")
        if asked is not None and self.metadata is not None and asked != recorded:
            self.warnings.append(
                f"--token-label-area {asked} overrides {recorded} of {printable(self.root)}/labels.json"
            )
        return asked or recorded

    def _check_classes(self, class_names: Sequence[str] | None) -> None:
        metadata, where, form = self.metadata, f"--token-label-data {printable(self.root)}", self.reader.form
        if metadata is not None and self.num_classes not in (None, metadata.num_classes):
            raise UserError(
                f"{where} has labels of {metadata.num_classes} classes, but the model has {self.num_classes}: give "
                f"--num-classes {metadata.num_classes} or make labels with an annotator for {self.num_classes} classes"
            )
        if form is not None and self.num_classes is not None and form.max_id >= self.num_classes:
            raise UserError(
                f"{where} has class ids up to {form.max_id}, which are not in 0..{self.num_classes - 1} (--num-classes "
                f"{self.num_classes}); were these labels made for other classes?"
            )
        if class_names is None or metadata is None or metadata.class_names in (None, list(class_names)):
            return
        pairs = enumerate(zip(metadata.class_names, class_names, strict=False))
        first = next((f"class {i} is {printable(a)} there, {printable(b)} here" for i, (a, b) in pairs if a != b), "")
        counts = f"{len(metadata.class_names)} classes there, {len(class_names)} here"
        raise UserError(f"{where} was made for other class folders ({first or counts}); make labels for this data set")

    def _classes_of_tail(self, label_tail: str) -> int:
        """The number of classes for `"exact"`, 0 for `"zero"`."""
        if label_tail == "zero":
            return 0
        shown = f"--label-tail {label_tail}: label archive {printable(self.root)}"
        if isinstance(self.reader, TreeReader):
            raise UserError(
                f"--label-tail {label_tail}: {printable(self.root)} is no archive with log-sum-exp, as "
                "`generate_label.py --format archive` makes it"
            )
        if not self.has_log_sum_exp:
            raise UserError(f"{shown} has no log-sum-exp: make it with `generate_label.py --format archive`")
        if not self.num_classes:
            raise UserError(f"{shown} does not say how many classes there are: give --num-classes")
        return self.num_classes

    def _relative_to_tail(self, index: int, record: Record) -> np.ndarray:
        values, log_sum_exp = record.values, record.log_sum_exp
        if log_sum_exp is None or not np.isfinite(log_sum_exp).all():
            raise UserError(f"{self.source(index)}: a log-sum-exp is NaN or infinite; make this label again")
        # torch warns about arrays that are read-only.
        both = torch.from_numpy(values.copy()), torch.from_numpy(log_sum_exp.copy())
        return relative_to_tail(*both, self._tail_classes).numpy()

    def _compare_size(self, index: int, recorded: list[int], width: int, height: int) -> None:
        was_width, was_height = recorded
        if abs(was_width * height - was_height * width) > _ASPECT_TOLERANCE * max(was_width * height, 1):
            raise UserError(
                f"{self.source(index)} was made of an image of {was_width} x {was_height} pixels, which now has "
                f"{width} x {height}: make this label again"
            )

    def _refuse_missing(self) -> None:
        names, known = self._names, set(self.metadata.skipped) if self.metadata else set()
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

    def _first_shape(self) -> tuple[int, int, int]:
        """The shape of the first usable map, for a store that records none."""
        for index in range(len(self)):
            if index in self.reader.missing:
                continue
            try:
                record, source = self.reader.record(index), self.source(index)
                ids = LabelMap(record.values, record.ids.astype(np.int32), source=source).validate(self.num_classes).ids
            except UserError as error:
                if self.bad_label == "stop" or isinstance(error, MachineFault):
                    raise
            else:
                return ids.shape[0], ids.shape[1], ids.shape[2]
        raise UserError(f"--token-label-data {printable(self.root)}: not one of its label files can be used")
