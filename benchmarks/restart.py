"""How long a run takes to come back: the seconds from the start of train.py's process to its first update, by part.

    python benchmark.py restart                                     # as many names as ImageNet has, VOLO-D0
    python benchmark.py restart --images 3000 --flags="--model volo_d0 -b 16 --torchcompile inductor"

The first start begins the run, with nothing compiled, and the others resume it. Each is killed when it has saved its
first update; what it has spent until then, but for the save, is in its records (`volo.record.goodput`).
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.data import make_images
from benchmarks.rounds import BenchmarkSettings, Rows
from tlt.errors import UserError
from volo.config import value_types as t
from volo.config.fields import flag
from volo.config.settings_shared import DEBUG
from volo.record.history import EVENTS, Record, read_json_lines

_CLASSES = 1000
_LINKS = 30_000  # file systems limit the names of one file
# No warm-up, whose length would depend on the data; a save after each update.
_FLAGS = "--epochs 2 --warmup-epochs 0 --recovery-interval 1 --experiment run --resume auto"
_PARTS = ("imports", "connecting", "listing", "labels", "building", "checkpoint", "data", "compiling", "step")


class Flags(BenchmarkSettings):
    """The settings of `benchmark.py restart`."""

    data_dir: t.Dir = flag("", "image folders with splits train and val (else some are made)")
    images: t.Positive = flag(1_281_167, "how many training images are made, which are links to a few files")
    flags: str = flag("--model volo_d0 -b 16 -j 2", "of train.py")
    starts: t.Positive = flag(3, "of the run; all but the first resume it")
    output: t.File = flag("", "append each row to it as a line of JSON")
    debug: bool = DEBUG()


def run(settings: Flags) -> None:
    """Start the run as often as asked, and write a row of each start."""
    rows = Rows(settings, ("start", "first update, s", *(f"{part}, s" for part in _PARTS), "note"))
    with tempfile.TemporaryDirectory(prefix="benchmark-restart-") as name:
        data = settings.data_dir or _made(Path(name, "data"), settings.images)
        script = Path(__file__).resolve().parents[1] / "train.py"
        command = [sys.executable, str(script), data, *f"{_FLAGS} {settings.flags} --output {name}".split()]
        # What torch has set here, when it was imported, is no user's wish.
        environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
        environment["VOLO_COMPILED"] = str(Path(name, "compiled"))
        for number in range(1, settings.starts + 1):
            with rows.measuring({"start": number}):
                spent = _first_update(command, environment, Path(name, "run", EVENTS))
                parts = {f"{part}, s": spent.get(part, 0.0) for part in _PARTS}
                rows.write({"start": number, "first update, s": sum(parts.values())} | parts)


def _made(root: Path, images: int) -> str:
    """Make folders of images with names as ImageNet's, and one validation image for each class; return the root."""
    make_images(root / "files", -(-images // _LINKS), (500, 375))
    files = sorted((root / "files").rglob("*.jpg"))
    for label in range(min(_CLASSES, images)):
        folders = [root / split / f"n{label:08d}" for split in ("train", "val")]
        for folder in folders:
            folder.mkdir(parents=True)
        os.link(files[0], folders[1] / "ILSVRC2012_val.JPEG")
        for number in range(label, images, _CLASSES):
            os.link(files[number // _LINKS], folders[0] / f"n{label:08d}_{number}.JPEG")
    return str(root)


def _first_update(command: list[str], environment: dict[str, str], events: Path) -> Record:
    """Start the run, kill it after its first save, and return what it had spent then. Raises UserError if it ends."""
    log = events.parent.with_suffix(".log")
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        while process.poll() is None:
            for event in read_json_lines(events)[0]:
                if event["kind"] == "checkpoint" and event["pid"] == process.pid:
                    process.kill()
                    return event["spent"]
            time.sleep(0.2)
    raise UserError(f"train.py has ended: {(log.read_text().strip().splitlines() or [''])[-1][:160]}")
