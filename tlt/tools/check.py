"""Checks whether labels and images belong together (`tlt check`)."""

from __future__ import annotations

from collections import Counter

from tlt.data.sources import open_images
from tlt.data.sources.records import RecordImages
from tlt.errors import MachineFault, UserError
from tlt.io.jobs import Progress
from tlt.io.text import printable
from tlt.labels.label_info import Agreement, agreement_text
from tlt.labels.shards import ShardReader
from tlt.labels.store import open_labels

_SHOWN = 3  # examples per kind of fault


def check(data: str, labels: str, split: str = "train", num_classes: int | None = None) -> tuple[bool, list[str]]:
    """Read every label of the images in `data`. The images themselves are read only if they are in shards. Return
    whether every image has a valid label; and the report, as lines of text. Raise UserError if there are no images, or
    nothing that could be their labels."""
    folder = open_images(data, split, None, allow_root=True)
    store = open_labels(labels, folder.paths, num_classes=num_classes, bad_label="skip")
    skipped = set(store.info.skipped)
    missing = store.reader.missing
    info = store.reader.info
    unusable: dict[str, str] = {}
    shapes: dict[str, tuple[int, int, int]] = {}
    agreement = Agreement()
    progress = Progress("checking", len(folder), "image")
    for row, name in enumerate(folder.paths):
        try:
            if row not in missing:
                label_map = store.reader.read(row).validate(store.num_classes)
                shapes[name] = label_map.shape
                agreement.add(int(folder.classes[row]), label_map)
        except MachineFault:
            raise
        except UserError as error:
            unusable[name] = str(error)
        progress.step()
    progress.close()
    usual = store.shape if info or not shapes else Counter(shapes.values()).most_common(1)[0][0]
    reader = store.reader.table if isinstance(store.reader, ShardReader) else None
    tables = [source for source in (folder, reader) if isinstance(source, RecordImages)]
    faults = {
        "images without label": {name: "" for row in sorted(missing) if (name := folder.paths[row]) not in skipped},
        "labels of another shape": {name: str(shape) for name, shape in shapes.items() if shape != usual},
        "labels that can't be used": unusable,
        "files with a wrong checksum": {file: "" for table in tables for file in sorted(table.damaged_files())},
    }
    lines = list(folder.warnings)
    if skipped:
        lines.append(f"{len(skipped)} images could not be read when the labels were made, and have none")
    shape = f"(k, h, w) = {usual}" if shapes else "none could be read"
    lines.append(f"{len(folder)} images, {len(shapes)} labels read, {shape}")
    for kind, reasons in {**faults, "labels without image": dict.fromkeys(store.reader.extra(), "")}.items():
        lines.append(f"{kind}: {len(reasons)}")
        lines += [f"  {printable(name)}{': ' + why if why else ''}" for name, why in [*reasons.items()][:_SHOWN]]
    same_classes = not store.info.transfer and store.info.class_names in (None, folder.class_names)
    lines.append(agreement_text(agreement.summary()) if same_classes else "agreement: the labels are of other classes")
    return not any(faults.values()), lines
