"""`volo.train(...)` and `volo.predict(...)`: the programs `volo train` and `volo predict`, run in this process.

Keywords are the flags' names with underscores: `epochs=100`, `token_label=True`, `scale=(0.5, 1.0)`, `amp=False` or
`no_amp=True`, `model_kwargs={"depth": 3}`. The same parser checks them. None is as if the keyword were not there.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch

from tlt.errors import UserError
from volo.cluster.binding import bind_process
from volo.cluster.stopping import INTERRUPTED, STOP, Stopped
from volo.commands import predict as predict_program
from volo.commands import train as train_program
from volo.commands.console import ignore_known_warnings
from volo.commands.predict import Prediction
from volo.commands.train import TrainResult
from volo.config.args import TRAIN, by_name, changed_flags
from volo.config.flag_table import Program
from volo.config.flags_programs import PREDICT

Result = TypeVar("Result")
Path = str | os.PathLike[str]


def train(data_dir: Path | None = None, **flags: Any) -> TrainResult:
    """Train as `volo train DATA_DIR --flags` does, on one device, and return when the run is over.

    Ctrl-C (a notebook's stop button) saves after the present update and raises KeyboardInterrupt; the same call with
    `resume="auto"` goes on. `bind` is "none" here, because binding would outlast the run.

    Raises:
        UserError: A keyword or a file is wrong; the message is one line that names the remedy.
        KeyboardInterrupt: The run was interrupted, and has saved.
        SystemExit: Another signal has ended the run, which has saved; the code is that of `volo train`.
    """
    return _run(TRAIN, train_program.train_on_ranks, {"bind": "none", "data_dir": data_dir} | flags)


def predict(paths: Path | Sequence[Path], **flags: Any) -> list[Prediction]:
    """Predict the classes of images as `volo predict PATHS --flags` does: `volo.predict("a.jpg", checkpoint=run.path)`.
    Unreadable images are left out.

    Raises:
        UserError: A keyword or a file is wrong, or no image can be read.
    """
    return _run(PREDICT, predict_program.predict_all, {"paths": paths} | flags)


def _run(program: Program, work: Callable[[Any], Result], keywords: Mapping[str, Any]) -> Result:
    given = {name: _plain(value) for name, value in keywords.items() if value is not None}
    args = program.parse(by_name(program.parser(), given, f"volo.{program.name}"))
    with _process_as_it_was(_words(program, args)):
        if "bind" in args:
            args.notes += bind_process(args)
        try:
            with STOP.handled(ends_process=False) if program is TRAIN else nullcontext(), STOP.raising():
                return work(args)
        except Stopped as stop:
            if isinstance(stop.__cause__, UserError):
                raise stop.__cause__ from None
            raise (KeyboardInterrupt if stop.exit_code == INTERRUPTED else SystemExit)(stop.exit_code) from stop


def _words(program: Program, args: Namespace) -> list[str]:
    """Return the command that is recorded for the run."""
    folder = [args.data_dir] if program is TRAIN and args.data_dir else []
    words = chain(*changed_flags(vars(args)).values()) if program is TRAIN else []
    return ["volo", program.name, *folder, *words]


def _plain(value: Any) -> Any:
    """Return a value as a recipe could hold it: paths as texts, tuples and arrays as lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic, torch.Tensor)) else value


@contextmanager
def _process_as_it_was(command: list[str]) -> Iterator[None]:
    """Put back what a program sets for its whole process: environment, random numbers, torch's settings, warnings."""
    cudnn, on_gpu = torch.backends.cudnn, torch.cuda.is_initialized()
    settings: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_num_threads, torch.get_num_threads()),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (lambda benchmark: setattr(cudnn, "benchmark", benchmark), cudnn.benchmark),
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
        (lambda on: gc.enable() if on else gc.disable(), gc.isenabled()),
        (lambda words: setattr(sys, "argv", words), sys.argv),
    ]
    environment, devices = dict(os.environ), range(torch.cuda.device_count()) if on_gpu else ()
    stream = torch.cuda.current_stream() if on_gpu else None
    sys.argv = command
    torch.set_default_dtype(torch.float32)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices):
            ignore_known_warnings()
            yield
    finally:
        for put_back, value in settings:
            put_back(value)
        for name in {*os.environ} | {*environment}:
            if os.environ.get(name) != environment.get(name):
                os.environ.update({name: environment[name]}) if name in environment else os.environ.pop(name)
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGUSR2)
        if torch.cuda.is_initialized():
            torch.cuda.set_stream(stream or torch.cuda.default_stream(0))  # and its device
