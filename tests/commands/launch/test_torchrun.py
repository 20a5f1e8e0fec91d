"""A run that torchrun starts again after a fault goes on in its directory, without `--resume`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.conftest import QUICK, ROOT, Call, metrics, storage
from tests.conftest import LIMIT, free_port
from volo.checkpoint.resume import restarted_run


@pytest.mark.parametrize(("run_id", "named"), [("none", ""), ("mine", "--experiment sweep/a")])
def test_a_restart_goes_on_with_the_run_of_its_launch_alone(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str, named: str
) -> None:
    """torchrun's run_id is "none" where none is given."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": run_id}.items():
        monkeypatch.setenv(name, value)
    flags = f"{data} {QUICK} --lr 1e-3 --output {tmp_path / 'out'} {named}"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert call("train", f"{flags} --epochs 1").code == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = call("train", f"{flags} --epochs 2")
    assert again.code == 0 and "1 epochs, 2 updates done" in again.out, again.err
    (record,) = (tmp_path / "out").rglob("run.json")
    assert not named or record.parent == tmp_path / "out" / named.split()[1]
    if not named:
        starts = json.loads(record.read_text())
        assert restarted_run(tmp_path / "out", "", "") == (record.parent, "auto")
        for launch in ("another", "none", None):
            record.write_text(json.dumps([starts[0] | {"launch": launch}]))
            assert restarted_run(tmp_path / "out", "", "") is None


def test_torchrun_restarts_a_killed_rank(data: Path, tmp_path: Path) -> None:
    killed = "os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0' and '/train/' in str(path) and next(number) == 12"
    env = storage(tmp_path, f"{killed} and os.kill(os.getpid(), 9)")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1"]
    flags = f"{QUICK} -b 4 --lr 1e-3 --epochs 1 --recovery-interval 1 --output {tmp_path / 'out'}"
    command = [*torchrun, "--master-port", str(free_port()), str(ROOT / "train.py"), str(data)]
    ended = subprocess.run(
        [*command, *flags.split()], env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT
    )
    assert ended.returncode == 0, ended.stderr
    assert "resumed" in ended.stdout and "0 epochs, " in ended.stdout
    (record,) = (tmp_path / "out").rglob("run.json")
    assert [each["update"] for each in metrics(record.parent)] == [1, 2, 3, 4]
