"""Checks that labels and images belong together (`tlt check`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tlt.data.sources.image_file import BadImage
from tlt.data.sources.open_images import open_images
from tlt.data.sources.records import RecordImages
from tlt.data.sources.source import ImageSource
from tlt.errors import MachineFault, UserError
from tlt.io.progress import Progress
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.agreement import Agreement, agreement_text
from tlt.labels.shards import ShardReader
from tlt.labels.store import LabelStore, open_labels

_SHOWN = 3  # examples of each fault


@dataclass
class Report:
    """The faults that `check` found, each as (image or label file, reason)."""

    images: int
    labels: int = 0
    shape: tuple[int, int, int] | None = None
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    wrong_shape: list[tuple[str, str]] = field(default_factory=list)
    unusable: list[tuple[str, str]] = field(default_factory=list)
    damaged_files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    agreement: Agreement | None = None

    @property
    def usable(self) -> bool:
        """Whether every image has a label that can be trained on."""
        return not (self.missing or self.wrong_shape or self.unusable or self.damaged_files)

    def lines(self) -> list[str]:
        """The report as lines of text."""
        shape = f"(k, h, w) = {self.shape}" if self.shape else "none could be read"
        counts = [
            ("images without label", [(name, "") for name in self.missing]),
            ("labels without image", [(name, "") for name in self.extra]),
            ("labels of another shape", self.wrong_shape),
            ("labels that can't be used", self.unusable),
            ("files with a wrong checksum", [(name, "") for name in self.damaged_files]),
        ]
        lines = [*self.notes, f"{self.images} images, {self.labels} labels read, {shape}"]
        for what, faults in counts:
            lines.append(f"{what}: {len(faults)}")
            lines += [f"  {printable(name)}{': ' + why if why else ''}" for name, why in faults[:_SHOWN]]
        lines.append(
            agreement_text(self.agreement.summary()) if self.agreement else "agreement: the labels are of other classes"
        )
        return lines


def check(data: str, labels: str, split: str = "train", num_classes: int | None = None) -> Report:
    """Read every label of the images in `data`.

    Raises:
        UserError: No images, or nothing that could be their labels.
    """
    folder = open_images(data, split, allow_root=True)
    store = open_labels(labels, folder.paths, num_classes=num_classes, bad_label="skip")
    skipped = set(store.info.skipped)
    missing_names = [folder.paths[row] for row in store.missing() if folder.paths[row] not in skipped]
    report = Report(len(folder), missing=missing_names, notes=[*folder.warnings])
    if skipped:
        report.notes.append(f"{len(skipped)} images could not be read when the labels were made, and have none")
    compared = not store.info.transfer and store.info.class_names in (None, folder.class_names)
    report.agreement = Agreement() if compared else None
    shapes: dict[int, tuple[int, int, int]] = {}
    missing = set(store.missing())
    progress = Progress("checking", len(folder), "image")
    for row, truth in enumerate(folder.classes.tolist()):
        if row not in missing:
            label_map = _load(store, folder, row, report)
            if label_map is not None:
                shapes[row] = label_map.shape
                if report.agreement is not None:
                    report.agreement.add(truth, label_map)
        progress.step()
    progress.close()
    _compare_shapes(report, store, shapes, folder.paths)
    report.extra = store.reader.extra()
    tables = [each.table for each in (folder, store.reader) if isinstance(each, (RecordImages, ShardReader))]
    report.damaged_files = sorted({file for table in tables for file in table.damaged_files()})
    return report


def _load(store: LabelStore, folder: ImageSource, row: int, report: Report) -> LabelMap | None:
    try:
        label_map = store.load(row, *folder.size(row))
    except MachineFault:
        raise
    except (BadImage, UserError) as error:
        report.unusable.append((folder.paths[row], str(error)))
        return None
    report.labels += 1
    return label_map


def _compare_shapes(
    report: Report, store: LabelStore, shapes: dict[int, tuple[int, int, int]], names: Sequence[str]
) -> None:
    """Report maps of another shape than the recorded one, or than the most frequent one where none is recorded."""
    if not shapes:
        return
    frequent = Counter(shapes.values()).most_common(1)[0][0]
    report.shape = store.shape if store.reader.info else frequent
    odd = [(names[row], f"{shape}") for row, shape in shapes.items() if shape != report.shape]
    report.wrong_shape = odd
