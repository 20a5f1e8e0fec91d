"""The state of a training run that checkpoints save, and what is checked before one is loaded.

The optimizer's state is loaded, but not its settings (weight decay, betas, ...). Those come from the command that
resumes, and it reports how its arguments differ from those in the file.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim import Optimizer

from tlt.errors import UserError
from tlt.io.files import blamed_on
from tlt.io.weights import EMA_KEYS, check_finite, clean_names, clean_state_dict, first_non_finite, load_clean, unwrap
from tlt.models.fit_weights import DENSE_ENTRIES, fit_state_dict, joined_state_dict, place_of, split_state_dict
from volo.checkpoint.finetune import explain_misfit, needed, place_text
from volo.cluster.shard import local
from volo.cluster.tensor_parallel import own_model_state, own_optimizer_state, whole_model_state, whole_optimizer_state
from volo.record.records import plain

SCALER_KEY = "amp_scaler"
MOMENTS = "moments"  # begins the names of the optimizer's tensors
STATISTICS_KEY = "rank_statistics"
ORDER_KEY = "order"  # what decides which images an epoch's updates have
_FORMAT = 2  # timm's: `epoch` is the last finished one


@dataclass
class TrainState:
    """Everything that a run resumes from: model, optimizer, loss scaler, moving average, position, and within an epoch
    the sums of its log and each rank's BatchNorm statistics (`state_dict`).

    There is no random state: data order, augmentation, MixToken boxes and dropout are functions of seed and position.
    """

    model: nn.Module  # bare or wrapped; saved and loaded under the bare model's parameter names
    optimizer: Optimizer
    scaler: torch.amp.GradScaler | None = None
    ema: ModelEmaV3 | None = None
    epoch: int = 0  # number of finished epochs, and so the number of the next one
    update: int = 0  # optimizer steps done in all epochs
    scores: dict[int, dict[str, float]] = field(default_factory=dict)  # by epoch, all results of validation
    loaded_progress: dict[str, Any] = field(default_factory=dict)  # a checkpoint's `progress`, until the meter has it
    current_progress: Callable[[], dict[str, Any]] = dict  # `Meter.progress`, of plain types; all ranks call it
    metadata: dict[str, Any] = field(default_factory=dict)  # entries for the payload: arch, args, model_config
    updates_per_epoch: int = field(kw_only=True)
    unproven: str | Path | None = None  # file of a loaded optimizer state that no step has used yet

    def state_dict(self) -> dict[str, Any]:
        """Return the payload of a checkpoint. Every rank calls this; only rank 0's is complete.

        Everything except tensors is of plain types. The tensors are the model's own, unless the model is divided among
        ranks (`volo.cluster.tensor_parallel`).
        """
        payload = {
            **plain(self.metadata),
            "version": _FORMAT,
            "epoch": self.epoch - 1,
            "update": self.update,
            "updates_per_epoch": self.updates_per_epoch,
            "metric": None,
            "scores": {epoch: dict(scores) for epoch, scores in self.scores.items()},
            "progress": plain(self.current_progress()),
            "optimizer": whole_optimizer_state(self.model, self.optimizer),
            "optimizer_class": type(self.optimizer).__name__,
            "optimizer_params": _parameter_names(self.model, self.optimizer),
        }
        for entry, model in self._models().items():
            payload[entry], dense = split_state_dict(model, whole_model_state(model))
            if dense:
                payload[DENSE_ENTRIES[entry]] = dense
        if self.within_epoch and dist.is_initialized():
            payload[STATISTICS_KEY] = {name: gather_statistics(model) for name, model in self._models().items()}
        if self.scaler is not None:
            payload[SCALER_KEY] = self.scaler.state_dict()
        return payload

    @property
    def within_epoch(self) -> bool:
        """Whether an epoch is unfinished, so that its ranks have not yet shared BatchNorm's statistics."""
        return self.update != self.epoch * self.updates_per_epoch

    def _models(self) -> dict[str, nn.Module]:
        return {"state_dict": self.model} | ({} if self.ema is None else {EMA_KEYS[0]: self.ema.module})

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors that an update changes, the model's own: weights, buffers, averages, moments."""
        states = {entry: model.state_dict() for entry, model in self._models().items()}
        states |= {f"{MOMENTS}{number}": state for number, state in enumerate(self.optimizer.state.values())}
        return {
            f"{entry}.{name}": local(value)
            for entry, state in states.items()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }

    def load(self, checkpoint: dict[str, Any], path: str | Path, load_optimizer: bool = True) -> list[str]:
        """Restore the state from a checkpoint of this project, timm or the published code; return lines for the user.

        Nothing changes unless everything fits. The arguments in the file are ignored. Raises UserError if architecture,
        head, image size or optimizer differ, or weights are NaN.

        Args:
            checkpoint: The result of `tlt.io.weights.read_checkpoint`.
            path: Path of the file, for messages.
            load_optimizer: False (`--no-resume-opt`) starts with a new optimizer and loss scaler.
        """
        weights = self._checked_weights(checkpoint, path, use_ema=False)
        has_ema = any(isinstance(checkpoint.get(key), dict) for key in EMA_KEYS)
        averages = self._checked_weights(checkpoint, path, use_ema=True) if has_ema and self.ema is not None else None
        resumable = "epoch" in checkpoint
        if resumable and load_optimizer:
            if not isinstance(checkpoint.get("optimizer"), dict) or not checkpoint["optimizer"]:
                raise UserError(f"{path} holds no optimizer state: resume without it with --no-resume-opt")
            optimizer_state = checked_optimizer_state(self.model, self.optimizer, checkpoint, path)
        epoch, update, scores, progress, statistics = _position(checkpoint, self.updates_per_epoch, path)

        load_clean(self.model, weights)
        loaded = [False] if averages is None else [False, True]
        places = {place_of(self.model, checkpoint, use_ema, path) for use_ema in loaded}
        messages = [f"weights: {place_text(*place)}" for place in sorted(places) if place[1]]
        messages += self._load_ema(averages if averages is not None else weights, has_ema)
        if resumable and load_optimizer:
            with optimizer_state_of(path):
                load_optimizer_state(self.optimizer, optimizer_state)
            self.unproven = path
            messages += self._load_scaler(checkpoint.get(SCALER_KEY))
        elif load_optimizer:
            messages.append("it holds weights only: optimizer, schedule and epoch count start anew")
        order = self.metadata.get(ORDER_KEY)
        if update != epoch * self.updates_per_epoch and checkpoint.get(ORDER_KEY, order) != order:
            update = epoch * self.updates_per_epoch
            messages.append(f"the updates of an epoch had other images than now: epoch {epoch + 1} starts anew")
        if checkpoint.get("updates_per_epoch", self.updates_per_epoch) != self.updates_per_epoch:
            before = f"an epoch had {checkpoint['updates_per_epoch']} updates, now {self.updates_per_epoch}"
            messages.append(f"{before} (another global batch or data set): epoch {epoch + 1} starts anew")
        self.epoch = epoch
        self.update = update
        self.scores = scores
        self.loaded_progress = progress
        if self.within_epoch and not set_statistics(self._models(), statistics):
            messages.append("another number of ranks: all take the running statistics of BatchNorm from rank 0")
        return messages

    def _checked_weights(self, checkpoint: dict[str, Any], path: str | Path, use_ema: bool) -> dict[str, Tensor]:
        """Return this rank's parts of the weights in a checkpoint, after checking them."""
        whole = joined_state_dict(self.model, checkpoint, use_ema, path)
        weights = own_model_state(self.model, whole)
        fit = fit_state_dict(self.model, weights)
        if needed(fit.missing) or fit.dropped or fit.resized:
            raise UserError(explain_misfit(self.model, fit, checkpoint, path))
        check_finite(whole, path)
        # Counters that old files lack keep the model's value.
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


def _position(
    checkpoint: dict[str, Any], updates_per_epoch: int, path: str | Path
) -> tuple[int, int, dict[int, dict[str, float]], dict[str, Any], dict[str, Tensor]]:
    """Return epoch, update, scores, progress and statistics at which the checkpoint's run stopped, with defaults for
    what the file lacks. Raises UserError if an entry is invalid."""
    with blamed_on(path, "does not tell where its run stopped"):
        epoch = int(checkpoint.get("epoch", 0))
        if "epoch" in checkpoint and checkpoint.get("version", 1) >= _FORMAT:
            epoch += 1
        same = int(checkpoint.get("updates_per_epoch", 0)) == updates_per_epoch
        update = int(checkpoint["update"]) if same else epoch * updates_per_epoch
        scores = {
            int(number): {str(name): float(score) for name, score in metrics.items()}
            for number, metrics in checkpoint.get("scores", {}).items()
        }
        statistics = dict(checkpoint.get(STATISTICS_KEY, {}))
        if min(epoch, update) < 0 or not all(isinstance(rows, Tensor) for rows in statistics.values()):
            raise ValueError(f"epoch {epoch}, update {update}, or statistics that are no tensors")
        return epoch, update, scores, dict(checkpoint.get("progress", {})), statistics


def ranked_by(args: Mapping[str, Any]) -> str:
    """Return the name of the score that ranks epochs: `top1`, or `top1_ema` if the moving average is validated."""
    average = args.get("model_ema") and not args.get("model_ema_force_cpu")
    return f"{args.get('eval_metric', 'top1')}{'_ema' if average else ''}"


def selected_by_ema(checkpoint: Mapping[str, Any]) -> bool | None:
    """Return whether training ranked its epochs by the moving average; None if the file does not say.

    timm and the published code record arguments of the same names and rank by the same rule.
    """
    args = checkpoint.get("args")
    return ranked_by(args).endswith("_ema") if isinstance(args, dict) and "model_ema" in args else None


def _statistics(model: nn.Module) -> list[Tensor]:
    """Return the buffers that `timm.utils.distribute_bn` shares."""
    return [b for name, b in model.named_buffers() if "running_mean" in name or "running_var" in name]


def gather_statistics(model: nn.Module) -> Tensor:
    """Return BatchNorm's running statistics of all ranks, (ranks, values). Every rank must call this.

    The ranks average them once per epoch (`--dist-bn`). Until then, each rank has those of the images that it has seen.
    """
    device = next(model.parameters()).device
    values = torch.cat([torch.empty(0, device=device), *(buffer.flatten().to(device) for buffer in _statistics(model))])
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return torch.stack(rows)


def set_statistics(models: dict[str, nn.Module], gathered: dict[str, Tensor]) -> bool:
    """Set this rank's statistics; return False if `gathered` is of another number of ranks or of other models."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for name in [name for name in models if name in gathered]:
        buffers = _statistics(models[name])
        rows = gathered[name]
        counts = [buffer.numel() for buffer in buffers]
        if rows.shape != (size, sum(counts)):
            return False
        for buffer, part in zip(buffers, rows[rank].split(counts), strict=True):
            buffer.copy_(part.view_as(buffer))
    return True


# Keys of parameter groups that schedules and layer decay write.
_GROUP_SETTINGS = {"params", "param_names", "lr", "initial_lr", "lr_scale", "lr_min"}
# Optimizer state that has the shape of its parameter or, in timm's NovoGrad, is a single value.
_PER_VALUE = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
_COUNTER = "step"  # a counter in a parameter group is state, although Lookahead lists it among the settings


def optimizer_state_of(path: str | Path | None) -> AbstractContextManager[None]:
    """Turn errors of the block into a UserError about this file's optimizer state; without a path let them pass."""
    remedy = "use the optimizer of the checkpoint, or leave its state out with --no-resume-opt"
    return blamed_on(path and f"{path}: its optimizer state", "does not fit", remedy)


def checked_optimizer_state(
    model: nn.Module, optimizer: Optimizer, checkpoint: dict[str, Any], path: str | Path
) -> dict[str, Any]:
    """Return this rank's part of a checkpoint's optimizer state, after checking that it fits the model's parameters.

    Its entry `optimizer` may hold anything. The entries `optimizer_class` (class name) and `optimizer_params`
    (parameter names in the order of the state) may be missing. Without names, states are assigned by position in the
    parameter groups, which changes with weight decay and layer decay. Raises UserError with the remedy if the state
    does not fit.
    """
    own_class = type(optimizer).__name__
    groups = optimizer.param_groups
    saved: Any = checkpoint["optimizer"]
    saved_class = checkpoint.get("optimizer_class")
    names = checkpoint.get("optimizer_params")
    with optimizer_state_of(path):
        if isinstance(saved_class, str) and saved_class != own_class:
            raise ValueError(f"it is of {saved_class}, --opt gives {own_class}")
        if names is not None:
            saved = _regrouped(saved, names, _parameter_names(model, optimizer), groups)
        sizes, own_sizes = ([len(group["params"]) for group in listed] for listed in (saved["param_groups"], groups))
        if sizes != own_sizes:
            raise ValueError(f"its groups have {sizes} parameters, this model's {own_sizes}")
        rank_state = own_optimizer_state(model, optimizer, saved)
        _check_state(optimizer, saved, rank_state)
    return rank_state


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, in its order."""
    names, parameters = zip(*unwrap(model).named_parameters(), strict=True)
    name_of = dict(zip(parameters, clean_names(list(names)), strict=True))
    return [name_of[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _regrouped(
    saved: dict[str, Any], names: list[str], own_names: list[str], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Rearrange `saved`, whose parameters have `names`, into the `groups` of an optimizer whose parameters have
    `own_names`. Each new group gets the options of its first parameter's old group. Raises ValueError if the two sets
    of names differ."""
    if others := sorted({*names} ^ {*own_names}):
        raise ValueError(f"it is of other parameters ({len(others)}, such as {others[0]})")
    group_of = {index: group for group in saved["param_groups"] for index in group["params"]}
    index_of = dict(zip(names, group_of, strict=True))
    state = {
        number: saved["state"][index_of[name]]
        for number, name in enumerate(own_names)
        if index_of[name] in saved["state"]
    }
    numbers = iter(range(len(own_names)))
    regrouped = []
    for group in groups:
        own_numbers = [next(numbers) for _ in group["params"]]
        regrouped.append({**group_of[index_of[own_names[own_numbers[0]]]], "params": own_numbers})
    return {"state": state, "param_groups": regrouped}


def load_optimizer_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load the state that `checked_optimizer_state` returned, but keep this optimizer's settings.

    Tensors are moved to the devices of the parameters. `fused` and `foreach` keep this optimizer's values.
    """
    keep = _GROUP_SETTINGS | {name for name in optimizer.defaults if not name.endswith(_COUNTER)}
    groups = []
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        kept = {key: value for key, value in group.items() if key in keep}
        loaded = {key: value for key, value in saved_group.items() if key not in keep}
        groups.append({**loaded, **kept, "params": saved_group["params"]})
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    # Give moments the strides of their parameters. If they differ (`--channels-last` in only one of the runs), torch's
    # fused step silently uses the wrong elements on a CPU.
    for parameter, state in optimizer.state.items():
        for key in _PER_VALUE & state.keys():
            if state[key].shape == parameter.shape and state[key].stride() != parameter.stride():
                state[key] = torch.empty_like(parameter).copy_(state[key])


def _check_state(optimizer: Optimizer, whole: dict[str, Any], local: dict[str, Any]) -> None:
    """Raise ValueError if a state tensor has another shape than its parameter, because torch's fused steps would then
    read and write beyond its end; or if it holds NaN."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    single = type(optimizer).__module__.startswith("timm.")  # timm's NovoGrad keeps a single value
    for number, index in enumerate(index for group in whole["param_groups"] for index in group["params"]):
        state = whole["state"].get(index, {})
        tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
        for key in _PER_VALUE & state.keys():
            if local["state"][index][key].shape != parameters[number].shape and not (
                single and state[key].numel() == 1
            ):
                shapes = f"{tuple(state[key].shape)}, the parameter {tuple(parameters[number].shape)}"
                raise ValueError(f"{key} of parameter {number} is {shapes}")
        if broken := first_non_finite(tensors):
            raise ValueError(f"{broken} of parameter {number} holds NaN or infinite values")
