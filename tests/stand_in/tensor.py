"""A tensor on the CUDA device that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.stand_in.streams import ACTIVE, Block, Stream

CUDA = torch.device("cuda", 0)


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
        device, dtype, non_blocking, memory_format = parse_to(*args, **kwargs)
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


class Mode(TorchDispatchMode):
    """Sends every operation of a thread to the stand-in."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ACTIVE.device.run(operation, args, kwargs or {})


def leaves_of(values: Iterable[Any]) -> list[Any]:
    """Arguments, and what those hold that are lists; torch's trees take ten times as long."""
    result: list[Any] = []
    for value in values:
        result.extend(value) if type(value) in (list, tuple) else result.append(value)
    return result


def as_device_and_dtype(args: Any) -> Any:
    """The arguments of `to(other)`, whose device C++ does not know, as those of `to(device, dtype)`."""
    return (CUDA, args[0].dtype, *args[1:]) if args and isinstance(args[0], CudaTensor) else args


def parse_to(*args: Any, real: Any = torch._C._nn._parse_to, **kwargs: Any) -> Any:
    return real(*as_device_and_dtype(args), **kwargs)
