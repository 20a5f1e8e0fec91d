"""Where encoded images are: the images of a split, whatever kind of data set they are in (`--dataset`).

Flags are checked with the table of kinds here, so that what opens one is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from tlt.errors import MissingSplit, UserError
from tlt.io.text import printable

if TYPE_CHECKING:
    from tlt.data.sources.source import ImageSource

# Kind -> module here, its function that opens it, and what stands behind the slash; in capitals: anything. Given that,
# DATA, split and a function for progress, the function returns the images.
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
    data: str | None,
    split: str,
    dataset: str | None = "",
    class_names: Sequence[str] | None = None,
    allow_root: bool = False,
    on_progress: Callable[[str, int], None] | None = None,
    split_flag: str = "--split",
    classes: bool = True,
) -> ImageSource:
    """Find the images of a split. Records in large files are read once, every byte of them, and their table is written
    beside them, where there is none yet (`tlt.data.sources.records`).

    Args:
        data: Folder of the data set; None only where `needs_folder` is false.
        split: Such as `"train"` or `"validation"`.
        dataset: Kind of data set (`--dataset`); "": image folders or shards, whichever is there; None: so it is, and
            the program has no such flag.
        class_names: Imposed class list; None: the data set's own.
        allow_root: Take `data` itself where no split of any name is in it.
        on_progress: Called often, with what is done and how many images or files were found; None: lines are printed.
        split_flag: The program's flag that names the split.
        classes: False: images of folders may lie anywhere, and are of one class.

    Raises:
        UserError: No such data set, an unknown kind, or it can't be used as it is; names the flag or file.
    """
    from tlt.data.sources.folder import find_split, holds_shards, other_kinds, scan_folder
    from tlt.data.sources.source import check_classes

    kind, name = parse_kind(dataset)
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
        # Of a folder without splits it makes both.
        held_out = split_flag == "--val-split" or (split_flag == "--train-split" and not kind)
        hint = "; --val-fraction 0.1 makes a split" if held_out else ""
        hint += "" if kind or dataset is None else other_kinds(data or "")
        raise UserError(f"{error} ({split_flag}){hint}") from error
    check_classes(images.classes, images.class_names, printable(images.root))
    if class_names is not None:
        images.number_by(class_names)
    return images


def parse_kind(dataset: str | None) -> tuple[str, str]:
    """(kind, name) of a `--dataset`: the prefix before the first slash in lower case, and the rest as it is, as timm
    has them; ("", "") for image folders and shards, which are told apart by what is there.

    Raises:
        UserError: No such kind, or one that can't be read by index.
    """
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
    """Whether a kind is in a folder of the user's: Hugging Face's data sets have a cache of their own."""
    return parse_kind(dataset)[0] != "hfds"
