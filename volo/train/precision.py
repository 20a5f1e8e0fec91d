"""Mixed precision, and the optimizer step that skips non-finite gradients.

On CUDA `--amp` means float16 autocast with loss scaling, or bfloat16 on request. On the CPU it means bfloat16, because
float16 is about 50 times slower there. A step whose gradients are not finite changes no weight.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from tlt.errors import NonFiniteError, UserError
from tlt.models.flops import on_meta
from volo.cluster.distributed import from_all
from volo.cluster.shard import total_norm
from volo.config.settings_shared import MixedPrecision

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def compute_dtype(flags: MixedPrecision, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype of `--model-dtype` or `--amp`; None for float32. float16 on a CPU is a UserError."""
    if flags.model_dtype == "bfloat16":
        return torch.bfloat16
    if not flags.amp:
        return None
    if device.type == "cpu" and flags.amp_dtype == "float16":
        raise UserError("--amp-dtype float16 is about 50 times slower than float32 on a CPU; use --amp-dtype bfloat16")
    return DTYPES[flags.amp_dtype or ("float16" if device.type == "cuda" else "bfloat16")]


# In a working copy, norms stay in float32 and share parameters and running statistics with the master.
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


class WorkingCopy:
    """A bfloat16 copy of `master` that computes, while the float32 master is optimized, averaged, validated and saved.

    After a backward pass the copy's gradients are added to the master's, which sum up micro-batches. After a step the
    master's weights are copied back. The copy runs under bfloat16 autocast, with norms and softmax in float32.
    Autocast on a float32 model casts weights in every forward pass and gradients in every backward pass, and its
    activations are float32 from the position embedding on. With the copy (`module`, with the names of `master`), all of
    these are bfloat16.
    """

    def __init__(self, master: nn.Module) -> None:
        norms = [module for module in master.modules() if isinstance(module, _NORMS)]
        shared = {id(tensor): tensor for norm in norms for tensor in (*norm.parameters(), *norm.buffers())}
        self.module = copy.deepcopy(master, dict(shared))  # deepcopy adds what it copies to its dictionary
        for parameter in self.module.parameters():
            if id(parameter) not in shared:
                parameter.data = parameter.data.bfloat16()
        pairs = zip(master.parameters(), self.module.parameters(), strict=True)
        self._pairs = [(weight, cast) for weight, cast in pairs if weight is not cast]

    @torch.no_grad()
    def refresh_copy(self) -> None:
        """Copy the master's weights into the copy, rounded."""
        torch._foreach_copy_([cast for _, cast in self._pairs], [weight for weight, _ in self._pairs])

    @torch.no_grad()
    def accumulate_into_master(self) -> None:
        """Add the copy's gradients to the master's in float32, and clear the copy's."""
        new = []
        old = []
        for weight, cast in self._pairs:
            if cast.grad is not None and weight.grad is not None:
                old.append((weight.grad, cast.grad))
            elif cast.grad is not None:
                weight.grad = torch.empty_like(weight)
                new.append((weight.grad, cast.grad))
            cast.grad = None
        if new:
            torch._foreach_copy_([weight for weight, _ in new], [cast for _, cast in new])
        if old:
            torch._foreach_add_([weight for weight, _ in old], [cast for _, cast in old])

    def return_to_copy(self) -> None:
        """Move the accumulated gradients back to the copy, rounded, so that the next backward pass adds to them:
        DistributedDataParallel knows only the copy, and sends the gradients that it has after that pass."""
        for weight, cast in self._pairs:
            if weight.grad is not None:
                cast.grad = weight.grad.to(cast.dtype)
                weight.grad = None


class RunningStatistics:
    """The running statistics of a model's BatchNorm layers, except of those in evaluation mode. Forward passes change
    them before it is known whether the step is skipped."""

    def __init__(self, model: nn.Module) -> None:
        self._views: dict[torch.dtype, list[Tensor]] = {}  # one-dimensional views of the model's buffers
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if module.training and (name.startswith("running_") or name == "num_batches_tracked"):
                    self._views.setdefault(buffer.dtype, []).append(buffer.view(-1))
        self._before = self._gathered()

    def note(self) -> None:
        """Record the current statistics, because code outside the step may have changed them."""
        for before, now in zip(self._before, self._gathered(), strict=True):
            before.copy_(now)

    def _gathered(self) -> list[Tensor]:
        return [torch.cat(views) for views in self._views.values()]

    @torch.no_grad()
    def settle(self, skipped: Tensor) -> None:
        """End a step. Restore the earlier statistics if `skipped` (a scalar on the device) is true, or if one of the
        new ones is not finite: the square of a large value overflows before the value itself does."""
        if not self._views:
            return
        now = self._gathered()
        back = torch.stack([skipped, *(~torch.isfinite(values).all() for values in now)]).any()
        for views, before, values in zip(self._views.values(), self._before, now, strict=True):
            before.copy_(torch.where(back, before, values))
            torch._foreach_copy_(views, before.split([len(view) for view in views]))


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped before a step, to the limit `threshold`: by the mode `"norm"` (2-norm of them all),
    `"value"` (each element) or `"agc"` (adaptive, per unit), which doesn't clip the `heads`, as in timm and the paper
    (arXiv 2102.06171, section 4.1)."""

    threshold: float
    mode: str = "norm"
    heads: Sequence[nn.Module] = ()

    def __call__(self, parameters: list[nn.Parameter], norm: Tensor) -> None:
        """Clip the gradients of `parameters`, whose 2-norm is `norm`."""
        if self.mode == "norm":
            nn.utils.clip_grads_with_norm_(parameters, self.threshold, norm)
        elif self.mode == "value":
            nn.utils.clip_grad_value_(parameters, self.threshold)
        else:
            left_out = {parameter for head in self.heads for parameter in head.parameters()}
            adaptive_clip_grad([parameter for parameter in parameters if parameter not in left_out], self.threshold)


class SkippedSteps:
    """Counts the steps that were skipped because a gradient was not finite. `note` leaves its argument on the device.
    The other methods, except `restore_counts`, wait for the device."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._counts = [0, 0]  # steps skipped in a row, and in the whole run, before those in `_steps`
        self._steps: list[Tensor] = []  # (2,) bool each: a gradient was not finite, this rank's loss was not finite

    def note(self, outcome: Tensor) -> None:
        """Record the second value that `Precision.step` returned."""
        self._steps.append(outcome)

    def pop(self) -> dict[int, bool]:
        """Return the steps skipped since the last call, counted back from the newest one (-1, -2, ...): True if this
        rank's loss was not finite."""
        self._counts, steps, self._steps = self.counts(), self._finished_steps(), []
        return {number - len(steps): own for number, (broken, own) in enumerate(steps) if broken}

    def _finished_steps(self) -> list[list[bool]]:
        return torch.stack(self._steps).tolist() if self._steps else []

    def counts(self) -> list[int]:
        """Return the steps skipped in a row until now, and in the whole run."""
        in_a_row, skipped = self._counts
        for broken, _ in self._finished_steps():
            in_a_row = in_a_row + 1 if broken else 0
            skipped = skipped + broken
        return [in_a_row, skipped]

    def restore_counts(self, in_a_row: int, skipped: int) -> None:
        """Continue from the numbers that `counts` returned."""
        self._counts = [in_a_row, skipped]

    def check(self) -> int:
        """Return how many steps were skipped in the whole run. This synchronises, so call it once per log interval.
        Raise NonFiniteError if the newest steps, more than `limit` in a row, were skipped."""
        in_a_row, skipped = self.counts()
        if in_a_row > self.limit:
            raise NonFiniteError(
                f"the gradients of {in_a_row} steps in a row were not finite (--max-nonfinite): weights were left "
                "as they were; lower --lr, use --clip-grad 1.0 or --amp-dtype bfloat16; the images of these steps are "
                "in events.jsonl"
            )
        return skipped


class Precision:
    """Autocast, loss scaling, clipping, and the step that skips non-finite gradients.

    Args:
        amp_dtype: Dtype of autocast; None for float32.
        max_nonfinite: `skipped.check` raises after more than this many skipped steps in a row, 16 more with a scaler.
        working_copy: What computes in place of the model, if anything.
        norm_of: Returns the 2-norm of the parameters' gradients.
    """

    def __init__(
        self,
        device: torch.device,
        amp_dtype: torch.dtype | None = None,
        clip: Clipping | None = None,
        max_nonfinite: int = 10,
        working_copy: WorkingCopy | None = None,
        norm_of: Callable[[Iterable[nn.Parameter]], Tensor] = total_norm,
    ) -> None:
        self.device = device
        self.amp_dtype = amp_dtype
        self.clip = clip
        self.working_copy = working_copy
        self._norm_of = norm_of
        scaled = amp_dtype is torch.float16 and device.type == "cuda"
        self.scaler = torch.amp.GradScaler(device.type) if scaled else None
        # The loss scale starts at 2^16, so up to 16 halvings are calibration and no divergence.
        self.skipped = SkippedSteps(max_nonfinite + (16 if scaled else 0))
        self._statistics: RunningStatistics | None = None
        self._loss_broken = torch.zeros((), dtype=torch.bool, device=device)  # whether a loss of the step is not finite
        self.keeps_gradients = False  # whether a step zeroes gradients in place instead of freeing them

    def begin(self, model: nn.Module | None = None) -> None:
        """Record the running statistics of `model`, which is always the same, and refresh the working copy. Call this
        in training mode, before training starts or continues."""
        if model is not None:
            self._statistics = self._statistics or RunningStatistics(model)  # made once: CUDA graphs use its addresses
            self._statistics.note()
        if self.working_copy is not None:
            self.working_copy.refresh_copy()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which a forward pass and its loss run; for float32 it does nothing."""
        return nullcontext() if self.amp_dtype is None else torch.autocast(self.device.type, dtype=self.amp_dtype)

    def backward(self, loss: Tensor, reduced: bool = False) -> None:
        """Accumulate the gradients of `loss`, scaled if float16 needs that. If `reduced`, this backward pass averages
        the accumulated gradients over the ranks."""
        self._loss_broken.logical_or_(~torch.isfinite(loss.detach()))
        if self.working_copy is not None and reduced:
            self.working_copy.return_to_copy()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.working_copy is not None:
            self.working_copy.accumulate_into_master()

    def step(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], note: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, Tensor]:
        """Clip the gradients, step unless one of them is not finite, and clear them; `note` is called before they are
        cleared. All ranks decide alike whether to step, because they have the same all-reduced gradients. Return the
        2-norm of the gradients before clipping, a scalar on the device, and the argument of `skipped.note`."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        norm = self._norm_of(parameters)
        broken = ~torch.isfinite(norm)
        outcome = torch.stack([broken, self._loss_broken])
        self._loss_broken.zero_()
        if self.clip is not None:
            self.clip(parameters, norm)
        _step_unless(broken, optimizer)
        if self._statistics is not None:
            self._statistics.settle(broken)
        if self.scaler is not None:
            self.scaler.update()
        note()
        optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        if self.working_copy is not None:
            self.working_copy.refresh_copy()
        return norm, outcome

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo what a forward and a backward pass between two updates have changed."""
        optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        if self._statistics is not None:
            self._statistics.settle(torch.ones_like(self._loss_broken))
        self._loss_broken.zero_()


# Their fused steps leave weights and moments unchanged if `found_inf` is set, even the first step. torch's SGD would
# afterwards add momentum that was never written, and apex's FusedAdam ignores `found_inf`.
_SKIP_ON_DEVICE = (torch.optim.Adam, torch.optim.AdamW)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer can be skipped without the host knowing."""
    groups = optimizer.param_groups
    parts = any(isinstance(p, DTensor) for p in groups[0]["params"])  # weights that --shard divides
    return type(optimizer) in _SKIP_ON_DEVICE and all(group["fused"] for group in groups) and not parts


def _step_unless(broken: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step if `broken` is false. Fused Adam decides this on the device, other optimizers after a synchronisation."""
    if skips_on_device(optimizer):
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = broken.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(broken):
        optimizer.step()


# The largest allowed difference relative to the largest value. Rounding causes 0.4 %, sums in bfloat16 cause 2 %.
_TOLERANCE = 0.05
_OWN_FORWARD = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)  # these call `_conv_forward`


def check_convolutions(
    model: nn.Module, input_size: tuple[int, int, int], dtype: torch.dtype | None, device: torch.device
) -> list[str]:
    """Let convolutions that this processor computes wrong in bfloat16 run in float32; return a warning about them. The
    float32 model, on its device and in its memory format, will compute in `dtype`; only bfloat16 on a CPU is tested.
    Weights and their dtypes stay unchanged, and copies of the model do the same. Every rank must call this, because
    processors may differ."""
    if dtype is not torch.bfloat16 or device.type != "cpu":
        return []
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _ConvNd)}
    samples: dict[object, tuple[str, Tensor]] = {}  # a layer of each kind and input shape, with an input

    def note(name: str, layer: nn.Module, inputs: tuple[Tensor]) -> None:
        samples.setdefault((*_kind(layer), inputs[0].shape, inputs[0].stride()), (name, inputs[0]))

    def run(network: nn.Module, images: Tensor) -> None:
        for name in layers:
            network.get_submodule(name).register_forward_pre_hook(partial(note, name))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            network(images)

    try:
        run(on_meta(model), torch.empty(2, *input_size, device="meta"))
    except Exception:  # layers that need the values of tensors raise errors of any type
        run(copy.deepcopy(model), torch.zeros(2, *input_size))
    wrong = [name for name, x in samples.values() if not _error(layers[name], x) <= _TOLERANCE]  # also if it is NaN
    wrong = sorted({name for of_rank in from_all(wrong) for name in of_rank})
    if not wrong:
        return []
    kinds = {_kind(model.get_submodule(name)) for name in wrong}
    remedy = "float32 computes them"
    for layer in layers.values():
        if _kind(layer) in kinds and type(layer).forward in _OWN_FORWARD:
            layer._conv_forward = partial(_in_float32, layer._conv_forward)  # type: ignore[method-assign]
        elif _kind(layer) in kinds:
            remedy = "use float32 (without --amp and --model-dtype), or another version of torch"
    return [
        f"warning: torch {torch.__version__} computes {', '.join(wrong)} and convolutions like it wrong in bfloat16 "
        f"on this processor: {remedy}"
    ]


def _kind(layer: nn.Module) -> tuple[type, str]:
    return type(layer), layer.extra_repr()  # has channels, window, stride, padding, dilation and groups


@torch.no_grad()
def _error(layer: nn.Module, sample: Tensor) -> float:
    """Return bfloat16's error for an input of this shape, relative to the largest value; it may be NaN."""
    x = torch.empty_strided(sample.shape, sample.stride()).normal_(generator=torch.Generator().manual_seed(0))
    right = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        return float((layer(x).float() - right).abs().max() / right.abs().max().clamp_min(1e-30))


def _in_float32(convolve: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a convolution of `x` in float32 on a CPU; the result has the dtype that it would have otherwise."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    with torch.autocast("cpu", enabled=False):
        return convolve(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
