"""The operations of the CUDA device that is not there, and what it has seen."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tests.stand_in.graph import Graph
from tests.stand_in.streams import Block, Event, Stream, current_stream
from tests.stand_in.tensor import CudaTensor, Mode, leaves_of
from volo.kernels import windows  # noqa: F401 (defines the operators that answer for Triton's programs)

# They allocate, or look at the same memory in another way.
_NO_KERNEL = ("empty", "new_empty", "lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "_local_scalar_dense")
# The shape of the result depends on the values, which the host has to know.
_READ_BY_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")
_REPEAT_DEVICE = ("aten::_to_copy", "aten::new_")
_INDEXING = ("index", "index_put_", "index_put", "_index_put_impl_")
_PRODUCTS = ("convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm")


class Wait(NamedTuple):
    """A place at which the host waits for the device."""

    operation: str
    stack: tuple[str, ...]  # the product's functions from the outermost on, each "folder/file.py:function"

    def __str__(self) -> str:
        return f"{self.operation} in {' > '.join(self.stack)}"


class StandIn:
    """What the device has done, and the operations on it."""

    active: StandIn

    def __init__(self) -> None:
        self.main = self.default = Stream(name="main stream")  # of the thread that trains, and of others
        self.mains = {self.main}
        self.capturing: Graph | None = None
        self.left_by_failures: set[str] = set()  # of captures, which torch does not clear up
        self.waits: list[Wait] = []
        self.launches = Counter[str]()  # by "folder/file.py:function" of the product
        self.races: list[str] = []
        self.in_backward = False
        self.sync_debug_mode = "default"  # that of `torch.cuda.set_sync_debug_mode`
        self._pinned: dict[int, Any] = {}  # page-locked storages, by address; kept, so that no address comes twice
        products = [getattr(torch.ops.aten, name).default for name in _PRODUCTS]
        self._replaced = {
            **{product: partial(_in_float32, product) for product in products},
            torch.ops.volo.outlook_attention.default: torch.ops.volo.outlook_windows.default,
            torch.ops.volo.outlook_attention_backward.default: torch.ops.volo.outlook_windows_backward.default,
        }

    def host_waits(self, operation: str, event: Event | None = None) -> None:
        """Note a wait for an event, or for the end of what this thread's stream does."""
        self.refuse_in_capture(operation)
        self.waits.append(Wait(operation, tuple(product_frames())[::-1]))
        if event is None and self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {self.waits[-1]}")
        (event or current_stream().record_event()).reached()

    def refuse_in_capture(self, operation: str, *_: Any) -> None:
        """Raise as a GPU does for what a graph can't hold, or would hold with the host's numbers of the capture."""
        if self.capturing is not None:
            self.capturing.failed = True
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {operation}")

    def clear_up(self, what: str) -> None:
        """Take back what a failed capture has left."""
        if what not in self.left_by_failures:
            raise RuntimeError(f"{what}: INTERNAL ASSERT FAILED, no capture has left it")
        self.left_by_failures.remove(what)

    def synchronize(self, _: Any = None) -> None:
        after_all = Stream()
        for stream in (self.default, *self.mains):
            after_all.wait_stream(stream)
        after_all.synchronize()

    def race(self, message: str) -> None:
        self.races.append(f"{message} ({' < '.join(product_frames())})")

    def pin(self, tensor: Tensor) -> Tensor:
        """Note that a tensor's memory is page-locked."""
        self.refuse_in_capture("pin_memory")
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def run(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do an operation on the device that its tensors, or its argument `device`, name."""
        leaves = leaves_of((*args, *kwargs.values()))
        own = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
        asked = kwargs.get("device") and torch.device(kwargs["device"]).type
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):  # of a prediction of memory
            return operation(*args, **kwargs)
        if asked == "cpu" and (self.in_backward or (own and operation._schema.name.startswith(_REPEAT_DEVICE))):
            asked = "cuda"  # C++ repeats what it takes for the device of a tensor
        page_locked = kwargs.get("pin_memory")
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"} if page_locked else kwargs
        # In inference mode operations arrive before they are taken apart.
        if (own or asked == "cuda") and torch.is_inference_mode_enabled() and operation._can_decompose():
            with Mode():
                return operation.decompose(*args, **kwargs)
        if asked not in (None, "cuda") or not (own or asked):  # what is made elsewhere: empty_like(x, device="cpu")
            made = operation(*_held(args), **kwargs)
            return self.pin(made) if page_locked else made
        with torch.inference_mode(False):  # a view can't be one of that mode where its base is not
            return self._run(operation, args, kwargs, leaves)

    def _run(self, operation: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        name = operation._schema.name.split("::")[1]
        own = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
        plain = [t for t in leaves if isinstance(t, Tensor) and not (isinstance(t, CudaTensor) or t.is_meta)]
        if name == "_to_copy" and not own:
            return self._copied(operation, args[0], kwargs)
        if name == "copy_" and plain:
            return self._copied_into(*args[:2], non_blocking=bool((args + (False,))[2] or kwargs.get("non_blocking")))
        self._check(operation, name, plain, kwargs)
        if name in _READ_BY_HOST or (name in _INDEXING and _asks_host(args[1])):
            self.host_waits(name)
        return self._computed(operation, name, args, kwargs, own)

    def _check(self, operation: Any, name: str, plain: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Raise as a GPU does for operands of the CPU; its numbers (0-dimensional tensors) and indices are taken."""
        if any(t.ndim for t in plain) and name not in _INDEXING:
            shapes = [tuple(t.shape) for t in plain]
            raise RuntimeError(f"Expected all tensors to be on the same device: {name} got {shapes} on cpu")
        generator = kwargs.get("generator")
        if generator is not None:
            self.refuse_in_capture("a generator that is not the default one")
        if "generator" in self.left_by_failures and torch.Tag.nondeterministic_seeded in operation.tags:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        if generator is not None and not isinstance(generator, CudaGenerator):
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")

    def _computed(self, operation: Any, name: str, args: Any, kwargs: Any, own: list[CudaTensor]) -> Any:
        kernel = not (operation.is_view or name in _NO_KERNEL or name.startswith("empty"))
        by_held = {id(t.held): t for t in own}
        hold = _frozen if self.capturing else _held
        held_args, held_kwargs = hold(args), {name: hold(value) for name, value in kwargs.items()}
        held_kwargs = {k: "cpu" if k == "device" else v for k, v in held_kwargs.items()}
        run = partial(self._replaced.get(operation, operation), *held_args, **held_kwargs)
        if not kernel:
            result = run()
        elif self.capturing is not None:
            what = name, next(product_frames(), ""), _numbers(args, kwargs)
            result = self.capturing.keep(what, run, own, _written(operation, args, kwargs))
        else:
            self._launch(name, current_stream(), own, _written(operation, args, kwargs))
            result = run()
        blocks = {t.held.untyped_storage()._cdata: t.block for t in own}

        def wrapped(held: Tensor) -> CudaTensor:
            if (same := by_held.get(id(held))) is not None:
                if same.shape != held.shape or same.dtype != held.dtype:
                    raise NotImplementedError(f"{name} changes the shape or type of its operand")
                return same
            return self._on_device(held, blocks.get(held.untyped_storage()._cdata))

        if name in ("_local_scalar_dense", "equal", "is_nonzero"):
            return result
        return _mapped(result, wrapped)

    def _on_device(self, held: Tensor, block: Block | None = None) -> CudaTensor:
        return CudaTensor(held, block or Block(current_stream()))

    def _launch(self, name: str, stream: Stream, tensors: Iterable[CudaTensor], written: Iterable[Any] = ()) -> None:
        self.refuse_in_capture(name)
        self.launch(name, stream, {t.block for t in tensors}, {t.block for t in written if isinstance(t, CudaTensor)})

    def launch(self, name: str, stream: Stream, used: set[Block], written: set[Block]) -> None:
        """Count a kernel, and look whether its stream may touch the memory of its operands already."""
        stream.time += 1
        self.launches[next(product_frames(), "")] += 1
        for block in used:
            if not stream.comes_after(*block.written):
                self.race(f"{name} on {stream} touches what {block.written[0]} may still be writing")
            block.used[stream] = stream.time
        for block in written:
            if readers := [other for other, time in block.used.items() if not stream.comes_after(other, time)]:
                self.race(f"{name} on {stream} overwrites what {readers[0]} may still be reading")
            block.written = (stream, stream.time)

    def _copied(self, operation: Any, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """`_to_copy` to the device."""
        non_blocking = bool(kwargs.get("non_blocking"))
        self._launch("_to_copy", current_stream(), [])
        if not (non_blocking and self.is_pinned(tensor)):
            self.host_waits("copy from memory that is not page-locked" if non_blocking else "copy to the device")
        return self._on_device(operation(tensor, **{**kwargs, "device": "cpu"}))

    def to_host(self, tensor: Tensor, non_blocking: bool, **options: Any) -> Tensor:
        """A copy on the CPU, in page-locked memory where the host does not wait for it."""
        assert isinstance(tensor, CudaTensor)
        self._launch("_to_copy", current_stream(), [tensor])
        made = tensor.held.to(copy=True, **options)
        return self._arriving(self.pin(made) if non_blocking else made, made.clone(), non_blocking)

    def _copied_into(self, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        """`copy_` between the devices."""
        self._launch("copy_", current_stream(), [t for t in (target, source) if isinstance(t, CudaTensor)], [target])
        if isinstance(target, CudaTensor):
            if source.ndim and not (non_blocking and self.is_pinned(source)):
                self.host_waits("copy to the device")
            target.held.copy_(source)
            return target
        assert isinstance(source, CudaTensor)
        return self._arriving(target, source.held, non_blocking)

    def _arriving(self, target: Tensor, values: Tensor, non_blocking: bool) -> Tensor:
        """Write values to a tensor of the CPU, when the host has waited for them."""
        stream = current_stream()
        if non_blocking and self.is_pinned(target):
            stream.copies.append((stream.time, target, values.detach().clone()))
            with torch.no_grad():
                target.fill_(float("nan")) if target.is_floating_point() else target.zero_().bitwise_not_()
            return target
        self.host_waits("copy to the host")
        with torch.no_grad():
            target.copy_(values)
        return target


def _mapped(values: Any, function: Callable[[Any], Any]) -> Any:
    """The same with another tensor in place of each."""
    if isinstance(values, Tensor):
        return function(values)
    return type(values)([_mapped(value, function) for value in values]) if type(values) in (list, tuple) else values


def _held(values: Any) -> Any:
    return _mapped(values, lambda tensor: tensor.held if isinstance(tensor, CudaTensor) else tensor)


def _in_float32(product: Any, *args: Any, **kwargs: Any) -> Any:
    """A product of bfloat16 in float32, rounded: a processor's own may be wrong (AMX), and rounds as it likes."""
    if not any(isinstance(each, Tensor) and each.dtype is torch.bfloat16 for each in args):
        return product(*args, **kwargs)
    exact = product(*(_mapped(each, Tensor.float) for each in args), **kwargs)
    return _mapped(exact, Tensor.bfloat16)


def _numbers(args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The numbers of the host among operands."""
    leaves = [leaf for leaf in leaves_of((*args, *kwargs.values())) if not isinstance(leaf, CudaTensor)]
    return tuple(leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves)


def _frozen(values: Any) -> Any:
    """As `_held`; a graph keeps the number of a CPU's tensor."""
    return _mapped(values, lambda tensor: tensor.held if isinstance(tensor, CudaTensor) else tensor.clone())


def _written(operation: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation overwrites."""
    if operation is torch.ops.aten.native_batch_norm.default:  # its schema does not tell of the running statistics
        return [statistics for statistics in args[3:5] if statistics is not None and args[5]]
    by_name = {argument.name: argument for argument in operation._schema.arguments}
    named = [*zip(by_name.values(), args, strict=False), *((by_name[name], value) for name, value in kwargs.items())]
    return leaves_of(value for argument, value in named if argument.alias_info and argument.alias_info.is_write)


def _asks_host(indices: Any) -> bool:
    """Whether indexing has to ask how many rows a mask chooses, or to copy indices from the host."""
    result = [index for index in indices if index is not None]
    return any(index.dtype in (torch.bool, torch.uint8) or not isinstance(index, CudaTensor) for index in result)


class CudaGenerator(torch.Generator):
    """A generator of the device; draws what the CPU's draws."""

    def __new__(cls, device: Any = "cuda") -> CudaGenerator:
        return super().__new__(cls, "cpu")


def product_frames() -> Iterator[str]:
    """The product's functions that are being run, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/volo/" in path or "/tlt/" in path:
            yield f"{'/'.join(path.rsplit('/', 2)[1:])}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
