"""Records of steps whose gradients were not finite, with all that `volo.commands.replay` needs to repeat them."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tlt.data.loader import TrainLoader
from volo.checkpoint.checkpoint_file import save_checkpoint
from volo.checkpoint.train_state import TrainState
from volo.cluster.distributed import World, max_over_ranks
from volo.record.events import utc_now
from volo.record.run_directory import plain
from volo.train.precision import Precision

FOLDER = "nonfinite"
MOST_RECORDS = 10  # per start of a run
_CALIBRATION = 16  # steps that may be skipped until the loss scale fits, see `Precision`


class NonFiniteRecorder:
    """Writes `nonfinite/UPDATE-rankR.json` for each rank whose loss was not finite; for all if the losses were finite.

    Every rank has one. Nothing is kept while training: the order of the data is a function of the update.
    """

    def __init__(
        self,
        args: Namespace,
        state: TrainState,
        loader: TrainLoader,
        precision: Precision,
        lr_at: Callable[[int], float],
        world: World,
        directory: Path,
        event: Callable[..., None],
    ) -> None:
        self.args, self.state, self.loader, self.precision = args, state, loader, precision
        self.lr_at, self.world, self.event = lr_at, world, event
        self.folder = directory / FOLDER
        self.written = self.calibration = 0
        self._weights: str | None = None

    def __call__(self, broken: Mapping[int, bool]) -> None:
        """Record updates: the keys are equal on all ranks, the values say whether this rank's loss was not finite."""
        for update, own in broken.items():
            anyone = max_over_ranks(int(own))
            if self.precision.scaler is not None and not anyone and self.calibration < _CALIBRATION:
                self.calibration += 1
            elif self.written < MOST_RECORDS:
                self.written += 1
                # Skipped steps leave the weights unchanged, so the present ones are those of the first step in a row.
                in_a_row = all(later in broken for later in range(update, self.state.update))
                self._record(update, own, bool(anyone), in_a_row)

    def _record(self, update: int, own: bool, anyone: bool, in_a_row: bool) -> None:
        self.folder.mkdir(exist_ok=True)
        if in_a_row and self._weights is None:
            self._weights = f"weights-{update}.pth.tar"
            self.state.gather()
            if self.world.is_primary:
                self._save_weights(self._weights)
        if anyone and not own:
            return
        record = self._facts(update) | {"loss_finite": not own, "weights": self._weights if in_a_row else None}
        path = self.folder / f"{update}-rank{self.world.rank}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        self.event("nonfinite", update=update, lr=record["lr"], loss_finite=not own, record=str(path))

    def _save_weights(self, name: str) -> None:
        payload = self.state.state_dict()
        kept = {key: payload[key] for key in payload if key not in ("optimizer", "best", "outdated")}
        # Forward passes of skipped steps have put NaN into BatchNorm's running statistics, which training doesn't read.
        spoilt = [name for name in kept["state_dict"] if name.endswith(("running_mean", "running_var"))]
        kept["state_dict"] |= {name: torch.nan_to_num(kept["state_dict"][name]) for name in spoilt}
        save_checkpoint(self.folder / name, kept)

    def _facts(self, update: int) -> dict[str, Any]:
        epoch, within = divmod(update, len(self.loader))
        micro_batches = next(self.loader.index_stream.epoch(epoch, within))
        dataset, scaler = self.loader.dataset, self.precision.scaler
        return {
            "time": utc_now(),
            "update": update,
            "epoch": epoch,
            "update_in_epoch": within,
            "rank": self.world.data_rank,
            "world_size": self.world.data_size,
            "seed": self.args.seed,
            "lr": self.lr_at(update),
            "loss_scale": scaler.get_scale() if scaler is not None else None,
            "device": self.world.device.type,
            "data": str(self.args.data_dir),
            "args": plain(vars(self.args)),
            "micro_batches": [
                {"indices": indices.tolist(), "paths": [dataset.path(int(i)) for i in indices]}
                for indices in micro_batches
            ],
        }
