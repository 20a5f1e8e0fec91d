"""The output contract and timm's model interface, for both families."""

import pytest
import timm
import torch
from timm.models.volo import VOLO as TimmVOLO
from timm.optim import create_optimizer_v2

from tests.models.conftest import fill, make_images
from tlt.errors import UserError
from tlt.models import TokenLabelModel, adapt_state_dict, fast_ops
from tlt.models.layers import SelfAttention
from volo.models.volo import ClassAttention

NAMES = ["volo_test", "lvvit_test"]
CLASSES = 7


def build(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{"img_size": 64, "num_classes": CLASSES, **kwargs}).eval()


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.mark.parametrize("training", [False, True])
def test_output_contract(name, training):
    model, x = build(name).train(training), make_images(3, 64)
    cls, tokens = model(x, dense=True)
    assert cls.shape == (3, CLASSES) and tokens.shape == (3, 16, CLASSES)
    torch.testing.assert_close(model(x), cls + 0.5 * tokens.max(dim=1).values)
    features = model.forward_features(x)
    assert features.shape == (3, 17, model.num_features)
    torch.testing.assert_close(model.forward_head(features), model(x))
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features[:, 0])
    torch.testing.assert_close(model.head(features[:, 0]), cls)
    assert isinstance(model, TokenLabelModel) and model.head_hidden_size == model.num_features


def test_box_mixes_empty_does_not_and_full_swaps_class_tokens(name):
    model, x = build(name), make_images(4, 64, 96)
    plain, mixed = model(x, dense=True), model(x, dense=True, mix_box=(1, 0, 3, 2))
    torch.testing.assert_close(model(x, dense=True, mix_box=(2, 2, 2, 4)), plain)
    assert not torch.allclose(mixed[0], plain[0], atol=1e-4)
    cls, tokens = model(x, dense=True, mix_box=(0, 0, 4, 6))
    torch.testing.assert_close((cls.flip(0), tokens), plain)


@pytest.mark.parametrize("rate", ["drop_rate", "attn_drop_rate", "drop_path_rate"])
def test_dropout_acts_in_training_only(name, rate):
    model, x = build(name, **{rate: 0.5}), make_images(4, 64)
    torch.testing.assert_close(model(x), build(name)(x), rtol=0, atol=0)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    outputs = []
    model.named_blocks()[0][1].attn.register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    assert not torch.equal(model(x), model(x))
    assert torch.equal(*outputs) == (rate == "drop_path_rate" or (rate, name) == ("drop_rate", "volo_test"))


def test_dense_head_off(name):
    model, x = build(name), make_images(2, 64)
    cls, _ = model(x, dense=True)
    model.set_dense_head(False)
    torch.testing.assert_close(model(x), cls)
    model(x).sum().backward()
    assert not any(p.requires_grad or p.grad is not None for p in model.aux_head.parameters())
    assert "aux_head.weight" in model.state_dict()
    with pytest.raises(UserError, match="set_dense_head"):
        model(x, dense=True)
    model.reset_classifier(3)
    assert not model.aux_head.weight.requires_grad
    model.set_dense_head(True)
    assert model(x, dense=True)[1].shape == (2, 16, 3) and model.aux_head.weight.requires_grad
    off = build(name, dense_head=False)
    assert not off.dense_head and not off.aux_head.weight.requires_grad


def test_reset_classifier_replaces_both_heads(name):
    model, x = build(name), make_images(2, 64)
    model.reset_classifier(3, global_pool="avg")
    assert model.get_classifier() is model.head and model.head.out_features == model.aux_head.out_features == 3
    features = model.forward_features(x)
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features[:, 1:].mean(1))
    model.reset_classifier(0, "token")
    assert model(x).shape == (2, model.num_features) and model.num_classes == 0
    model.reset_classifier(5, "")
    assert model(x).shape == (2, 17, 5)
    with pytest.raises(UserError, match="global_pool"):
        model(x, dense=True)
    with pytest.raises(UserError, match="token, avg"):
        model.reset_classifier(5, "max")


def test_other_sizes_run_load_and_set_alike(name):
    source, x = build(name), make_images(2, 96, 48)
    at_run_time = source(x)
    target = build(name, img_size=(96, 48))
    assert target.token_grid() == (6, 3) == source.token_grid((96, 48))
    state, resized = adapt_state_dict(target, source.state_dict())
    target.load_state_dict(state)
    assert resized == ["pos_embed"]
    torch.testing.assert_close(target(x), at_run_time)
    source.set_input_size((96, 48))
    torch.testing.assert_close(source(x), at_run_time)
    assert source.img_size == (96, 48) and source.pos_embed.shape == target.pos_embed.shape
    assert adapt_state_dict(target, state)[1] == []
    empty = state["pos_embed"][:, :1] if name.startswith("lvvit") else state["pos_embed"][:, :0]
    assert adapt_state_dict(target, {"pos_embed": empty})[1] == []  # nothing to resize: its shape does not fit


def test_token_grids_that_are_not_square():
    model, square = build("lvvit_test", img_size=(96, 48)), build("lvvit_test", img_size=96)
    with pytest.raises(UserError, match="pos_embed.*18 tokens"):
        adapt_state_dict(square, model.state_dict())
    turned = build("lvvit_test", img_size=(48, 96))  # as many tokens, but not the same ones
    assert adapt_state_dict(turned, model.state_dict(), source_grid=(6, 3))[1] == ["pos_embed"]


def test_features_only():
    shape, lvvit = (80, 48), timm.create_model("lvvit_test", features_only=True, out_indices=(0, 1), img_size=64)
    assert [m.shape for m in lvvit(make_images(2, 64, 32))] == [(2, 64, 4, 2)] * 2
    assert not [key for key in lvvit.state_dict() if "blocks.2" in key]
    features = timm.create_model("volo_test", features_only=True, img_size=64).eval()
    maps = features(make_images(2, *shape))
    assert features.feature_info.reduction() == [8, 16] and features.feature_info.channels() == [32, 64]
    for m, reduction, channels in zip(maps, (8, 16), (32, 64), strict=True):
        assert m.shape == (2, channels, shape[0] // reduction, shape[1] // reduction)
    assert not [key for key in features.state_dict() if "head" in key or "post_network" in key]
    first = timm.create_model("volo_test", features_only=True, out_indices=(0,))
    assert not [key for key in first.state_dict() if "network.1" in key or "pos_embed" in key]
    assert first(make_images(1, 64))[0].shape == (1, 32, 8, 8)


def test_intermediates_equal_timms():
    like = {"layers": (1, 1, 1, 1), "embed_dims": (32, 64, 64, 64), "num_heads": (2, 4, 4, 4), "stem_hidden_dim": 16}
    theirs = TimmVOLO(**like, mlp_ratio=2.0, patch_size=8, img_size=64, num_classes=CLASSES)
    ours, theirs = fill(build("volo_test")), fill(theirs).eval()
    x = make_images(1, 64)
    for kwargs in ({}, {"indices": [0, 2], "norm": True}, {"indices": 1, "intermediates_only": True}):
        got, expected = ours.forward_intermediates(x, **kwargs), theirs.forward_intermediates(x, **kwargs)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    nhwc = ours.forward_intermediates(x, indices=[3], output_fmt="NHWC", intermediates_only=True)
    nchw = ours.forward_intermediates(x, indices=[3], intermediates_only=True)
    torch.testing.assert_close(nhwc[0].permute(0, 3, 1, 2), nchw[0])


def test_device_type_and_channels_of_the_factory(name):
    model = timm.create_model(name, device="meta", dtype=torch.bfloat16, num_classes=0, in_chans=5)
    images = torch.empty(2, 5, 64, 64, device="meta", dtype=torch.bfloat16)
    assert model(images).shape == (2, model.num_features)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_functional_transformations(name, monkeypatch):
    monkeypatch.setattr(fast_ops, "MKL_IS_SLOW", True)
    model = build(name).double()
    model.set_dense_head(False)  # whose maximum has corners
    x, tangent = make_images(2, 64).double(), make_images(2, 64, 64).double().flip(0)
    _, moved = torch.func.jvp(model, (x,), (tangent,))
    step = 1e-5 * tangent
    torch.testing.assert_close(moved, (model(x + step) - model(x - step)) / 2e-5, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(torch.vmap(lambda image: model(image[None])[0])(x), model(x))
    gradients = torch.vmap(torch.func.grad(lambda image: model(image[None]).square().sum()))(x)
    expected = x.clone().requires_grad_()
    model(expected).square().sum().backward()
    torch.testing.assert_close(gradients, expected.grad)


def test_intermediates_by_index(name):
    model, x = build(name), make_images(2, 64, 32)
    final, maps = model.forward_intermediates(x)
    torch.testing.assert_close(final, model.forward_features(x))
    assert len(maps) == len(model.feature_info)
    pairs = model.forward_intermediates(x, intermediates_only=True, return_prefix_tokens=True)
    assert {isinstance(pair, tuple) for pair in pairs} == {hasattr(model, "num_prefix_tokens")}  # as DPTs expect it
    early, some = model.forward_intermediates(x, indices=[0], stop_early=True)
    torch.testing.assert_close(some[0], maps[0])
    assert early.shape != final.shape or not torch.allclose(early, final)
    last = model.forward_intermediates(x, indices=[-1], norm=True, intermediates_only=True)[0]
    if name == "lvvit_test":
        torch.testing.assert_close(last.flatten(2).transpose(1, 2), final[:, 1:])
    with pytest.raises(AssertionError, match="9"):  # timm's
        model.forward_intermediates(x, indices=[9])


def rates_of(model, **kwargs):
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.05, **kwargs)
    names = {p: n for n, p in model.named_parameters()}
    groups = [(names[p], group) for group in optimizer.param_groups for p in group["params"]]
    return {n: group.get("lr_scale", 1.0) for n, group in groups}, {n: g["weight_decay"] for n, g in groups}


def test_layer_decay_follows_depth():
    scales, decay = rates_of(build("volo_test"), layer_decay=0.5)
    order = ["patch_embed.proj.weight", "network.0.0.attn.v.weight", "network.1.proj.weight"]
    order += [f"network.{stage}.0.mlp.fc1.weight" for stage in (2, 3, 4)]
    order += ["post_network.0.attn.q.weight", "post_network.1.attn.q.weight", "head.weight"]
    assert [scales[n] for n in order] == pytest.approx([0.5**depth for depth in range(len(order) - 1, -1, -1)])
    assert scales["aux_head.weight"] == 1.0 and scales["cls_token"] == scales["post_network.0.attn.q.weight"]
    assert scales["norm.weight"] == scales["post_network.1.attn.q.weight"]
    assert decay["pos_embed"] == decay["cls_token"] == decay["norm.weight"] == decay["head.bias"] == 0.0
    assert decay["head.weight"] == 0.05
    scales, _ = rates_of(build("lvvit_test"), layer_decay=0.5)
    order = ["patch_embed.conv1.weight", *[f"blocks.{i}.attn.qkv.weight" for i in range(3)], "head.weight"]
    assert [scales[n] for n in order] == pytest.approx([0.5**depth for depth in range(4, -1, -1)])
    assert scales["pos_embed"] == scales["cls_token"] == scales["patch_embed.conv1.weight"]
    assert scales["norm.weight"] == scales["blocks.2.attn.qkv.weight"]


@pytest.mark.parametrize("attention", [SelfAttention, ClassAttention])
def test_half_precision_products_do_not_overflow(attention):
    """|q_i| = |k_i| = 48 over 32 channels: the product is 73,728, above float16; scaled it is 13,033."""
    layer = attention(32, 1, qkv_bias=True)
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        for projection in ("q", "kv", "qkv"):
            if hasattr(layer, projection):
                getattr(layer, projection).bias.fill_(48.0)
        layer.proj.weight.copy_(torch.eye(32))
    out = layer.half()(torch.zeros(1, 5, 32, dtype=torch.half))
    torch.testing.assert_close(out, torch.full_like(out, 48.0))
