"""Models are registered by an import, and by our own programs when they need them: until then nothing imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

import tlt
from tests.commands.conftest import ROOT
from tests.conftest import LIMIT


def started(monkeypatch: pytest.MonkeyPatch, *command: str) -> bool:
    """Whether a Python that was started with `command` runs a program of ours, which registers the models late."""
    main = ModuleType("__main__")
    if not command[0].startswith("-"):
        main.__file__ = command[0]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", ["python", *command])
    return tlt._starts_program()


def test_only_programs_of_this_project_register_the_models_late(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [str(path) for path in ROOT.glob("*.py") if path.name != "setup.py"]
    assert len(programs) == 4
    for program in (*programs, "/usr/bin/volo", "/usr/bin/tlt", str(ROOT / "volo/commands/launch.py")):
        assert started(monkeypatch, program), program
    assert started(monkeypatch, "-m", "volo") and started(monkeypatch, "-m", "tlt")
    for others in (["/home/me/train.py"], ["-m", "mine.train"], ["-c"], [str(ROOT / "demo/digits.py")]):
        assert not started(monkeypatch, *others), others  # gets the models by importing volo, as ever


@pytest.mark.parametrize("argv", ["['']", f"[{str(ROOT / 'train.py')!r}]"])
def test_an_import_registers_the_models_whatever_sys_argv_holds_and_loads_the_rest_on_demand(argv: str) -> None:
    code = (
        f"import sys; sys.argv = {argv}; import volo, tlt, timm;"
        "assert all(map(timm.is_model, ('volo_d1', 'lvvit_s')));"
        "assert not {'tlt.api', 'tlt.data.loader', 'tlt.labels.store'} & set(sys.modules);"
        "tlt.open_labels; assert 'tlt.labels.store' in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
