"""What `volo label` and `volo features` share: a network sees every image of a folder, whole, and what it gives becomes
a row of an archive.

After an interruption the same command continues, with any number of processes. The last bits of a network's output
depend on which images share a batch. So batches follow the order of the folder, and an interrupted batch is repeated as
a whole; the rows are then the same as without an interruption.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from tlt.data.batch import SkipCounter, Skipped
from tlt.data.loader import EvalLoader
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.jobs import Progress
from tlt.io.text import printable
from tlt.labels.row_writer import RowWriter
from volo.cluster.distributed import World, from_all, from_primary, primary_first, wait_for_hosts
from volo.commands.console import say
from volo.config.settings_data import Loading
from volo.config.settings_shared import MixedPrecision
from volo.train.data import validation_loader
from volo.train.trained_model import TrainedModel

RANK_TIMEOUT = 7 * 86400.0  # seconds for which the other ranks wait while rank 0 checks the existing rows

Writer = TypeVar("Writer", bound=RowWriter[Any])


@dataclass(frozen=True)
class ArchiveJob:
    """A network, the images that it sees, and the archive that is written.

    Attributes:
        out: Folder of the archive.
        doing, done: The work in messages, such as "labelling" and "labelled".
    """

    trained: TrainedModel
    folder: ImageSource
    loading: Loading
    batch_size: int
    world: World
    out: str
    doing: str
    done: str

    def open(self, make: Callable[..., Writer], model_kwargs: dict[str, Any], overwrite: bool) -> Writer:
        """Return the archive's writer of this rank, made by `make(overwrite=, first=, made_by=)`; rank 0 creates the
        archive, or finds it. Raises UserError if OUT holds something else."""
        # Not the batch size, which decides last bits alone: a job that ran out of memory goes on with a smaller one.
        made_by: dict[str, Any] = {"--model-kwargs": model_kwargs}
        with suppress(BadImage):
            made_by["sha256 of the first image"] = hashlib.sha256(self.folder.read(0)).hexdigest()[:16]
        with primary_first():
            first = self.world.is_primary
            return make(overwrite=overwrite and first, first=first, made_by=made_by)

    def pending(self, writer: RowWriter[Any]) -> list[int] | None:
        """Return the rows that are still to write, the same on all ranks; None if the archive was complete already,
        which is said."""
        if from_primary(writer.complete):
            writer.close()
            say([f"{printable(self.out)} was complete already"], self.world.is_primary)
            return None
        pending = from_primary(writer.pending() if self.world.is_primary else [])
        if len(pending) < len(self.folder):
            done = len(self.folder) - len(pending)
            say([f"{done} of {len(self.folder)} images are {self.done} already"], self.world.is_primary)
        return pending

    def loader(self, rows: Sequence[int], skips: SkipCounter | None = None) -> EvalLoader:
        """Return the loader of these images, which are squashed as a whole to the network's input size. Its indices
        count within `rows`."""
        whole = self.trained.data_config | {"crop_pct": 1.0, "crop_mode": "squash"}
        alone = World(0, 0, 1, self.world.device)
        images = self.folder.select(list(rows))
        return validation_loader(self.loading, images, self.batch_size, whole, alone, skips=skips)

    def write(
        self,
        writer: Writer,
        pending: Sequence[int],
        rows_of: Callable[[Tensor, Sequence[str]], Iterable[Any]],
        write: Callable[[int, Any], None],
    ) -> list[str] | None:
        """Write the pending rows. The ranks share the batches that contain one. Then rank 0 marks the images that
        nobody could read as absent, and returns their paths; other ranks return None. Raises UserError if more of them
        are unreadable than `--max-bad-images` allows, or all are; or the disk is full.

        Args:
            rows_of: Returns what is written for images (B, 3, H, W), given their names for messages.
            write: Writes it into a row.
        """
        world, size = self.world, self.batch_size
        wanted = set(pending)
        starts = sorted({row // size * size for row in pending})[world.rank :: world.size]
        rows = [row for start in starts for row in range(start, min(start + size, len(self.folder)))]
        skips = SkipCounter(len(self.folder), self.loading.max_bad_images)
        progress = Progress(self.doing, len(pending)) if world.is_primary else None
        for batch in self.loader(rows, skips) if rows else ():
            numbers = [rows[index] for index in batch.indices.tolist()]
            names = [printable(self.folder.path(row)) for row in numbers]
            for row, content in zip(numbers, rows_of(batch.images, names), strict=True):
                if row in wanted:
                    write(row, content)
            if progress is not None:  # assumes that the other ranks have done as much
                progress.step(min(batch.size * world.size, len(pending) - progress.done))
        wait_for_hosts()
        skipped = from_all(skips.reasons)
        if progress is None:
            return None
        progress.step(len(pending) - progress.done)
        progress.close()
        return self._mark_absent(writer, wanted, skipped)

    def _mark_absent(self, writer: RowWriter[Any], pending: set[int], skipped: list[dict[str, str]]) -> list[str]:
        """Mark the images that could not be read, given path and reason for each rank, and return their paths."""
        folder = self.folder
        counter = SkipCounter(len(folder), self.loading.max_bad_images)
        counter.record(Skipped(*item) for of_rank in skipped for item in of_rank.items())
        if len(counter.reasons) == len(folder):
            raise UserError(f"not one of {len(folder)} images in {printable(folder.root)} can be read: check them")
        say(counter.take_lines())
        absent = sorted(row for row in pending if folder.path(row) in counter.reasons)
        for row in absent:
            writer.write_absent(row)
        return [folder.paths[row] for row in absent]


def described(trained: TrainedModel, weights: str, mixed: MixedPrecision) -> dict[str, Any]:
    """Return what an archive records of the network that made it."""
    record = {"model": trained.name, "weights": weights, "input_size": trained.data_config["input_size"]}
    record |= {"resize": "squash", **{key: trained.data_config[key] for key in ("interpolation", "mean", "std")}}
    return record | {"amp_dtype": (mixed.amp_dtype or "default") if mixed.amp else None}
