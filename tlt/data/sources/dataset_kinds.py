"""The kinds of data set that `--dataset` names: a row each. Standard library only, as flags are checked with it."""

from __future__ import annotations

import difflib
from typing import NamedTuple, NoReturn

from tlt.errors import UserError

FOLDERS = ("", "imagefolder", "image_folder", "folder")  # names of the kind that needs none
TORCH_NAMES = ("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist")


class Kind(NamedTuple):
    """How a kind is opened.

    Attributes:
        module: Of `tlt.data.sources`; it is imported when a data set of the kind is opened.
        function: Given name, data and split it returns `RecordFiles`; where `records` is false, with `class_names` too,
            the images.
        records: Whether images are records in large files (`tlt.data.sources.records`).
        names: What may stand behind the slash: anything where there are none; no slash where it is None.
        folder: Whether the data set is in a folder of the user's.
    """

    module: str
    function: str
    records: bool = True
    names: tuple[str, ...] | None = ()
    folder: bool = True


TABLE = {
    "tfrecord": Kind("tfrecords", "find_records", names=None),
    "wds": Kind("webdatasets", "find_shards"),
    "tfds": Kind("tfds", "find_tfds"),
    # Hugging Face's data sets have a cache of their own.
    "hfds": Kind("hub", "open_hub_dataset", records=False, folder=False),
    "csv": Kind("csv_images", "open_csv", records=False),
    "torch": Kind("torch_datasets", "open_torch_dataset", records=False, names=TORCH_NAMES),
}
KINDS = tuple(
    shown
    for kind, row in TABLE.items()
    for shown in ([kind] if row.names is None else [f"{kind}/{name}" for name in row.names or ("NAME",)])
)


def parse_kind(dataset: str) -> tuple[str, str]:
    """(kind, name) of a `--dataset`: the prefix before the first slash in lower case, and the rest as it is, as timm
    has them; ("", "") for image folders and shards, which are told apart by what is there.

    Raises:
        UserError: No such kind, or one that can't be read by index.
    """
    if dataset.lower() in FOLDERS:
        return "", ""
    kind, _, name = dataset.partition("/")
    kind = kind.lower()
    if kind == "hfids":
        raise UserError(f"--dataset {dataset}: streams can't be read by index; hfds/{name} reads the same data set")
    row = TABLE.get(kind)
    if row is not None and row.names and name.lower() not in row.names:
        _refuse(dataset, name.lower(), row.names, "a folder of class folders needs no --dataset")
    if row is None or (not name and row.names is not None):
        _refuse(dataset, dataset, KINDS, "image folders and tar shards need none")
    return kind, name.lower() if row.names else name


def needs_folder(dataset: str) -> bool:
    """Whether a kind is in a folder of the user's."""
    kind, _ = parse_kind(dataset)
    return not kind or TABLE[kind].folder


def _refuse(dataset: str, asked: str, known: tuple[str, ...], hint: str) -> NoReturn:
    near = difflib.get_close_matches(asked, known, n=1, cutoff=0.5)
    known_ones = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise UserError(f"--dataset {dataset}: {known_ones} ({hint})")
