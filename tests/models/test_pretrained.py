"""Published weights: found in torch's hub folder, converted to what is asked for, or refused in one line."""

import urllib.error

import pytest
import timm
import torch

from tlt.errors import UserError


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.mark.parametrize(
    ("name", "file"), [("volo_d1.sail_in1k_384", "d1_384_85.2.pth.tar"), ("lvvit_s", "lvvit_s-26M-224-83.3.pth.tar")]
)
def test_without_network_the_file_and_its_place_are_named(no_network, name, file):
    with torch.device("meta"), pytest.raises(UserError) as raised:
        timm.create_model(name, pretrained=True)
    message = str(raised.value)
    assert "\n" not in message and str(no_network / file) in message and "--" not in message
    assert "no route to host" in message and "https://github.com/" in message


def test_models_without_published_weights(no_network):
    with pytest.raises(UserError, match="volo_d0.*pretrained=False"):
        timm.create_model("volo_d0", pretrained=True)
    with pytest.raises(UserError, match="lvvit_l: .*lvvit_l.in1k_448 and lvvit_l.in1k_512"):
        timm.create_model("lvvit_l", pretrained=True)


@pytest.fixture
def published(no_network):
    """Weights under the name of LV-ViT-T's release file, in the place that the message names."""
    torch.manual_seed(1)
    model = timm.create_model("lvvit_t").eval()
    torch.save({"state_dict": model.state_dict(), "arch": "lvvit_t"}, no_network / "lvvit_t.pth")
    return model


def test_weights_are_converted_to_size_channels_and_classes(published):
    loaded = timm.create_model("lvvit_t", pretrained=True, img_size=(64, 96), in_chans=1, num_classes=10)
    torch.testing.assert_close(loaded.blocks[3].attn.qkv.weight, published.blocks[3].attn.qkv.weight)
    assert loaded.pos_embed.shape == (1, 1 + 4 * 6, 240)
    torch.testing.assert_close(loaded.pos_embed[:, 0], published.pos_embed[:, 0])
    summed = published.patch_embed.conv1.weight.sum(1, keepdim=True)
    torch.testing.assert_close(loaded.patch_embed.conv1.weight, summed)
    assert loaded.head.out_features == loaded.aux_head.out_features == 10
    features = timm.create_model("lvvit_t", pretrained=True, features_only=True, out_indices=(2,))
    torch.testing.assert_close(features.model.blocks[2].mlp.fc1.weight, published.blocks[2].mlp.fc1.weight)
