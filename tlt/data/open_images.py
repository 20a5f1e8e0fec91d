"""The images of a split, whatever kind of data set they are in: what every program calls."""

from __future__ import annotations

from collections.abc import Sequence

from tlt.data.folder import find_split, scan_folder
from tlt.data.shards import is_sharded, open_shards
from tlt.data.source import ImageSource
from tlt.dataset_kinds import parse_kind


def open_images(
    data: str | None, split: str, dataset: str = "", class_names: Sequence[str] | None = None, allow_root: bool = False
) -> ImageSource:
    """Find the images of a split.

    Args:
        data: Folder of the data set; None only where `tlt.dataset_kinds.needs_folder` is false.
        split: Such as `"train"` or `"validation"`.
        dataset: Kind of data set (`--dataset`); "": image folders or shards, whichever is there.
        class_names: Imposed class list; None: the data set's own.
        allow_root: Take `data` itself where no split of any name is in it.

    Raises:
        UserError: No such data set, an unknown kind, or it can't be used as it is; names the flag or file.
    """
    kind, name = parse_kind(dataset)
    if kind == "hfds":
        from tlt.data.hub import open_hub_dataset

        return open_hub_dataset(name, data, split, class_names)
    assert data is not None
    if kind == "torch":
        from tlt.data.torch_datasets import open_torch_dataset

        return open_torch_dataset(name, data, split, class_names)
    folder = find_split(data, split, allow_root)
    return open_shards(folder, class_names) if is_sharded(folder) else scan_folder(folder, class_names)
