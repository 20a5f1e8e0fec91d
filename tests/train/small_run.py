"""A run of a few milliseconds: model, data, directory."""

import io
from pathlib import Path
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim import Optimizer

import volo  # noqa: F401  (registers the models)
from tlt.io.weights import read_checkpoint
from volo.checkpoint.checkpoint import CheckpointDir, RankedCheckpoint, best_of
from volo.checkpoint.resume import newest_checkpoint, verified
from volo.checkpoint.state import TrainState
from volo.config.settings_train import TrainSettings
from volo.config.train import TRAIN
from volo.train.optimizer import create_optimizer
from volo.train.schedule import LrSchedule

METADATA = {
    "arch": "tiny",
    "args": {"lr": 0.1, "data": Path("/data"), "scale": (0.08, 1.0)},
    "model_config": {"img_size": (64, 48), "crop_pct": 0.96},
}


def arguments(line: str = "") -> TrainSettings:
    """What train.py makes of flags."""
    return TRAIN.parse(["/data", *line.split()])


def schedule_of(args: TrainSettings, lr: float, updates_per_epoch: int) -> LrSchedule:
    return LrSchedule(args.schedule, args.checkpoints, args.run.seed, lr, updates_per_epoch)


def optimizer_of(args: TrainSettings, model: nn.Module, device: torch.device | None = None) -> Optimizer:
    lr = args.schedule.lr_base if args.schedule.lr is None else args.schedule.lr
    return create_optimizer(model, args.optim, args.distributed, lr, device)


def build(seed: int = 0, optimizer: str = "adamw", ema: bool = True, scaler: bool = True, **kwargs: Any) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    weights, biases = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    return TrainState(
        model,
        create_optimizer_v2(groups, opt=optimizer, lr=0.01, weight_decay=0.05, momentum=0.9),
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) if scaler else None,
        ema=ModelEmaV3(model, decay=0.9) if ema else None,
        metadata=dict(METADATA),
        **{"updates_per_epoch": 4, **kwargs},
    )


def train(state: TrainState, epochs: int = 1) -> None:
    """Train on data that are a function of the update number."""
    for _ in range(epochs):
        for _ in range(state.updates_per_epoch):
            images = torch.randn(5, 6, generator=torch.Generator().manual_seed(state.update))
            loss = state.model(images).square().mean()
            state.optimizer.zero_grad()
            if state.scaler is None:
                loss.backward()
                state.optimizer.step()
            else:
                state.scaler.scale(loss).backward()  # type: ignore[attr-defined]
                state.scaler.step(state.optimizer)  # type: ignore[attr-defined]
                state.scaler.update()  # type: ignore[attr-defined]
            state.update += 1
            if state.ema is not None:
                state.ema.update(state.model, step=state.update)
        state.epoch += 1


def save(
    files: CheckpointDir, state: TrainState, metric: float | None = None, ranked: bool = True
) -> RankedCheckpoint | None:
    """Save here and now, after an epoch or (not `ranked`) within one; return the best checkpoint so far."""
    if ranked:
        state.scores.setdefault(state.epoch - 1, {} if metric is None else {files.ranked_by: metric})
    files.write(files.plan(state.state_dict(), ranked))
    return best_of(files.ranking(state.scores))


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.clone()]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for v in values for t in tensors(v)]


def same(first: TrainState, second: TrainState) -> bool:
    one, two = first.state_dict(), second.state_dict()
    position = (first.epoch, first.update, first.scores) == (second.epoch, second.update, second.scores)
    scale = one.get("amp_scaler") == two.get("amp_scaler")
    pairs = zip(tensors(one), tensors(two), strict=True)
    return position and scale and all(torch.equal(a, b) for a, b in pairs)


def resumed(directory: Path, file: Path | None = None, **kwargs: Any) -> tuple[TrainState, CheckpointDir, list[str]]:
    """What a program does on --resume."""
    state = build(seed=99, **kwargs)
    files = CheckpointDir(directory, keep=2)
    path, checkpoint, messages = (file, verified(file), []) if file else newest_checkpoint(directory)
    if path is not None:
        messages += state.load(checkpoint, path)
        messages += files.restore(state, path)
    return state, files, messages


def names(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir()}


def epoch_of(path: Path) -> int:
    return read_checkpoint(path)["epoch"]


def payload_of(state: TrainState) -> dict[str, Any]:
    """What a file would hold; it shares nothing with the state."""
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def three_epochs(directory: Path) -> TrainState:
    state, files = build(), CheckpointDir(directory, keep=5)
    for metric in (1.0, 3.0, 2.0):
        train(state)
        save(files, state, metric)
    return state


def separate(path: Path, content: bytes) -> None:
    """Write `content` under this name alone, not into the file it shares with others."""
    path.unlink()
    path.write_bytes(content)
