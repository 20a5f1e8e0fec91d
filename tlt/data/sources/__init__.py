"""Finds the images of a split in any kind of data set (`--dataset`).

The table of kinds is here so that flags can be checked before the module of a kind is imported.
"""

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from tlt.errors import MissingSplit, UserError
from tlt.io.text import printable, some_names

if TYPE_CHECKING:
    from tlt.data.sources.source import ImageSource

# Kind -> its module in this folder, the function that opens it, and the allowed names after the slash; names in
# capitals stand for any name. The function takes name, DATA, split and `on_progress`, and returns the images.
OPENERS = {
    "tfrecord": ("tfrecords", "open_tfrecords", [""]),
    "wds": ("tar_shards", "open_webdataset", ["NAME"]),
    "tfds": ("tfrecords", "open_tfds", ["NAME"]),
    "hfds": ("libraries", "open_hub_dataset", ["NAME"]),
    "csv": ("folder", "open_csv", ["FILE"]),
    "torch": ("libraries", "open_torch_dataset", ["cifar10", "cifar100"]),
}
KINDS = [f"{kind}/{name}".rstrip("/") for kind, (_, _, names) in OPENERS.items() for name in names]


def open_images(
    data: str | os.PathLike[str] | None,
    split: str,
    dataset: str | None = "",
    class_names: Sequence[str] | None = None,
    allow_root: bool = False,
    on_progress: Callable[[str, int], None] | None = None,
    split_flag: str = "--split",
    classes: bool = True,
) -> "ImageSource":
    """Find the images of a split. If records in large files have no table yet, they are read once, every byte, and a
    table is written beside them (`tlt.data.sources.records`). Raise UserError if the data set does not exist, its kind
    is unknown, or it is unusable; the message names the flag or file.

    Args:
        data: Folder of the data set; may be None only if `needs_folder` is false.
        split: A name such as `"train"` or `"validation"`.
        dataset: Kind of data set (`--dataset`). "" means image folders or shards, whichever exists; so does None, for
            programs without this flag.
        class_names: Class list to impose; None keeps the data set's own.
        allow_root: Whether to use `data` itself if it has no split of any name.
        on_progress: Called often with a message and the number of images or files so far; None prints lines.
        split_flag: The program's flag for the split, for messages.
        classes: False allows images of folders anywhere; all get one class.
    """
    from tlt.data.sources.folder import TRAIN_SPLITS, find_split, holds_shards, other_kinds, scan_folder
    from tlt.data.sources.source import check_classes

    kind, name = parse_kind(dataset)
    data = data and os.fspath(data)
    if data is None and needs_folder(dataset):
        raise UserError("DATA is missing: the folder that holds the images")
    try:
        if kind:
            module, function, _ = OPENERS[kind]
            images: ImageSource = getattr(import_module(f"{__name__}.{module}"), function)(
                name, data, split, on_progress
            )
        elif holds_shards(folder := find_split(data or "", split, allow_root)):
            from tlt.data.sources.tar_shards import open_shards

            images = open_shards(folder, on_progress)
        else:
            images = scan_folder(folder, on_progress, classes)
    except MissingSplit as error:
        is_train = split_flag == "--train-split" or split in TRAIN_SPLITS
        # For a folder without splits, --val-fraction makes both splits.
        held_out = split_flag == "--val-split" or (split_flag == "--train-split" and not kind)
        hint = "; --val-fraction 0.1 makes a split" if held_out else ""
        hint += "" if kind or dataset is None else other_kinds(os.fspath(data or ""))
        raise UserError(f"{error} ({split_flag}{_likely(data, is_train)}){hint}") from error
    check_classes(images.classes, images.class_names, printable(images.root))
    folded = Counter(map(str.casefold, images.class_names))
    if alike := [name for name in images.class_names if folded[name.casefold()] > 1]:
        images.warnings.append(f"{printable(images.root)}: classes that differ in case alone: {some_names(alike)}")
    if class_names is not None:
        images.number_by(class_names)
    return images


def _likely(data: str | os.PathLike[str] | None, is_train: bool) -> str:
    """Return the name of a folder in `data` that may be the split, after a space; "" if there is none."""
    parts = ("train",) if is_train else ("val", "dev", "test")
    names = [entry.name for entry in os.scandir(data) if entry.is_dir()] if data and os.path.isdir(data) else []
    own = [name for name in sorted(names) if is_train or "train" not in name.lower()]
    likely = next((name for part in parts for name in own if re.search(rf"(?<![a-z]){part}", name.lower())), None)
    return f" {shlex.quote(printable(likely))}" if likely else ""


def parse_kind(dataset: str | None) -> tuple[str, str]:
    """Split `--dataset` at its first slash into (kind, name), the kind in lower case, as timm does; ("", "") for image
    folders and shards, which are recognised by their files. Raise UserError if the kind is unknown, or can't be read by
    index."""
    if dataset is None or dataset.lower() in ("", "imagefolder", "image_folder", "folder"):
        return "", ""
    kind, _, name = dataset.partition("/")
    kind = kind.lower()
    if kind == "hfids":
        raise UserError(f"--dataset {dataset}: streams can't be read by index; hfds/{name} reads the same data set")
    if kind == "torch":
        name = name.lower()
    _, _, names = OPENERS.get(kind, ("", "", []))
    if name not in names and not (name and any(map(str.isupper, names))):
        raise UserError(f"--dataset {dataset}: there are {', '.join(KINDS)} (image folders and tar shards need none)")
    return kind, name


def needs_folder(dataset: str | None) -> bool:
    """Return whether a kind needs a folder: Hugging Face's data sets have a cache of their own."""
    return parse_kind(dataset)[0] != "hfds"
