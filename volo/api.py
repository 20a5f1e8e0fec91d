"""`volo.train(...)` and `volo.predict(...)`: the programs `volo train` and `volo predict`, run in this process.

Keywords are the flags' names with underscores: `epochs=100`, `token_label=True`, `scale=(0.5, 1.0)`, `amp=False` or
`no_amp=True`, `model_kwargs={"depth": 3}`. The same parser checks them. None is as if the keyword were not there.
"""

import faulthandler
import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import numpy as np
import torch

from tlt.errors import UserError
from volo.cluster.stopping import INTERRUPTED, STOP, Stopped
from volo.commands.console import bound
from volo.commands.predict import Prediction, predict_all
from volo.commands.train import TrainResult, train_on_ranks
from volo.config.parser import Program
from volo.config.settings_evaluate import PREDICT
from volo.config.train import TRAIN

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
    return _run(TRAIN, train_on_ranks, [] if data_dir is None else [str(data_dir)], {"bind": "none"} | flags)


def predict(paths: Path | Sequence[Path], **flags: Any) -> list[Prediction]:
    """Predict the classes of images as `volo predict PATHS --flags` does: `volo.predict("a.jpg", checkpoint=run.path)`.
    Unreadable images are left out.

    Raises:
        UserError: A keyword or a file is wrong, or no image can be read.
    """
    each = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    return _run(PREDICT, predict_all, list(map(str, each)), flags)


def _run(program: Program, work: Callable[[Any], Result], paths: list[str], flags: dict[str, Any]) -> Result:
    words = [*program.parser().words_of(flags), *["--"] * bool(paths), *paths]
    with _process_as_it_was():
        sys.argv = ["volo", program.name, *words]  # what the records tell
        settings = bound(program.parse(words))
        try:
            with STOP.handled(ends_process=False) if program is TRAIN else nullcontext(), STOP.raising():
                return work(settings)
        except Stopped as stop:
            if isinstance(stop.__cause__, UserError):
                raise stop.__cause__ from None
            raise (KeyboardInterrupt if stop.exit_code == INTERRUPTED else SystemExit)(stop.exit_code) from stop


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Put back what a program sets for its whole process: environment, arguments, random numbers, torch's settings."""
    cudnn = torch.backends.cudnn
    used = torch.cuda.is_initialized()
    settings: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_num_threads, torch.get_num_threads()),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (lambda benchmark: setattr(cudnn, "benchmark", benchmark), cudnn.benchmark),
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
        (lambda on: gc.enable() if on else gc.disable(), gc.isenabled()),
        (lambda words: setattr(sys, "argv", words), sys.argv),
        (lambda before: [os.environ.pop(name) for name in {*os.environ} - before], {*os.environ}),
    ]
    stream = torch.cuda.current_stream() if used else None
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if used else ()):
            yield
    finally:
        for put_back, value in settings:
            put_back(value)
        with suppress(AttributeError):  # Windows has no such signal
            faulthandler.unregister(signal.SIGUSR2)
        if torch.cuda.is_initialized():
            torch.cuda.set_stream(stream or torch.cuda.default_stream(0))  # and its device
