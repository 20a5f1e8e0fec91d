"""Writes a folder of images to try everything with (`volo sample pictures`): scans of handwritten digits.

They are the 1,797 scans of UCI's "Optical Recognition of Handwritten Digits" that scikit-learn contains, so nothing is
downloaded. Every fifth scan is held out: `pictures/train/3/0013.jpg`, `pictures/validation/0/0000.jpg`.
"""

import shutil
from pathlib import Path

from PIL import Image

from tlt.errors import UserError, require
from tlt.io.files import os_errors_as
from volo.config.settings_tools import SampleSettings

SIZE = 64  # px; scans of 8 x 8 px are enlarged, so that augmentation has pixels to work on
HELD_OUT_EVERY = 5


def run(settings: SampleSettings) -> int:
    """Write the folder. Raises UserError if the folder exists already or can't be written, or scikit-learn is
    missing."""
    folder = Path(settings.directory)
    if folder.exists():
        raise UserError(f"{folder} is there already: name a new folder")
    with os_errors_as(lambda error: f"{folder} can't be written: {error.strerror}"):
        write_digits(folder, settings.images)
    return 0


def write_digits(folder: Path, most: int | None = None) -> None:
    """Write `most` scans (None: all) to train/ and validation/ in a folder, unless it exists. The folder appears only
    when it is complete."""
    if folder.is_dir():
        return
    digits = require("sklearn.datasets", "demo").load_digits()
    staged = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(staged, ignore_errors=True)
    scans = list(zip(digits.images, digits.target, strict=True))[:most]
    for split in ("train", "validation"):
        for digit in range(10):
            (staged / split / str(digit)).mkdir(parents=True)  # even if there are no scans for it
    for number, (scan, digit) in enumerate(scans):
        # Scans have 0 for paper and 16 for ink.
        image = Image.fromarray((255 - scan * 255 / 16).astype("uint8")).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        split = "train" if number % HELD_OUT_EVERY else "validation"
        image.save(staged / split / str(digit) / f"{number:04d}.jpg", quality=95)
    staged.rename(folder)
    print(f"wrote {len(scans)} scans to {folder}")
