"""The state of a training run that checkpoints save."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim import Optimizer

from tlt.errors import UserError
from tlt.io.weights import EMA_KEYS, check_finite, clean_state_dict, load_clean
from tlt.models.fit_weights import fit_state_dict
from tlt.models.wrap import DENSE_ENTRIES, joined_state_dict, split_state_dict
from volo.checkpoint.finetune import explain_misfit, needed
from volo.checkpoint.optimizer_state import checked_optimizer_state, load_optimizer_state
from volo.cluster.whole_state import own_model_state, whole_model_state, whole_optimizer_state
from volo.record.run_directory import plain

SCALER_KEY = "amp_scaler"
STATISTICS_KEY = "rank_statistics"
_FORMAT = 2  # timm's: `epoch` is the last finished one


class RankedCheckpoint(NamedTuple):
    """A `checkpoint-N.pth.tar` that is kept. `epoch` is N; `metric` is None where there was no finite one."""

    metric: float | None
    epoch: int
    file: str


@dataclass
class TrainState:
    """Model, optimizer, loss scaler, moving average and the position in the run.

    Data order, augmentation, MixToken boxes and dropout are functions of seed and position, so no random state is part
    of it.
    """

    model: nn.Module  # bare or wrapped; saved and loaded under the bare model's names
    optimizer: Optimizer
    scaler: torch.amp.GradScaler | None = None
    ema: ModelEmaV3 | None = None
    epoch: int = 0  # epochs finished, which is the number of the one to run next
    update: int = 0  # optimizer steps done, over all epochs
    best: list[RankedCheckpoint] = field(default_factory=list)  # best first
    scores: dict[int, dict[str, float]] = field(default_factory=dict)  # by epoch, all results of validation
    outdated: list[str] = field(default_factory=list)  # files that the newest save was to remove
    progress: dict[str, Any] = field(default_factory=dict)  # a checkpoint's sums of its epoch, until the meter has them
    sums: Callable[[], dict[str, Any]] = dict  # returns those of the present epoch, of plain types; all ranks call it
    metadata: dict[str, Any] = field(default_factory=dict)  # of the payload: arch, args, model_config
    updates_per_epoch: int = field(kw_only=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the payload of a checkpoint. Every rank calls this; only rank 0's is complete.

        Everything but tensors is of plain types. The tensors are shared with the model, unless it is divided among
        ranks (`volo.cluster.whole_state`).
        """
        payload = {
            **plain(self.metadata),
            "version": _FORMAT,
            "epoch": self.epoch - 1,
            "update": self.update,
            "updates_per_epoch": self.updates_per_epoch,
            "metric": None,
            "best": [list(entry) for entry in self.best],
            "scores": {epoch: dict(scores) for epoch, scores in self.scores.items()},
            "outdated": list(self.outdated),
            "progress": plain(self.sums()),
            "optimizer": whole_optimizer_state(self.model, self.optimizer),
            "optimizer_class": type(self.optimizer).__name__,
        }
        for entry, model in self._models().items():
            payload[entry], dense = split_state_dict(model, whole_model_state(model))
            if dense:
                payload[DENSE_ENTRIES[entry]] = dense
        if self._between_epochs and (statistics := gather_statistics(self._models(), self._device)):
            payload[STATISTICS_KEY] = statistics
        if self.scaler is not None:
            payload[SCALER_KEY] = self.scaler.state_dict()
        return payload

    @property
    def _between_epochs(self) -> bool:
        """Whether an epoch is under way: its ranks have not yet shared their statistics."""
        return self.update != self.epoch * self.updates_per_epoch

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _models(self) -> dict[str, nn.Module]:
        return {"state_dict": self.model} | ({} if self.ema is None else {EMA_KEYS[0]: self.ema.module})

    def load(self, checkpoint: dict[str, Any], path: str | Path, load_optimizer: bool = True) -> list[str]:
        """Restore the state from a `checkpoint` of ours, timm or the published code; return lines for the user.

        Nothing is changed unless everything fits. The arguments in the file are ignored.

        Args:
            checkpoint: The result of `tlt.io.weights.read_checkpoint`.
            path: The file, for messages.
            load_optimizer: False (`--no-resume-opt`) starts with a new optimizer and loss scaler.

        Raises:
            UserError: The architecture, head, image size or optimizer is another one, or weights are NaN.
        """
        weights = self._checked_weights(checkpoint, path, use_ema=False)
        has_ema = any(isinstance(checkpoint.get(key), dict) for key in EMA_KEYS)
        averages = self._checked_weights(checkpoint, path, use_ema=True) if has_ema and self.ema is not None else None
        resumable = "epoch" in checkpoint
        if resumable and load_optimizer:
            if not isinstance(checkpoint.get("optimizer"), dict) or not checkpoint["optimizer"]:
                raise UserError(f"{path} holds no optimizer state: resume without it with --no-resume-opt")
            saved = checkpoint["optimizer"], path, checkpoint.get("optimizer_class")
            optimizer_state = checked_optimizer_state(self.model, self.optimizer, *saved)
        position = _position(checkpoint, self.updates_per_epoch, path)
        progress, statistics = _of_ranks(checkpoint, path)

        load_clean(self.model, weights)
        messages = self._load_ema(averages if averages is not None else weights, has_ema)
        if resumable and load_optimizer:
            messages += load_optimizer_state(self.optimizer, optimizer_state)
            messages += self._load_scaler(checkpoint.get(SCALER_KEY))
        elif load_optimizer:
            messages.append("it holds weights only: optimizer, schedule and epoch count start anew")
        if checkpoint.get("updates_per_epoch", self.updates_per_epoch) != self.updates_per_epoch:
            messages.append(_changed_epoch(checkpoint, self.updates_per_epoch, position.epoch))
        self.epoch, self.update, self.best, self.outdated, self.scores = position
        self.progress = progress
        if not self._between_epochs:
            return messages
        try:
            return messages + set_statistics(self._models(), statistics)
        except ValueError as error:
            raise UserError(f"{path} is refused: {error}") from error

    def _checked_weights(self, checkpoint: dict[str, Any], path: str | Path, use_ema: bool) -> dict[str, Tensor]:
        """Return this rank's parts of the weights in a checkpoint."""
        whole = joined_state_dict(self.model, checkpoint, use_ema, path)
        weights = own_model_state(self.model, whole)
        fit = fit_state_dict(self.model, weights)
        if needed(fit.missing) or fit.dropped or fit.resized:
            raise UserError(explain_misfit(self.model, fit, checkpoint, weights, path))
        check_finite(whole, path)
        # Counters that are missing in old files keep their value.
        return {**clean_state_dict(self.model), **weights}

    def _load_ema(self, weights: dict[str, Tensor], from_file: bool) -> list[str]:
        if self.ema is None:
            return ["its EMA weights are left out, --model-ema is off"] if from_file else []
        load_clean(self.ema.module, weights)
        return [] if from_file else ["it holds no EMA weights: the average starts from its plain weights"]

    def _load_scaler(self, saved: Any) -> list[str]:
        if self.scaler is None or not self.scaler.state_dict():
            return ["its loss scale is left out, this run scales no loss"] if saved else []
        if not isinstance(saved, dict) or not saved:
            return ["it holds no loss scale: that starts anew"]
        self.scaler.load_state_dict(saved)
        return []


class _Position(NamedTuple):
    epoch: int
    update: int
    best: list[RankedCheckpoint]
    outdated: list[str]
    scores: dict[int, dict[str, float]]


def _position(checkpoint: dict[str, Any], updates_per_epoch: int, path: str | Path) -> _Position:
    """Read the position of a run; a file without an epoch is at the beginning."""
    try:
        epoch = int(checkpoint.get("epoch", 0))
        if "epoch" in checkpoint and checkpoint.get("version", 1) >= _FORMAT:
            epoch += 1
        same = int(checkpoint.get("updates_per_epoch", 0)) == updates_per_epoch
        update = int(checkpoint["update"]) if same else epoch * updates_per_epoch
        best = [_ranked(*entry) for entry in checkpoint.get("best", [])]
        outdated = [_checkpoint_name(name) for name in checkpoint.get("outdated", [])]
        scores = _scores(checkpoint, best)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UserError(f"{path} does not tell where its run stopped ({type(error).__name__}: {error})") from error
    if min(epoch, update) < 0:
        raise UserError(f"{path} does not tell where its run stopped (epoch {epoch}, update {update})")
    return _Position(epoch, update, best, outdated, scores)


def _scores(checkpoint: dict[str, Any], best: list[RankedCheckpoint]) -> dict[int, dict[str, float]]:
    """Read the scores of each epoch; in files without them, the one score that ranked each kept epoch."""
    if "scores" in checkpoint:
        return {
            int(epoch): {str(name): float(score) for name, score in scores.items()}
            for epoch, scores in checkpoint["scores"].items()
        }
    name = ranked_by(checkpoint.get("args") or {})
    return {entry.epoch: {name: entry.metric} for entry in best if entry.metric is not None}


def ranked_by(args: Mapping[str, Any]) -> str:
    """Return the name of the score that ranks epochs: `top1`, or `top1_ema` if the average is validated."""
    average = args.get("model_ema") and not args.get("model_ema_force_cpu")
    return f"{args.get('eval_metric', 'top1')}{'_ema' if average else ''}"


def selected_by_ema(checkpoint: Mapping[str, Any]) -> bool | None:
    """Return whether training ranked its epochs by the moving average; None if the file does not say.

    timm and the published code record arguments of the same names, and rank by the same rule.
    """
    args = checkpoint.get("args")
    return ranked_by(args).endswith("_ema") if isinstance(args, dict) and "model_ema" in args else None


def _of_ranks(checkpoint: dict[str, Any], path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the sums of the current epoch and the statistics of the ranks; files of other programs have neither."""
    progress, statistics = checkpoint.get("progress", {}), checkpoint.get(STATISTICS_KEY, {})
    for name, value in (("progress", progress), (STATISTICS_KEY, statistics)):
        if not isinstance(value, dict):
            raise UserError(f"{path} does not tell where its run stopped ({name} is a {type(value).__name__})")
    if not all(isinstance(rows, Tensor) for rows in statistics.values()):
        raise UserError(
            f"{path} does not tell where its run stopped ({STATISTICS_KEY} holds other things than tensors)"
        )
    return progress, statistics


def _ranked(metric: Any, epoch: Any, file: Any) -> RankedCheckpoint:
    finite = isinstance(metric, (int, float)) and math.isfinite(metric)
    return RankedCheckpoint(float(metric) if finite else None, int(epoch), _checkpoint_name(file))


def _checkpoint_name(name: Any) -> str:
    """Return `name` if it is the name of a checkpoint: these files get removed, and the content is not trusted."""
    if not isinstance(name, str) or not re.fullmatch(r"checkpoint-\d+\.pth\.tar", name):
        raise ValueError(f"{str(name)[:60]!r} is no checkpoint's name")
    return name


def _changed_epoch(checkpoint: dict[str, Any], updates_per_epoch: int, epoch: int) -> str:
    before = checkpoint["updates_per_epoch"]
    return (
        f"an epoch had {before} updates, now {updates_per_epoch} (another global batch or data set): "
        f"epoch {epoch} begins with its first update"
    )


def _statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that `timm.utils.distribute_bn` shares."""
    return [b for name, b in model.named_buffers() if "running_mean" in name or "running_var" in name]


def gather_statistics(models: dict[str, nn.Module], device: torch.device) -> dict[str, Tensor]:
    """Return BatchNorm's running statistics (ranks, values) of each model that has any; nothing for one rank.

    The ranks share them once an epoch (`--dist-bn`); until then each rank has those of the images that it has seen.
    Every rank must call this. `device` is where the ranks exchange tensors.
    """
    if not dist.is_initialized():
        return {}
    gathered = {}
    for name, model in models.items():
        if statistics := _statistics(model):
            own = torch.cat([buffer.flatten().to(device) for buffer in statistics])
            rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, own)
            gathered[name] = torch.stack(rows)
    return gathered


def set_statistics(models: dict[str, nn.Module], gathered: dict[str, Tensor]) -> list[str]:
    """Set the statistics of this rank, or the mean if the number of ranks has changed; return lines for the user.

    Raises:
        ValueError: The statistics belong to other models.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    messages: list[str] = []
    for name, model in models.items():
        if name not in gathered:
            continue
        rows, buffers = gathered[name], _statistics(model)
        counts = [buffer.numel() for buffer in buffers]
        if rows.ndim != 2 or rows.shape[1] != sum(counts) or not len(rows) or not torch.isfinite(rows).all():
            raise ValueError(f"its running statistics of {len(rows)} ranks are not of this model")
        own = rows[rank] if len(rows) == size else rows.mean(0)
        for buffer, part in zip(buffers, own.split(counts), strict=True):
            buffer.copy_(part.view_as(buffer))
        if len(rows) != size:
            messages = [f"BatchNorm's running statistics are the mean of {len(rows)} ranks', now on {size}"]
    return messages
