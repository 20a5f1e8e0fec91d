"""`volo COMMAND`: the list of commands, and how they are found."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT
from volo import cli


def volo(*words: str, root: Path = ROOT, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m volo WORDS` of the packages in `root`."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); import runpy"]
    command[-1] += f"; sys.argv = [__file__ := 'volo', *{list(words)!r}]; runpy.run_module('volo', run_name='__main__')"
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_without_a_command_all_are_listed(words: list[str]) -> None:
    ended = volo(*words)
    assert ended.returncode == 0 and not ended.stderr
    listed = [line.split()[0] for line in ended.stdout.splitlines()[2:]]
    assert listed == list(cli.COMMANDS)


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", "did you mean train?"), ("x", "there are train, validate, label")]
)
def test_an_unknown_command_is_one_line(word: str, hint: str) -> None:
    ended = volo(word)
    assert ended.returncode == 2 and hint in ended.stderr and ended.stderr.count("\n") == 1 and not ended.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_parser_and_program(name: str) -> None:
    module, _, function = cli.COMMANDS[name].parser.partition(":")
    assert callable(getattr(import_module(module), function))
    assert callable(import_module(cli.COMMANDS[name].program).run)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_and_mistakes_name_what_was_typed(name: str) -> None:
    told = volo(name, "--help")
    assert told.returncode == 0 and told.stdout.startswith(f"usage: volo {name} "), told.stdout[:200]
    mistake = volo(name, "--nonsense")
    assert mistake.returncode == 2 and f"see volo {name} --help" in mistake.stderr, mistake.stderr
