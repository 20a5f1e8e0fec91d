"""Label maps on disk: the published tree of one file per image, found, read and written.

`ROOT/<class>/<name>.pt` holds a tensor [2, k, H, W]: logits, then class ids, half precision. Half precision counts
exactly to 2,048 only, so a tree for more classes is written in single precision, which the published reader takes too.
An image has one label of its own; the published reader cuts the path at its first dot, and so hands one label to all
of `a.b.jpg`, `a.c.jpg` and `a.jpg`.

`ROOT/labels.json` says what the maps are (`tlt.labels.label_info`). Published trees have none.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from tlt.errors import UserError
from tlt.io.files import os_errors_told, read_bytes, write_whole
from tlt.io.jobs import SearchProgress
from tlt.io.names import Names
from tlt.io.text import natural_sorted, printable
from tlt.io.weights import load_plain
from tlt.label_map import LabelMap, whole_ids
from tlt.labels.label_info import INFO_NAME, LabelInfo

# Largest class id up to which every id is a number of its own.
_EXACT_IDS = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}
_SAMPLED = 1024  # files of a tree that `identity` reads: if 100 of 10,000 change, some of them are among these


def label_names(names: Sequence[str]) -> list[str]:
    """Relative label file of every relative image path: `a/x.jpg` -> `a/x.pt`; where `a/x.png` exists as well,
    `a/x.jpg.pt` and `a/x.png.pt`."""
    shared = Counter(os.path.splitext(name)[0] for name in names)
    return [f"{name}.pt" if shared[os.path.splitext(name)[0]] > 1 else usual_label_name(name) for name in names]


def usual_label_name(name: str) -> str:
    """The label file of an image that shares its stem with no other: `a/x.jpg` -> `a/x.pt`."""
    return os.path.splitext(name)[0] + ".pt"


def find_labels(names: Sequence[str], files: Set[str], root: str) -> Names:
    """The label file of every image, `a/x.jpg.pt` or else `a/x.pt`; "" where neither is among the `files` of `root`.

    Raises:
        UserError: A label file fits two images.
    """
    labels, owner = [], dict[str, str]()
    for name in names:
        label = next((candidate for candidate in (f"{name}.pt", usual_label_name(name)) if candidate in files), "")
        if label and (other := owner.setdefault(label, name)) != name:
            raise UserError(
                f"label {printable(os.path.join(root, label))} fits {printable(other)} and {printable(name)}; make the "
                "labels again with volo label, which tells the two apart"
            )
        labels.append(label)
    return Names(labels)


def label_files_below(root: str, on_progress: Callable[[str, int], None] | None = None) -> set[str]:
    """Label files below a folder, relative to it; reports to `on_progress` how many there are so far.

    Raises:
        UserError: A folder can't be read.
    """

    def unreadable(error: OSError) -> None:
        raise UserError(
            f"label folder {printable(str(error.filename))} can't be read ({error.strerror}): mend its permissions"
        ) from error

    paths, report = set[str](), on_progress or SearchProgress()
    for folder, _, files in os.walk(root, onerror=unreadable, followlinks=True):
        prefix = "" if folder == root else os.path.relpath(folder, root).replace(os.sep, "/") + "/"
        # A hidden file was left behind by a killed writer.
        paths.update(prefix + name for name in files if name.endswith(".pt") and not name.startswith("."))
        report(f"looking for labels in {printable(root)}", len(paths))
    return paths


def write_map(path: str | Path, label_map: LabelMap, num_classes: int) -> None:
    """Write one label file in the published form, in half precision if that can tell all classes apart, else single,
    replacing `path` in one step."""
    dtype = torch.float16 if num_classes - 1 <= _EXACT_IDS[torch.float16] else torch.float32
    both = torch.stack([torch.from_numpy(label_map.values).to(dtype), torch.from_numpy(label_map.ids).to(dtype)])
    torch.save(both, content := io.BytesIO())  # into a file it would say of a full disk no more than RuntimeError
    # Not flushed to the disk: a million flushes take hours, and a torn file is found and made again.
    write_whole(path, content.getvalue(), sync=False)


def read_map(path: str | Path, num_classes: int | None = None) -> LabelMap:
    """Read one label file, [2, k, H, W] or [1, 2, k, H, W], without running code from it.

    What the map says is checked by `LabelMap.validate`.

    Args:
        num_classes: The number format of the file must be able to tell so many apart.

    Raises:
        UserError: Missing, damaged, no such tensor, or class ids that its number format can't hold. The message starts
            with the file.
        MachineFault: It can't be read because of the machine.
    """
    name = f"label {printable(str(path))}"
    with os_errors_told(lambda error: f"{name} can't be read: {error.strerror}"):
        tensor = load_plain(io.BytesIO(read_bytes(path)), name)
    if not isinstance(tensor, torch.Tensor):
        raise UserError(f"{name} holds a {type(tensor).__name__}, not a tensor [2, k, H, W]")
    # A small file may say that it is one of gigabytes, every value of which is the same in memory.
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise UserError(f"{name} is refused: it holds fewer values than its shape {tuple(tensor.shape)} has")
    if tensor.ndim == 5 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 4 or tensor.shape[0] != 2 or not tensor.numel():
        raise UserError(f"{name}: shape {tuple(tensor.shape)} is not [2, k, H, W] (logits, class ids)")
    ids = whole_ids(tensor[1].double().numpy(), name)
    limit = _EXACT_IDS.get(tensor.dtype, 2**31 - 1)
    if max(int(ids.max()), (num_classes or 1) - 1) > limit:
        raise UserError(
            f"{name}: class ids in {str(tensor.dtype).removeprefix('torch.')} are exact to {limit} only, too few for "
            f"{num_classes or int(ids.max()) + 1} classes; make the labels again with volo label"
        )
    return LabelMap(tensor[0].half().numpy(), ids, source=name)


class TreeReader:
    """The label files of a list of images. A `tlt.labels.store.Reader`.

    Args:
        names: Image paths relative to the image folder.
        num_classes: Class ids must be below it.
        found: As in `tlt.data.sources.folder.FolderListing`.

    Raises:
        UserError: No such folder, or two images with one label file.
    """

    def __init__(
        self,
        root: str,
        names: Names,
        num_classes: int | None = None,
        on_progress: Callable[[str, int], None] | None = None,
    ) -> None:
        self.root, self.num_classes, self._names = root, num_classes, names
        if not os.path.isdir(root):
            raise UserError(f"token labels {printable(root)}: this does not exist or is not a folder")
        self.info = LabelInfo.read(os.path.join(root, INFO_NAME))
        self._files = find_labels(names, label_files_below(root, on_progress), root)
        self.missing = set(np.flatnonzero(np.diff(self._files.ends, prepend=0) == 0).tolist())

    def path(self, index: int) -> str:
        """Label file of image `index`; where there is none, the file that was looked for."""
        return os.path.join(self.root, self._files[index] or usual_label_name(self._names[index]))

    def source(self, index: int) -> str:
        return f"label {printable(self.path(index))}"

    def read(self, index: int) -> LabelMap:
        return read_map(self.path(index), self.num_classes)

    def identity(self) -> bytes:
        file, digest = Path(self.root) / INFO_NAME, hashlib.sha256()
        count = min(len(self._names), _SAMPLED)
        for index in (number * len(self._names) // count for number in range(count)):
            path = self.path(index)
            digest.update(os.fsencode(os.path.relpath(path, self.root)))
            with suppress(OSError):  # one that is missing
                digest.update(read_bytes(path))
        return (file.read_bytes() if file.is_file() else b"") + digest.digest()

    def extra(self) -> list[str]:
        return natural_sorted(label_files_below(self.root).difference(self._files))
