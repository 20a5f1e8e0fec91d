"""The public names of `tlt` and its models: they are there, typed, and loaded late; the loop of the page runs."""

import inspect
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
from torch.nn.parallel import DistributedDataParallel

import tlt
import volo
from tests.commands.conftest import ROOT
from tests.conftest import LIMIT, python_path
from tests.data.conftest import refuses
from tlt.labels.features import FeatureInfo, FeatureWriter
from volo.config.train import TRAIN
from volo.train.data import augment_config

PAGE = (ROOT / "docs" / "python_api.md").read_text()
SMALL = {
    '"volo_d0", img_size=size': '"test_resnet"',
    "(224, 224)": "(64, 64)",
    "batch_size=32": "batch_size=8, workers=0",
    "range(100)": "range(2)",
    '"vit_small_patch14_dinov2", pretrained=True, img_size=224': '"test_vit2", img_size=64',
}


@pytest.fixture
def images(make_dataset: Callable[..., Path]) -> Any:
    return tlt.open_images(str(make_dataset(train=20)), "train")


def test_names_are_those_of_the_page_with_docstrings():
    named = re.findall(r"^\| `(\w+)|, `(\w+)` \| its argument", PAGE, re.MULTILINE)
    assert {name for pair in named for name in pair if name} == set(tlt.__all__)
    for name in tlt.__all__:
        each = getattr(tlt, name)
        assert inspect.getdoc(each) and name in dir(tlt), name
        for function in [each, *vars(each).values()] if inspect.isclass(each) else [each]:
            if inspect.isfunction(function) and not function.__name__.startswith("_"):
                assert "return" in function.__annotations__, (name, function)
    with pytest.raises(AttributeError, match="has no attribute 'labels_of'"):
        _ = tlt.labels_of  # type: ignore[attr-defined]


@pytest.mark.parametrize("taught", ["", "computed", "stored"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_loop_of_the_page_runs(device, taught, make_dataset, make_labels, monkeypatch):
    _, loop, computed, stored = re.findall(r"^```(?:python|diff)\n(.*?)^```", PAGE, re.M | re.S)
    changes = {"": "", "computed": computed, "stored": stored}[taught]
    for old, new in re.findall(r"^[ -](.*\n)((?:\+.*\n)+)", changes, re.M):
        kept = old if f" {old}" in changes.splitlines(keepends=True) else ""
        assert old in loop
        loop = loop.replace(old, kept + new.replace("\n+", "\n")[1:])
    for published, small in SMALL.items():
        assert published in loop or "vit" in published or "224" in published
        loop = loop.replace(published, small)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    data = make_dataset(train=20)
    make_labels(data)
    monkeypatch.chdir(data.parent)
    pictures = tlt.open_images(str(data.rename("pictures")), "train")
    writer = FeatureWriter("features", FeatureInfo((3, 3), 5), pictures.paths)
    for row in range(len(pictures)):
        writer.write(row, torch.randn(3, 3, 5))
    writer.finish()
    result: dict[str, Any] = {}
    exec(compile(loop, "python_api.md", "exec"), result)
    assert result["update"] == 5 and result["loss"].total.isfinite() and result["loss"].dense > 0
    assert result["outputs"][1].shape == (4, result["criterion"].grid[0] * result["criterion"].grid[1], 4)


def test_loader_continues_within_and_across_epochs(images):
    def loader(**options: Any) -> tlt.Loader:
        return tlt.Loader(images, None, tlt.AugmentConfig((32, 32)), 8, seed=3, workers=0, **options)

    whole = loader()
    first, second = [batch.images for batch in whole], [batch.images for batch in whole]
    assert [len(each) for each in first] == [8, 8, 4] and len(whole) == 3
    assert not torch.equal(first[0], second[0])
    again = loader()
    again.sampler.set_epoch(1)
    assert all(map(torch.equal, [batch.images for batch in again], second))
    resumed = [batch.images for batch in loader().epoch(1, 2)]
    assert len(resumed) == 1 and torch.equal(resumed[0], second[2])
    halves = [[batch.indices for batch in loader(world_size=2, rank=rank)] for rank in range(2)]
    assert sorted(torch.cat([*halves[0], *halves[1]]).tolist()) == list(range(20))
    assert len(loader(drop_last=True)) == 2


def test_a_loader_has_as_many_batches_as_it_yields(images):
    for world_size, micro_batches, more in product((1, 2), (1, 2, 3), ({}, {"drop_last": True}, {"repeats": 3})):
        how = {"workers": 0, "world_size": world_size, "micro_batches": micro_batches, **more}
        loader = tlt.Loader(images, None, tlt.AugmentConfig((8, 8)), 3, **how)
        assert len(loader) == len(list(loader)) == len(list(loader._keys(1, 0))), how


def test_boxes_that_are_always_empty_are_told():
    with pytest.warns(UserWarning, match="MixToken mixes nothing: with fewer than 3 tokens"):
        assert {tlt.draw_box(tlt.StepKey(0, update), (2, 9))[:3:2] for update in range(30)} <= {(0, 0), (1, 1), (2, 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len({tlt.draw_box(tlt.StepKey(0, update), (3, 3)) for update in range(30)}) > 3


def test_augmentation_is_that_of_volo_train_by_default():
    args = TRAIN.parse(["data", "--model", "lvvit_s"])
    settings = {"input_size": (3, 224, 224), "mean": (0.485, 0.456, 0.406)}
    assert tlt.AugmentConfig((224, 224)) == augment_config(args.augment, settings)


SQUARE = tlt.AugmentConfig((32, 32))


def test_three_strengths_of_colour_jitter_may_be_a_list(images):
    made = (tlt.AugmentConfig((8, 8), auto_augment=None, color_jitter=each) for each in (0.4, (0.4,) * 3, [0.4] * 3))
    assert [config.jitter for config in made] == [(0.4, 0.4, 0.4)] * 3


def test_labels_of_other_images_are_refused(images, make_labels):
    """Those of a selection are found by its names, whatever says which images are in it."""
    path = make_labels(Path(images.root).parent)
    labels = tlt.open_labels(path, images.paths)
    for other in (images.select([3, 1, 2, 0]), images.select(range(8)), images.select(images.classes == 2)):
        with refuses(r"labels are of other images than these of .*train, .*: open them with tlt.open_labels\(path"):
            tlt.Loader(other, labels, SQUARE, 2, workers=0)
        (batch, *_) = tlt.Loader(other, tlt.open_labels(path, other.paths), SQUARE, 2, workers=0)
        assert (batch.labels.ids[:, 0, 2, 2] == batch.classes).all()
    assert {*images.select(images.classes == 2).classes} == {2}
    tlt.Loader(tlt.open_images(images.root, "train", allow_root=True), labels, SQUARE, 2, workers=0)


def test_large_class_id_names_its_label(make_dataset, make_labels):
    data = make_dataset(train=8)
    labels = make_labels(data)
    label_map = torch.load(labels / "red" / "red3.pt")
    label_map[1, 1, 0, 0] = 1999
    torch.save(label_map, labels / "red" / "red3.pt")
    images = tlt.open_images(str(data), "train")

    def targets(classes: int, **options: Any) -> None:
        criterion, store = tlt.TokenLabelLoss((2, 2), classes), tlt.open_labels(labels, images.paths, **options)
        for batch in tlt.Loader(images, store, tlt.AugmentConfig((64, 64)), 4, workers=0):
            criterion.targets(batch)

    for options in ({}, {"num_classes": 4}):
        with pytest.raises(tlt.UserError, match=r"red/red3\.pt.*: class id 1999 is not in 0\.\.3"):
            targets(4, **options)
    targets(2000)


def test_a_criterion_of_a_model_knows_where_its_tokens_lie():
    model = tlt.with_dense_head(timm.create_model("test_resnet", num_classes=4), (64, 64))
    criterion = tlt.TokenLabelLoss.of(model, (64, 64), dense_weight=0.25)
    assert criterion.grid == model.token_grid((64, 64)) and criterion.dense_weight == 0.25
    assert criterion.window == model.token_positions((64, 64)).window(criterion.grid, (64, 64)) != (0, 0, 1, 1)
    assert replace(criterion, num_classes=5).window == criterion.window


@pytest.mark.parametrize("name", ["volo_test", "lvvit_test", "test_vit", "test_resnet"])
def test_a_dense_weight_of_0_trains_on_several_ranks(process_group, images, name):
    size = {} if name == "test_resnet" else {"img_size": 64}
    model = tlt.with_dense_head(timm.create_model(name, num_classes=4, **size), (64, 64))
    criterion = tlt.TokenLabelLoss.of(model, (64, 64), dense_weight=0.0)
    ranks = DistributedDataParallel(model)
    for batch in tlt.Loader(images, None, tlt.AugmentConfig((64, 64)), 8, workers=0):
        outputs = ranks(batch.images, dense=True)
        criterion(outputs, criterion.targets(batch)).total.backward()
    untrained = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert untrained == {name for name, _ in model.named_parameters() if name.startswith("aux_")} != set()


def test_versions_agree_and_both_packages_are_typed():
    project = (ROOT / "pyproject.toml").read_text()
    assert tlt.__version__ == volo.__version__ and f'\nversion = "{tlt.__version__}"\n' in project
    assert f"\nversion: {tlt.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    for package in ("tlt", "volo"):
        assert (ROOT / package / "py.typed").is_file() and f'\n{package} = ["py.typed"]\n' in project


@pytest.mark.parametrize("program", ["-m volo", "-m tlt", "-m volo report", "train.py", "benchmark.py"])
def test_every_program_has_a_version(program):
    ended = subprocess.run([sys.executable, *program.split(), "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"volo-tlt {tlt.__version__}\n", "")


def started(monkeypatch: pytest.MonkeyPatch, *command: str) -> bool:
    """Whether a Python that was started with `command` runs a program of ours, which registers the models late."""
    main = ModuleType("__main__")
    if not command[0].startswith("-"):
        main.__file__ = command[0]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", ["python", *command])
    return tlt._starts_program()


def test_only_programs_of_this_project_register_the_models_late(monkeypatch):
    for program in (ROOT / "train.py", ROOT / "volo/commands/launch.py", "/usr/bin/volo"):
        assert started(monkeypatch, str(program)), program
    assert started(monkeypatch, "-m", "volo") and started(monkeypatch, "-m", "tlt")
    for others in (["/home/me/train.py"], ["-m", "mine.train"], ["-c"], [str(ROOT / "demo/digits.py")]):
        assert not started(monkeypatch, *others), others  # gets the models by importing volo, as ever


def test_import_registers_models_and_loads_the_rest_on_demand():
    code = (
        f"import sys; sys.argv = [{str(ROOT / 'train.py')!r}]; import volo, tlt, timm;"
        "assert all(map(timm.is_model, ('volo_d1', 'lvvit_s')));"
        "late = {'tlt.api', 'tlt.data.loader', 'tlt.labels.store', 'volo.api', 'volo.config.train'};"
        "assert not late & set(sys.modules);"
        "tlt.open_labels; assert 'tlt.labels.store' in sys.modules; volo.predict; assert 'volo.api' in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
