"""A dense head and MixToken on timm's models, against the same models as timm runs them."""

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import convert_sync_batchnorm, freeze_batch_norm_2d
from torch import nn
from torch.utils._pytree import tree_flatten

import volo  # noqa: F401
from tlt.distill import with_projector
from tlt.errors import UserError
from tlt.labels.annotate import Annotator, check_dense
from tlt.models.fit_weights import is_dense_head
from tlt.models.token_labeling import TokenLabelModel
from tlt.models.wrap import WithDenseHead, with_dense_head
from tlt.teacher import FeatureTeacher

SWIN = {"window_size": 2, "embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
# name -> constructor arguments, cells of the embedding to one token
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "test_vit": ({"img_size": (64, 96)}, 1),  # class token, embedding channels last
    "test_vit3": ({"img_size": (64, 96)}, 1),  # attention pooling, patches in a row
    "test_vit4": ({"img_size": (64, 96)}, 1),  # registers, RMS norm behind the average
    "deit_tiny_distilled_patch16_224": ({"img_size": (64, 96), "embed_dim": 32, "depth": 1, "num_heads": 2}, 1),
    "vit_tiny_patch16_224": ({"img_size": (64, 96), "class_token": False, "global_pool": "avg", "depth": 1}, 1),
    "swin_tiny_patch4_window7_224": ({"img_size": (64, 96), **SWIN}, 8),
    "test_convnext": ({}, 8),
    "test_resnet": ({}, 8),
    "test_efficientnet": ({}, 16),
}
SIZE, CLASSES = (64, 96), 5


def plain(name: str) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=CLASSES, **MODELS[name][0]).eval()


def images(count: int = 4, size: tuple[int, int] = SIZE) -> torch.Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


def flat_features(name: str, model: Any) -> torch.Tensor:
    """(B, N, C) by what is known of each model."""
    features = model.forward_features(images())
    if features.ndim == 3:
        return features[:, model.num_prefix_tokens :]
    return features.flatten(1, 2) if "swin" in name else features.flatten(2).mT


@pytest.mark.parametrize("name", MODELS)
def test_model_stays_timms_and_the_dense_head_sees_each_place(name):
    model, reference = with_dense_head(plain(name), SIZE), plain(name)
    assert isinstance(model, WithDenseHead) and isinstance(model, type(reference)) and not model.training
    assert [n for n in model.state_dict() if not is_dense_head(n)] == list(reference.state_dict())
    assert not hasattr(model, "no_weight_decay") or model.no_weight_decay() == reference.no_weight_decay()
    with torch.no_grad():
        assert torch.equal(model(images()), reference(images()))
        cls, tokens = model(images(), dense=True)
        expected = model.aux_head(model.aux_norm(flat_features(name, reference)))
        torch.testing.assert_close((cls, tokens), (reference(images()), expected), rtol=1e-5, atol=1e-6)
    rows, cols = model.token_grid(SIZE)
    assert tokens.shape == (4, rows * cols, CLASSES) and rows < cols
    assert Annotator(model, 1)(images()).ids.shape == (4, 1, rows, cols)


def spatial_mask(box: tuple[int, int, int, int], grid: tuple[int, int], scale: int = 1, shift: int = 0) -> torch.Tensor:
    inside = torch.zeros(grid, dtype=torch.bool)
    inside[box[0] : box[2], box[1] : box[3]] = True
    rows, cols = (((torch.arange(side * scale) + shift) // scale).clamp(max=side - 1) for side in grid)
    return inside[rows][:, cols]


@pytest.mark.parametrize("name", MODELS)
def test_images_mix_behind_the_embedding_and_tokens_return(name):
    """The reference is timm's model, whose embedding's output is overwritten by hand."""
    model, scale = with_dense_head(plain(name), SIZE), MODELS[name][1]
    grid, reference = model.token_grid(SIZE), plain(name)
    box = (0, 1, grid[0] - 1, grid[1] - 1)
    layer = next(n for n in ("patch_embed", "stem", "maxpool", "bn1") if hasattr(reference, n))

    def overwrite(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        # Padding moves the tokens of an EfficientNet up and left by half of one.
        mask = spatial_mask(box, grid, scale, 8 if name == "test_efficientnet" else 0)
        if output.ndim == 3:
            mask = mask.reshape(-1)[:, None]
        else:
            mask = mask[None] if output.shape[2:] == mask.shape else mask[:, :, None]
        return torch.stack([torch.where(mask, output[3 - i], output[i]) for i in range(4)])

    getattr(reference, layer).register_forward_hook(overwrite)
    with torch.no_grad():
        cls, tokens = model(images(), dense=True, mix_box=torch.tensor(box))
        expected = reference(images())
        torch.testing.assert_close(cls, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model(images(), mix_box=box), expected, rtol=1e-5, atol=1e-6)
        mixed = model.aux_head(model.aux_norm(flat_features(name, reference)))
        inside = spatial_mask(box, grid).reshape(-1)
        torch.testing.assert_close(tokens[0, inside], mixed[3, inside], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tokens[0, ~inside], mixed[0, ~inside], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(expected, plain(name)(images()), atol=1e-5)
        assert torch.equal(model(images()), plain(name)(images()))  # nothing of the box is left


class Inside(nn.Module):
    """As LoRA and quantizers do, stands in a layer's place and calls it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


REPLACEMENTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "SyncBatchNorm": convert_sync_batchnorm,
    "frozen BatchNorm": freeze_batch_norm_2d,
    "within": Inside,
    "compiled": lambda layer: torch.compile(layer, backend="eager"),
}


@pytest.mark.parametrize(
    ("name", "point"), [("test_efficientnet", "bn1"), ("test_convnext", "stem"), ("test_resnet", "maxpool")]
)
@pytest.mark.parametrize("replaced", REPLACEMENTS)
def test_mixing_goes_on_when_other_programs_replace_layers(name, point, replaced):
    """In training, where SyncBatchNorm without other ranks equals BatchNorm to the bit."""
    model = with_dense_head(plain(name), SIZE).train(replaced != "frozen BatchNorm")
    twin = copy.deepcopy(model)
    setattr(twin, point, REPLACEMENTS[replaced](getattr(twin, point)))
    results = []
    for each in (model, twin, pickle.loads(pickle.dumps(twin)) if replaced == "SyncBatchNorm" else twin):
        outputs = each(images(), dense=True, mix_box=(0, 1, 1, 2))
        each.zero_grad()
        sum(output.square().sum() for output in outputs).backward()
        results.append([*outputs, next(each.parameters()).grad])
    tolerance = 1e-5 if "frozen" in replaced else 0.0
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=tolerance, atol=tolerance)


def test_an_unmixed_pass_is_an_error_and_leaves_no_box_behind():
    model = with_dense_head(plain("test_efficientnet"), SIZE)
    model.bn1.compile(backend="eager")  # its hooks are in the compiled part
    before = model(images())
    with pytest.raises(UserError, match="test_efficientnet did not mix images: the hook of its bn1 was not"):
        model(images(), dense=True, mix_box=(0, 0, 1, 1))
    assert not model.mix_point.calls and torch.equal(model(images()), before)


def test_a_failing_forward_pass_leaves_no_box_behind():
    model = with_dense_head(plain("test_vit"), SIZE)
    before = model(images())
    with pytest.raises(UserError, match="does not take images of 60 x 90 px"):
        model(images(size=(60, 90)), mix_box=(0, 0, 4, 3))
    with pytest.raises(RuntimeError):
        model(images().double(), mix_box=(0, 0, 4, 3))
    assert torch.equal(model(images()), before)


@pytest.mark.parametrize(
    ("name", "size", "settings", "reason"),
    [
        ("levit_128s", None, {}, "16 tokens, it doesn't say which patch each shows"),
        ("crossvit_9_240", None, {}, "they are list, neither a map nor tokens"),
        ("test_vit", (63, 64), {}, "does not take images of 63 x 64 px"),
        ("mvitv2_tiny", (256, 256), {}, "does not take images of 256 x 256 px"),
        ("test_vit", None, {"patch_drop_rate": 0.5}, "patch_drop_rate"),
        ("test_vit", None, {"num_classes": 0}, "it has no classes"),
        ("test_vit", None, {}, "it is on the meta device"),
        ("test_resnet", SIZE, {}, "it is on the meta device"),
    ],
)
def test_models_that_can_t_have_a_dense_head_say_why(name, size, settings, reason):
    with torch.device("meta" if "meta" in reason else "cpu"):
        model = timm.create_model(name, **settings)
    with pytest.raises(UserError, match=f"--model {name} .*{reason}"):
        with_dense_head(model, size)


def test_the_default_device_of_torch_is_not_that_of_the_model():
    model, batch = plain("test_vit4"), images()
    with torch.device("meta"):
        check_dense(model, batch)
        with_dense_head(model, SIZE).check_mix_token()
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}


def test_models_that_can_t_be_mixed_train_without():
    model, size = with_dense_head(timm.create_model("densenet121", num_classes=CLASSES), (64, 64)), (64, 64)
    for attempt in (model.check_mix_token, lambda: model(images(2, size), mix_box=(0, 0, 1, 1))):
        with pytest.raises(UserError, match="densenet121 .*none of its layers is one that MixToken.*--no-mix-token"):
            attempt()
    cls, tokens = model(images(2, size), dense=True)
    assert tokens.shape[1] == model.token_grid(size)[0] * model.token_grid(size)[1]


def test_first_convolution_with_extra_channels_is_found():
    model = timm.create_model("tresnet_m", num_classes=CLASSES, layers=(1, 1, 1, 1), width_factor=0.25)
    cls, tokens = with_dense_head(model, SIZE).eval()(images(), dense=True)
    assert (cls.shape, tokens.shape) == ((4, CLASSES), (4, 6, CLASSES))
    with pytest.raises(UserError, match="does not take images of 60 x 90 px|none of its layers tells"):
        model.token_positions((60, 90))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_as_many_channels_as_rows_are_not_taken_for_rows(layout):
    """pvt_v2's embedding is channels last and doesn't say so; test_convnext's is not."""
    name, size = ("test_convnext", (96, 96)) if layout == "NCHW" else ("pvt_v2_b0", (128, 128))
    model = with_dense_head(timm.create_model(name, num_classes=CLASSES), size)
    with torch.no_grad():
        shape = (model.stem if layout == "NCHW" else model.patch_embed)(images(1, size)).shape
    assert len(set(shape[1:])) == 1 and model.mix_point.layout == layout


def test_an_image_that_gets_past_the_embedding_is_found_out():
    class Leaking(type(timm.create_model("test_resnet"))):  # type: ignore[misc]
        def forward_features(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward_features(x) + x.mean((1, 2, 3))[:, None, None, None]

    model = timm.create_model("test_resnet", num_classes=CLASSES)
    model.__class__ = Leaking
    with pytest.raises(UserError, match="past its maxpool"):
        with_dense_head(model, SIZE).check_mix_token()
    assert not model.maxpool._forward_hooks


def test_switching_the_head_off_and_on_and_other_classes():
    model = with_dense_head(plain("test_vit4"), SIZE)
    model.set_dense_head(False)
    assert not any(p.requires_grad for n, p in model.named_parameters() if is_dense_head(n))
    with pytest.raises(UserError, match="switched off"):
        model(images(), dense=True)
    model.reset_classifier(7)  # which leaves it off
    assert model.aux_head.out_features == 7
    assert not any(p.requires_grad for n, p in model.named_parameters() if is_dense_head(n))
    model.set_dense_head(True)
    model.reset_classifier(9)
    cls, tokens = model(images(), dense=True)
    assert cls.shape == (4, 9) and tokens.shape == (4, 24, 9)
    assert all(p.requires_grad for p in model.parameters())
    check_dense(model, images())


TEACHER = FeatureTeacher(timm.create_model("test_resnet"), SIZE)
MAKE: dict[str, Callable[[Any], Any]] = {
    "dense": lambda model: with_dense_head(model, SIZE),
    "student": lambda model: with_projector(model, TEACHER, SIZE),
    "dense student": lambda model: with_projector(with_dense_head(model, SIZE), TEACHER, SIZE),
    "student, then dense": lambda model: with_dense_head(with_projector(model, TEACHER, SIZE), SIZE),
}


def saved(model: nn.Module) -> Any:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def results(made: str, model: Any, x: torch.Tensor, box: Any = None) -> list[torch.Tensor]:
    options = {"taught": True} if "student" in made else {}
    if "dense" in made or isinstance(model, TokenLabelModel):
        options |= {"dense": True, "mix_box": box}
    flat, _ = tree_flatten(model(x, **options))
    return [output.detach() for output in flat]


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "volo_test"])
@pytest.mark.parametrize("made", MAKE)
def test_what_was_made_is_a_whole_model(name, made):
    settings = {} if name == "test_resnet" else {"img_size": SIZE}
    model = MAKE[made](timm.create_model(name, num_classes=CLASSES, **settings)).eval()
    model.forward_features(images())  # leaves nothing behind that a copy can't have
    expected = results(made, model, images(), (0, 0, 1, 2))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved(model)):
        assert type(twin) is type(model) and list(twin.state_dict()) == list(model.state_dict())
        for ours, theirs in zip(results(made, twin, images(), (0, 0, 1, 2)), expected, strict=True):
            assert torch.equal(ours, theirs)
    names = list(model.state_dict())
    assert MAKE[made](MAKE[made](model)) is model and list(model.state_dict()) == names
    for classes in (0, 7):
        model.reset_classifier(classes)
    assert model(images()).shape == (4, 7) and (model.num_classes, model.get_classifier().out_features) == (7, 7)
    assert all(output.shape[-1] == 7 for output in results(made, model, images())[: 1 + ("dense" in made)])


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "volo_test"])
def test_threads_that_share_a_model_get_their_own_results(name):
    settings = {} if name == "test_resnet" else {"img_size": SIZE}
    model = MAKE["dense student"](timm.create_model(name, num_classes=CLASSES, **settings)).eval()
    batches = [images() * (1 + number) for number in range(8)]
    boxes = [(0, 0, number % 2, 1 + number % 3) if number % 3 else None for number in range(8)]
    expected = [results("dense student", model, *pair) for pair in zip(batches, boxes, strict=True)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            outputs = pool.map(partial(results, "dense student", model), batches, boxes)
            torch.testing.assert_close(list(outputs), expected)


@pytest.mark.parametrize("make", [*MAKE.values(), lambda model: FeatureTeacher(model, SIZE).tokens])
def test_a_model_that_is_not_timm_s_is_told_so(make):
    with pytest.raises(UserError, match="^Sequential is no model of timm: it has no "):
        make(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()))
