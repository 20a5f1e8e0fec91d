"""Mixed precision and the guarded optimizer step.

On CUDA `--amp` means float16 autocast with loss scaling (bfloat16 without, on request); on the CPU it means bfloat16,
because float16 there is about 50 times slower. A step whose gradients are not finite changes no weight.
"""

from __future__ import annotations

import copy
from argparse import Namespace
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
from tlt.models.flops import run_on_meta
from volo.cluster.distributed import from_all
from volo.cluster.shard import total_norm

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def compute_dtype(args: Namespace, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype of `--model-dtype` or `--amp`, None for float32.

    Raises:
        UserError: float16 is asked for on a CPU.
    """
    if getattr(args, "model_dtype", "float32") == "bfloat16":  # a flag of train.py alone
        return torch.bfloat16
    if not args.amp:
        return None
    if device.type == "cpu" and args.amp_dtype == "float16":
        raise UserError("--amp-dtype float16 is about 50 times slower than float32 on a CPU; use --amp-dtype bfloat16")
    return DTYPES[args.amp_dtype or ("float16" if device.type == "cuda" else "bfloat16")]


# Norms keep float32 parameters and running statistics, those of the master itself.
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


class WorkingCopy:
    """A bfloat16 copy of `master` that computes, while the float32 model is optimized, averaged, validated and saved.

    After a backward pass the gradients of the copy go to the master weights, which add up those of micro-batches; after
    a step the weights come back. The copy runs under bfloat16 autocast, which computes norms and softmax in float32.
    Autocast on a float32 model casts weights in every forward pass and gradients in every backward pass, and its
    activations are float32 from the position embedding on; here all of that is bfloat16.

    Attributes:
        module: The module that computes, with the names of `master`. Its norms share parameters and buffers.
    """

    def __init__(self, master: nn.Module) -> None:
        norms = [module for module in master.modules() if isinstance(module, _NORMS)]
        shared = [tensor for norm in norms for tensor in (*norm.parameters(), *norm.buffers())]
        self.module = copy.deepcopy(master, {id(tensor): tensor for tensor in shared})
        kept = {id(tensor) for tensor in shared}
        for parameter in self.module.parameters():
            if id(parameter) not in kept:
                parameter.data = parameter.data.bfloat16()
        pairs = zip(master.parameters(), self.module.parameters(), strict=True)
        self._pairs = [(own, cast) for own, cast in pairs if own is not cast]

    @torch.no_grad()
    def refresh_copy(self) -> None:
        """Round the master's weights into the copy."""
        torch._foreach_copy_([cast for _, cast in self._pairs], [own for own, _ in self._pairs])

    @torch.no_grad()
    def accumulate_into_master(self) -> None:
        """Add the copy's gradients to those of the master in float32, and clear them."""
        new, old = [], []
        for own, cast in self._pairs:
            if cast.grad is not None and own.grad is not None:
                old.append((own.grad, cast.grad))
            elif cast.grad is not None:
                own.grad = torch.empty_like(own)
                new.append((own.grad, cast.grad))
            cast.grad = None
        if new:
            torch._foreach_copy_([own for own, _ in new], [cast for _, cast in new])
        if old:
            torch._foreach_add_([own for own, _ in old], [cast for _, cast in old])

    def return_to_copy(self) -> None:
        """Move the accumulated gradients, rounded, back to the copy; the next backward pass adds its own to them.

        DistributedDataParallel knows only the copy, and sends the gradients that it has after that pass.
        """
        for own, cast in self._pairs:
            if own.grad is not None:
                cast.grad, own.grad = own.grad.to(cast.dtype), None


class RunningStatistics:
    """The running statistics of BatchNorm and its kind in a model, which its forward passes change before it is known
    whether the step is skipped.

    Args:
        model: In the mode in which it trains: layers in evaluation mode are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._views: dict[torch.dtype, list[Tensor]] = {}  # one-dimensional, of the model's memory
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if module.training and (name.startswith("running_") or name == "num_batches_tracked"):
                    self._views.setdefault(buffer.dtype, []).append(buffer.view(-1))
        self._before = self._gathered()

    def note(self) -> None:
        """Note those of now, which others may have changed."""
        for before, now in zip(self._before, self._gathered(), strict=True):
            before.copy_(now)

    def _gathered(self) -> list[Tensor]:
        return [torch.cat(views) for views in self._views.values()]

    @torch.no_grad()
    def settle(self, skipped: Tensor) -> None:
        """End a step: those of before it come back where it is `skipped`, a scalar on the device, and where a value of
        them is not finite: the square of a large value overflows before the value does."""
        if not self._views:
            return
        now = self._gathered()
        back = torch.stack([skipped, *(~torch.isfinite(values).all() for values in now)]).any()
        for views, before, values in zip(self._views.values(), self._before, now, strict=True):
            before.copy_(torch.where(back, before, values))
            torch._foreach_copy_(views, before.split([len(view) for view in views]))


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context in which a forward pass and its loss run; it changes nothing for float32 (None)."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped before a step.

    Attributes:
        mode: `"norm"` (2-norm of all gradients), `"value"` (each element) or `"agc"` (adaptive, per unit).
        heads: Modules that `"agc"` leaves unclipped, as timm and the paper do (arXiv 2102.06171, section 4.1).
    """

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


class Precision:
    """Autocast, loss scaling, clipping, and the step that skips non-finite gradients.

    Args:
        device: Where the model trains.
        amp_dtype: Autocast dtype, None for float32.
        clip: None leaves the gradients as they are.
        max_nonfinite: `check()` raises after more than this many skipped steps in a row.
        working_copy: The bfloat16 copy that computes; None: the model itself computes.
        norm_of: Returns the 2-norm of the gradients of parameters.
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
        self.device, self.amp_dtype, self.clip, self.working_copy = device, amp_dtype, clip, working_copy
        self._norm_of = norm_of
        scaled = amp_dtype is torch.float16 and device.type == "cuda"
        self.scaler = torch.amp.GradScaler(device.type) if scaled else None
        # The loss scale starts at 2^16: up to 16 halvings are calibration, not divergence.
        self.max_nonfinite = max_nonfinite + (16 if scaled else 0)
        self._statistics: RunningStatistics | None = None
        self._counts = [0, 0]  # steps skipped in a row, and in the whole run, before those in `_steps`
        self._loss_broken = torch.zeros((), dtype=torch.bool, device=device)  # in a micro-batch of the current step
        self._steps: list[Tensor] = []  # (2,) bool each: gradients not finite, this rank's loss not finite
        self.keeps_gradients = False  # in their memory, which a step then zeroes

    def begin(self, model: nn.Module | None = None) -> None:
        """Note running statistics of `model`, always the same one, and copy its weights into the working copy; call it
        in training mode, before training starts or goes on."""
        if model is not None:
            self._statistics = self._statistics or RunningStatistics(model)  # a CUDA graph knows where they lie
            self._statistics.note()
        if self.working_copy is not None:
            self.working_copy.refresh_copy()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward pass and the loss run."""
        return autocast(self.device, self.amp_dtype)

    def backward(self, loss: Tensor, reduced: bool = False) -> None:
        """Accumulate the gradients of `loss`, scaled where float16 needs it.

        Args:
            reduced: This backward pass averages the accumulated gradients over the ranks.
        """
        self._loss_broken.logical_or_(~torch.isfinite(loss.detach()))
        if self.working_copy is not None and reduced:
            self.working_copy.return_to_copy()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.working_copy is not None:
            self.working_copy.accumulate_into_master()

    def step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> Tensor:
        """Clip, step unless a gradient is not finite, clear the gradients.

        Returns the 2-norm of the gradients before clipping, a scalar on the device. All ranks agree on whether to step,
        because they hold the same all-reduced gradients.
        """
        norm, broken = self.update(optimizer, parameters)
        self.note(broken)
        return norm

    def note(self, broken: Tensor) -> None:
        """Note what `update` returned for the step just done, for `counts` and `check`."""
        self._steps.append(broken)

    def update(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
        """Do the device's part of `step`. Returns the norm and (2,) bool: gradients not finite, own loss not finite."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        norm = self._norm_of(parameters)
        broken = ~torch.isfinite(norm)
        told = torch.stack([broken, self._loss_broken])
        self._loss_broken.zero_()
        if self.clip is not None:
            self.clip(parameters, norm)
        _step_unless(broken, optimizer)
        if self._statistics is not None:
            self._statistics.settle(broken)
        if self.scaler is not None:
            self.scaler.update()
        optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        if self.working_copy is not None:
            self.working_copy.refresh_copy()
        return norm, told

    def pop_nonfinite_steps(self) -> dict[int, bool]:
        """The steps with non-finite gradients since the last call; True where this rank's own loss was not finite.

        Keys count back from the newest step: -1, -2, ... Synchronises with the device, as `counts` and `check`.
        """
        self._counts, steps, self._steps = self.counts(), self._finished_steps(), []
        return {number - len(steps): own for number, (broken, own) in enumerate(steps) if broken}

    def _finished_steps(self) -> list[list[bool]]:
        return torch.stack(self._steps).tolist() if self._steps else []

    def counts(self) -> list[int]:
        """Return the steps skipped in a row up to now, and in the whole run."""
        in_a_row, skipped = self._counts
        for broken, _ in self._finished_steps():
            in_a_row, skipped = (in_a_row + 1 if broken else 0), skipped + broken
        return [in_a_row, skipped]

    def restore_counts(self, in_a_row: int, skipped: int) -> None:
        """Continue from the numbers that `counts` returned."""
        self._counts = [in_a_row, skipped]

    def check(self) -> int:
        """Return how many steps were skipped in the whole run. Synchronises: call it once per log interval.

        Raises:
            NonFiniteError: More than `max_nonfinite` steps in a row were skipped.
        """
        in_a_row, skipped = self.counts()
        if in_a_row > self.max_nonfinite:
            raise NonFiniteError(
                f"the gradients of {in_a_row} steps in a row were not finite (--skip-nonfinite): weights were left "
                "as they were; lower --lr, use --clip-grad 1.0 or --amp-dtype bfloat16; the images of these steps are "
                "in events.jsonl"
            )
        return skipped


# Their fused steps leave weights and moments as they are where `found_inf` is set, in the first step as well. After
# torch's SGD the next step adds momentum that nobody has written, and apex's FusedAdam does not look at `found_inf`.
_SKIP_ON_DEVICE = (torch.optim.Adam, torch.optim.AdamW)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer can be skipped without asking the host."""
    groups = optimizer.param_groups
    parts = any(isinstance(p, DTensor) for p in groups[0]["params"])  # of --shard, on several ranks
    return type(optimizer) in _SKIP_ON_DEVICE and all(group["fused"] for group in groups) and not parts


def _step_unless(broken: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step if `broken` is false: decided on the device by fused Adam, else after one host synchronisation."""
    if skips_on_device(optimizer):
        optimizer.grad_scale, optimizer.found_inf = None, broken.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(broken):
        optimizer.step()


# The largest allowed difference, as a share of the largest value. Rounding gives 0.4 %, sums in bfloat16 give 2 %.
_TOLERANCE = 0.05
_OWN_FORWARD = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)  # those that call `_conv_forward`


def check_convolutions(
    model: nn.Module, input_size: tuple[int, int, int], dtype: torch.dtype | None, device: torch.device
) -> list[str]:
    """Let convolutions that this processor computes wrong in bfloat16 compute in float32; return a warning of them.

    Weights and their types stay as they are, and copies of the model do the same. Every rank must call this, because
    processors may differ.

    Args:
        model: In float32, on its device and in its memory format.
        input_size: (channels, H, W) of the images.
        dtype: The type that the model is to compute in; only bfloat16 on a CPU is tried.
    """
    if dtype is not torch.bfloat16 or device.type != "cpu":
        return []
    names: dict[nn.Module, str] = {layer: name for name, layer in model.named_modules() if isinstance(layer, _ConvNd)}
    distinct: dict[object, tuple[nn.Module, Tensor]] = {}  # and an input without contents

    def note(layer: nn.Module, given: tuple[Tensor]) -> None:
        if layer in names:
            distinct.setdefault((*_kind(layer), given[0].shape, given[0].stride()), (layer, given[0]))

    with nn.modules.module.register_module_forward_pre_hook(note):
        run_on_meta(model, input_size)
    wrong = [names[layer] for layer, given in distinct.values() if not _error(layer, given) <= _TOLERANCE]  # or NaN
    if not (found := sorted({name for names in from_all(wrong) for name in names})):
        return []
    kinds, remedy = {_kind(model.get_submodule(name)) for name in found}, "float32 computes them"
    for layer in names:
        if _kind(layer) in kinds and type(layer).forward in _OWN_FORWARD:
            layer._conv_forward = partial(_in_float32, layer._conv_forward)  # type: ignore[assignment, arg-type]
        elif _kind(layer) in kinds:
            remedy = "use float32 (without --amp and --model-dtype), or another version of torch"
    return [
        f"warning: torch {torch.__version__} computes {', '.join(found)} and convolutions like it wrong in bfloat16 on "
        f"this processor: {remedy}"
    ]


def _kind(layer: nn.Module) -> tuple[type, str]:
    return type(layer), layer.extra_repr()  # with channels, window, stride, padding, dilation and groups


@torch.no_grad()
def _error(layer: nn.Module, given: Tensor) -> float:
    """Return how far bfloat16 is off for an input of this shape, as a share of the largest value; it may be NaN."""
    x = torch.empty_strided(given.shape, given.stride()).normal_(generator=torch.Generator().manual_seed(0))
    right = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        return float((layer(x).float() - right).abs().max() / right.abs().max().clamp_min(1e-30))


def _in_float32(convolve: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a convolution of `x` in float32 on a CPU; the result has the type that it would have otherwise."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    with torch.autocast("cpu", enabled=False):
        return convolve(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
