"""Settings: their names are checked, each value has a source, and nothing changes one in place."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from volo.cli import COMMANDS
from volo.config.fields import flags_of
from volo.config.settings_train import EXPERIMENT, FITTED, START_ONLY, STARTS, TrainSettings
from volo.config.train import TRAIN

LABELS = "--token-label --token-label-data l"


class Asked:
    """Settings that are all `value` where they are read by name, and note these names."""

    def __init__(self, kind: type, value: str) -> None:
        self.defaults = kind()
        self.value = value
        self.names = set[str]()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return self.value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.defaults, name)


@pytest.mark.parametrize("program", COMMANDS)
def test_names_in_fields_are_settings_of_the_program(program):
    kind = COMMANDS[program].program.settings
    flags = flags_of(kind)
    for row in flags.values():
        named = {*row.excludes}
        for need in row.needs:
            for value in ("x", ""):  # so that each side of an `or` is asked
                need.met(asked := Asked(kind, value))
                named |= asked.names
        assert named <= flags.keys() and row.dest not in named, row.dest


def test_lists_of_names_are_of_settings_of_train_py():
    assert {*FITTED, *STARTS, *START_ONLY, *EXPERIMENT} <= flags_of(TrainSettings).keys()


def test_a_misspelt_setting_is_an_error():
    settings = TRAIN.parse(["/data"])
    with pytest.raises(KeyError, match="epocs"):
        settings.decide("command line", epocs=3)
    with pytest.raises(KeyError, match="epocs"):
        settings["epocs"]
    with pytest.raises(AttributeError, match="epocs"):
        settings.schedule.epocs  # type: ignore[attr-defined]  # noqa: B018


def test_settings_stay_as_they_are():
    settings = TRAIN.parse(["/data", "--epochs", "3", "--opt-kwargs", "a=1"])
    before, sources = settings.values(), dict(settings.sources)
    for name, flag in flags_of(TrainSettings).items():
        owner: Any = settings
        for step in flag.path:
            with pytest.raises(FrozenInstanceError):
                setattr(owner, step, None)
            owner = getattr(owner, step)
        with pytest.raises(FrozenInstanceError):
            setattr(owner, name, None)
    other = settings.decide("data", epochs=4, workers=2).noting("a line")
    assert (other.schedule.epochs, other.images.loading.workers, other.notes) == (4, 2, ("a line",))
    assert {name for name, value in other.values().items() if value != before[name]} == {"epochs", "workers"}
    assert (settings.values(), dict(settings.sources), settings.notes) == (before, sources, ())
    settings.optim.opt_kwargs.clear()  # a value that can be changed is nobody else's
    settings.augment.scale.clear()
    again = TRAIN.parse(["/data"])
    assert again.augment.scale == [0.08, 1.0] == TRAIN.parser().flags["scale"].default


# What a recipe says | the command line | settings: their sources. What has no source is the default.
SOURCES = """
| | epochs:default; model:default; data_dir:command line
epochs: 30 | | epochs:recipe; config:command line
epochs: 30 | --epochs 300 | epochs:command line
amp: true | --no-amp | amp:command line
lr_base: 0.1 | --lr 1e-3 | lr:command line; lr_base:default
| --sched wsd | sched:command line; decay_epochs:other flags
sched: rsqrt | --decay-epochs 3 | sched:recipe; decay_epochs:command line
| --token-label | token_label_size:other flags
| LABELS | token_label_size:default
compat: upstream | LABELS | compat:recipe; uncovered:other flags; token_label_data:command line
kd_model_name: [a] | --kd-model-name= | kd_model_name:command line
finetune: RUN | | finetune:recipe
"""


@pytest.mark.parametrize("row", SOURCES.strip().splitlines())
def test_sources_of_the_settings_of_train_py(row, tmp_path):
    recipe, line, expected = (cell.strip().replace("LABELS", LABELS) for cell in row.split("|"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.pth.tar").touch()
    (tmp_path / "r.yaml").write_text(recipe.replace("RUN", str(tmp_path / "run")))
    settings = TRAIN.parse(["/data", *line.split(), *(["-c", str(tmp_path / "r.yaml")] if recipe else [])])
    for name, source in (cell.split(":") for cell in expected.split("; ")):
        assert settings.sources.get(name, "default") == source, name
        assert settings.set_by_user(name) == (source in ("recipe", "command line"))
    defaults = TrainSettings().values()
    changed = {name for name, value in settings.values().items() if value != defaults[name]}
    assert changed <= settings.sources.keys()


@pytest.mark.parametrize(
    ("program", "line", "expected"),
    [
        ("train", "--data-dir /data", {"data_dir": "command line"}),
        ("validate", "--data-dir /data --model m", {"data": "command line", "pretrained": "other flags"}),
        ("validate", "/data --checkpoint FOLDER", {"checkpoint": "command line", "all": "other flags"}),
        ("export", "-o m.onnx --checkpoint c", {"format": "other flags"}),
        ("export", "-o m.onnx --format onnx --checkpoint c", {"format": "command line"}),
    ],
)
def test_sources_of_settings_of_programs(program, line, expected, tmp_path):
    settings = COMMANDS[program].program.parse(line.replace("FOLDER", str(tmp_path)).split())
    assert {name: settings.sources.get(name) for name in expected} == expected
