"""The guarded step: what it clips, what it skips, when it gives up; bfloat16 beside float32 master weights; wrong
convolutions on a CPU."""

import copy
import math
import pickle
from collections.abc import Iterator

import pytest
import timm
import torch
from timm.layers import EvoNorm2dB0
from timm.utils import ModelEmaV3
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.commands.conftest import QUICK, Make, few_pictures  # noqa: F401  (for all tests here)
from tests.processor.wrong_bfloat16 import wrong_convolutions
from tests.train.small_run import arguments, optimizer_of
from tlt.errors import NonFiniteError
from volo import cli
from volo.train.model import heads_of
from volo.train.precision import Clipping, Precision, WorkingCopy, check_convolutions, compute_dtype

CPU = torch.device("cpu")


def _linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


class _Blind(torch.optim.Optimizer):
    """Says that it skips steps on the device, but does not look at `found_inf` (apex's FusedAdam with capturable)."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            weight -= 0.1 * weight.grad


def step(precision: Precision, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> Tensor:
    """A step as the loop does it; returns the norm."""
    norm, outcome = precision.step(optimizer, parameters)
    precision.skipped.note(outcome)
    return norm


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Memory that is allocated but not written holds NaN, not what happened to be there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "loss-scale"])
@pytest.mark.parametrize(
    ("opt", "settings", "fused", "device"),
    [
        *(
            pytest.param(*row, device, marks=[pytest.mark.gpu] if device == "cuda" else [])
            for device in ("cpu", "cuda")
            for row in (
                *((opt, [], []) for opt in ("adam", "adamw", "sgd", "lookahead_adamw", "blind")),
                ("adamw", ["amsgrad=True"], []),
                ("momentum", [], ["fused=True"]),
            )
        ),
        ("adagrad", [], ["fused=True"], "cpu"),  # before 2.12 torch has it for CPUs alone
    ],
)
def test_fault_53_skipped_first_step_leaves_nothing_behind(opt, settings, fused, scaled, device):
    def train(kind: str, options: list[str], gradients: list[torch.Tensor]) -> tuple[torch.Tensor, Precision]:
        model = nn.Linear(3, 5, bias=False)
        model.weight = nn.Parameter(start.to(device, copy=True))
        if opt == "blind":
            optimizer: torch.optim.Optimizer = _Blind(model.parameters(), {})
        else:
            args = arguments(f"--opt {opt} --lr 0.1 --opt-kwargs {' '.join(options)}")
            optimizer = optimizer_of(args, model, torch.device(kind))
        precision = Precision(torch.device(device))
        precision.scaler = torch.amp.GradScaler(device, init_scale=4.0) if scaled else None
        for gradient in gradients:
            precision.backward((model.weight * gradient.to(device)).sum())
            step(precision, optimizer, list(model.parameters()))
        return model.weight.detach(), precision

    start, *good = torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(0))
    broken = torch.full_like(start, float("inf"))
    expected, _ = train("mps", settings, good)  # torch has no fused kernels for it
    found, precision = train(device, settings + fused, [broken, *good])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert precision.skipped.counts() == [0, 1]
    assert precision.scaler is None or precision.scaler.get_scale() == 2.0


@pytest.mark.parametrize(
    ("mode", "clip"),
    [("norm", nn.utils.clip_grad_norm_), ("value", nn.utils.clip_grad_value_), ("agc", adaptive_clip_grad)],
)
def test_clipping_is_torchs_and_timms(mode, clip):
    (model, optimizer), (reference, _) = _linear(), _linear()
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    precision = Precision(CPU, clip=Clipping(0.01, mode))
    precision.backward((model(torch.full((4, 3), 5.0)) ** 2).sum())
    norm = step(precision, optimizer, list(model.parameters()))
    (reference(torch.full((4, 3), 5.0)) ** 2).sum().backward()
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in reference.parameters()]))
    clip(reference.parameters(), 0.01)
    torch.testing.assert_close(seen, [p.grad for p in reference.parameters()])


def test_adaptive_clipping_leaves_the_heads_alone():
    model = timm.create_model("lvvit_test", img_size=32, num_classes=4)
    parameters = list(model.parameters())
    precision = Precision(CPU, clip=Clipping(1e-6, "agc", heads_of(model)))
    cls, tokens = model(torch.ones(2, 3, 32, 32), dense=True)
    precision.backward(cls.square().sum() + tokens.square().sum())
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    changed: set[str] = set()
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    optimizer.register_step_pre_hook(
        lambda *_: changed.update(n for n, p in model.named_parameters() if not torch.equal(p.grad, before[n]))
    )
    step(precision, optimizer, parameters)
    assert "blocks.0.mlp.fc1.weight" in changed
    assert not [name for name in changed if "head" in name]


@pytest.mark.parametrize(
    ("flags", "device", "dtype"),
    [
        ("", "cuda", None),
        ("--amp", "cpu", torch.bfloat16),
        ("--amp", "cuda", torch.float16),
        ("--amp --amp-dtype bfloat16", "cuda", torch.bfloat16),
        ("--model-dtype bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_fault_59_amp_on_a_cpu_is_bfloat16(flags, device, dtype):
    assert compute_dtype(arguments(flags).precision.mixed, torch.device(device)) is dtype
    with Precision(CPU, dtype).autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is (dtype or torch.float32)


def test_skipped_steps_in_a_row_end_the_run_across_a_resume():
    model, optimizer = _linear()
    precision = Precision(CPU, max_nonfinite=2)
    precision.skipped.restore_counts(1, 5)
    for scale, counts in ((float("nan"), [2, 6]), (1.0, [0, 6]), (float("nan"), [1, 7]), (float("nan"), [2, 8])):
        precision.backward(model(torch.ones(1, 3)).sum() * scale)
        step(precision, optimizer, list(model.parameters()))
        assert precision.skipped.counts() == counts and precision.skipped.check() == counts[1]
    precision.backward(model(torch.ones(1, 3)).sum() * float("inf"))
    step(precision, optimizer, list(model.parameters()))
    with pytest.raises(NonFiniteError, match="3 steps in a row") as caught:
        precision.skipped.check()
    assert caught.value.exit_code == 3


def build(name: str = "volo_test", size: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=4, **({"img_size": size} if name == "volo_test" else {}))


def images(number: int, count: int = 4) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(number))


def backward(precision: Precision, called: nn.Module, x: Tensor, share: float = 1.0) -> None:
    with precision.autocast():
        loss = called(x).float().logsumexp(-1).mean()
    precision.backward(loss * share)


@pytest.mark.parametrize("name", ["volo_test", "test_resnet"])
def test_norms_are_shared_and_the_rest_is_bfloat16(name):
    def of_norms(model: nn.Module) -> set[int]:
        norms = [module for module in model.modules() if isinstance(module, (nn.LayerNorm, _BatchNorm))]
        return {id(tensor) for norm in norms for tensor in norm.state_dict(keep_vars=True).values()}

    master = build(name)
    working = WorkingCopy(master).module
    shared = of_norms(master)
    assert of_norms(working) == shared
    for (name, own), (same, cast) in zip(master.named_parameters(), working.named_parameters(), strict=True):
        assert own.dtype is torch.float32 and name == same
        assert id(cast) in shared or torch.equal(cast, own.bfloat16()), name
    assert any(id(cast) not in shared for cast in working.parameters())


@pytest.mark.parametrize("name", ["volo_test", "test_resnet"])
def test_gradients_are_those_of_float32_up_to_rounding(name):
    master, reference = build(name), build(name).double()
    check_convolutions(master, (3, 32, 32), torch.bfloat16, CPU)
    working = WorkingCopy(master)
    backward(Precision(CPU, torch.bfloat16), working.module.eval(), images(0))
    backward(Precision(CPU), reference.eval(), images(0).double())
    working.accumulate_into_master()
    assert all(cast.grad is None for own, cast in working._pairs)
    mine, theirs = (nn.utils.parameters_to_vector([p.grad for p in m.parameters()]) for m in (master, reference))
    assert mine.dtype is torch.float32
    assert torch.nn.functional.cosine_similarity(mine.double(), theirs, dim=0) > 0.99


def test_steps_too_small_for_bfloat16_add_up():
    master = nn.Linear(1, 1, bias=False)
    nn.init.ones_(master.weight)
    working = WorkingCopy(master)
    precision = Precision(CPU, torch.bfloat16, working_copy=working)
    optimizer = torch.optim.SGD(master.parameters(), lr=2**-12)
    for _ in range(64):
        with precision.autocast():
            precision.backward(working.module(torch.ones(1, 1)).sum())
        step(precision, optimizer, list(master.parameters()))
    assert master.weight.item() == 1 - 2**-6 == working.module.weight.item()


def test_sixteen_micro_batches_add_up_in_float32():
    master = build()
    check_convolutions(master, (3, 32, 32), torch.bfloat16, CPU)
    working = WorkingCopy(master)
    working.module.eval()
    exact, precision = torch.zeros(()), Precision(CPU, torch.bfloat16, working_copy=working)
    for part in images(0, 32).chunk(16):
        with precision.autocast():
            loss = working.module(part).float().logsumexp(-1).mean()
        loss.backward()
        exact = exact + nn.utils.parameters_to_vector([p.grad.double() for p in working.module.parameters()])
        working.module.zero_grad()
    for part in images(0, 32).chunk(16):
        backward(precision, working.module, part)
    found = nn.utils.parameters_to_vector([p.grad for p in master.parameters()])
    assert (found - exact).norm() < 1e-6 * exact.norm()  # added in bfloat16: 4e-3


def test_step_that_is_not_finite_changes_nothing():
    master = build()
    working = WorkingCopy(master)
    precision = Precision(CPU, torch.bfloat16, working_copy=working)
    optimizer = torch.optim.AdamW(master.parameters(), lr=0.1, fused=True)
    nn.init.normal_(master.head.weight)  # as a checkpoint that is loaded later
    precision.begin()
    assert torch.equal(working.module.head.weight, master.head.weight.bfloat16())
    before = [p.clone() for p in (*master.parameters(), *working.module.parameters())]
    backward(precision, working.module.train(), images(0) * float("inf"))
    backward(precision, working.module, images(1))  # a micro-batch whose own loss is finite
    step(precision, optimizer, list(master.parameters()))
    after = [*master.parameters(), *working.module.parameters()]
    assert precision.skipped.counts() == [1, 1] and precision.skipped.pop() == {-1: True}
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("scale", [math.nan, 1e38, 1e20])  # gradients of the last are finite, its variance is not
@pytest.mark.parametrize("name", ["volo_test", "test_resnet", "others"])
def test_fault_53_broken_batch_spares_running_statistics(name, scale):
    others = [EvoNorm2dB0(3, apply_act=False), nn.InstanceNorm2d(3, track_running_stats=True), nn.Flatten()]
    model = nn.Sequential(*others, nn.Linear(3 * 32 * 32, 4)) if name == "others" else build(name)
    average, precision = ModelEmaV3(model.train()), Precision(CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    precision.begin(model)
    gathered = []
    for update in range(3):
        for number in (2 * update, 2 * update + 1):  # micro-batches, of which one may be broken
            backward(precision, model, images(number) * (scale if number == 2 else 1.0), 0.5)
        step(precision, optimizer, list(model.parameters()))
        average.update(model)
        gathered.append([buffer.clone() for buffer in model.buffers()])
    assert precision.skipped.counts() == [0, int(scale != 1e20)]
    assert len(gathered[0]) and all(map(torch.equal, gathered[0], gathered[1]))
    assert not all(map(torch.equal, gathered[1], gathered[2]))
    assert all(torch.isfinite(value).all() for value in [*model.state_dict().values(), *average.buffers()])


@pytest.mark.parametrize("model", [nn.Linear(4, 2), nn.BatchNorm1d(4)])  # without running statistics, and with
def test_skipped_step_keeps_the_statistics_of_its_begin(model):
    precision, optimizer = Precision(CPU), torch.optim.SGD(model.parameters())
    precision.begin(model)
    for buffer in model.buffers():
        buffer.fill_(3)  # the mean over the ranks, between two epochs
    precision.begin(model)
    precision.backward(model(torch.full((2, 4), math.inf)).sum())
    step(precision, optimizer, list(model.parameters()))
    assert precision.skipped.counts() == [1, 1] and all(buffer.eq(3).all() for buffer in model.buffers())


@pytest.mark.parametrize(
    ("name", "window", "factor"),
    [("volo_test", 7, -1.0), ("volo_test", 4, math.nan), ("test_resnet", 3, 0.5), ("test_resnet", 3, math.nan)],
)
def test_a_wrong_convolution_is_named_and_computed_in_float32(name, window, factor):
    model = build(name)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with wrong_convolutions(window, factor):
        (line,) = check_convolutions(model, (3, 32, 32), torch.bfloat16, CPU)
        assert torch.equal(torch.get_rng_state(), state) and model.training
        assert not check_convolutions(model, (3, 32, 32), torch.bfloat16, CPU)  # there is none left
        expected = model.eval()(images(0))
        with torch.autocast("cpu", torch.bfloat16):
            casts = model(images(0))
        cast = copy.deepcopy(model).bfloat16()(images(0).bfloat16())
    first = next(name for name, each in model.named_modules() if getattr(each, "kernel_size", 0) == (window, window))
    assert f"torch {torch.__version__} computes {first}" in line and line.endswith("float32 computes them")
    assert expected.dtype is torch.float32 and cast.dtype is casts.dtype is torch.bfloat16
    for found in (casts, cast):
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.06 * expected.abs().max().item())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_float32_is_in_the_compiled_graph_and_reaches_weights():
    layer = nn.Conv1d(3, 4, 2)
    with wrong_convolutions(2):
        assert check_convolutions(layer, (3, 8), torch.bfloat16, CPU)  # type: ignore[arg-type]
    x, copied = torch.randn(2, 3, 8), pickle.loads(pickle.dumps(WorkingCopy(layer)))
    with torch.autocast("cpu", torch.bfloat16):
        found = [torch.compile(each, backend="eager", fullgraph=True)(x) for each in (layer, copied.module)]
    assert torch.equal(found[0], layer(x).bfloat16()) and not torch.equal(*found)
    assert [p.dtype for p in copied.module.parameters()] == 2 * [torch.bfloat16]
    found[1].float().sum().backward()
    assert all(p.grad.dtype is torch.bfloat16 for p in copied.module.parameters())


def test_layers_calling_torch_themselves_are_named_with_a_remedy():
    with wrong_convolutions(2):
        (line,) = check_convolutions(nn.ConvTranspose2d(3, 3, 2), (3, 8, 8), torch.bfloat16, CPU)
    assert line.endswith("use float32 (without --amp and --model-dtype), or another version of torch")


def test_programs_name_it_and_go_on(make_dataset, tmp_path, capfd):
    data, run = make_dataset(train=8), tmp_path / "run"
    train = f"{data} {QUICK} --model-dtype bfloat16 --epochs 1 --output {tmp_path}"
    shown = [  # program, flags, how many models
        ("train", f"{train} --experiment run", 1),
        ("train", f"{train} --kd-model-name {run}", 2),
        ("validate", f"{data} --checkpoint {run} --amp -j 0", 1),
    ]
    for program, flags, models in shown:
        with wrong_convolutions(7):
            code = cli.run(program, flags.split())
        ended = capfd.readouterr()
        assert code == 0, ended.err
        assert ended.out.count("computes patch_embed.conv.0 and convolutions like it wrong in bfloat16") == models
        assert "nan" not in ended.out, ended.out
