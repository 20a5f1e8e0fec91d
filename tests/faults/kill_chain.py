"""kill -9 to the real train.py, at random instants and inside the writes of checkpoints.

    python -m tests.faults.kill_chain --out DIR --ranks 1 --kills 100 --seed 0 -- FLAGS OF TRAIN.PY

A run is started, killed and resumed until it ends by itself, then the next one, until there were `--kills` kills, half
of them inside a write. After each there has to be a valid newest checkpoint; each run has to end in the weights, the
moving average and the records of one that was never stopped. The last line printed is a JSON record of what was done.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from shutil import rmtree

import volo.commands.train  # noqa: F401
from tests.commands.conftest import ROOT, digest, spent_in
from tests.conftest import LIMIT, free_port, wait_until
from tests.same_records import without_times
from volo.checkpoint.checkpoint import STAGED
from volo.checkpoint.resume import newest_checkpoint
from volo.record.history import read_json_lines

APART = 0.05  # at most so many seconds lie between the deaths of two ranks
SKIPPED_WRITES = 3  # a kill inside a write comes in one of so many


class Life:
    """The processes of one start of train.py: for each rank a fork of this one, which starts in a tenth of the time."""

    def __init__(self, flags: list[str], ranks: int, log: Path) -> None:
        envs: list[dict[str, str]] = [{}]
        if ranks > 1:
            master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
            envs = [{**master, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        self.processes = [get_context("fork").Process(target=_train, args=(flags, env, log)) for env in envs]
        for process in self.processes:
            process.start()

    def codes(self) -> list[int | None] | None:
        """Exit codes, when all have ended."""
        return None if any(process.is_alive() for process in self.processes) else [p.exitcode for p in self.processes]

    def kill(self, generator: random.Random) -> None:
        """As a node that goes down: all processes, one after the other. Returns when they are gone."""
        generator.shuffle(self.processes)
        for process in self.processes:
            process.kill()
            if process is not self.processes[-1]:
                time.sleep(generator.uniform(0.0, APART))
        for process in self.processes:
            process.join()


def _train(flags: list[str], env: dict[str, str], log: Path) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(env)
    sys.argv = [str(ROOT / "train.py"), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


@dataclass
class Record:
    """What was done, and what it cost."""

    seed: int
    ranks: int
    kills: int = 0
    inside_a_write: int = 0  # an unfinished file was left
    runs: int = 0
    sha256: str = ""
    lost: list[int] = field(default_factory=list)  # updates, for each kill


class Chain:
    """The runs and kills of one call."""

    def __init__(self, flags: list[str], out: Path, ranks: int, kills: int, seed: int) -> None:
        self.flags, self.out, self.wanted = [*flags, "--output", str(out)], out, kills
        self.random, self.record, self.log = random.Random(seed), Record(seed, ranks), out / "output.txt"
        self.first_save = self.write = 0.0  # seconds: from a fork to its first write, and about what a write takes
        self.known = -1  # update of the newest checkpoint of the present run

    def go(self) -> Record:
        """Do all of it. Raises AssertionError where a run did not survive."""
        self.out.mkdir(parents=True)
        self._uninterrupted()
        while not self._enough:
            run, self.known = self.out / f"run{self.record.runs}", -1
            while not self._ended_by_itself(run):
                self._check(run)
            self._compare(run)
            rmtree(run)
            self.record.runs += 1
        return self.record

    @property
    def _enough(self) -> bool:
        return self.record.kills >= self.wanted and 2 * self.record.inside_a_write >= self.record.kills

    def _uninterrupted(self) -> None:
        """The run that all others are compared with, whose writes are timed."""
        whole, began, marks = self.out / "whole", time.monotonic(), []
        life = self._start(whole)
        for begun in (True, False):
            while bool(staged(whole)) != begun:
                assert time.monotonic() - began < LIMIT, self._told("it never saved")
                time.sleep(0.0003)
            marks.append(time.monotonic())
        self.first_save, self.write = marks[0] - began, marks[1] - marks[0]
        self._wait(life)
        self.record.sha256 = digest(whole)

    def _ended_by_itself(self, run: Path) -> bool:
        """Start it and kill it somewhere; True if it was quicker, or was to live."""
        aimed = self.record.inside_a_write * 2 <= self.record.kills
        life = self._start(run)
        if self._enough:
            self._wait(life)
            return True
        before = staged(run)
        instants = self._inside_a_write(run, life) if aimed else self._any_time()
        for _ in instants:
            if (codes := life.codes()) is not None:
                assert set(codes) == {0}, self._told(f"exit codes {codes}")
                return True
        life.kill(self.random)
        self.record.kills += 1
        inside = bool(staged(run) - before)
        self.record.inside_a_write += inside
        if aimed:  # a loaded machine does not write as quickly as it did before, nor as slowly: two of three shall hit
            self.write *= 1.3 if inside else 0.6
        return False

    def _any_time(self) -> Iterator[None]:
        """Wait until a random instant between the start and some saves."""
        end = time.monotonic() + self.random.uniform(0.0, 2 * self.first_save)
        while time.monotonic() < end:
            yield
            time.sleep(0.001)

    def _inside_a_write(self, run: Path, life: Life) -> Iterator[None]:
        """Wait for one of the next writes, and then for a random part of the time that it takes."""
        known, end = staged(run), time.monotonic() + LIMIT
        for write in range(self.random.randint(1, SKIPPED_WRITES)):
            for begun in (False, True) if write else (True,):
                while bool(staged(run) - known) != begun:
                    yield
                    assert time.monotonic() < end, self._told("it never saved")
                    time.sleep(0.0003)
        time.sleep(self.random.uniform(0.0, self.write))
        yield

    def _check(self, run: Path) -> None:
        """What `--resume auto` would take now is valid, and no older than what was there before."""
        result = newest_checkpoint(run)
        records, _ = read_json_lines(run / "events.jsonl")
        assert not records or spent_in(run).restarts <= self.record.kills
        saved_updates = [record["update"] for record in records if record["kind"] == "checkpoint"]
        if result.path is None:
            assert self.known < 0 and not saved_updates, result.skipped
            self.record.lost.append(_reported(run))
            return
        assert not result.skipped
        update = result.checkpoint["update"]
        assert update >= max([self.known, *saved_updates]), f"update {update} of {self.known}, {saved_updates}"
        self.known = update
        self.record.lost.append(max(0, _reported(run) - update))

    def _compare(self, run: Path) -> None:
        """It is what an uninterrupted run is, file by file."""
        whole = self.out / "whole"
        assert digest(run) == self.record.sha256, self._told(f"{run.name} ends in other weights")
        for name in ("metrics.jsonl", "summary.csv"):
            assert without_times(run / name) == without_times(whole / name), self._told(f"{run.name}: other {name}")

    def _start(self, run: Path) -> Life:
        flags = [*self.flags, "--experiment", run.name, "--resume", "auto", "-j", "0"]
        return Life(flags, self.record.ranks, self.log)

    def _wait(self, life: Life) -> None:
        codes = wait_until(life.codes, lambda: self._told("its end"))
        assert set(codes) == {0}, self._told(f"exit codes {codes}")

    def _told(self, what: str) -> str:
        """`what`, and the end of what the programs printed."""
        return "\n".join([what, *self.log.read_text(errors="replace").splitlines()[-60:]])


def staged(run: Path) -> set[str]:
    """Unfinished files."""
    return {file.name for file in run.glob(f"{STAGED}*")}


def _reported(run: Path) -> int:
    """Updates of which the run has told the loss."""
    records, _ = read_json_lines(run / "metrics.jsonl")
    return max((record["update"] for record in records if record["event"] == "train"), default=0)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a directory that does not exist yet")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="+", help="of train.py")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    try:
        print(json.dumps(asdict(Chain(args.flags, args.out, args.ranks, args.kills, args.seed).go())))
    finally:
        for process in active_children():  # after a failure; this process would wait for them
            process.kill()


if __name__ == "__main__":
    main()
