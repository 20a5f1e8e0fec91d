"""Lists image files with their classes and order: those in folders, found in one pass, or those of a table (`--dataset
csv/FILE`, with the columns `path` and `class`, and optionally `split`).

The class of an image is the name of the folder that holds it. Classes and images are in natural order of their paths
(`n2` before `n10`), as in timm. timm silently ignores unreadable folders, empty classes, other suffixes and two folders
with one name; here they are errors or warnings, because each can shift all labels.
"""

import csv
import os
import re
from collections import Counter, defaultdict
from pathlib import PurePath

import numpy as np

from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, image_extensions, read_file
from tlt.data.sources.source import ImageSource, ProgressCallback, left_out_lines
from tlt.errors import MissingSplit, UserError
from tlt.io.files import blamed_on, os_errors_as, read_lines, regular_only
from tlt.io.jobs import SearchProgress
from tlt.io.names import Names
from tlt.io.text import leads_out, lookalikes, natural_key, natural_sorted, printable, some_names

TRAIN_SPLITS = ("train", "training")
VALIDATION_SPLITS = ("val", "valid", "validation", "eval", "evaluation")
TABLE = "shards"  # name of the table of images in a folder of tar shards
LABELS = "labels"  # of label maps
PACKING = "packing.json"  # says what `tlt pack-images` packs here, and whether it has finished
# Folders that file systems, network drives and archive programs create, some of which hold small pictures.
_SYSTEM_FOLDERS = {"lost+found", "$RECYCLE.BIN", "System Volume Information", "__MACOSX"}
_SYSTEM_FOLDERS |= {"@eaDir", "@Recycle", "#recycle", "#snapshot"}
_HIDDEN = re.compile(r"(^|/)\.")


class FolderListing:
    """Lists the images below `root`. Raises UserError if a folder is missing or unreadable. `on_progress` is called
    with a message and the number of images so far; None prints lines if it takes long. If folders are `classes`, images
    in `root` itself have no class and are left out."""

    def __init__(
        self, root: str | os.PathLike[str], on_progress: ProgressCallback | None = None, classes: bool = True
    ) -> None:
        self.root = os.fspath(root)
        self._on_progress = on_progress or SearchProgress()
        self._classes = classes
        self.names = list[str]()  # `CLASS/FILE` relative to `root`, in natural order of the whole path
        self.leaves = list[str]()  # folders that hold images, or no folder
        self.leaf = list[int]()  # for each name, the index in `leaves` of its folder
        self._left_out = defaultdict[str, list[str]](list)
        self._linked: set[str] = set()  # real paths of folders that were read through links
        self._suffixes = image_extensions()
        self._real_root = os.path.realpath(self.root)
        if not os.path.isdir(self.root):
            raise UserError(f"image folder {printable(self.root)} does not exist or is not a folder")
        pending = [("", -1)]  # paths, the next one last, with the leaf of an image or -1 for a folder
        while pending:
            path, leaf = pending.pop()
            if leaf < 0:
                pending += reversed(self._children(path))
                self._on_progress(f"listing {printable(self.root)}", len(self.names))
            else:
                self.names.append(path)
                self.leaf.append(leaf)

    @property
    def warnings(self) -> list[str]:
        """Return a line for each reason for which entries were left out."""
        return [f"{printable(self.root)}: {line}" for line in left_out_lines(self._left_out)]

    def _children(self, folder: str) -> list[tuple[str, int]]:
        prefix = os.path.join(folder, "")
        images, folders = self._entries(folder)
        if self._classes and not folder:
            self._left_out["images outside of any class folder"] += images
            images = []
        for link in sorted(name for name, is_link in folders.items() if is_link):
            if self._is_read_elsewhere(prefix + link):
                self._left_out["links to folders already read"].append(prefix + link)
                del folders[link]
        leaf = len(self.leaves)
        if (images or not folders) and (folder or not self._classes):
            self.leaves.append(folder)
        if not folders:
            return [(prefix + name, leaf) for name in natural_sorted(images)]
        # Whole paths are in natural order if each folder is sorted as if a slash followed its name.
        names = sorted(sorted([*images, *folders]), key=lambda name: natural_key(name + "/" * (name in folders)))
        return [(prefix + name, -1 if name in folders else leaf) for name in names]

    def _entries(self, folder: str) -> tuple[list[str], dict[str, bool]]:
        """Return the names of the images in a folder, and its subfolders with whether each is a link."""
        path = os.path.join(self.root, folder)
        images = list[str]()
        folders = dict[str, bool]()
        remedy = "mend its permissions or the link"
        remedy += "; leaving it out would change the class numbers" if self._classes else ""
        explained = os_errors_as(lambda e: f"{printable(e.filename or path)} can't be read ({e.strerror}): {remedy}")
        with explained, os.scandir(path) as entries:
            for entry in entries:
                name = entry.name
                by_suffix = name[name.rfind(".") :].lower() in self._suffixes
                if by_suffix and name[0] != "." and entry.is_file():
                    images.append(name)
                elif name[0] != "." and name not in _SYSTEM_FOLDERS and entry.is_dir():
                    folders[name] = entry.is_symlink()
                else:
                    self._left_out[_kind(entry, by_suffix)].append(os.path.join(folder, name))
        return images, folders

    def _is_read_elsewhere(self, link: str) -> bool:
        """Return whether a linked folder is read anyway, at its real place or through another link, or contains the
        split or the link itself."""
        path = os.path.join(self.root, link)
        real, parent = map(os.path.realpath, (path, os.path.dirname(path)))
        if any(os.path.commonpath([real, folder]) == real for folder in (self._real_root, parent)):
            return True
        read_above = {real, *map(str, PurePath(real).parents)} & {self._real_root, *self._linked}
        if any(not _HIDDEN.search(real[len(folder) :]) for folder in read_above):  # hidden folders are not read
            return True
        self._linked.add(real)
        return False


def _kind(entry: os.DirEntry[str], by_suffix: bool) -> str:
    """Return the kind of an entry that is neither an image nor a folder."""
    if entry.name[0] == ".":
        return "hidden entries"
    if entry.name in _SYSTEM_FOLDERS:
        return "folders of the system"
    if by_suffix:
        return "pipes or dangling links"
    entry.stat()  # raises for a dangling link: it may have been a class folder
    return "files that are not images by their suffix"


class ImageFolder(ImageSource):
    """A source of image files; `paths` are relative to `root`."""

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        return read_file(self.path(index), max_pixels)


def scan_folder(
    root: str | os.PathLike[str], on_progress: ProgressCallback | None = None, classes: bool = True
) -> ImageFolder:
    """Find all images under `root`, a folder of class folders, at any depth. All folders found are classes, in natural
    order, even without images. Without `classes` images may lie anywhere, and all have one class. Raise UserError if a
    folder is missing or unreadable, there are no images, or two class folders have one name."""
    listing = FolderListing(root, on_progress, classes)
    if not classes:
        same = np.zeros(len(listing.names), np.int64)
        return ImageFolder(listing.root, Names(listing.names), same, ["unlabelled"], [], listing.warnings)
    where = printable(listing.root)
    folders = dict[str, str]()
    for folder in listing.leaves:
        first = folders.setdefault(os.path.basename(folder), folder)
        if first != folder:
            raise UserError(
                f"two class folders named {printable(os.path.basename(folder))!r} in {where}: {printable(first)} and "
                f"{printable(folder)}; the folder's own name is the class, so give each its own"
            )
    names = natural_sorted(folders)
    numbers = {name: number for number, name in enumerate(names)}
    if not listing.names:
        notes = "".join(f"; {line}" for line in listing.warnings)
        raise UserError(
            f"no images in the class folders of {where} (expected {where}/CLASS/IMAGE.jpg or another format that "
            f"Pillow reads){notes}{other_kinds(listing.root)}"
        )
    image_classes = np.array([numbers[os.path.basename(folder)] for folder in listing.leaves], np.int64)[listing.leaf]
    warnings = [*listing.warnings]
    if empty := [names[number] for number in np.flatnonzero(np.bincount(image_classes, minlength=len(names)) == 0)]:
        warnings.append(f"{where}: {len(empty)} classes without images keep their number: {some_names(empty)}")
    return ImageFolder(listing.root, Names(listing.names), image_classes, names, list(folders), warnings)


def open_csv(name: str, data: str, split: str, _on_progress: object) -> ImageFolder:
    """Return the images of a table, in its order. `name` is the file, relative to `data` or absolute; its first line
    names the columns. `path` is an image file's path relative to `data`. `split` selects the rows whose column `split`,
    if there is one, has this name or a synonym.

    Raise UserError if the file can't be read, has other columns, a row with other fields, an image twice, or an image
    that is missing or outside `data`; MissingSplit if no row is in the split, or a table without splits is asked for
    the validation images.
    """
    file = os.path.join(data, name)
    searched = split_names(split)
    rows = _rows(file)
    csv_name = printable(file)
    used = [row for row in rows if row.get("split", "train") in searched]
    if not used:
        splits = some_names(sorted({row["split"] for row in rows if "split" in row}))
        raise MissingSplit(f"{csv_name} has no row whose column 'split' says {split}: it has {splits}")
    paths = [row["path"] for row in used]
    gone = [path for path in paths if not os.path.isfile(os.path.join(data, path))]
    if gone or len(set(paths)) < len(paths):
        what = f"{len(gone)} images that are not there ({some_names(gone)})" if gone else "an image more than once"
        raise UserError(f"{csv_name} names {what}: paths count from {printable(data)}")
    class_names = natural_sorted({row["class"] for row in rows})
    numbers = {name: number for number, name in enumerate(class_names)}
    image_classes = np.array([numbers[row["class"]] for row in used])
    return ImageFolder(data, Names(paths), image_classes, class_names, class_names)


def _rows(file: str) -> list[dict[str, str]]:
    """Return the rows, with normalised paths (`a.jpg` for `./a.jpg`)."""
    csv_name = printable(file)
    rows = list[dict[str, str]]()
    told = blamed_on(file, "can't be read as a table", "see --dataset csv/FILE")
    with told, open(file, newline="", encoding="utf-8-sig", opener=regular_only) as lines:
        reader = csv.DictReader(lines, skipinitialspace=True)
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        if not {"path", "class"} <= {*reader.fieldnames}:
            raise UserError(f"{csv_name} is no table, with commas, of columns 'path' and 'class' in its first line")
        for read in reader:
            row = {name: text.strip() if name in ("class", "split") and text else text for name, text in read.items()}
            where = f"{csv_name}, line {reader.line_num}"
            if any(row.get(None, ())) or None in row.values() or "" in (row["path"], row["class"]):
                raise UserError(
                    f"{where}: a row needs a path and a class, and a field for each column and no more; write "
                    '"a, b" for a name with a comma'
                )
            row["path"] = os.path.normpath(row["path"])
            if leads_out(row["path"]):
                raise UserError(f"{where}: {printable(row['path'])} is not below DATA: paths count from there")
            rows.append(row)
    return rows


def split_names(split: str) -> list[str]:
    """Return the names to try for a split: its own, then timm's synonyms of it."""
    synonyms = [name for names in (TRAIN_SPLITS, VALIDATION_SPLITS) if split in names for name in names]
    return [split, *(name for name in synonyms if name != split)]


def find_split(data_dir: str | os.PathLike[str], split: str, allow_root: bool = False) -> str:
    """Return the folder of a split under `data_dir`, or `data_dir` itself if it has no split of any name and
    `allow_root` is set (for programs that read one split only). The split's own name comes first, then timm's synonyms
    of it. Raise UserError if there is no such folder; the message shows the names tried. timm uses `data_dir` itself in
    this case, so a run without a validation folder validates on the training images."""
    data_dir = os.fspath(data_dir)
    if not os.path.isdir(data_dir):
        raise UserError(f"data folder {printable(data_dir)} does not exist or is not a folder{other_kinds(data_dir)}")
    searched = split_names(split)
    for name in searched:
        if os.path.isdir(os.path.join(data_dir, name)):
            return os.path.join(data_dir, name)
    any_split = any(os.path.isdir(os.path.join(data_dir, name)) for name in TRAIN_SPLITS + VALIDATION_SPLITS)
    if allow_root and not any_split:
        return data_dir
    raise MissingSplit(
        f"no {printable(split)!r} folder in {printable(data_dir)} (searched {', '.join(map(printable, searched))}; "
        f"it holds {some_names(sorted(os.listdir(data_dir)))}): make it, or name another split"
    )


def other_kinds(path: str) -> str:
    """Return a hint if `path` is a file that is no image, or a folder with such a file; else ""."""
    inside = os.listdir(path) if os.path.isdir(path) else []
    paths = [os.path.join(path, name) for name in inside if name[0] != "."] or [path]
    if all(os.path.splitext(file)[1].lower() in image_extensions() or not os.path.isfile(file) for file in paths):
        return ""
    return "; unpack archives first, and name another kind of data set by --dataset (docs/data.md)"


def holds_shards(folder: str) -> bool:
    """Return whether a folder has shards: a table, or tar files and no folder. Raise UserError if some are missing."""
    try:
        with os.scandir(folder) as entries:
            folders = {entry.name: entry.is_dir() for entry in entries}
    except OSError:  # scan_folder reports it
        return False
    if f"{TABLE}.json" in folders:
        return True
    if PACKING in folders:
        raise UserError(f"shards in {printable(folder)} are not complete: run `tlt pack-images` again")
    return not any(folders.values()) and any(name.endswith(".tar") and name[0] != "." for name in folders)


def compare_classes(train: ImageSource, val: ImageSource) -> None:
    """Check that both splits have the same class folders. One without training images may be missing in `val`. Raise
    UserError if a class is in one split only; the message names both lists."""
    trained = [train.class_names[index] for index in np.unique(train.classes).tolist()]
    train_names = set(train.class_names)
    validated = set(val.folder_names)
    only_train = [name for name in trained if name not in validated]
    only_val = [name for name in val.folder_names if name not in train_names]
    if only_train or only_val:
        raise UserError(
            f"classes differ: {len(only_train)} in {printable(train.root)} only ({some_names(only_train)}), "
            f"{len(only_val)} in {printable(val.root)} only ({some_names(only_val)}): "
            f"make the missing folders (they may be empty) or remove the others{lookalikes(only_train, only_val)}"
        )


def check_num_classes(folder: ImageSource, num_classes: int) -> list[str]:
    """Compare `--num-classes` with the class folders. Return a warning if it is larger. Raise UserError if it is
    smaller, because class ids would be out of range."""
    count = len(folder.class_names)
    if num_classes < count:
        raise UserError(
            f"--num-classes {num_classes}, but {printable(folder.root)} has {count} class folders: give {count}"
        )
    if num_classes > count:
        return [f"--num-classes {num_classes}, but {printable(folder.root)} has {count} class folders only"]
    return []


def read_class_map(path: str | os.PathLike[str]) -> list[str]:
    """Read a class list (`--class-map`): one folder name per line, where the line's number is the class index. Raise
    UserError if the file is unreadable or empty, or has a name twice."""
    path = os.fspath(path)
    names = [line.strip() for line in read_lines(path, "class map")]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not names:
        problem = f"names {some_names(twice)} more than once" if twice else "is empty"
        raise UserError(f"class map {printable(path)} {problem}: give one class folder per line")
    return names
