"""`--torchcompile`: which parts of a model are compiled, and how failures are explained.

Scope "blocks" compiles each block; blocks of one kind share a graph, so that compiling takes the time of one layer per
kind. The rest of the model is not compiled, except its stem on a GPU. Scope "model" makes everything one graph, which
torch's own CUDA graphs need.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from tlt.errors import UserError
from tlt.models.token_labeling import TokenLabelModel
from volo.config.flag_rules import other_sizes
from volo.config.flags_train import CUDA_GRAPH_MODES

F = TypeVar("F", bound=Callable[..., Any])

_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"
_GRAPHS = 8  # torch's own limit of graphs per function, here for each image size


def compile_model(model: Any, args: Namespace) -> Any:
    """Compile a model as the flags `--torchcompile...` say, and return the module to call.

    Blocks are compiled in place and keep their names; later copies of the model are not compiled.

    Args:
        model: The bare model, or a module such as DistributedDataParallel that wraps it.

    Raises:
        UserError: torch has no such backend, or the model doesn't name its blocks.
    """
    if not args.torchcompile:
        return model
    check_scope(args, model)
    if _scope(args, model) == "model":
        return _compiler(args)(model)
    compile_modules(_blocks(model) + stems(model), args)
    return model


def compile_modules(modules: list[nn.Module], args: Namespace) -> None:
    """Compile each module in place, as the flags `--torchcompile...` say."""
    if args.torchcompile:
        options = _compiler(args).keywords
        for module in modules:
            module.compile(**options)


def feature_compiler(model: nn.Module, args: Namespace) -> Callable[[F], F]:
    """Compile `model` for a function that calls parts of it. Return a decorator for that function.

    Raises:
        UserError: torch has no such backend.
    """
    if args.torchcompile and _scope(args, model) == "model":
        return _compiler(args)
    compile_model(model, args)
    return lambda function: function


def check_scope(args: Namespace, model: nn.Module) -> None:
    """Raise UserError for `--torchcompile-scope blocks` if the model doesn't name its blocks."""
    if args.torchcompile_scope == "blocks" and not _blocks(model):
        raise UserError(
            f"--torchcompile-scope blocks: only VOLO and LV-ViT name their blocks, {args.model} is compiled as a "
            "whole: --torchcompile-scope model"
        )


def _scope(args: Namespace, model: nn.Module) -> str:
    """Return which part of a model is compiled: "blocks" or "model"."""
    if not _blocks(model):
        return "model"
    return args.torchcompile_scope or ("model" if args.torchcompile_mode in CUDA_GRAPH_MODES else "blocks")


def begin_step() -> None:
    """Tell CUDA graphs that their previous outputs are no longer needed. Do nothing without CUDA graphs.

    Call this before the first forward pass of each update, but not between its micro-batches, whose accumulated
    gradients are in the memory of the graphs.
    """
    if _CUDA_GRAPHS in sys.modules:
        torch.compiler.cudagraph_mark_step_begin()


@contextmanager
def compile_errors_told(args: Namespace) -> Iterator[None]:
    """Turn errors of torch's compiler in the block into one line.

    Raises:
        UserError: In place of torch's own exception.
    """
    try:
        yield
    except Exception as error:
        # Triton compiles a program when it is first called.
        of_compiler = type(error).__module__.startswith(("torch._dynamo.exc", "torch._inductor.", "triton."))
        if not args.torchcompile or not of_compiler:
            raise
        inner = getattr(error, "inner_exception", None) or error
        reason = " ".join(f"{type(inner).__name__}: {inner}".split())[:300]  # cuts off torch's general advice
        raise UserError(
            f"--torchcompile {args.torchcompile}: torch can't compile this ({reason}): try another "
            "--torchcompile-scope, or leave --torchcompile out; --debug shows all"
        ) from error


def _compiler(args: Namespace) -> partial[Any]:
    """Return torch.compile with the backend and mode of the flags."""
    if args.torchcompile not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise UserError(f"--torchcompile {args.torchcompile}: no such backend, there are {known}")
    if args.torchcompile_mode in CUDA_GRAPH_MODES:
        importlib.import_module(_CUDA_GRAPHS)  # so that `begin_step` sees it from the first step on
    if (budget := getattr(args, "activation_memory_budget", None)) is not None:  # only train.py has this flag
        torch._functorch.config.activation_memory_budget = budget
    options = {"backend": args.torchcompile, "mode": args.torchcompile_mode}
    if sizes := other_sizes(args):
        # One graph per size. By default torch would make a graph for any size at the second one, whichever that is.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS * (1 + len(sizes)))
        options["dynamic"] = False
    return partial(torch.compile, **options)


def stems(model: nn.Module) -> list[nn.Module]:
    """Return the stem of the VOLO or LV-ViT in a model on a GPU: one kernel can do its BatchNorm and ReLU there.
    Return none if BatchNorm's statistics are those of several GPUs, whose exchange no graph can contain."""
    embeds = [m.patch_embed for m in model.modules() if isinstance(m, TokenLabelModel) and next(m.parameters()).is_cuda]
    return [stem for stem in embeds if not any(isinstance(m, nn.SyncBatchNorm) for m in stem.modules())]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the VOLO or LV-ViT in a model; [] for other models."""
    return [block for m in model.modules() if isinstance(m, TokenLabelModel) for _, block in m.named_blocks()]
