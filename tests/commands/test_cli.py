"""`volo COMMAND`: the list of commands, and how they are found."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT
from volo import cli
from volo.config import flag_table


def volo(*words: str, root: Path = ROOT, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m volo WORDS` of the packages in `root`."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); import runpy"]
    command[-1] += f"; sys.argv = [__file__ := 'volo', *{list(words)!r}]; runpy.run_module('volo', run_name='__main__')"
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_without_a_command_all_are_listed() -> None:
    ended = volo()
    assert ended.returncode == 0 and not ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()[2:]] == list(cli.COMMANDS)


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", "did you mean train?"), ("x", "there are train, validate, label")]
)
def test_an_unknown_command_is_one_line(
    word: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["volo", word])
    assert cli.main() == 2
    told = capsys.readouterr()
    assert hint in told.err and told.err.count("\n") == 1 and not told.out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_runs_and_names_in_help_and_mistakes_what_was_typed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(import_module(cli.COMMANDS[name].module).run)
    for script in ["volo", *([flag_table.SCRIPTS[name]] if name in flag_table.SCRIPTS else [])]:
        typed = f"volo {name}" if script == "volo" else script
        monkeypatch.setattr(sys, "argv", [f"/somewhere/{script}"])
        with pytest.raises(SystemExit, match="0"):
            cli.run(name, ["--help"])
        assert capsys.readouterr().out.startswith(f"usage: {typed} ")
        assert cli.run(name, ["--nonsense"]) == 2
        assert f"see {typed} --help" in capsys.readouterr().err
