"""A CUDA device that is not there: whole programs run with `--device cuda` on a machine without a driver.

A tensor on it says "cuda:0" to Python, and its numbers are computed on the CPU, so that programs end as on a GPU and
their losses can be compared. What a GPU punishes, the stand-in finds:

- An operation on tensors of both devices, or an attribute that a batch lost on its way, raises.
- `waits` lists every place at which the host waits for the device. A copy from memory that is not page-locked is one.
- `launches` counts the operations that start a kernel or a copy, by the stage of the product that starts them.
- A copy to page-locked memory arrives when the host has waited for it; until then its memory holds NaN, or -1.
- In the capture of a graph (`tests/stand_in/graph.py`) nothing is computed and nothing may wait. `replay` does it all
  with the numbers that Python had then, and is one launch.
- `races` lists where a stream reads or writes what another one may still be writing or reading, and memory that is
  given back while another stream than its own may still use it.

Not here: the rounding of a GPU, and autocast's list of operations for CUDA (the CPU's takes its place); Triton's
programs (the operator of `volo.kernels.windows` answers for them, `tests/models/test_outlook_triton.py` interprets
them); torch.compile and NCCL; worker processes (-j 0). C++ takes a tensor for one of the CPU.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.stand_in import streams
from tests.stand_in.graph import Graph, capture
from tests.stand_in.streams import ACTIVE, Block, Event, Stream, current_stream, on_stream
from volo.kernels import windows  # noqa: F401 (defines the operators that answer for Triton's programs)

CUDA = torch.device("cuda", 0)
_GPU = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132)
# They allocate, or look at the same memory in another way.
_NO_KERNEL = ("empty", "new_empty", "lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "_local_scalar_dense")
# The shape of the result depends on the values, which the host has to know.
_READ_BY_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")
_REPEAT_DEVICE = ("aten::_to_copy", "aten::new_")
_INDEXING = ("index", "index_put_", "index_put", "_index_put_impl_")


class Wait(NamedTuple):
    """A place at which the host waits for the device."""

    operation: str
    stack: tuple[str, ...]  # the product's functions from the outermost on, each "folder/file.py:function"

    def __str__(self) -> str:
        return f"{self.operation} in {' > '.join(self.stack)}"


class CudaTensor(Tensor):
    """A tensor on the device. Its values are those of `held`, a tensor on the CPU."""

    held: Tensor
    block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor, block: Block) -> CudaTensor:
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device="cpu"
        )
        made.held, made.block = held, block
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ACTIVE.device.run(operation, args, kwargs or {})

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def _set_data(self, values: CudaTensor) -> None:
        Tensor.data.__set__(self, values)  # type: ignore[attr-defined]
        self.held, self.block = values.held, values.block

    data = property(lambda self: self.detach(), _set_data)  # type: ignore[assignment]

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:  # type: ignore[override]
        device, dtype, non_blocking, memory_format = _parse_to(*args, **kwargs)
        same = {"dtype": dtype or self.dtype, "memory_format": memory_format or torch.preserve_format}
        if device is None or device.type == "cuda":
            return Tensor.to(self, same["dtype"], copy=copy, memory_format=same["memory_format"])
        if device.type == "cpu":
            return ACTIVE.device.to_host(self.detach(), non_blocking, **same)
        return self.held.to(device, dtype)

    def cpu(self, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        return self.to("cpu")

    def cuda(self, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        return self

    def new_tensor(self, values: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(values, dtype=dtype or self.dtype, device=CUDA)

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.block.recorded.add(stream)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError(f"cannot pin 'torch.cuda.{self.dtype}': only dense CPU tensors can be pinned")

    def is_pinned(self, *_: Any) -> bool:
        return False

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy = self.detach().clone()
            memo[id(self)] = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"


class _Mode(TorchDispatchMode):
    """Sends every operation of a thread to the stand-in."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ACTIVE.device.run(operation, args, kwargs or {})


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
        self._replaced = {
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
        event = self.default.record_event()
        event.known |= {**self.main.known, self.main: self.main.time}
        event.synchronize()

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
        leaves = _leaves((*args, *kwargs.values()))
        own = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
        asked = kwargs.get("device") and torch.device(kwargs["device"]).type
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):  # of a prediction of memory
            return operation(*args, **kwargs)
        if asked == "cpu" and (self.in_backward or (own and operation._schema.name.startswith(_REPEAT_DEVICE))):
            asked = "cuda"  # C++ repeats what it takes for the device of a tensor
        page_locked = kwargs.get("pin_memory")
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"} if page_locked else kwargs
        if not own and asked != "cuda":
            made = operation(*args, **kwargs)
            return self.pin(made) if page_locked else made
        # In inference mode operations arrive before they are taken apart.
        if torch.is_inference_mode_enabled() and operation._can_decompose():
            with _Mode():
                return operation.decompose(*args, **kwargs)
        with torch.inference_mode(False):  # a view can't be one of that mode where its base is not
            return self._run(operation, args, kwargs, leaves, asked, bool(page_locked))

    def _run(
        self, operation: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any], asked: str | None, page_locked: bool
    ) -> Any:
        name = operation._schema.name.split("::")[1]
        own = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
        plain = [t for t in leaves if isinstance(t, Tensor) and not (isinstance(t, CudaTensor) or t.is_meta)]
        if name == "_to_copy" and not own:
            return self._copied(operation, args[0], kwargs)
        if name == "copy_" and plain:
            return self._copied_into(*args[:2], non_blocking=bool((args + (False,))[2] or kwargs.get("non_blocking")))
        if asked not in (None, "cuda"):  # such as empty_like(x, device="cpu")
            made = operation(*_held(args), **kwargs)
            return self.pin(made) if page_locked else made
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


def _leaves(values: Iterable[Any]) -> list[Any]:
    """Arguments, and what those hold that are lists; torch's trees take ten times as long."""
    found: list[Any] = []
    for value in values:
        found.extend(value) if type(value) in (list, tuple) else found.append(value)
    return found


def _mapped(values: Any, function: Callable[[Any], Any]) -> Any:
    """The same with another tensor in place of each."""
    if isinstance(values, Tensor):
        return function(values)
    return type(values)([_mapped(value, function) for value in values]) if type(values) in (list, tuple) else values


def _held(values: Any) -> Any:
    return _mapped(values, lambda tensor: tensor.held if isinstance(tensor, CudaTensor) else tensor)


def _numbers(args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The numbers of the host among operands."""
    leaves = [leaf for leaf in _leaves((*args, *kwargs.values())) if not isinstance(leaf, CudaTensor)]
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
    return _leaves(value for argument, value in named if argument.alias_info and argument.alias_info.is_write)


def _asks_host(indices: Any) -> bool:
    """Whether indexing has to ask how many rows a mask chooses, or to copy indices from the host."""
    found = [index for index in indices if index is not None]
    return any(index.dtype in (torch.bool, torch.uint8) or not isinstance(index, CudaTensor) for index in found)


class CudaGenerator(torch.Generator):
    """A generator of the device; draws what the CPU's draws."""

    def __new__(cls, device: Any = "cuda") -> CudaGenerator:
        return super().__new__(cls, "cpu")


class DefaultGenerator:
    """Stands for the device's, whose numbers are the CPU's."""

    def clone_state(self) -> None:
        ACTIVE.device.refuse_in_capture("clone_state")

    def graphsafe_set_state(self, state: None) -> None:
        ACTIVE.device.left_by_failures.discard("generator")


class _GeneratorOf(torch.Generator):
    """Stands for `torch.Generator`; annotations of modules that are imported meanwhile need a class."""

    def __new__(cls, device: Any = "cpu", real: Any = torch.Generator) -> Any:
        return CudaGenerator() if torch.device(device).type == "cuda" else real(device)


def product_frames() -> Iterator[str]:
    """The product's functions that are being run, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/volo/" in path or "/tlt/" in path:
            yield f"{'/'.join(path.rsplit('/', 2)[1:])}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]


def _run_thread(thread: threading.Thread, real: Any = threading.Thread.run) -> None:
    with _Mode():
        real(thread)


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`; torch's puts the memory of the device behind a tensor of the CPU."""
    shared: dict[nn.Parameter, nn.Parameter] = {}
    with torch.no_grad():
        for each in module.modules():
            for name, parameter in each._parameters.items():
                if parameter is not None and parameter not in shared:
                    shared[parameter] = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
                each._parameters[name] = None if parameter is None else shared[parameter]
            for name, buffer in each._buffers.items():
                each._buffers[name] = None if buffer is None else function(buffer)
    return module


def _backward(*args: Any, real: Any = torch.autograd.backward, **kwargs: Any) -> None:
    ACTIVE.device.in_backward = any(isinstance(leaf, CudaTensor) for leaf in _leaves((*args, *kwargs.values())))
    try:
        real(*args, **kwargs)
    finally:
        ACTIVE.device.in_backward = False


def _of_tensor(args: Any) -> Any:
    """The arguments of `to(other)`, whose device C++ does not know, as those of `to(device, dtype)`."""
    return (CUDA, args[0].dtype, *args[1:]) if args and isinstance(args[0], CudaTensor) else args


def _to(tensor: Tensor, *args: Any, real: Any = Tensor.to, **kwargs: Any) -> Tensor:
    return real(tensor, *_of_tensor(args), **kwargs)


def _parse_to(*args: Any, real: Any = torch._C._nn._parse_to, **kwargs: Any) -> Any:
    return real(*_of_tensor(args), **kwargs)


def _grouped(tensors: Any, with_indices: bool = False, real: Any = torch._C._group_tensors_by_device_and_dtype) -> Any:
    """Groups for `_foreach` operations, which C++ makes by its own idea of the device."""
    groups = real(tensors, with_indices)
    if not any(isinstance(leaf, CudaTensor) for leaf in _leaves(_leaves(tensors))):
        return groups
    return {(CUDA, dtype): group for (_, dtype), group in groups.items()}


@contextmanager
def stand_in_cuda() -> Iterator[StandIn]:
    """Within the block this machine has one H100, as far as Python can see."""
    stand_in = ACTIVE.device = StandIn()
    streams.begin()
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    nothing, zero, memory = (lambda *_, **__: None), (lambda *_, **__: 0), (lambda *_, **__: 1 << 30)
    seeds = ("manual_seed_all", "manual_seed", "set_rng_state")
    cuda = {
        **{name: nothing for name in ("_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats", "init")},
        **{name: partial(stand_in.refuse_in_capture, name) for name in seeds},
        **{name: memory for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")},
        **{name: lambda *_, **__: True for name in ("is_available", "is_initialized", "is_bf16_supported")},
        "max_memory_reserved": memory,
        "mem_get_info": lambda device=None: (_GPU.total_memory, _GPU.total_memory),
        "current_device": zero,
        "device_count": lambda: 1,
        "is_current_stream_capturing": lambda: stand_in.capturing is not None,
        "get_device_properties": lambda device=None: _GPU,
        "get_device_capability": lambda device=None: (_GPU.major, _GPU.minor),
        "get_device_name": lambda device=None: _GPU.name,
        "get_rng_state": lambda device=None: (
            stand_in.refuse_in_capture("get_rng_state") or torch.zeros(16, dtype=torch.uint8)
        ),
        "set_sync_debug_mode": lambda mode: setattr(stand_in, "sync_debug_mode", mode),
        "get_sync_debug_mode": lambda: ("default", "warn", "error").index(stand_in.sync_debug_mode),
        "synchronize": stand_in.synchronize,
        "current_stream": current_stream,
        "default_stream": lambda device=None: stand_in.default,
        "set_stream": streams.set_stream,
        "stream": on_stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 1),
        "default_generators": (DefaultGenerator(),),
    }
    with ExitStack() as patches:
        for name, value in cuda.items():
            patches.enter_context(patch.object(torch.cuda, name, value))
        for owner, name, value in (
            (torch.accelerator, "current_stream", current_stream),
            (torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")),
            (torch, "Generator", _GeneratorOf),
            (torch, "autocast", _Autocast),
            (torch, "is_autocast_enabled", lambda *_: enabled("cpu")),
            (torch, "get_autocast_dtype", lambda *_: dtype_of("cpu")),
            (torch._C, "_group_tensors_by_device_and_dtype", _grouped),
            (nn.Module, "_apply", _apply),
            (threading.Thread, "run", _run_thread),
            (torch.autograd, "backward", _backward),
            (torch._C, "_cuda_endAllocateToPool", lambda *_: stand_in.clear_up("pool")),
            (torch._C, "_cuda_releasePool", lambda *_: stand_in.clear_up("memory")),
            (Tensor, "to", _to),
            (torch._C._nn, "_parse_to", _parse_to),
            (Tensor, "pin_memory", lambda self, *_: stand_in.pin(self.clone())),
            (Tensor, "is_pinned", lambda self, *_: stand_in.is_pinned(self)),
        ):
            patches.enter_context(patch.object(owner, name, value))
        kinds = torch.utils._foreach_utils._foreach_supported_types
        patches.enter_context(
            patch.object(torch.utils._foreach_utils, "_foreach_supported_types", [*kinds, CudaTensor])
        )
        # torch.tensor(values, device="cuda") then copies a tensor of the CPU, and asks no driver for its device.
        torch._C._ensureCUDADeviceGuardSet()
        patches.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        patches.enter_context(_Mode())
        yield stand_in
