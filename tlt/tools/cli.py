"""`tlt`: label archives, and checks of labels and of stored features.

    tlt pack TREE OUT --images DATA     one archive out of a tree of labels
    tlt unpack ARCHIVE OUT              a tree of labels out of an archive
    tlt pack-masks MASKS OUT ...        labels out of masks of classes
    tlt pack-table FILE OUT ...         labels out of a table of classes
    tlt pack-images DATA OUT            images and labels into tar shards
    tlt check DATA LABELS               do labels and images belong together?
    tlt show DATA LABELS -o page.png    images, labels and token targets

LABELS may be a feature archive (`volo features`) in `check` and `show`.
Exit codes: 0 done; 2 bad input, or `check` found what can't be used (one
line on stderr, no traceback; `--debug` shows it); 5 a process was killed or
hung; 130 interrupted from the keyboard.
"""

# Arguments are parsed before torch is imported.
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import NoReturn

from tlt import __version__
from tlt.errors import UserError
from tlt.io.jobs import available_cpus
from tlt.io.text import WholeWords, open_streams, printable
from tlt.upstream import WINDOW_ROWS

_path = os.path.expanduser  # a shell does not expand `~` after "="
_COMPAT = f"volo train's, for these labels: {', '.join(WINDOW_ROWS)}"
_SPLIT = "folder of the images within DATA, if there is one (train)"


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise UserError: one line, without the usage that argparse prints before it."""
        raise UserError(f"{printable(message)} (see {self.prog} --help)")


def parser() -> ArgumentParser:
    """Return the parser of all commands. A flag's destination is the name of the function's argument."""
    description = __doc__.split("\n\n", 1)
    top = _Parser("tlt", description="\n\n".join(description), formatter_class=RawDescriptionHelpFormatter)
    top.add_argument("--version", action="version", version=f"volo-tlt {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (arguments, summary, add_flags) in _COMMANDS.items():
        # Argparse's own usage line puts flags with several values where they would swallow the positional arguments.
        usage = f"tlt {name} {arguments} [flags]"
        command = commands.add_parser(
            name, usage=usage, help=summary, description=add_flags.__doc__, formatter_class=WholeWords
        )
        add_flags(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return top


def _pack(command: ArgumentParser) -> None:
    """Pack every label file of TREE into the archive OUT, a folder. Every entry is checked. A killed command goes on
    where it was."""
    command.add_argument("tree", metavar="TREE", help="label files, CLASS/IMAGE.pt")
    command.add_argument("out", metavar="OUT", help="folder of the archive")
    command.add_argument("--images", type=_path, metavar="DATA", help="images: stores names, measures agreement")
    command.add_argument("--split", help=_SPLIT)
    command.add_argument("--area", choices=("full", "center"), help="what the maps cover (labels.json, else full)")
    command.add_argument("--transposed", action="store_true", help="the maps' rows are columns: turn them")
    command.add_argument("--overwrite", action="store_true", help="replace the archive in OUT, and nothing else")


def _unpack(command: ArgumentParser) -> None:
    """Write the maps of ARCHIVE as label files, CLASS/IMAGE.pt, as published. Every entry is checked."""
    command.add_argument("archive", metavar="ARCHIVE")
    command.add_argument("out", metavar="OUT", help="folder of the tree")
    command.add_argument("--overwrite", action="store_true", help="replace label files in OUT, and nothing else")


def _pack_masks(command: ArgumentParser) -> None:
    """Pack masks into the archive OUT: for each cell of a grid, the share of every class among its pixels. MASKS is a
    folder of PNG files of class numbers, with the paths or names of the images, or JSON files of COCO. Numbers are
    those of the class folders. If classes are not folders, images may lie anywhere below DATA, and OUT/classes.csv
    says their classes (volo train's --dataset csv/FILE). A killed command goes on where it was."""
    add = command.add_argument
    add("masks", nargs="+", metavar="MASKS", help="folder of PNG files, or JSON files")
    _labels_of_images(command)
    add("--grid", type=_positive, nargs=2, metavar="N", help="rows, columns of cells (usual image size / 16)")
    add("-k", "--top-k", type=_positive, default=5, metavar="N", help="classes kept per cell (5)")
    add("--ignore", type=_whole, nargs="*", metavar="N", help="numbers that are void (255; in JSON none)")
    add("--classes", type=_path, metavar="FILE", help="number,name lines or JSON: where folders aren't the classes")
    add("--map", dest="merge", type=_path, metavar="FILE", help="number,target lines: another number, or a name")
    add("--suffix", dest="endings", nargs=2, default=("", ""), metavar="S", help="how names of image and mask end")
    add("--workers", type=_positive, default=available_cpus(), metavar="N", help="processes (one per CPU)")


def _pack_table(command: ArgumentParser) -> None:
    """Pack a table into the archive OUT: one cell an image, with the classes of a row and their probabilities. FILE
    has lines of image, class, ids and probabilities (0,391 and 0.27,1.0), separated by tabs, or is a parquet file. More
    than 1 in all is divided by its sum; classes of the rest are as --label-tail says."""
    command.add_argument("table", metavar="FILE", help="lines with tabs (.tsv), or .parquet")
    _labels_of_images(command)
    command.add_argument("-k", "--top-k", type=_positive, metavar="N", help="classes kept per image (all)")


def _labels_of_images(command: ArgumentParser) -> None:
    add = command.add_argument
    add("out", metavar="OUT", help="folder of the archive")
    add("--images", type=_path, required=True, metavar="DATA", help="the images")
    add("--split", help=_SPLIT)
    add("--dataset", default="", metavar="KIND", help="volo train's (class folders)")
    add("--overwrite", action="store_true", help="replace the archive in OUT, and nothing else")


def _pack_images(command: ArgumentParser) -> None:
    """Pack the images of DATA, byte for byte, into tar shards OUT/SPLIT/00000.tar, ... in WebDataset's layout. Programs
    read OUT instead of DATA: same order, same classes. Every byte is read back. A killed command goes on where it
    was."""
    add = command.add_argument
    add("data", metavar="DATA", help="images")
    add("out", metavar="OUT", help="folder of the shards, one folder per split in it")
    add("--split", dest="splits", nargs="+", default=(), metavar="S", help="training set first (train validation)")
    add("--dataset", default="", metavar="KIND", help="volo train's (class folders)")
    add("--labels", type=_path, metavar="LABELS", help="label tree or archive of the first split: packed too")
    add("--shard-size", dest="shard_mb", type=_positive, default=512, metavar="MB", help="about so large (512)")
    add("--workers", type=_positive, default=available_cpus(), metavar="N", help="processes (one per CPU)")
    add("--max-side", type=_positive, metavar="N", help="longest side, px: makes larger images smaller")
    add("--overwrite", action="store_true", help="replace the shards in OUT, and nothing else")


def _check(command: ArgumentParser) -> None:
    """Count missing, extra, wrong-shaped and unusable labels, and say how often labels name the class of the image's
    folder. LABELS is a tree or an archive. Of a feature archive, count the same, and tell how much of
    the images' colours a sample of it explains where it lies, and if it is moved: mirrored, or to other images."""
    _images_and_labels(command)
    command.add_argument("--num-classes", type=_positive, metavar="N", help="labels: class ids must be below it")


def _images_and_labels(command: ArgumentParser) -> None:
    command.add_argument("data", metavar="DATA", help="image folder")
    command.add_argument("labels", metavar="LABELS", help="label tree or archive, or feature archive")
    command.add_argument("--split", default="train", help=_SPLIT)
    command.add_argument("--dataset", default="", metavar="KIND", help="volo train's (class folders)")


def _show(command: ArgumentParser) -> None:
    """Draw images, their label maps over them, and what the training pipeline makes of both: the augmented images with
    the target of every token. Of a feature archive, the colours are the first three principal components. Needs
    matplotlib."""
    _images_and_labels(command)
    command.add_argument("-o", "--output", required=True, type=_path, metavar="FILE", help="picture (.png ...)")
    command.add_argument("-n", "--n", type=_positive, metavar="N", help="images, spread over DATA (8)")
    command.add_argument("--images", nargs="+", metavar="NAME", help="these images instead: path within DATA, or name")
    command.add_argument("--masks", nargs="+", metavar="MASKS", help="draw those of which the labels were made, too")
    command.add_argument("--area", choices=("full", "center"), help="what label maps cover (as recorded, else full)")
    command.add_argument("--size", type=_positive, nargs=2, default=(224, 224), metavar="N", help="H W, px (224 224)")
    command.add_argument("--grid", type=_positive, nargs=2, metavar="N", help="rows, columns of tokens (size / 16)")
    command.add_argument("--aa", default="rand-m9-mstd0.5-inc1", metavar="POLICY", help="volo train's; none: none")
    command.add_argument("--scale", type=float, nargs=2, default=(0.08, 1.0), metavar="R", help="volo train's")
    command.add_argument("--hflip", type=float, default=0.5, metavar="P", help="volo train's (0.5)")
    command.add_argument("--reprob", type=float, default=0.25, metavar="P", help="volo train's (0.25)")
    command.add_argument("--uncovered", choices=("ignore", "uniform"), default="ignore", help="volo train's (ignore)")
    command.add_argument("--compat", nargs="+", choices=WINDOW_ROWS, default=(), metavar="ROW", help=_COMPAT)
    command.add_argument("--seed", type=_whole, default=0, help="of the choice of images and of the augmentation (0)")
    command.add_argument("--epoch", type=_positive, default=1, metavar="N", help="the augmentation of this epoch (1)")


def _whole(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


_positive = partial(_whole, least=1)

_COMMANDS = {  # name -> positional arguments, help line, function that adds flags (its docstring is the description)
    "pack": ("TREE OUT", "a tree of label files into an archive", _pack),
    "unpack": ("ARCHIVE OUT", "an archive into a tree of label files", _unpack),
    "pack-masks": ("MASKS OUT --images DATA", "masks of classes into an archive of labels", _pack_masks),
    "pack-table": ("FILE OUT --images DATA", "a table of classes into an archive of labels", _pack_table),
    "pack-images": ("DATA OUT", "images and labels into tar shards", _pack_images),
    "check": ("DATA LABELS", "whether labels, or features, and images belong together", _check),
    "show": ("DATA LABELS -o FILE", "a picture of images with their labels, or features", _show),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `tlt` command: pass the flags to the command's function, and print the lines that it returns."""
    open_streams()
    debug = "--debug" in (sys.argv if argv is None else argv)
    try:
        flags = vars(parser().parse_args(argv))
        name = flags.pop("command").replace("-", "_")
        debug = flags.pop("debug")
        module = import_module(f"tlt.tools.{'pack' if name == 'unpack' else name}")
        result = getattr(module, name)(**flags)
    except UserError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    usable, lines = result if name == "check" else (True, result)
    print("\n".join(lines), flush=True)
    return 0 if usable else UserError.exit_code
