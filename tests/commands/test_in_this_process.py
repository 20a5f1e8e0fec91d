"""`volo.train(...)` and `volo.predict(...)`: what the programs do, and the process is as it was before."""

import csv
import json
import os
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import tqdm.auto
import yaml

import volo
from tests.commands.conftest import same_weights
from tlt.errors import UserError
from tlt.io.jobs import progress_bar
from tlt.io.weights import read_checkpoint
from volo.checkpoint.saver import Saver
from volo.cluster import stopping
from volo.config.settings_evaluate import PREDICT
from volo.config.train import TRAIN
from volo.record.history import epochs_of

SMALL: dict[str, Any] = {
    **{"model": "volo_test", "img_size": 32, "num_classes": np.int64(4), "batch_size": 8, "workers": 0},
    **{"warmup_epochs": 0, "cooldown_epochs": 0, "log_interval": 1, "lr": 2e-3, "seed": None},
}  # as QUICK


def state_of_the_process() -> list[Any]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)]
    drawn = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]
    numbers = [torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision()]
    return [*handlers, *drawn, *numbers, torch.backends.cudnn.benchmark, dict(os.environ), sys.argv]


def test_a_run_is_the_programs_and_the_process_is_as_before(call, trained_run, tmp_path, monkeypatch):
    data, same = trained_run
    monkeypatch.setattr(sys, "argv", ["train.py"])  # a user's own
    signal.signal(signal.SIGINT, lambda *_: None)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    before = state_of_the_process()
    try:
        run = volo.train(data, **SMALL, epochs=2, model_ema=True, amp=False, output=tmp_path, experiment="run")
        assert state_of_the_process() == before
    finally:
        torch.set_default_dtype(torch.float32)
    same_weights(same / "last.pth.tar", run.path / "last.pth.tar")
    settings = [yaml.safe_load((folder / "args.yaml").read_text()) for folder in (same, run.path)]
    assert {n for n in settings[0] if settings[0][n] != settings[1][n]} == {"output", "bind"}
    assert (run.path, run.classes) == (tmp_path / "run", sorted(os.listdir(data / "train")))
    assert run.curve == epochs_of(run.path) and len(run.curve) == 2
    assert run.best == max(row["eval_top1_ema"] for row in run.curve)
    start = json.loads((run.path / "events.jsonl").read_text().splitlines()[0])
    assert start["command"][:2] == ["volo", "train"] and start["command"][-2:] == ["--", str(data)]

    images = [data / "validation" / "red" / "red3.jpg", data / "train" / "red"]
    assert call("predict", f"{images[0]} {images[1]} --checkpoint {same} -j 0 --topk 3 -o {tmp_path}/p.csv").code == 0
    result = volo.predict(images, checkpoint=run.path, topk=3, workers=0)
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [(each.path, each.best) for each in result] == [(row["path"], row["class_name"]) for row in rows[::3]]
    classes = [(row["class_name"], float(row["probability"])) for row in rows]
    assert sum((each.classes for each in result), []) == classes


def test_keywords_become_the_words_of_a_command_line():
    keywords: dict[str, Any] = {"scale": (0.5, 1), "mean": np.array([0.25, 0.5]), "hflip": 0, "token_label": True}
    keywords |= {"mix_token": False, "no_amp": True, "pretrained": False, "no_aug": False, "seed": None, "aa": ""}
    keywords |= {"torchcompile": True, "output": Path("a b"), "model_kwargs": {"depth": 3, "act": "1"}}
    keywords["kd_model_name"] = ["k", Path("l")]
    words = "--scale 0.5 1 --mean 0.25 0.5 --hflip=0 --token-label --no-mix-token --no-amp --no-pretrained --aug --aa="
    words += " --torchcompile --output=a_b --model-kwargs depth=3 act='1' --kd-model-name k l"
    assert TRAIN.parser().words_of(keywords) == [word.replace("_", " ") for word in words.split()]
    assert PREDICT.parser().words_of({"pretrained": False, "amp": True}) == ["--amp"]  # there is no --no-pretrained


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"imgsz": 64}, "unknown flag --imgsz, did you mean --img-size? (see volo train --help)"),
        ({"imgsz": False}, "unknown flag --imgsz, did you mean --img-size?"),
        ({"data": "d"}, "unknown flag --data, did you mean DATA_DIR, without a flag?"),
        ({"hflip": False}, "--hflip: invalid float value: 'False'"),
        ({"pretrained": "yes"}, "--pretrained: a switch takes no value: 'yes'"),
        ({"input_size": (3, 64)}, "--input-size: expected 3 arguments"),
        ({"config": "nosuch"}, "--config nosuch: No such file"),
        ({"model": "volo_dO"}, "did you mean volo_d0?"),
    ],
)
def test_a_mistake_is_a_user_error_of_one_line(keywords, message, data):
    with pytest.raises(UserError) as caught:
        volo.train(data, **keywords)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_ctrl_c_saves_and_the_same_call_goes_on(data, tmp_path, monkeypatch):
    def train() -> None:
        volo.train(data, **SMALL, epochs=2, output=tmp_path, experiment="cut", resume="auto")

    after_update, signals = Saver.after_update, {1: signal.SIGINT, 3: signal.SIGTERM}

    def interrupted(saver: Saver) -> None:
        after_update(saver)
        if number := signals.pop(saver.state.update, None):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Saver, "after_update", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train()
    assert signal.getsignal(signal.SIGINT) is handler and (tmp_path / "cut" / "last.pth.tar").is_file()
    with pytest.raises(SystemExit, match="85"):
        train()
    assert read_checkpoint(tmp_path / "cut" / "last.pth.tar")["update"] == 3
    # Once more ends a program at once, but not the process that goes on.
    now = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    with stopping.STOP.handled(ends_process=False):
        os.kill(os.getpid(), signal.SIGINT)
        now[0] = 2.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_threads_run_it_and_failures_are_the_programs(data, tmp_path, monkeypatch):
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(volo.train, data, **SMALL, epochs=1, output=tmp_path, experiment="run").result()
        assert run.best is not None and run.path == tmp_path / "run"
        again = pool.submit(volo.train, data, **SMALL, epochs=1, output=tmp_path, experiment="run")
        assert isinstance(again.exception(), UserError)  # holds checkpoints already


def test_the_package_is_a_function_as_well():
    assert callable(volo.train) and isinstance(sys.modules["volo.train"], ModuleType)
    assert sys.modules["volo.train"].loop.train_epochs.__module__ == "volo.train.loop"
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        volo.fit  # noqa: B018


def test_a_notebook_draws_the_bar(monkeypatch):
    assert progress_bar(total=3) is None  # neither a terminal nor a notebook
    widget = type("tqdm_notebook", (), {"__init__": lambda self, **options: vars(self).update(options)})
    widget.__module__ = "tqdm.notebook"
    monkeypatch.setattr(tqdm.auto, "tqdm", type("tqdm", (widget,), {}))
    bar: Any = progress_bar(total=3)
    assert isinstance(bar, widget) and bar.total == 3 and bar.leave is False  # type: ignore[attr-defined]
