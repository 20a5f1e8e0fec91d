"""Label maps on disk: the published tree of one file per image, read and written.

`ROOT/<class>/<name>.pt` holds a tensor [2, k, H, W]: logits, then class ids, half precision. Half precision counts
exactly to 2,048 only, so a tree for more classes is written in single precision, which the published reader takes too.

`ROOT/labels.json` says what the maps are (`tlt.labels.label_info`). Published trees have none.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from tlt.errors import UserError
from tlt.io.files import with_retries
from tlt.io.names import Names
from tlt.io.progress import SearchProgress
from tlt.io.text import printable
from tlt.io.weights import load_plain
from tlt.label_map import LabelMap
from tlt.labels.label_files import find_labels, label_files_below, usual_label_name
from tlt.labels.label_info import INFO_NAME, LabelInfo

# Largest class id up to which every id is a number of its own.
_EXACT_IDS = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}


def label_dtype(num_classes: int) -> torch.dtype:
    """The number format of a tree: half precision as published, if it can tell all classes apart, else single."""
    return torch.float16 if num_classes - 1 <= _EXACT_IDS[torch.float16] else torch.float32


def write_map(path: str | Path, label_map: LabelMap, num_classes: int) -> None:
    """Write one label file in the published form, replacing `path` in one step."""
    dtype = label_dtype(num_classes)
    both = torch.stack([torch.from_numpy(label_map.values).to(dtype), torch.from_numpy(label_map.ids).to(dtype)])
    path = Path(path)
    # No process id in the name: what a killed run leaves behind, the next one overwrites.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        torch.save(both, temporary)
        # Not flushed to the disk: a million flushes take hours, and a torn file is found and made again.
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_map(path: str | Path, num_classes: int | None = None) -> LabelMap:
    """Read one label file, [2, k, H, W] or [1, 2, k, H, W], without running code from it.

    What the map says is checked by `LabelMap.validate`.

    Args:
        num_classes: The number format of the file must be able to tell so many apart.

    Raises:
        UserError: Missing, damaged, no such tensor, or class ids that its number format can't hold. The message starts
            with the file.
    """
    shown = f"label {printable(str(path))}"
    tensor = read_tensor(path, shown)
    if tensor.ndim == 5 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 4 or tensor.shape[0] != 2 or not tensor.numel():
        raise UserError(f"{shown}: shape {tuple(tensor.shape)} is not [2, k, H, W] (logits, class ids)")
    ids = tensor[1].double()
    if not torch.isfinite(ids).all() or (ids != ids.round()).any():
        raise UserError(f"{shown}: class ids are not whole numbers; is the order logits, class ids?")
    limit = _EXACT_IDS.get(tensor.dtype, 2**31 - 1)
    if max(int(ids.max()), (num_classes or 1) - 1) > limit:
        raise UserError(
            f"{shown}: class ids in {str(tensor.dtype).removeprefix('torch.')} are exact to {limit} only, too few for "
            f"{num_classes or int(ids.max()) + 1} classes; make the labels again with generate_label.py"
        )
    return LabelMap(tensor[0].half().numpy(), ids.int().numpy(), source=shown)


def read_tensor(path: str | Path, shown: str) -> torch.Tensor:
    """The tensor of a label file, without running code from it. Raises UserError, starting with `shown`, or
    MachineFault."""
    try:
        content = load_plain(io.BytesIO(with_retries(Path(path).read_bytes, str(path))), shown)
    except FileNotFoundError as error:
        raise UserError(f"{shown} does not exist") from error
    except OSError as error:
        raise UserError(f"{shown} can't be read: {error.strerror}") from error
    if not isinstance(content, torch.Tensor):
        raise UserError(f"{shown} holds a {type(content).__name__}, not a tensor [2, k, H, W]")
    # A small file may say that it is one of gigabytes, every value of which is the same in memory.
    if content.layout != torch.strided or content.nbytes > content.untyped_storage().nbytes():
        raise UserError(f"{shown} is refused: it holds fewer values than its shape {tuple(content.shape)} has")
    return content


_SAMPLED = 1024  # files of a tree that `identity` reads: if 100 of 10,000 change, some of them are among these


class TreeReader:
    """The label files of a list of images. A `tlt.labels.store.Reader`.

    Args:
        names: Image paths relative to the image folder.
        num_classes: Class ids must be below it.
        found: As in `tlt.data.sources.folder.FolderListing`.

    Attributes:
        files: The label file of every image, relative to the tree, "" where there is none.

    Raises:
        UserError: No such folder, or two images with one label file.
    """

    def __init__(
        self,
        root: str,
        names: Names,
        num_classes: int | None = None,
        found: Callable[[str, int], None] | None = None,
    ) -> None:
        self.root, self.num_classes, self._names = root, num_classes, names
        if not os.path.isdir(root):
            raise UserError(f"--token-label-data {printable(root)} does not exist or is not a folder")
        self.info = LabelInfo.read(os.path.join(root, INFO_NAME))
        self.files = find_labels(names, tree_listing(root, found), root)
        self.missing = set(np.flatnonzero(np.diff(self.files.ends, prepend=0) == 0).tolist())

    def path(self, index: int) -> str:
        """Label file of image `index`; where there is none, the file that was looked for."""
        return os.path.join(self.root, self._label(index))

    def source(self, index: int) -> str:
        return f"label {printable(self.path(index))}"

    def read(self, index: int) -> LabelMap:
        return read_map(self.path(index), self.num_classes)

    def identity(self) -> bytes:
        file = Path(self.root) / INFO_NAME
        digest = hashlib.sha256()
        count = min(len(self._names), _SAMPLED)
        for number in range(count):
            index = number * len(self._names) // count
            digest.update(os.fsencode(self._label(index)))
            path = self.path(index)
            with suppress(OSError):  # one that is missing
                digest.update(with_retries(Path(path).read_bytes, path))
        return (file.read_bytes() if file.is_file() else b"") + digest.digest()

    def extra(self) -> list[str]:
        used = set(self.files)
        return [label for label in label_files_below(self.root) if label not in used]

    def _label(self, index: int) -> str:
        return self.files[index] or usual_label_name(self._names[index])


def tree_listing(root: str, found: Callable[[str, int], None] | None = None) -> Callable[[str], Set[str]]:
    """A function that lists the label files in a folder of a tree, and reports to `found` how many there are so far."""
    report, count = found or SearchProgress(), 0

    def files_in(folder: str) -> frozenset[str]:
        nonlocal count
        path = os.path.join(root, folder)
        try:
            with os.scandir(path) as entries:
                names = frozenset(each.name for each in entries if each.name.endswith(".pt") and each.is_file())
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()
        except OSError as error:
            raise UserError(
                f"label folder {printable(path)} can't be read ({error.strerror}): mend its permissions"
            ) from error
        count += len(names)
        report(f"looking for labels in {printable(root)}", count)
        return names

    return files_in
