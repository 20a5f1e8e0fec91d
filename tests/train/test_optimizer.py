"""Optimizers by name, parameter groups, layer decay."""

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

from tests.train.small_run import arguments, optimizer_of
from tlt.errors import UserError
from volo.checkpoint.state import load_optimizer_state
from volo.train.optimizer import set_lr


class Small(nn.Module):
    """A weight, its bias, a norm, a position embedding and a part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pos_embed = nn.Parameter(torch.randn(1, 2, 3))
        self.body = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.unused = nn.Linear(3, 3).requires_grad_(False)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x + self.pos_embed))


def test_weight_decay_spares_vectors_and_what_the_model_names():
    model = Small()
    optimizer = optimizer_of(arguments(), model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    names = {name: decay.get(id(p)) for name, p in model.named_parameters()}
    spared, untrained = ["pos_embed", "body.bias", "norm.weight", "norm.bias"], ["unused.weight", "unused.bias"]
    assert names == {"body.weight": 0.05} | dict.fromkeys(spared, 0.0) | dict.fromkeys(untrained)


def test_layer_decay_is_timms_and_survives_set_lr():
    model = timm.create_model("vit_tiny_patch16_224", depth=3, img_size=32, num_classes=2)
    optimizer = optimizer_of(arguments("--layer-decay 0.5"), model)
    expected = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    scales = {id(p): group["lr_scale"] for group in expected for p in group["params"]}
    set_lr(optimizer, 0.02)
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(0.02 * scales[id(group["params"][0])])
    assert len({group["lr"] for group in optimizer.param_groups}) == 5
    set_lr(optimizer, 0.04)
    assert max(group["lr"] for group in optimizer.param_groups) == pytest.approx(0.04)


def test_fused_where_torch_has_it():
    for device in ("cuda", "cpu"):
        assert optimizer_of(arguments(), Small(), torch.device(device)).defaults["fused"] is True
    assert not optimizer_of(arguments(), Small(), torch.device("mps")).defaults["fused"]
    assert "fused" not in optimizer_of(arguments("--opt lamb"), Small()).defaults
    assert not optimizer_of(arguments("--opt sgd"), Small()).defaults["fused"]  # its skipped first step does harm


@pytest.mark.parametrize(
    ("line", "device", "message"),
    [
        ("--opt adamx", "cpu", "--opt adamx: timm has no such optimizer, did you mean adam"),
        ("--opt adahessian", "cpu", "second derivatives"),
        ("--opt bnbadamw8bit", "cuda", "needs bitsandbytes, which is not installed (pip install bitsandbytes)"),
        ("--momentum 0.5", "cpu", "--momentum 0.5 has no effect: --opt adamw has no momentum"),
        ("--opt sgd --opt-eps 1e-6", "cpu", "--opt-eps 1e-06 has no effect"),
        ("--opt-betas 0.9", "cpu", "--opt adamw takes 2 betas, 1 are given"),
        ("--opt-betas 0.9 1.5", "cpu", "--opt adamw can't be made (ValueError: Invalid beta"),
    ],
)
def test_refused_in_one_line(line, device, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        optimizer_of(arguments(line), Small(), torch.device(device))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_moments_of_another_memory_format():
    torch.manual_seed(0)
    start, gradients = torch.randn(4, 3, 5, 5), [torch.randn(4, 3, 5, 5) for _ in range(2)]
    ends = []
    for layouts in (("contiguous_format",) * 2, ("contiguous_format", "channels_last")):
        saved = None
        weight = start
        for gradient, layout in zip(gradients, layouts, strict=True):
            model = nn.Conv2d(3, 4, 5, bias=False).to(memory_format=getattr(torch, layout))
            model.weight.data.copy_(weight)
            optimizer = optimizer_of(arguments("--lr 0.1"), model)
            if saved is not None:
                load_optimizer_state(optimizer, saved)
            model.weight.grad = torch.empty_like(model.weight).copy_(gradient)
            optimizer.step()
            weight, saved = model.weight.detach(), optimizer.state_dict()
        ends.append(weight)
    torch.testing.assert_close(ends[1], ends[0])
