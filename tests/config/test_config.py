"""Recipes: read strictly, as the command line is, which wins over them."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import yaml

from tlt.errors import UserError
from tlt.tools.cli import parser
from volo.cli import COMMANDS
from volo.config.recipes import load_yaml
from volo.config.train import TRAIN


def recipe(tmp_path: Path, text: str = "", **values: object) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(text or yaml.safe_dump(values))
    return str(path)


def read(path: str | Path) -> dict[str, object]:
    return load_yaml(str(path), TRAIN.parser())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epochs: 30", {"epochs": 30}),
        ("lr: 1e-3", {"lr": 1e-3}),  # YAML 1.1 reads this as text
        ("min-lr: 4.0e-6\ntoken-label: true", {"min_lr": 4e-6, "token_label": True}),
        ("amp: off", {"amp": False}),
        ("mean: 0.5", {"mean": [0.5]}),
        ("drop_path: null", {"drop_path": None}),
        ("torchcompile: true", {"torchcompile": "inductor"}),
        ("model_kwargs: {depth: 3, act: relu}", {"model_kwargs": {"depth": 3, "act": "relu"}}),
        ("experiment: 2024", {"experiment": "2024"}),
        ("experiment: 007\noutput: 1_0\nepochs: 010", {"experiment": "007", "output": "1_0", "epochs": 10}),
        ("wandb_tags: [01, 1.50]\nval_split: 0x1f", {"wandb_tags": ["01", "1.50"], "val_split": "0x1f"}),
        ("head_init_bias: -6.9\nlr_noise: [0.1, 0.5]", {"head_init_bias": -6.9, "lr_noise": [0.1, 0.5]}),
        # As an older version has written it down, where each name was a flag of its own.
        (
            "amp: true\napex_amp: true\nnative_amp: false\ndrop_connect: null\ndrop_path: 0.1",
            {"amp": True, "drop_path": 0.1},
        ),
    ],
)
def test_values_have_their_type_of_the_command_line(tmp_path, text, expected):
    values = read(recipe(tmp_path, text))
    assert values == expected
    assert [type(value) for value in values.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!python/object/apply:os.system ['touch hacked']", "could not determine a constructor"),
        ("epocs: 3", "unknown key 'epocs', did you mean epochs"),
        ("learning-rate: 3", "unknown key 'learning-rate', did you mean lr?"),
        ("exist_ok: 1", "unknown key 'exist_ok', did you mean resume auto?"),
        ("config: other.yaml", "unknown key 'config'"),
        ("mixup_mode: bogus", "mixup_mode: argument --mixup-mode: invalid choice: 'bogus' (choose from"),
        ("epochs: 1.5", "--epochs: invalid int value: '1.5'"),
        ("epochs:", "epochs: has no value"),
        ("output: 2024-01-01", "needs quotes"),
        ("experiment: a/../../b", "--experiment: 'a/../../b' leads out"),
        ("input_size: [3, 224]", "--input-size: expected 3 arguments"),
        ("model_kwargs: [1]", "no mapping"),
        ("epochs: 3\nepochs: 4", "'epochs' stands there twice"),
        ("min_lr: 3\nmin-lr: 4", "min_lr stands there twice"),
        ("---", "holds nothing where KEY: VALUE lines are expected"),
        ("epochs: 3\n  lr: [", "line 2"),
        ("model_kwargs: &a {x: 1}\ndata_dir: *a", "line 2, column 11"),
    ],
)
def test_fault_54_55_56_57_one_line_names_the_file(tmp_path, text, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        read(recipe(tmp_path, text))
    assert message in str(caught.value) and "recipe.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "hacked").exists()


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    for name, message in (("missing.yaml", "No such file"), (".", "directory"), ("binary.yaml", "binary.yaml")):
        with pytest.raises(UserError, match=message):
            read(tmp_path / name)


LABELLED: dict[str, object] = {"token_label": True, "token_label_data": "l"}


def test_command_line_wins_over_recipe_and_recipe_over_defaults(tmp_path):
    path = recipe(tmp_path, epochs=30, batch_size=64, amp=True, model_ema=True)
    args = TRAIN.parse(["-c", path, "/data", "--epochs", "3", "--no-amp"])
    assert (args.schedule.epochs, args.images.batch_size, args.images.loading.workers) == (3, 64, None)
    assert args.precision.mixed.amp is False and args.ema.model_ema is True
    assert args.set_by_user("batch_size") and not args.set_by_user("warmup_epochs")  # what the data may decide
    # A flag at its default value is a flag all the same.
    assert TRAIN.parse(["-c", path, "/data", "--batch-size", "128"]).images.batch_size == 128


@pytest.mark.parametrize(
    ("in_recipe", "line", "expected"),
    [
        ({"lr_base": 1e-3, "lr_base_size": 352}, "--lr 5e-4", {"lr": 5e-4, "lr_base": 1.6e-3, "lr_base_size": 1024}),
        ({"lr_base": 1e-3, "lr_base_size": 352}, "--lr-base 2e-3", {"lr_base": 2e-3, "lr_base_size": 352}),
        ({"img_size": 224}, "--input-size 3 64 32", {"img_size": None, "input_size": [3, 64, 32]}),
        (LABELLED | {"token_label_size": 14}, "--img-size 384", {"img_size": 384, "token_label_size": None}),
        (LABELLED | {"token_label_size": 1}, "--img-size 384", {"token_label_size": 1}),
        ({"drop_path": 0.5}, "--drop-connect 0.1", {"drop_path": 0.1}),
        ({"aa": "rand-m5", "reprob": 0.1}, "--no-aug", {"no_aug": True, "aa": "rand-m9-mstd0.5-inc1", "reprob": 0.25}),
        ({"pretrained": True}, "--finetune f", {"pretrained": False, "finetune": "f"}),
        # As runs wrote their arguments down when there was one teacher at most.
        ({"kd_model_name": "", "kd_distill_type": "logit"}, "", {"kd_model_name": "", "kd_distill_type": ["logit"]}),
        # What is switched off is no alternative.
        ({"finetune": "f"}, "--no-pretrained", {"pretrained": False, "finetune": "f"}),
        ({"pretrained": True}, "--finetune= --initial-checkpoint=", {"pretrained": True}),
        ({"token_label": True, "token_label_teacher": "t"}, "--token-label-data=", {"token_label_teacher": "t"}),
        (
            {"token_label": True, "token_label_data": "l", "dense_weight": 1.0, "ground_truth": True},
            "--no-token-label",
            {"token_label": False, "token_label_data": "", "dense_weight": 0.5, "ground_truth": False},
        ),
    ],
)
def test_command_line_voids_the_recipes_alternative(tmp_path, in_recipe, line, expected):
    args = TRAIN.parse(["-c", recipe(tmp_path, **in_recipe), "/data", *line.split()])
    assert {name: args[name] for name in expected} == expected


def test_paths_know_the_home_folder_and_impossible_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    places = {"PATH", "FILE", "DIR", "DATA", "DATA_DIR", "OUT", "IMAGE", "RUN"}
    models = ("--model", "--kd-model-name", "--token-label-teacher")
    rows = [row for command in COMMANDS.values() for row in command.program.parser().flags.values()]
    for row in rows:
        if (row.metavar or getattr(row.type, "metavar", "")) in places or row.label in models:
            assert callable(row.type) and row.type("~/a") == "/home/me/a", row.label
            assert row.type("local-dir:~/a") == "local-dir:/home/me/a" and row.type("a~") == "a~"
            for text in ("a" * 300, "a\0b"):
                with pytest.raises(ArgumentTypeError, match="no name of a file"):
                    row.type(text)
    for flags in ("pack a b --images=~/a", "pack-images a b --labels=~/a", "show a b --output=~/a"):
        assert "/home/me/a" in vars(parser().parse_args(flags.split())).values(), flags
    known = read(recipe(tmp_path, finetune="~/w.pth", output="~/runs", model="local-dir:~/m"))
    assert known == {"finetune": "/home/me/w.pth", "output": "/home/me/runs", "model": "local-dir:/home/me/m"}
    for more in (["--experiment", "x" * 300], [f"--finetune={'x' * 300}"], ["--output", "a/" + "é" * 200]):
        with pytest.raises(UserError, match="no name of a file"):
            TRAIN.parse(["/data", *more])


def test_resolved_arguments_are_a_recipe_that_repeats_them(tmp_path):
    line = "/data --apex-amp --drop-connect 0.1 --torchcompile --model-kwargs depth=3 --min-lr 0 --bn-tf --mean 0.5"
    first = TRAIN.parse(line.split())
    settings = {name: value for name, value in first.values().items() if name not in ("config", "data_dir_option")}
    second = TRAIN.parse(["-c", recipe(tmp_path, **settings)])
    assert {**second.values(), "config": ""} == first.values() and second.notes == first.notes
