"""Forward passes on tensors without contents: with the shapes, types and devices of a run, but without computation.

They show how much memory a step needs before any is allocated, also on a machine without a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from tlt.models.recompute import is_product


class MemoryTally(TorchDispatchMode):
    """Counts operations and the memory of their results.

    Attributes:
        held: Bytes of results that are still referenced; tensors that share memory count once.
        products, rest: Floating-point operations so far, by `is_product`.

    Args:
        known: Tensors whose memory is not counted.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.held = self.products = self.rest = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._hold(value.untyped_storage())
        if func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
            self.products += flops if is_product(func) else 0
            self.rest += 0 if is_product(func) else flops
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._known:
            return

        def gone(_: Any) -> None:
            del self._alive[key]
            self.held -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.held += size


class _AbsentGpu(TorchFunctionMode):
    """Counts fused attention for a GPU that is not there, where torch would choose the unfused one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args
        fused = torch.ops.aten._scaled_dot_product_efficient_attention
        return fused(query, key, value, None, True, kwargs.get("dropout_p", 0.0))[0]


@contextmanager
def _autocast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Enter `torch.autocast`, also for CUDA on a machine without a GPU, where torch would disable it."""
    with ExitStack() as stack:
        if dtype is not None and (device_type != "cuda" or torch.cuda.is_available()):
            stack.enter_context(torch.autocast(device_type, dtype=dtype))
        elif dtype is not None:
            stack.callback(torch.set_autocast_dtype, device_type, torch.get_autocast_dtype(device_type))
            stack.callback(torch.set_autocast_enabled, device_type, False)
            stack.callback(torch.clear_autocast_cache)
            torch.set_autocast_dtype(device_type, dtype)
            torch.set_autocast_enabled(device_type, True)
        yield


@dataclass(frozen=True)
class StepShape:
    """The properties of a step, besides model and batch, that determine its memory.

    Attributes:
        input_size: (channels, H, W).
        device_type: "cpu", or "cuda", whether there is a GPU or not.
        amp_dtype: Type of autocast; None for float32.
        dense: Whether the step uses both heads, as with token labels.
    """

    input_size: tuple[int, int, int]
    device_type: str
    amp_dtype: torch.dtype | None = None
    dense: bool = False


class Mark(NamedTuple):
    """A position in a forward pass: bytes held, and operations done so far."""

    held: int
    products: int
    rest: int


def forward_marks(model: nn.Module, shape: StepShape, batch: int, blocks: Iterable[nn.Module] = ()) -> list[Mark]:
    """Run a forward pass and a loss of `batch` images on tensors without contents; the model is unchanged.

    Returns:
        Marks at the beginning and the end of each block, in the order in which they run, and at the end.
    """
    absent = shape.device_type == "cuda" and not torch.cuda.is_available()
    if absent and torch.__version__ < "2.10":  # autograd asks the driver, and ends the process without one
        raise RuntimeError("it needs torch 2.10")
    marks: list[Mark] = []
    with FakeTensorMode(), ExitStack() as stack:
        state = {name: _without_contents(value, shape.device_type) for name, value in _state(model)}
        images = torch.empty(batch, *shape.input_size, device=shape.device_type)
        tally = MemoryTally([*state.values(), images])

        def mark(*_: Any) -> None:
            marks.append(Mark(tally.held, tally.products, tally.rest))

        for block in blocks:
            stack.callback(block.register_forward_pre_hook(mark).remove)
            stack.callback(block.register_forward_hook(mark).remove)
        if absent:
            stack.enter_context(_AbsentGpu())
        stack.enter_context(tally)
        stack.enter_context(_autocast(shape.device_type, shape.amp_dtype))
        held = torch.func.functional_call(_Loss(model), state, (images, {"dense": True} if shape.dense else {}))
        mark()
        del held
    return marks


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(f"model.{name}", value) for name, value in [*model.named_parameters(), *model.named_buffers()]]


def _without_contents(value: Tensor, device_type: str) -> Tensor:
    empty = torch.empty(tuple(value.shape), dtype=value.dtype, device=device_type)
    return empty.requires_grad_(value.requires_grad)


class _Loss(nn.Module):
    """A model with the largest memory of a loss: logits in float32, and gradients of their size.

    The token-label loss holds the same, plus a part of its labels (docs/performance.md).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, options: dict[str, Any]) -> list[Tensor]:
        outputs = self.model(images, **options)
        logits = [each.float() for each in (outputs if isinstance(outputs, tuple) else (outputs,))]
        return [*(each.logsumexp(-1) for each in logits), *map(torch.empty_like, logits)]
