"""What a run begins as. Rank 0 decides it once, before anything is built, in this order (docs/checkpoints.md):

1. A run that its launcher starts again goes on in the directory of its first start.
2. `--resume FILE` goes on in FILE's directory, if that is a run's and `--experiment` and `--output` name no other. From
   a milestone it does only if `--experiment` names that directory.
3. `--experiment NAME` is the directory OUTPUT/NAME. If it holds checkpoints, only `--resume auto` goes on there.
4. `--resume auto` alone goes on in the directory of the newest run of the same experiment.
5. Any other run gets a new directory, OUTPUT/TIME-MODEL-SIZE.

RESTARTED (by 1) and CONTINUE (by `--resume auto`) begin with the newest checkpoint of the directory that is whole and
finite. Without one, the file that `--resume` or `--branch` names counts: CONTINUE if it is in the directory, BRANCH if
it is another run's. Without such a file, the run is NEW.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tlt.errors import UserError
from volo.checkpoint.resume import newest_checkpoint, verified
from volo.cluster.distributed import from_primary
from volo.config.checkpoint_files import MILESTONE
from volo.config.settings_train import EXPERIMENT, FITTED, TrainSettings
from volo.record.records import settings_of
from volo.record.run_directory import new_directory, newest_alike, run_of_launch

DEFAULT_OUTPUT = "output/train"


class Kind(Enum):
    """What a run begins as."""

    NEW = "a new run"
    CONTINUE = "a run that goes on"
    RESTARTED = "a run that its launcher has started again"
    BRANCH = "a branch"


@dataclass(frozen=True)
class Asked:
    """What the flags say about the start of a run.

    Attributes:
        output, experiment, resume, branch: Values of the flags of these names.
        name_end: What the name of a new directory ends in.
        settings: The settings that define the experiment.
        defaulted: Settings that no flag gives, so that the data or a checkpoint determine them.
    """

    output: str = ""
    experiment: str = ""
    resume: str = ""
    branch: str = ""
    name_end: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    defaulted: Sequence[str] = ()

    @property
    def root(self) -> Path:
        """The directory that holds the directories of runs."""
        return Path(self.output or DEFAULT_OUTPUT)

    @property
    def file(self) -> Path | None:
        """The checkpoint that a flag names."""
        name = self.branch or ("" if self.resume == "auto" else self.resume)
        return Path(name) if name else None

    @property
    def resumed(self) -> Path | None:
        """The directory of the file of `--resume`; None for a milestone's, unless `--experiment` names a run."""
        if self.file is None or self.branch or (MILESTONE.fullmatch(self.file.name) and not self.experiment):
            return None
        return self.file.parent

    def names(self, directory: Path) -> bool:
        """Whether `--output` and `--experiment`, as far as they are given, name this directory."""
        if self.experiment:
            return (self.root / self.experiment).resolve() == directory.resolve()
        return not self.output or self.root.resolve() == directory.resolve().parent


def asked_by(settings: TrainSettings, image_size: tuple[int, int]) -> Asked:
    """Return what train.py's arguments say about the start of a run on images of this size (H, W)."""
    return Asked(
        settings.run.output,
        settings.run.experiment,
        settings.checkpoints.resume,
        settings.checkpoints.branch,
        name_end=f"-{re.sub(r'[^-.a-zA-Z0-9_]+', '_', settings.network.model)}-{max(image_size)}",
        settings={name: value for name, value in settings_of(settings).items() if name in EXPERIMENT},
        defaulted=[name for name in FITTED if not settings.set_by_user(name)],
    )


@dataclass(frozen=True)
class Start:
    """What a run begins as, where, with which checkpoint, and why.

    Attributes:
        file: The checkpoint, which was read and verified; None for a new run.
        checkpoint: Content of the file until the run's state has it; {} for a new run.
        messages: Lines for the user, among them one for each checkpoint that was skipped.
    """

    kind: Kind
    directory: Path
    file: Path | None
    reason: str
    checkpoint: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    messages: list[str] = field(default_factory=list, compare=False)

    def __str__(self) -> str:
        return f"start: {self.kind.value} in {self.directory}{f' from {self.file}' if self.file else ''}: {self.reason}"


def decide_start(asked: Asked, report: Callable[[str], None], hold: Callable[[Path], None] | None) -> Start:
    """Decide what the run begins as, read its checkpoint, and make its directory if that is a new one. Raises UserError
    if the directory holds checkpoints that no flag asks for, is in use, or can't be made; or if the checkpoint that a
    flag names can't be read.

    Args:
        report: Receives a line if a newer run is another experiment.
        hold: Keeps other jobs out of a directory before a checkpoint is looked for. None (`--dry-run`) keeps out
            nobody, and then no directory is made.
    """
    launched = run_of_launch(asked.root, asked.experiment, asked.resumed)  # 1
    directory, reason = (launched, "an earlier start began there") if launched else _directory(asked, report)
    looks = asked.resume == "auto" or (launched is not None and any(launched.glob("*.pth.tar")))
    file = asked.file
    messages: list[str] = []
    if directory is not None and directory.is_dir():
        if hold is not None and (looks or file):
            hold(directory)
        if looks:
            newest, checkpoint, messages = newest_checkpoint(directory)
            if newest is not None:
                kind = Kind.RESTARTED if launched else Kind.CONTINUE
                return Start(kind, directory, newest, reason, checkpoint, messages)
    checkpoint = verified(file) if file else {}
    directory = directory or new_directory(asked.root, asked.name_end, make=hold is not None)
    if file is not None:
        kind = Kind.CONTINUE if file.parent.resolve() == directory.resolve() else Kind.BRANCH
        reason = f"{'--branch' if asked.branch else '--resume'} names the file"
        return Start(kind, directory, file, reason, checkpoint, messages)
    if not looks:
        return Start(Kind.NEW, directory, None, "no flag names a checkpoint")
    messages.append(f"no checkpoint to resume in {directory}: a fresh start")
    return Start(Kind.NEW, directory, None, "no checkpoint is there", messages=messages)


def _directory(asked: Asked, report: Callable[[str], None]) -> tuple[Path | None, str]:
    """Return the directory by the rules 2 to 5, None for a new one, and why it is this one."""
    if asked.resumed is not None and (asked.resumed / "args.yaml").is_file() and asked.names(asked.resumed):
        return asked.resumed, "--resume names the file"  # 2
    if not asked.experiment:  # 4 and 5
        auto = asked.resume == "auto"
        newest = newest_alike(asked.root, asked.name_end, asked.settings, asked.defaulted, report) if auto else None
        return newest, "it is the newest run of this experiment"
    directory = asked.root / asked.experiment  # 3
    if asked.branch and Path(asked.branch).resolve().parent == directory.resolve():
        raise UserError(f"--branch {asked.branch} is of {directory} itself: name another --experiment for the branch")
    if asked.resume != "auto" and any(directory.glob("*.pth.tar")):
        raise UserError(
            f"{directory} already holds checkpoints: continue it with --resume auto, or name another --experiment"
        )
    return directory, "--experiment names it"


def on_every_rank(start: Start | None) -> Start:
    """Return rank 0's decision on every rank; the others, which pass None, read the checkpoint themselves."""
    told = start and [start.kind.name, str(start.directory), str(start.file or ""), start.reason]
    kind, directory, name, reason = from_primary(told or [])
    if start is not None:
        return start
    file = Path(name) if name else None
    return Start(Kind[kind], Path(directory), file, reason, verified(file) if file else {})
