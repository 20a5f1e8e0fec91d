"""Weights of another image size, class count, channel count or architecture."""

import functools
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import volo  # noqa: F401  (registers the models)
from tlt.errors import UserError
from tlt.models.fit_weights import rows_by_name
from tlt.utils import load_pretrained_weights
from volo.checkpoint.finetune import FinetuneReport, load_finetune, load_weights
from volo.checkpoint.model_config import model_config_of

UNFETCHED = {"hf_hub_id": None, "url": "", "custom_load": False, "num_classes": 10}


def build(name: str = "volo_test", seed: int = 0, **kwargs: Any) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(name, **{"num_classes": 10, "img_size": 64, **kwargs})


def states(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.pth.tar"
    torch.save({"state_dict": build(seed=1).state_dict()}, path)
    return path


def unchanged(before: dict[str, Tensor], model: nn.Module) -> bool:
    return all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def empty_state(name: str, **kwargs: Any) -> dict[str, Tensor]:
    """Names and shapes of a large model, in a few bytes."""
    with torch.device("meta"):
        state = timm.create_model(name, **kwargs).state_dict()
    return {k: torch.zeros(()).expand(v.shape) for k, v in state.items()}


@pytest.mark.parametrize("load", [load_weights, load_finetune, load_pretrained_weights])
def test_nan_weights_are_refused_and_nothing_is_loaded(tmp_path, load):
    state, model = states(build(seed=1)), build(seed=2)
    state["network.2.0.mlp.fc1.bias"][3] = float("nan")
    torch.save(state, tmp_path / "x")
    before = states(model)
    with pytest.raises(UserError, match=r"network.2.0.mlp.fc1.bias holds 1 NaN"):
        load(model, tmp_path / "x")
    assert unchanged(before, model)


@pytest.mark.parametrize(
    ("name", "size", "load"), [("volo_test", (48, 80), load_weights), ("lvvit_test", (64, 96), load_finetune)]
)
def test_position_embedding_is_resized(tmp_path, name, size, load):
    source, model = build(name, seed=1), build(name, seed=2, img_size=size)
    torch.save(source.state_dict(), tmp_path / "x")
    report = load(model, tmp_path / "x")
    assert (report.resized, report.dropped, report.missing, report.share) == (["pos_embed"], [], [], 1.0)
    pos = source.pos_embed.detach()
    first = pos[:, :1] if pos.ndim == 3 else None
    grid = pos[:, 1:].reshape(1, 4, 4, -1) if pos.ndim == 3 else pos
    target = (size[0] // 16, size[1] // 16)
    expected = F.interpolate(grid.permute(0, 3, 1, 2), target, mode="bicubic", align_corners=False).permute(0, 2, 3, 1)
    if first is not None:
        expected = torch.cat((first, expected.flatten(1, 2)), dim=1)
    assert torch.equal(model.pos_embed, expected)
    others = {k: v for k, v in states(source).items() if k != "pos_embed"}
    assert all(torch.equal(model.state_dict()[k], v) for k, v in others.items())
    assert model(torch.randn(1, 3, *size)).shape == (1, 10)


NARROW = {"depth": 1, "embed_dim": 32, "num_heads": 2}
SWIN = {"window_size": 4, "embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}


@pytest.mark.parametrize("load", [load_weights, load_finetune])
@pytest.mark.parametrize(
    ("name", "kwargs", "resized"),
    [
        ("vit_tiny_patch16_384", NARROW, ["pos_embed"]),
        ("deit_tiny_distilled_patch16_224", NARROW, ["pos_embed"]),
        ("vit_small_patch14_reg4_dinov2", NARROW | {"patch_size": 16}, ["pos_embed"]),
        ("beit_base_patch16_224", NARROW, ["blocks.0.attn.relative_position_bias_table"]),
        ("swin_tiny_patch4_window7_224", SWIN, ["layers.3.blocks.0.attn.relative_position_bias_table"]),
        ("tnt_s_patch16_224", {"depth": 1}, ["patch_pos"]),
    ],
)
def test_timm_models_resize_as_timm_does(tmp_path, name, kwargs, resized, load):
    kwargs, size = {**kwargs, "num_classes": 10}, (64, 160)
    source, model = build(name, seed=1, img_size=128, **kwargs), build(name, seed=2, img_size=size, **kwargs)
    torch.save(source.state_dict(), tmp_path / "bare")
    file = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "bare"), **UNFETCHED}}
    reference = timm.create_model(name, img_size=size, **file, **kwargs)
    of_another_name = {"arch": name.replace("384", "224"), "model_config": {"img_size": [128, 128]}}
    torch.save({"state_dict": source.state_dict(), **of_another_name}, tmp_path / "x")
    report = load(model, tmp_path / "x")
    assert (report.resized, report.dropped, report.missing) == (resized, [], [])
    assert unchanged(states(reference), model)


@pytest.mark.parametrize(
    ("name", "kwargs", "misfit"),
    [
        ("cait_xxs24_224", NARROW | {"depth_token_only": 1}, "pos_embed"),
        ("convit_tiny", NARROW, "pos_embed"),
        ("levit_128s", {}, "stages.0.blocks.0.attn.attention_biases"),
    ],
)
def test_weights_timm_cannot_resize_are_copied(tmp_path, name, kwargs, misfit):
    torch.save(build(name, img_size=128, **kwargs).state_dict(), tmp_path / "x")
    model = build(name, img_size=96, num_classes=3, **kwargs)
    before = states(model)
    with pytest.raises(UserError, match=rf"x: {misfit}: the model's is .*{name} has no rule to resize it .*--img-size"):
        load_finetune(model, tmp_path / "x")
    assert unchanged(before, model)


@pytest.mark.parametrize(("name", "kwargs"), [("lvvit_test", {}), ("vit_tiny_patch16_224", NARROW)])
@pytest.mark.parametrize("size", [(64, 64), (128, 32)])
def test_weights_of_an_oblong_grid(tmp_path, name, kwargs, size):
    source, model = build(name, seed=1, img_size=(32, 128), **kwargs), build(name, seed=2, img_size=size, **kwargs)
    payload = {"state_dict": source.state_dict(), "model_config": {"img_size": [32, 128]}}
    torch.save(payload, tmp_path / "x")
    load_finetune(model, tmp_path / "x")
    source.set_input_size(size)
    assert torch.equal(model.pos_embed, source.pos_embed)  # 2 x 8 tokens, not the square 4 x 4


def test_channels_are_adapted_as_by_timm_or_dropped(file, tmp_path):
    name = "patch_embed.conv.0.weight"
    model = build(in_chans=1)
    report = load_finetune(model, file)
    assert report.resized == [name] and report.missing == []
    expected = states(build(seed=1))[name].double().sum(1, keepdim=True)
    torch.testing.assert_close(model.state_dict()[name].double(), expected, rtol=1e-6, atol=1e-6)
    torch.save(build(seed=1, in_chans=5).state_dict(), tmp_path / "x")
    report = load_finetune(build(seed=2, in_chans=4), tmp_path / "x")
    assert report.dropped == report.missing == [name]


def test_everything_at_once_and_the_report(file):
    state = torch.load(file)["state_dict"]
    del state["norm.bias"]
    torch.save(state | {"extra.weight": torch.zeros(3)}, file)
    report = load_finetune(build(num_classes=7, img_size=(96, 64), in_chans=1), file)
    assert isinstance(report, FinetuneReport)
    names = {*report.kept, *report.resized, *report.dropped}
    assert names == {*state, "extra.weight"}
    text, resized = str(report), "pos_embed ((1, 4, 4, 64) -> (1, 6, 4, 64))"
    assert f"resized 2: patch_embed.conv.0.weight (3 -> 1 input channels), {resized}" in text
    assert f"kept {len(report.kept)}\n" in text and str(file) in text
    assert "dropped 5: head.weight (10 classes, the model has 7)" in text and "extra.weight (not in the model)" in text
    assert "missing 5: " in text and "norm.bias" in text


def test_weights_that_do_not_fit_are_told_with_the_remedy(file):
    model = build(num_classes=7)
    before = states(model)
    for other, reason in (
        (model, "10 classes, the model has 7"),
        (build(num_classes=12), "10 classes, the model has 12"),
        (build(in_chans=1), "3 -> 1 input channels"),
        (build("lvvit_test"), "the model's is"),
    ):
        with pytest.raises(UserError, match=rf"does not fit --model .*{reason}.*--num-classes.*--finetune") as caught:
            load_weights(other, file)
        assert "\n" not in str(caught.value)
    headless = {name: value for name, value in build().state_dict().items() if not name.startswith("aux_head")}
    torch.save(headless, file)
    with pytest.raises(UserError, match=r"\(aux_head.weight is missing from it\)"):
        load_weights(build(), file)
    torch.save(build().state_dict() | {"extra.weight": torch.zeros(3)}, file)
    with pytest.raises(UserError, match=r"\(extra.weight: not in the model\)"):
        load_weights(build(), file)
    assert unchanged(before, model)


@pytest.mark.parametrize("load", [load_weights, load_finetune])
def test_another_model_is_named_by_the_files_word(tmp_path, load):
    record = {"arch": "resnet10t", "state_dict": empty_state("resnet10t"), "model_config": {"class_names": THEIRS}}
    torch.save(record, tmp_path / "x")
    model = timm.create_model("test_resnet")
    for names in ((), THEIRS[::-1]):
        with pytest.raises(UserError, match="checkpoint is resnet10t, --model is test_resnet"):
            load(model, tmp_path / "x", class_names=names)


def test_file_that_fits_nothing(tmp_path):
    model = build()
    before = states(model)
    for state in ({"foo": torch.zeros(3)}, {"cls_token": torch.zeros(1, 1, 64), "foo": torch.zeros(3)}):
        torch.save(state, tmp_path / "x")
        with pytest.raises(UserError, match="x does not fit --model volo_test"):
            load_finetune(model, tmp_path / "x")
    assert unchanged(before, model)


def test_published_loader_drops_heads_by_the_files_own_count(file):
    model = build(num_classes=7, img_size=96)
    load_pretrained_weights(model, file, num_classes=7)  # strict: all but the heads has to fit
    assert model.pos_embed.shape == (1, 6, 6, 64)
    assert torch.equal(model.cls_token, build(seed=1).cls_token)
    load_pretrained_weights(model, file)  # the published default, 1000, for a model of 7 classes
    with pytest.raises(UserError, match="num_classes is 12, the model has 7"):
        load_pretrained_weights(model, file, num_classes=12)


def test_model_config_is_checked():
    config = {"name": "volo_d1", "kwargs": {"drop_path_rate": 0.1}, "img_size": [224, 192], "dense_head": False}
    config |= {"crop_pct": 0.96, "std": [0.5, 0.5, 0.5], "class_names": ["a", "b"]}
    assert model_config_of({"model_config": config | {"of_a_later_version": 1, "labels": None}}) == config
    assert model_config_of({}) is None


@pytest.mark.parametrize(("key", "value"), [
    ("name", 3), ("num_classes", True), ("num_classes", -1), ("img_size", [224]), ("img_size", [224, 0]),
    ("crop_pct", float("nan")), ("crop_pct", "0.9"), ("crop_pct", -0.9), ("std", [0.5, 0.0, 0.5]), ("dense_head", 1),
    ("class_names", [1]), ("num_classes", 10**10), ("img_size", [10**6, 224]), ("in_chans", 10**6), ("kwargs", {1: 2}),
    ("kwargs", {"checkpoint_path": "other.pth"}), ("kwargs", {"depth": 10**6}), ("kwargs", {"layers": [4] * 101}),
    ("kwargs", {"layers": functools.reduce(lambda inner, _: [inner, inner], range(60), [])}),  # 2^60, written out
])  # fmt: skip
def test_model_config_of_a_wrong_kind(key, value):
    with pytest.raises(UserError, match=f"file.pth: model_config has {key}"):
        model_config_of({"model_config": {key: value}}, "file.pth")


THEIRS = ["cat", "dog", "owl", "ox"]


@pytest.mark.parametrize("name", ["volo_test", "vit_tiny_patch16_224", "resnet10t"])
@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (["ox", "cat", "dog", "owl"], "4 of 4"),
        (["owl", "emu", "cat", "gnu"], "2 of 4"),
        (["dog", "ox"], "2 of 2"),
        (["emu", "owl", "gnu", "cat", "dog", "ox"], "4 of 6"),
        (["a", "b", "c", "d"], ""),
    ],
)
def test_rows_of_heads_go_by_the_names_of_the_classes(tmp_path, name, ours, said):
    kwargs = NARROW if name.startswith("vit") else {}
    kwargs = kwargs | ({"img_size": 64} if name != "resnet10t" else {})
    torch.manual_seed(1)
    source = timm.create_model(name, num_classes=4, **kwargs).eval()
    torch.manual_seed(2)
    model = timm.create_model(name, num_classes=len(ours), **kwargs).eval()
    config = {"name": name, "num_classes": 4, "class_names": THEIRS}
    torch.save({"state_dict": source.state_dict(), "model_config": config}, tmp_path / "x")
    before, x = states(model), torch.randn(2, 3, 64, 64)
    same = [(row, THEIRS.index(each)) for row, each in enumerate(ours) if each in THEIRS]
    if sorted(ours) == THEIRS:
        load_weights(model, tmp_path / "x", class_names=ours)
    else:
        with pytest.raises(UserError, match="--finetune takes what fits"):
            load_weights(model, tmp_path / "x", class_names=ours)
    for load in (load_finetune, load_pretrained_weights):
        model.load_state_dict(before)
        report = load(model, tmp_path / "x", class_names=ours)
        heads = [n for n in before if n.split(".")[0] in ("head", "fc", "aux_head")]
        logits, theirs = model(x), source(x)
        for row in range(len(ours)):
            kept = dict(same).get(row)
            expected = {n: before[n][row] if kept is None else source.state_dict()[n][kept] for n in heads}
            assert all(torch.equal(model.state_dict()[n][row], value) for n, value in expected.items())
        if said:
            torch.testing.assert_close(logits[:, [a for a, _ in same]], theirs[:, [b for _, b in same]])
            assert {*report.resized} >= {*heads} and f"of which the file has {said}" in report.notes[heads[0]]
        else:
            assert {*report.dropped} == {*heads} and "class 0 is cat there, a here" in report.notes[heads[0]]


@pytest.mark.parametrize(
    ("theirs", "ours", "counts", "rows"),
    [
        (["a", "b"], ["b", "a"], (2, 2), [1, 0]),
        (["a", "b"], ["a", "b"], (2, 2), None),
        (["a", "b"], ["a", "c"], (2, 2), [0, -1]),
        (["a", "b"], ["a"], (3, 3), None),  # one name for three classes
        (["a", "b"], ["b", "a", "c"], (3, 3), [1, 0, -1]),
        (["a", "b"], ["b", "a"], (3, 3), [1, 0, 2]),  # the third has no name
        (["a", "b"], [], (2, 2), None),
        ([], ["a", "b"], (2, 2), None),
        (["a", "b"], ["0", "1"], (2, 2), None),
        (["1", "0"], ["0", "1"], (2, 2), [1, 0]),
        (["a", "b", "c"], ["c", "a"], (3, 2), [2, 0]),
        (["a", "b", "c"], ["c", "a"], (2, 2), None),  # more names than classes
    ],
)
def test_class_names_decide(theirs, ours, counts, rows):
    assert rows_by_name(theirs, ours, counts) == rows
