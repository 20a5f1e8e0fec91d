"""Checks whether labels or stored features belong to the images (`tlt check`)."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from tlt.data.sources import open_images
from tlt.data.sources.records import RecordImages
from tlt.data.sources.source import ImageSource
from tlt.errors import MachineFault, UserError
from tlt.io.jobs import Progress
from tlt.io.text import printable
from tlt.labels.archive import LABELS
from tlt.labels.features import FEATURES, FeatureStore, is_feature_archive, open_features
from tlt.labels.label_info import Agreement, agreement_text
from tlt.labels.rows import ArchiveKind, RowReader
from tlt.labels.shards import ShardReader
from tlt.labels.store import LabelStore, Reader, open_labels
from tlt.tools.placement import check_placement

_SHOWN = 3  # examples per kind of fault


def check(
    data: str, labels: str, split: str = "train", num_classes: int | None = None, dataset: str = ""
) -> tuple[bool, list[str]]:
    """Read every label of the images in `data`, or every map where `labels` is a feature archive. The images themselves
    are read only if they are in shards, and a sample of them for features. Return whether every image has what it
    should; and the report, as lines of text. Raise UserError if there are no images, or nothing that could be their
    labels or features."""
    stored = is_feature_archive(labels)
    folder = open_images(data, split, dataset, allow_root=True, classes=not stored)
    if not stored:
        return check_labels(folder, open_labels(labels, folder.paths, num_classes=num_classes, bad_label="skip"))
    if num_classes is not None:
        raise UserError(f"--num-classes is for labels, and {printable(labels)} holds features: leave it out")
    return check_features(folder, open_features(labels, folder.paths, bad_label="skip"))


def check_labels(folder: ImageSource, store: LabelStore) -> tuple[bool, list[str]]:
    """Check the labels of a folder, as `check` does."""
    shapes: dict[str, tuple[int, int, int]] = {}
    agreement = Agreement()

    def read(row: int) -> None:
        label_map = store.reader.read(row).validate(store.num_classes)
        shapes[folder.paths[row]] = label_map.shape
        agreement.add(int(folder.classes[row]), label_map)

    unusable = read_all(folder, store.reader.missing, read)
    usual = store.shape if store.reader.info or not shapes else Counter(shapes.values()).most_common(1)[0][0]
    faults = {
        "labels of another shape": {name: str(shape) for name, shape in shapes.items() if shape != usual},
        "labels that can't be used": unusable,
    }
    shape = f"(k, h, w) = {usual}" if shapes else "none could be read"
    usable, lines = report(folder, store.reader, LABELS, f"{len(shapes)} labels read, {shape}", faults)
    same_classes = not store.info.transfer and store.info.class_names in (None, folder.class_names)
    lines.append(agreement_text(agreement.summary()) if same_classes else "agreement: the labels are of other classes")
    return usable, lines


def check_features(folder: ImageSource, store: FeatureStore) -> tuple[bool, list[str]]:
    """Check the stored features of a folder, as `check` does."""

    def read(row: int) -> None:
        with np.errstate(invalid="ignore"):  # 0 times an infinite scale
            features = store.read(row)
        if not np.isfinite(features).all():
            raise UserError("they are not finite")
        if features.shape[:2] != (1, 1) and (features == features[0, 0]).all():
            raise UserError("all tokens are equal")

    unusable = read_all(folder, store.missing, read)
    rows = [row for row, name in enumerate(folder.paths) if row not in store.missing and name not in unusable]
    summary = f"{len(rows)} maps read, {store.info.text}"
    usable, lines = report(folder, store, FEATURES, summary, {"features that can't be used": unusable})
    in_place, line = check_placement(folder, store, rows)
    return usable and in_place, [*lines, line]


def read_all(folder: ImageSource, missing: set[int], read: Callable[[int], None]) -> dict[str, str]:
    """Call `read` with the row of each image that is not missing. Return why it raised UserError, by image."""
    unusable: dict[str, str] = {}
    progress = Progress("checking", len(folder), "image")
    for row, name in enumerate(folder.paths):
        try:
            if row not in missing:
                read(row)
        except MachineFault:
            raise
        except UserError as error:
            unusable[name] = str(error)
        progress.step()
    progress.close()
    return unusable


def report(
    folder: ImageSource,
    reader: Reader | RowReader[Any],
    of: ArchiveKind[Any],
    summary: str,
    faults: dict[str, dict[str, str]],
) -> tuple[bool, list[str]]:
    """Return whether there is no fault, and lines that report the faults, for each kind by image or file; those that
    labels and features share are added."""
    table = reader.table if isinstance(reader, ShardReader) else None
    skipped = set(reader.info.skipped) if reader.info is not None else set()
    tables = [source for source in (folder, table) if isinstance(source, RecordImages)]
    missing = {name: "" for row in sorted(reader.missing) if (name := folder.paths[row]) not in skipped}
    damaged = {file: "" for source in tables for file in sorted(source.damaged_files())}
    all_faults = {f"images without {of.one}": missing, **faults, "files with a wrong checksum": damaged}
    lines = list(folder.warnings)
    if skipped:
        lines.append(f"{len(skipped)} images could not be read when the {of.all} were made, and have none")
    lines.append(f"{len(folder)} images, {summary}")
    for kind, reasons in {**all_faults, f"{of.all} without image": dict.fromkeys(reader.extra(), "")}.items():
        lines.append(f"{kind}: {len(reasons)}")
        lines += [f"  {printable(name)}{': ' + why if why else ''}" for name, why in [*reasons.items()][:_SHOWN]]
    return not any(all_faults.values()), lines
