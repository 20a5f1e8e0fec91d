"""What the API does to models: wrappers are seen through or refused, and what raises leaves a model as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tlt
import volo  # noqa: F401
from tests.data.conftest import refuses
from volo.train.precision import check_convolutions

SIZE = (64, 64)
TEACHER = tlt.FeatureTeacher(timm.create_model("test_resnet"), SIZE)


def made(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=4, **({} if "resnet" in name else {"img_size": SIZE}), **settings)


def images(channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, *SIZE, generator=torch.Generator().manual_seed(1))


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "DDP": DistributedDataParallel,
    "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "ModelEmaV2": ModelEmaV2,
    "ModelEmaV3": ModelEmaV3,
    "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "compiled FSDP1": lambda model: torch.compile(WRAPPERS["FSDP1"](model), backend="eager"),
    "FSDP2": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
}


@pytest.mark.parametrize("name", ["volo_test", "test_resnet"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_are_seen_through_or_refused_in_a_line(process_group, wrapper, name):
    model = tlt.with_dense_head(made(name), SIZE)
    wrapped, divided = WRAPPERS[wrapper](copy.deepcopy(model)), "FSDP" in wrapper
    assert tlt.with_dense_head(wrapped, SIZE) is wrapped
    assert tlt.TokenLabelLoss.of(wrapped, SIZE) == tlt.TokenLabelLoss.of(model, SIZE)
    for refused in (
        lambda: tlt.with_dense_head(WRAPPERS[wrapper](made("test_vit")), SIZE),
        lambda: tlt.with_projector(wrapped, TEACHER, SIZE),
        lambda: tlt.TokenLabelLoss.of(wrapped, SIZE, dense_weight=0.0),
        *((lambda: tlt.FeatureTeacher(wrapped, SIZE), lambda: tlt.DistillLoss.of(wrapped, SIZE, TEACHER)) * divided),
    ):
        with refuses("wraps or divides the model already: do this before"):
            refused()
    if not divided:
        student = tlt.with_projector(model, TEACHER, SIZE)
        losses = [tlt.DistillLoss.of(each, SIZE, TEACHER) for each in (student, WRAPPERS[wrapper](student))]
        assert (losses[0].grid, losses[0].window) == (losses[1].grid, losses[1].window)
        teachers = [tlt.FeatureTeacher(each, SIZE) for each in (wrapped, made(name))]
        assert torch.equal(*(teacher(images(), "feature") for teacher in teachers))


def test_without_a_dense_loss_the_dense_head_adds_nothing():
    for name in ("volo_test", "lvvit_test"):
        model = made(name).eval()
        tlt.TokenLabelLoss.of(model, SIZE)
        assert not torch.equal(model(images()), model(images(), dense=True)[0])
        tlt.TokenLabelLoss.of(model, SIZE, dense_weight=0.0)
        outputs = model(images(), dense=True)
        assert torch.equal(model(images()), outputs[0]) and torch.equal(model.both_heads(*outputs), outputs[0])
        model.reset_classifier(5)  # which leaves it untrained
        assert torch.equal(model(images()), model(images(), dense=True)[0]) and not model.aux_head.weight.requires_grad


@pytest.mark.parametrize("kind", ["token", "feature", "logit"])
@pytest.mark.parametrize("settings", [{"in_chans": 1}, {"dtype": torch.float16}, {"dtype": torch.bfloat16}])
def test_a_teacher_may_be_grey_or_of_half_precision(settings, kind):
    for name in ("test_resnet", "volo_test"):
        whole = made(name, **{key: value for key, value in settings.items() if key != "dtype"}).eval()
        channels = settings.get("in_chans", 3)
        check_convolutions(whole, (channels, *SIZE), settings.get("dtype"), torch.device("cpu"))
        model = copy.deepcopy(whole).to(settings.get("dtype"))
        teacher, expected = tlt.FeatureTeacher(model, SIZE), tlt.FeatureTeacher(whole, SIZE)
        outputs = teacher(images(channels), kind)
        assert outputs.dtype == torch.float32
        torch.testing.assert_close(outputs, expected(images(channels), kind), rtol=0.1, atol=0.1 * float(outputs.std()))
        if channels == 1:  # each mean is that of three
            mean, std = (sum(row) / 3 for row in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
            own_mean, own_std = (sum(model.pretrained_cfg[key]) / 3 for key in ("mean", "std"))
            seen = (images(1) * std + mean - own_mean) / own_std
            torch.testing.assert_close(teacher(images(1), "logit"), whole(seen), rtol=1e-4, atol=1e-5)
        with refuses(f"takes images of {channels} channels, not 4"):
            teacher(images(4), kind)


@pytest.mark.parametrize("kind", ["token", "feature", "logit"])
def test_student_forgets_earlier_teachers_and_learns_throughout(kind):
    other, model = tlt.FeatureTeacher(made("test_vit2"), SIZE), made("test_resnet")
    for teacher in ([TEACHER, other], other, [TEACHER], [other, TEACHER, other]):
        tlt.with_projector(model, teacher, SIZE, kind)
        count = len(teacher) if isinstance(teacher, list) else 1
        names = {name.partition(".")[0] for name in model.state_dict() if name.startswith("kd_")}
        assert len(names) == (0 if kind == "logit" else count * (1 + (count > 1)))
        outputs, features = model(images(), taught=True)
        model.zero_grad()
        (outputs.sum() + sum(each.sum() for each in (features if isinstance(teacher, list) else [features]))).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


VOLO, DENSE, PLAIN = made("volo_test"), tlt.with_dense_head(made("test_resnet"), SIZE), made("test_vit")
SMALL = tlt.FeatureTeacher(made("test_vit"), (60, 60))
LEAVES: list[tuple[Any, Callable[[Any], Any], str]] = [
    (VOLO, lambda m: m.set_input_size(8), "image size 8x8 is too small"),
    (VOLO, lambda m: m.set_input_size(0), "img_size 0"),
    (VOLO, lambda m: m.set_input_size((64, 64, 3)), "img_size .*: give 1 or 2 numbers"),
    (VOLO, lambda m: m.reset_classifier(-1), "num_classes -1"),
    (VOLO, lambda m: m.reset_classifier(7, "max"), "global_pool"),
    (VOLO, lambda m: m.set_drop_path_mode("subsets"), "drop_path_mode subsets: choose from mask, subset"),
    (VOLO, lambda m: tlt.TokenLabelLoss.of(m, (8, 8), dense_weight=0.0), "image size 8x8 is too small"),
    (DENSE, lambda m: tlt.TokenLabelLoss.of(m, SIZE, dense_weight=0.0, gt_weight_agree=50), "gt_weight_agree 50"),
    (PLAIN, lambda m: tlt.FeatureTeacher(m, SIZE, mean=(124, 116, 104)), "--mean"),
    (PLAIN, lambda m: tlt.with_dense_head(m, (60, 60)), "does not take images of 60 x 60 px"),
    *(
        (PLAIN, lambda m, each=each: tlt.with_projector(m, *each), "does not take images of 60 x 60 px")
        for kind in ("token", "feature", "logit")
        for each in ((TEACHER, (60, 60), kind), (SMALL, SIZE, kind))
    ),
    (PLAIN, lambda m: tlt.with_projector(m, TEACHER, 64, "feature"), "img_size 64: give 2 numbers"),
]


def described(model: nn.Module) -> Any:
    parts = [(name, type(module), module.training) for name, module in model.named_modules()]
    weights = [(name, p.requires_grad, p.shape) for name, p in model.named_parameters()]
    return parts, weights, {key: value for key, value in vars(model).items() if isinstance(value, int | str | tuple)}


def test_what_raises_leaves_the_model_as_it_was():
    for model, change, message in LEAVES:
        before = described(model.train()), model.eval()(images())
        model.train()
        with refuses(message):
            change(model)
        assert described(model) == before[0], message
        assert torch.equal(model.eval()(images()), before[1]), message


def test_student_without_dense_head_refuses_token_teachers():
    student = tlt.with_projector(made("test_vit"), TEACHER, SIZE)
    for options in ({"mix_box": (0, 0, 1, 1)}, {"dense": True}):
        for taught in (False, True):
            with refuses(r"dense=True and mix_box need the dense head: call tlt.with_dense_head"):
                student(images(), taught=taught, **options)
    with refuses("attn_mask: not together with taught=True"):
        student(images(), taught=True, attn_mask=None)
    assert torch.equal(student.eval()(images(), attn_mask=None), student(images()))
    with refuses("kind logits: choose from token, feature, logit"):
        TEACHER(images(), "logits")
