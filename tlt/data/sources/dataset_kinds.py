"""The kinds of data set that `--dataset` names: a row each. Standard library only, as flags are checked with it."""

from __future__ import annotations

import difflib
from typing import NoReturn

from tlt.errors import UserError

FOLDERS = ("", "imagefolder", "image_folder", "folder")  # names of the kind that needs none
TORCH_NAMES = ("cifar10", "cifar100")
# Kind -> function of `tlt.data.sources` that opens it, imported when it is needed. Given what stands behind the slash,
# DATA, split, class list and a function for progress, it returns the images.
OPENERS = {
    "tfrecord": "tfrecords.open_tfrecords",
    "wds": "webdatasets.open_webdataset",
    "tfds": "tfrecords.open_tfds",
    "hfds": "libraries.open_hub_dataset",
    "csv": "csv_images.open_csv",
    "torch": "libraries.open_torch_dataset",
}
KINDS = ("tfrecord", "wds/NAME", "tfds/NAME", "hfds/NAME", "csv/FILE", *(f"torch/{name}" for name in TORCH_NAMES))


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
    if kind == "torch" and name:
        if name.lower() not in TORCH_NAMES:
            _refuse(dataset, name.lower(), TORCH_NAMES, "a folder of class folders needs no --dataset")
        return kind, name.lower()
    if kind not in OPENERS or (not name and kind != "tfrecord"):
        _refuse(dataset, dataset, KINDS, "image folders and tar shards need none")
    return kind, name


def needs_folder(dataset: str) -> bool:
    """Whether a kind is in a folder of the user's: Hugging Face's data sets have a cache of their own."""
    return parse_kind(dataset)[0] != "hfds"


def _refuse(dataset: str, asked: str, known: tuple[str, ...], hint: str) -> NoReturn:
    near = difflib.get_close_matches(asked, known, n=1, cutoff=0.5)
    known_ones = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise UserError(f"--dataset {dataset}: {known_ones} ({hint})")
