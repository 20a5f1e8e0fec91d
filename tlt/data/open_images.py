"""The images of a split, whatever kind of data set they are in: what every program calls."""

from __future__ import annotations

from collections.abc import Sequence

from tlt.data.folder import find_split, scan_folder
from tlt.data.shards import is_sharded, open_shards
from tlt.data.source import ImageSource
from tlt.errors import UserError

FOLDERS = ("", "imagefolder", "image_folder", "folder")  # names of the kind that needs none


def open_images(
    data: str, split: str, dataset: str = "", class_names: Sequence[str] | None = None, allow_root: bool = False
) -> ImageSource:
    """Find the images of a split.

    Args:
        data: Folder of the data set.
        split: Such as `"train"` or `"validation"`.
        dataset: Kind of data set (`--dataset`); "": what is found there.
        class_names: Imposed class list; None: the data set's own.
        allow_root: Take `data` itself where no split of any name is in it.

    Raises:
        UserError: No such data set, an unknown kind, or it can't be used as it is; names the flag or file.
    """
    if dataset.lower() not in FOLDERS:
        raise UserError(f"--dataset {dataset}: image folders alone are read; leave it out")
    folder = find_split(data, split, allow_root)
    return open_shards(folder, class_names) if is_sharded(folder) else scan_folder(folder, class_names)
