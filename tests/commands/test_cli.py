"""`volo COMMAND`: the list of commands, and how they are found."""

import argparse
import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch

from benchmarks import program as benchmarks
from tests.benchmarks.conftest import benchmark
from tests.commands.conftest import ROOT
from tests.conftest import python_path
from tlt.errors import UserError
from tlt.tools.cli import _COMMANDS
from tlt.tools.cli import parser as tlt_parser
from volo import cli
from volo.config import parser


def test_without_a_command_all_are_listed():
    ended = subprocess.run([sys.executable, "-m", "volo"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0 and not ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()[2:]] == list(cli.COMMANDS)


@pytest.mark.parametrize(("word", "hint"), [("trian", "did you mean train?"), ("x", "there are train, validate")])
def test_unknown_command(word, hint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["volo", word])
    assert cli.main() == 2
    printed = capsys.readouterr()
    assert hint in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_names_itself_in_help_and_mistakes(name, monkeypatch, capsys):
    assert callable(import_module(cli.COMMANDS[name].module).run)
    for script in ["volo", *([parser.SCRIPTS[name]] if name in parser.SCRIPTS else [])]:
        typed = f"volo {name}" if script == "volo" else script
        monkeypatch.setattr(sys, "argv", [f"/somewhere/{script}"])
        with pytest.raises(SystemExit, match="0"):
            cli.run(name, ["--help"])
        assert capsys.readouterr().out.startswith(f"usage: {typed} ")
        assert cli.run(name, ["--nonsense"]) == 2
        assert f"see {typed} --help" in capsys.readouterr().err


PROGRAMS = [*cli.COMMANDS, *map("benchmark {}".format, benchmarks.COMMANDS), *map("tlt {}".format, ["", *_COMMANDS])]


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_fits_80_columns_and_breaks_no_word(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    program, _, command = name.partition(" ")
    if program == "tlt":
        top = tlt_parser()
        parsers = next(action for action in top._actions if isinstance(action, argparse._SubParsersAction)).choices
        parser = parsers[command] if command else top
    else:
        parser = benchmarks.program_of(command).parser() if command else cli.COMMANDS[name].program.parser()
    text, of_actions = parser.format_help(), [action.help for action in parser._actions]
    assert max(map(len, text.splitlines())) <= 79
    texts = [parser.description, *(h % {"prog": "tlt"} for h in of_actions if h and h != argparse.SUPPRESS)]
    assert {word for part in texts for word in part.split()} <= {*text.split()}


ON_A_GPU = {
    "train": "{data} --model volo_test --img-size 32 --num-classes 4 -j 0 --output {out}",
    "validate": "{data} --checkpoint {weights} -j 0",
    "label": "{data} {out} --model volo_test --img-size 32 --checkpoint {weights} --num-classes 4 -j 0",
    "features": "{data} {out} --checkpoint {weights} -j 0",
    "predict": "{data} --checkpoint {weights} -j 0",
    "attention": "{image} --checkpoint {weights} -o {out}",
    "preflight": "",
    "step": "--model volo_test --img-size 32 -b 2 --peer",
    "infer": "--model volo_test --img-size 32 -b 2 --peer",
    "outlook": "-b 1 --cells 4 --no-compile",
    "data": "--images 2 --image-size 40 40 --img-size 32 -b 2 --workers 0",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "data")) for n in ON_A_GPU])
def test_fault_60_programs_share_one_float32_on_a_gpu(name, trained_run, tmp_path, monkeypatch, stand_in):
    """By the settings at the moment when it first uses the GPU, which need not be there."""
    result: list[tuple[str, bool]] = []

    def begin(*_: Any) -> None:
        result.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark))
        raise UserError("enough")

    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(stand_in, "_launch", begin)
    data, run = trained_run
    places = {"data": data, "weights": run / "last.pth.tar", "image": data / "train" / "red" / "red3.jpg"}
    flags = f"{ON_A_GPU[name]} --device cuda".format(out=tmp_path / "new.png", **places).split()
    try:
        code = cli.run(name, flags) if name in cli.COMMANDS else benchmark(" ".join([name, *flags]))
        at_the_end = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    finally:
        torch.set_float32_matmul_precision(before)
    # The preflight of one process asks the GPU for nothing but its name.
    assert code == (0 if name == "preflight" else 2) and [*result, at_the_end][0] == ("high", True)


def test_every_program_with_a_device_is_among_those():
    programs = {name for name, command in cli.COMMANDS.items() if "device" in command.program.parser().flags}
    programs |= {name for name in benchmarks.COMMANDS if "device" in benchmarks.program_of(name).parser().flags}
    assert programs == {*ON_A_GPU, "run", "ablation"}  # which start other processes, and compute nothing themselves


@pytest.mark.parametrize("redirected", ["", ">&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_or_lack_letters_end_nothing(redirected, tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": python_path(ROOT)}
    for words, code in (("slurm é", 0), ("slurm d --é", 2)):
        command = f"{sys.executable} -m volo {words} {redirected}"
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == code and "Traceback" not in done.stderr, done
        assert redirected or "\\xe9" in done.stdout + done.stderr
