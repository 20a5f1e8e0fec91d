"""Recipes are read strictly: what argparse would refuse on the command line is refused in a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlt.errors import UserError
from volo.config.args import train_parser
from volo.config.recipes import load_yaml

KNOWN = train_parser().flags


def read(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_yaml(str(path), KNOWN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epochs: 30", {"epochs": 30}),
        ("lr: 1e-3", {"lr": 1e-3}),  # YAML 1.1 reads this as text
        ("lr: 1", {"lr": 1.0}),
        ("min-lr: 4.0e-6\ntoken-label: true", {"min_lr": 4e-6, "token_label": True}),
        ("amp: off", {"amp": False}),
        ("scale: [0.2, 1]", {"scale": [0.2, 1.0]}),
        ("mean: 0.5", {"mean": [0.5]}),
        ("input_size: [3, 256, 192]", {"input_size": [3, 256, 192]}),
        ("drop_path: null", {"drop_path": None}),
        ("torchcompile: true", {"torchcompile": "inductor"}),
        ("torchcompile: eager", {"torchcompile": "eager"}),
        ("torchcompile: false", {"torchcompile": None}),
        ("model_kwargs: {depth: 3, act: relu}", {"model_kwargs": {"depth": 3, "act": "relu"}}),
        ("data_dir: /data", {"data_dir": "/data"}),
        ("experiment: 2024", {"experiment": "2024"}),
    ],
)
def test_values_have_the_type_they_have_on_the_command_line(
    tmp_path: Path, text: str, expected: dict[str, object]
) -> None:
    values = read(tmp_path, text)
    assert values == expected
    assert [type(value) for value in values.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!python/object/apply:os.system ['touch hacked']", "line 1: could not determine a constructor"),
        ("epocs: 3", "unknown key 'epocs', did you mean epochs"),
        ("leraning_rate: 0.1", "unknown key 'leraning_rate'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("mixup_mode: bogus", "mixup_mode: invalid choice: 'bogus' (choose from 'batch', 'pair', 'elem')"),
        ("amp_dtype: bogus", "amp_dtype: invalid choice"),
        ("epochs: 1.5", "epochs: invalid int value: '1.5'"),
        ("epochs: many", "epochs: invalid int value: 'many'"),
        ("epochs: -1", "epochs: -1 is out of range: at least 1"),
        ("epochs: true", "epochs: True is no value for --epochs"),
        ("epochs: [3]", "epochs: [3] is no value for --epochs"),
        ("epochs:", "epochs: has no value"),
        ("lr: .nan", "lr: nan is not a finite number"),
        ("amp: 1", "amp: 1 is neither true nor false"),
        ("amp: 'yes'", "amp: 'yes' is neither true nor false"),
        ("model: no", "model: False is no value for --model; text that looks like something else needs quotes"),
        ("output: 2024-01-01", "needs quotes"),
        ("input_size: [3, 224]", "2 values where 3 are expected"),
        ("scale: []", "an empty list"),
        ("model_kwargs: [1]", "no mapping"),
        ("epochs: 3\nepochs: 4", "'epochs' stands there twice"),
        ("min_lr: 3\nmin-lr: 4", "min_lr stands there twice"),
        ("", "holds nothing where KEY: VALUE lines are expected"),
        ("- epochs", "holds a list where"),
        ("epochs", "holds a str where"),
        ("epochs: 3\n  lr: [", "line 2"),
        ("model_kwargs: &a {x: 1}\n<<: *a", "line 2: << is not read"),
        ("#" * 1_000_001, "not a file of less than 1000000 bytes"),
        ("\n".join(f"key{i}: 1" for i in range(40_000)), "unknown key"),
        ("epochs: \t@", "line 1"),
    ],
)
def test_fault_54_55_56_57_refused_in_one_line_that_names_the_file(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value) and "recipe.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "hacked").exists()


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--config .*missing.yaml: No such file"):
        load_yaml(str(tmp_path / "missing.yaml"), KNOWN)
    with pytest.raises(UserError, match="directory"):
        load_yaml(str(tmp_path), KNOWN)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: not a file"):
        load_yaml(str(tmp_path / "pipe"), KNOWN)
    bomb = "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40))])
    (tmp_path / "bomb.yaml").write_text(bomb)
    with pytest.raises(UserError, match="bomb.yaml, line 2: << is not read"):
        load_yaml(str(tmp_path / "bomb.yaml"), KNOWN)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match="binary.yaml"):
        load_yaml(str(tmp_path / "binary.yaml"), KNOWN)
