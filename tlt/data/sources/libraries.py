"""Reads data sets of other libraries by index: Hugging Face's `datasets` (`--dataset hfds/NAME`) from its memory-mapped
tables, and torchvision's CIFAR-10 and CIFAR-100 (`--dataset torch/NAME`) as images in PPM format."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tlt.data.sources.folder import TRAIN_SPLITS, VALIDATION_SPLITS
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, BadImage, check_length, read_file
from tlt.data.sources.source import MAX_CLASS, ImageSource, check_classes, numbered_names
from tlt.errors import MissingSplit, UserError, require
from tlt.io.text import natural_sorted, printable


@dataclass
class HubImages(ImageSource):
    """A source of encoded images in the only column of a `datasets.Dataset` in Arrow format."""

    table: Any = field(kw_only=True)

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        image = self.table[index].column(0)[0]
        if not image.is_valid:
            raise BadImage("no image in this row")
        data = image["bytes"].as_buffer()
        path = image["path"].as_py()
        if not data and path:
            return read_file(path, max_pixels)
        check_length(len(data or b""), max_pixels)
        return bytearray(data)


def open_hub_dataset(name: str, data: str | None, split: str, _on_progress: object) -> HubImages:
    """Open a data set with one column of images and one of classes. Raise UserError if it can't be loaded, or lacks
    this split or the columns. `name` is that of `datasets.load_dataset`: a name on the hub, or a folder. `datasets`
    stores its files in `data`; None takes its own cache. Slices (`train[:10%]`) are allowed as `split`."""
    datasets = require("datasets", "hf")
    flag = f"--dataset hfds/{printable(name)}"
    try:
        table = datasets.load_dataset(name, split=split, cache_dir=data)
    # Its builders, file systems and the hub raise errors of any class.
    except Exception as error:
        reason = printable(str(error).strip().split("\n")[0])
        raise MissingSplit(f"{flag}, split {printable(split)}, can't be loaded: {reason}") from error
    image = _column(table.features, ("Image", "bytes"), "image", flag)
    label = _column(table.features, ("ClassLabel", "text or whole number"), "label", flag)
    labels = table.select_columns(label).with_format("arrow")[:].column(0)
    if labels.null_count:
        raise UserError(
            f"{flag}, split {printable(split)}: {labels.null_count} of {len(labels)} images have no {label}: take a "
            "labelled split, or filter the data set"
        )
    values = labels.to_numpy()
    class_names = folder_names = list(getattr(table.features[label], "names", ()))
    if values.dtype == object:  # texts
        class_names = folder_names = natural_sorted({*values})
        numbers = {name: number for number, name in enumerate(class_names)}
        values = np.array([numbers[name] for name in values], np.int64)
    elif not class_names:  # whole numbers are classes as they are, as in tar shards
        folder_names = [*map(str, np.unique(values))]
        class_names = [*map(str, range(min(int(values.max(initial=-1)), MAX_CLASS) + 1))]
    classes = values.astype(np.int64)
    check_classes(classes, class_names, flag)
    # Arrow's values are views of the mapped file, so that we know a length before we copy.
    table = table.select_columns(image).cast_column(image, datasets.Image(decode=False)).with_format("arrow")
    paths = numbered_names(class_names[number] for number in classes)
    return HubImages(f"{name}/{split}", paths, classes, class_names, folder_names, table=table)


def _kind(feature: Any) -> str:
    """Return the kind of a column, in words for messages."""
    dtype = str(getattr(feature, "dtype", ""))
    if type(feature).__name__ != "Value":  # bytes may have a path beside them
        return "bytes" if isinstance(feature, dict) and "bytes" in feature else type(feature).__name__
    return "bytes" if "binary" in dtype else "text or whole number" if re.search("string|int", dtype) else dtype


def _column(features: Any, kinds: tuple[str, ...], preferred: str, flag: str) -> str:
    """Return the name of the column of the first kind that there is: `preferred`, else the only one."""
    kind = next((kind for kind in kinds if kind in map(_kind, features.values())), kinds[0])
    columns = [column for column, feature in features.items() if _kind(feature) == kind]
    if preferred in columns or len(columns) == 1:
        return preferred if preferred in columns else columns[0]
    raise UserError(
        f"{flag} has {len(columns) or 'no'} {kind} column{'s' * (len(columns) > 1)} among "
        f"{', '.join(features)}: name one of them {preferred!r}, by cast_column and rename_column of `datasets`"
    )


@dataclass
class ArrayImages(ImageSource):
    """A source of pixels in memory, (N, H, W, 3) uint8, which forked workers share."""

    pixels: np.ndarray = field(kw_only=True)

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        height, width = self.pixels.shape[1:3]
        return bytearray(b"P6\n%d %d\n255\n" % (width, height) + self.pixels[index].tobytes())


def open_torch_dataset(name: str, data: str, split: str, _on_progress: object) -> ArrayImages:
    """Open "cifar10" or "cifar100" in torchvision's layout below its `root` folder, `data`. torchvision reads it, and
    loads pickles only if their md5 is the published one. Nothing is downloaded. The split "test" is that of validation.
    Raise UserError if the data set is missing or damaged, or has no such split."""
    from torchvision import datasets

    flag = f"--dataset torch/{name} in {printable(data)}"
    if split not in (*TRAIN_SPLITS, *VALIDATION_SPLITS, "test"):
        raise UserError(f"{flag}: no split {printable(split)!r}; it has train and validation")
    reader = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    try:
        dataset = reader(data, train=split in TRAIN_SPLITS)
    except RuntimeError as error:
        raise UserError(f"{flag}: {reader.base_folder} is missing or damaged: unpack {reader.url} there") from error
    class_names = list(dataset.classes)
    classes = np.asarray(dataset.targets, np.int64)
    paths = numbered_names((class_names[number] for number in classes), ".ppm")
    return ArrayImages(data, paths, classes, class_names, class_names, pixels=np.asarray(dataset.data))
