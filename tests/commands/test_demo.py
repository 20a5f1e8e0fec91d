"""The demo's commands, without running them: what they say is what the programs understand. And its images."""

import json
import shlex
import sys
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.commands.conftest import ROOT
from tests.conftest import module_of
from tlt.errors import install_command
from tlt.tools import cli as tlt_cli
from volo.cli import COMMANDS
from volo.config.fields import Settings
from volo.config.parser import SCRIPTS
from volo.config.settings_train import TrainSettings


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """demo/digits.py, working in another folder."""
    module = module_of(ROOT / "demo" / "digits.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def understood(command: str) -> Any:
    program, *words = shlex.split(command.removeprefix("python "))
    if program == "-m" and words[0] == "tlt":
        return tlt_cli.parser().parse_args(words[1:])
    if program == "-m":
        program, words = words[1], words[2:]
    if program == "./distributed_train.sh":
        program, words = "train.py", words[1:]
    return COMMANDS[{script: name for name, script in SCRIPTS.items()}.get(program, program)].program.parse(words)


@pytest.mark.parametrize(
    ("backend", "shards", "output", "images", "gpus"),
    [
        ("", False, "demo_output", "digits", 0),
        ("dali-cpu", False, "demo_output/dali-cpu", "digits", 1),
        ("pil", True, "demo_output/pil_shards", "packed", 8),
    ],
)
def test_the_commands_are_understood(digits, tmp_path, monkeypatch, backend, shards, output, images, gpus):
    commands: list[str] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(digits, "run", lambda command, done=False: commands.append(command))
    monkeypatch.setattr(digits, "write_digits", lambda folder: None)
    (run := tmp_path / output / "volo_d0").mkdir(parents=True)
    (run / "validation.json").write_text(json.dumps([{"img_size": "32x32", "top1": 99.0, "images": 360}]))
    (run / "summary.csv").write_text("images_per_second\n100\n")
    (tmp_path / output / "digits/validation/3").mkdir(parents=True)
    (tmp_path / output / "digits/validation/3/0003.jpg").touch()
    flags = (["--data-backend", backend] if backend else []) + ["--shards"] * shards
    monkeypatch.setattr(sys, "argv", ["digits.py", *flags])
    digits.main()
    args = [understood(command) for command in commands]
    trained = [each for each in args if isinstance(each, TrainSettings)]
    values = [each.values() for each in args if isinstance(each, Settings)]
    assert [each.images.data_dir for each in trained] == [f"{output}/{name}" for name in ("digits", images)]
    assert [each["data"] for each in values if "split" in each][-1] == f"{output}/{images}"
    assert args[-1].images.paths == [f"{output}/digits/validation/3/0003.jpg"]
    assert {each["data_backend"] for each in values if "data_backend" in each} == {backend or "torchvision"}
    assert trained[1].labels.token_label_data == (f"{output}/packed" if shards else f"{output}/labels.tlt")
    (processes,) = [int(command.split()[1]) for command in commands if command.startswith("./distributed_train.sh")]
    assert processes == (1 if gpus == 1 else 2) and processes * trained[1].images.batch_size == 32


def test_the_sample_is_a_folder_of_scans(tmp_path, call, monkeypatch):
    folder = tmp_path / "pictures"
    for code in (0, 2):
        ended = call("sample", f"{folder} --images 200")
        assert ended.code == code and len((ended.out + ended.err).splitlines()) == 1
    files = {split: sorted(folder.glob(f"{split}/*/*.jpg")) for split in ("train", "validation")}
    assert {split: len(result) for split, result in files.items()} == {"train": 160, "validation": 40}
    assert len({file.parent.name for result in files.values() for file in result}) == 10
    assert "is there already: name a new folder" in ended.err and (folder / "validation/0/0000.jpg").is_file()
    # Ink is dark: a nine has less of it in its lower left quarter than a six.
    six, nine = (
        np.mean([np.asarray(Image.open(f))[32:, :32] for f in folder.glob(f"train/{n}/*.jpg")]) for n in (6, 9)
    )
    assert six < nine
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    ended = call("sample", str(tmp_path / "other"))
    assert ended.code == 2 and "pip install '.[demo]' in a checkout" in ended.err and not (tmp_path / "other").exists()


def test_how_to_install_follows_the_repository_that_is_named(monkeypatch):
    named = Message()
    for url in ("Documentation, https://b.org", "Repository, https://a.org/x.git"):
        assert install_command("plot") == "pip install '.[plot]' in a checkout of volo-tlt"
        named["Project-URL"] = url
        monkeypatch.setattr("tlt.errors.metadata", lambda name: named)
    assert install_command() == "pip install 'volo-tlt @ git+https://a.org/x.git'"
    assert install_command("plot") == "pip install 'volo-tlt[plot] @ git+https://a.org/x.git'"
