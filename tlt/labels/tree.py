"""Finds, reads and writes label maps in the published form: a tree with one file per image.

`ROOT/<class>/<name>.pt` holds a tensor [2, k, H, W]: logits, then class ids, in half precision. Half precision counts
exactly only to 2,048, so a tree for more classes is written in single precision, which the published reader accepts
too. We give each image its own label; the published reader cuts the path at its first dot, so `a.b.jpg`, `a.c.jpg` and
`a.jpg` all get the same one.

`ROOT/labels.json` describes the maps (`tlt.labels.label_info`). Published trees have none.
"""

import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import InitVar, dataclass
from pathlib import Path

import numpy as np
import torch

from tlt.errors import UserError
from tlt.io.files import os_errors_as, read_bytes, write_whole
from tlt.io.jobs import SearchProgress
from tlt.io.names import Names
from tlt.io.text import natural_sorted, printable
from tlt.io.weights import load_plain
from tlt.label_map import LabelMap, whole_ids
from tlt.labels.label_info import INFO_NAME, LabelInfo

# The largest class id up to which a number format represents every integer.
_EXACT_IDS = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}
_SAMPLED = 1024  # number of files that `identity` reads: of 100 changed files among 10,000 it almost surely reads one


def label_names(names: Sequence[str]) -> list[str]:
    """Return the relative label file of every relative image path: `a/x.jpg` -> `a/x.pt`, but `a/x.jpg.pt` and
    `a/x.png.pt` if `a/x.png` exists as well."""
    shared = Counter(os.path.splitext(name)[0] for name in names)
    return [f"{name}.pt" if shared[os.path.splitext(name)[0]] > 1 else usual_label_name(name) for name in names]


def usual_label_name(name: str) -> str:
    """Return the label file of an image whose stem no other image has: `a/x.jpg` -> `a/x.pt`."""
    return os.path.splitext(name)[0] + ".pt"


def find_labels(names: Sequence[str], files: Set[str], root: str) -> Names:
    """Return the label file of each image, `a/x.jpg.pt` or else `a/x.pt`; "" if neither is in the `files` of `root`.
    Raise UserError if a label file fits two images."""
    labels = []
    owner = dict[str, str]()
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
    """Return the label files below a folder, relative to it. `on_progress` gets a message and the number so far. Links
    are followed, except those to a folder in which they lie. Raise UserError if a folder can't be read."""
    paths = set[str]()
    report = on_progress or SearchProgress()
    folders = [("", frozenset[str]())]  # with the real paths of the folders whose links led there
    explained = "label folder {0.filename} can't be read ({0.strerror}): mend its permissions"
    while folders:  # os.walk calls itself for each level in Python below 3.12
        prefix, way = folders.pop()
        with os_errors_as(lambda e: printable(explained.format(e))), os.scandir(os.path.join(root, prefix)) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append((f"{prefix}{entry.name}/", way))
                elif entry.is_symlink() and os.path.isdir(entry):
                    above = way | {os.path.realpath(os.path.join(root, prefix))}
                    real = os.path.realpath(entry)
                    if not any(f"{each}/".startswith(f"{real}/") for each in above):
                        folders.append((f"{prefix}{entry.name}/", above))
                # A hidden file is what a killed writer left behind.
                elif entry.name.endswith(".pt") and not entry.name.startswith("."):
                    paths.add(prefix + entry.name)
        report(f"looking for labels in {printable(root)}", len(paths))
    return paths


def write_map(path: str | Path, label_map: LabelMap, num_classes: int) -> None:
    """Write one label file in the published form, in half precision if that can represent all classes, else in single
    precision. `path` is replaced atomically."""
    dtype = torch.float16 if num_classes - 1 <= _EXACT_IDS[torch.float16] else torch.float32
    both = torch.stack([torch.from_numpy(label_map.values).to(dtype), torch.from_numpy(label_map.ids).to(dtype)])
    torch.save(both, content := io.BytesIO())  # written to a file, a full disk would raise a vague RuntimeError
    # We don't sync: a million syncs take hours, and a later run finds and replaces a torn file.
    write_whole(path, content.getvalue(), sync=False)


def read_map(path: str | Path, num_classes: int | None = None) -> LabelMap:
    """Read one label file, [2, k, H, W] or [1, 2, k, H, W], without running code from it. `LabelMap.validate` checks
    the values. Raise UserError, which starts with the file, if it is missing or damaged, holds no such tensor, or has
    class ids that its number format can't represent, which must suffice for `num_classes`; MachineFault if the machine
    is at fault."""
    name = f"label {printable(str(path))}"
    with os_errors_as(lambda error: f"{name} can't be read: {error.strerror}"):
        tensor = load_plain(io.BytesIO(read_bytes(path)), name)
    if not isinstance(tensor, torch.Tensor):
        raise UserError(f"{name} holds a {type(tensor).__name__}, not a tensor [2, k, H, W]")
    # A small file may claim a shape of gigabytes in which all values share the same memory.
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


@dataclass
class TreeReader:
    """Reads the label files of a list of images, given their paths relative to the image folder; class ids must be
    below `num_classes`. A `tlt.labels.store.Reader`. Raises UserError if there is no such folder, or one label file
    fits two images."""

    root: str
    names: Names
    num_classes: int | None = None
    on_progress: InitVar[Callable[[str, int], None] | None] = None

    def __post_init__(self, on_progress: Callable[[str, int], None] | None) -> None:
        if not os.path.isdir(self.root):
            raise UserError(f"token labels {printable(self.root)}: this does not exist or is not a folder")
        self.info = LabelInfo.read(os.path.join(self.root, INFO_NAME))
        self._files = find_labels(self.names, label_files_below(self.root, on_progress), self.root)
        self.missing = set(np.flatnonzero(np.diff(self._files.ends, prepend=0) == 0).tolist())

    def path(self, index: int) -> str:
        """Return the label file of image `index`, or the usual path of one if there is none."""
        return os.path.join(self.root, self._files[index] or usual_label_name(self.names[index]))

    def source(self, index: int) -> str:
        return f"label {printable(self.path(index))}"

    def read(self, index: int) -> LabelMap:
        return read_map(self.path(index), self.num_classes)

    def identity(self) -> bytes:
        file = Path(self.root) / INFO_NAME
        digest = hashlib.sha256()
        count = min(len(self.names), _SAMPLED)
        for index in (number * len(self.names) // count for number in range(count)):
            path = self.path(index)
            digest.update(os.fsencode(os.path.relpath(path, self.root)))
            with suppress(OSError):  # the file may be missing
                digest.update(read_bytes(path))
        return (file.read_bytes() if file.is_file() else b"") + digest.digest()

    def extra(self) -> list[str]:
        return natural_sorted(label_files_below(self.root).difference(self._files))
