"""Vision transformers of Hugging Face's Transformers: the logits are those of its own models."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

from tlt.errors import UserError
from volo.checkpoint.finetune import load_finetune
from volo.config.train import TRAIN
from volo.train.architecture import ModelRequest, requested_by
from volo.train.model import build_model, data_config_of

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32}


def _saved(kind: str, folder: Path, **settings: Any) -> torch.nn.Module:
    torch.manual_seed(1)
    # Weights far larger than those of a fresh model: an error in any of them shows in the logits.
    config = transformers.ViTConfig(**SMALL | {"patch_size": 8, "initializer_range": 0.2} | settings)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(folder)
    return model


def _request(*flags: str) -> ModelRequest:
    return requested_by(TRAIN.parse(["data", *flags]))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_labels": 5, "patch_size": 4, "qkv_bias": False, "num_channels": 1},
        {"num_labels": 7, "hidden_size": 192, "num_hidden_layers": 12, "patch_size": 16},
    ],
)
def test_logits_are_those_of_transformers(settings, tmp_path):
    theirs = _saved("ViTForImageClassification", tmp_path, **settings)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4], "image_std": [0.3]}))
    request = _request("--model", f"local-dir:{tmp_path}", "--pretrained")
    ours = build_model(request).eval()
    images = torch.randn(3, settings.get("num_channels", 3), 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images).logits, rtol=1e-5, atol=1e-5)
    looks = data_config_of(request, ours)
    assert looks["input_size"] == tuple(images.shape[1:]) and (looks["mean"][0], looks["std"][0]) == (0.4, 0.3)
    assert (looks["interpolation"], looks["crop_pct"]) == ("bilinear", 1.0)


@pytest.mark.parametrize("of_file", [True, False], ids=["names of files", "names of modules"])
def test_fine_tuning_takes_the_backbone_alone(of_file, tmp_path):
    theirs = _saved("ViTModel", tmp_path)
    path = tmp_path / "model.safetensors"
    if not of_file:
        path = tmp_path / "weights.pth"
        torch.save(theirs.state_dict(), path)
    # A head of two layers: Transformers calls the first one pooler.
    ours = timm.create_model(
        "vit_transformers", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, mlp_ratio=1.5
    ).eval()
    report = load_finetune(ours, path)
    assert sorted(report.dropped) == ["pooler.dense.bias", "pooler.dense.weight"]
    assert report.missing == ["head.weight", "head.bias"] and report.share == 1
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = theirs(images).last_hidden_state
        torch.testing.assert_close(ours.forward_features(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["git-lfs", "cut", "NaN", "none", "another model's"])
def test_weights_of_a_folder_are_checked_like_any(kind, tmp_path):
    _saved("ViTForImageClassification", tmp_path)
    file, named = tmp_path / "model.safetensors", "model.safetensors"
    weights = safetensors.torch.load_file(file)
    if kind == "NaN":
        next(iter(weights.values())).fill_(float("nan"))
        safetensors.torch.save_file(weights, file)
        named = "is refused: .* holds .* NaN"
    elif kind == "none":
        file.unlink()
    elif kind == "another model's":
        name = next(name for name in weights if name.endswith("position_embeddings"))
        safetensors.torch.save_file({**weights, name: weights[name][..., :8].contiguous()}, file)
        named = f"{tmp_path} cannot be built with .*pos_embed"
    else:
        lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
        file.write_bytes(lfs if kind == "git-lfs" else file.read_bytes()[:-9])
    with pytest.raises(UserError, match=named) as caught:
        build_model(_request("--model", f"local-dir:{tmp_path}", "--pretrained"))
    assert "\n" not in str(caught.value) and "fetched" not in str(caught.value)


def test_what_timm_lacks_is_told(tmp_path):
    _saved("ViTForImageClassification", tmp_path, hidden_act="relu")
    with pytest.raises(UserError, match="hidden_act relu, this ViT has gelu"):
        build_model(_request("--model", f"local-dir:{tmp_path}"))
