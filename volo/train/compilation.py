"""`--torchcompile`: which parts of a model are compiled, and how failures are explained.

Scope "blocks" compiles each block; blocks of one kind share a graph, so that compiling takes the time of one layer per
kind. The rest of the model is not compiled, except its stem on a GPU. Scope "model" makes everything one graph, which
torch's own CUDA graphs need.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from tlt.errors import UserError
from tlt.models.token_labeling import TokenLabelModel
from volo.cluster.stopping import STOP
from volo.config.settings_shared import CUDA_GRAPH_MODES, Compilation

F = TypeVar("F", bound=Callable[..., Any])

_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"
_GRAPHS = 8  # torch's own limit of graphs per function, here for each image size


@dataclass(frozen=True)
class Compiler:
    """Compiles models as the flags `--torchcompile...` say, or leaves them as they are without these. `name` is what
    `--model` names, for messages; `sizes` is the number of image sizes that a run uses."""

    flags: Compilation
    name: str
    sizes: int = 1

    def model(self, model: Any) -> Any:
        """Compile a bare model, or a module such as DistributedDataParallel that wraps it; return the module to call.
        Blocks are compiled in place and keep their names; later copies of the model are not compiled. Raise UserError
        if torch has no such backend, or the model doesn't name its blocks."""
        if not self.flags.torchcompile:
            return model
        self.check_scope(model)
        if self._scope(model) == "model":
            return self._compile()(model)
        self.modules(_blocks(model) + stems(model))
        return model

    def modules(self, modules: list[nn.Module]) -> None:
        """Compile each module in place."""
        if self.flags.torchcompile:
            options = self._compile().keywords
            for module in modules:
                module.compile(**options)

    def features(self, model: nn.Module) -> Callable[[F], F]:
        """Compile `model` for a function that calls parts of it. Return a decorator for that function."""
        if self.flags.torchcompile and self._scope(model) == "model":
            return self._compile()
        self.model(model)
        return lambda function: function

    def check_scope(self, model: nn.Module) -> None:
        """Raise UserError for `--torchcompile-scope blocks` if the model doesn't name its blocks."""
        if self.flags.torchcompile_scope == "blocks" and not _blocks(model):
            whole = f"{self.name} is compiled as a whole: --torchcompile-scope model"
            raise UserError(f"--torchcompile-scope blocks: only VOLO and LV-ViT name their blocks, {whole}")

    def _scope(self, model: nn.Module) -> str:
        """Return which part of a model is compiled: "blocks" or "model"."""
        if not _blocks(model):
            return "model"
        cuda_graphs = self.flags.torchcompile_mode in CUDA_GRAPH_MODES
        return self.flags.torchcompile_scope or ("model" if cuda_graphs else "blocks")

    def _compile(self) -> partial[Any]:
        """Return torch.compile with the backend and mode of the flags."""
        backend, mode = self.flags.torchcompile, self.flags.torchcompile_mode
        if backend not in torch.compiler.list_backends(exclude_tags=()):
            known = ", ".join(torch.compiler.list_backends())
            raise UserError(f"--torchcompile {backend}: no such backend, there are {known}")
        if mode in CUDA_GRAPH_MODES:
            importlib.import_module(_CUDA_GRAPHS)  # so that `begin_step` sees it from the first step on
        if self.flags.activation_memory_budget is not None:
            torch._functorch.config.activation_memory_budget = self.flags.activation_memory_budget
        options: dict[str, Any] = {"backend": backend, "mode": mode}
        if self.sizes > 1:
            # One graph per size. By default torch would make a graph for any size at the second one, whichever it is.
            limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(limit, _GRAPHS * self.sizes)
            options["dynamic"] = False
        return partial(torch.compile, **options)


def begin_step() -> None:
    """Tell CUDA graphs, if there are any, that their previous outputs are no longer needed. Call this before the first
    forward pass of each update, but not between its micro-batches, whose gradients are in the graphs' memory."""
    if _CUDA_GRAPHS in sys.modules:
        torch.compiler.cudagraph_mark_step_begin()


@contextmanager
def compile_errors_told(backend: str | None) -> Iterator[None]:
    """Turn errors of torch's compiler in the block into UserErrors of one line."""
    try:
        yield
    except Exception as error:
        # Triton compiles a program when it is first called.
        of_compiler = type(error).__module__.startswith(("torch._dynamo.exc", "torch._inductor.", "triton."))
        if not backend or not of_compiler:
            raise
        STOP.check()  # a launcher that ends this process ends its compiler, too
        inner = getattr(error, "inner_exception", None) or error
        reason = " ".join(f"{type(inner).__name__}: {inner}".split())[:300]  # cuts off torch's general advice
        remedy = "try another --torchcompile-scope, or leave --torchcompile out; --debug shows all"
        raise UserError(f"--torchcompile {backend}: torch can't compile this ({reason}): {remedy}") from error


def stems(model: nn.Module) -> list[nn.Module]:
    """Return the stem of the VOLO or LV-ViT in a model on a GPU: one kernel can do its BatchNorm and ReLU there.
    Return none if BatchNorm's statistics are those of several GPUs, whose exchange no graph can contain."""
    embeds = [m.patch_embed for m in model.modules() if isinstance(m, TokenLabelModel) and next(m.parameters()).is_cuda]
    return [stem for stem in embeds if not any(isinstance(m, nn.SyncBatchNorm) for m in stem.modules())]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the VOLO or LV-ViT in a model; [] for other models."""
    return [block for m in model.modules() if isinstance(m, TokenLabelModel) for _, block in m.named_blocks()]
