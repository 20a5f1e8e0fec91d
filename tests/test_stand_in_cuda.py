"""What a GPU would punish is seen on the CUDA device that is not there, and the product does none of it."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import tlt
import volo  # noqa: F401 (registers its models)
from tests.stand_in_cuda import stand_in_cuda
from tests.train.small_run import arguments, optimizer_of
from tlt.data.augment import device_stage
from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.plan import AugmentConfig, make_plan
from tlt.data.backends import create_backend, dali
from volo.checkpoint.replicas import checksum
from volo.cluster.distributed import World
from volo.config.train import TRAIN
from volo.train.distillation import DeviceTimer
from volo.train.model import prepare_model
from volo.train.precision import Clipping, Precision


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cuda")


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: ones(2) + torch.ones(2),
        lambda: nn.Linear(2, 2).cuda()(torch.ones(1, 2)),
        lambda: ones(2).copy_(ones(2)).numpy(),
        lambda: ones(2).pin_memory(),
        lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
    ],
)
def test_devices_do_not_mix(stand_in, mistake):
    with pytest.raises((RuntimeError, TypeError), match="device|pinned|numpy"):
        mistake()


@pytest.mark.parametrize(
    ("does", "waits"),
    [
        (lambda x: x.sum().item(), True),
        (lambda x: x[x > 0], True),
        (lambda x: x.cpu(), True),
        (lambda x: torch.ones(2).to("cuda", non_blocking=True), True),  # from memory that can be swapped out
        (lambda x: torch.ones(2).copy_(x, non_blocking=True), True),  # to such memory
        (lambda x: torch.tensor([1.0], device="cuda"), True),
        (lambda x: torch.cuda.synchronize(), True),
        (lambda x: torch.ones(2).pin_memory().to("cuda", non_blocking=True), False),
        (lambda x: x.to("cpu", non_blocking=True), False),
        (lambda x: x.to(torch.bfloat16).to("cuda"), False),
        (lambda x: torch.where(x > 0, x, 2.0).mul_(torch.tensor(3.0)), False),
        (lambda x: x[torch.zeros(2, dtype=torch.long, device="cuda")], False),
    ],
)
def test_a_wait_of_the_host_is_seen(does, waits):
    with stand_in_cuda() as device:
        x = ones(2)
        device.waits.clear()
        does(x)
        assert bool(device.waits) == waits
        torch.cuda.set_sync_debug_mode("error")
        device.waits.clear()


def test_what_is_copied_arrives_when_the_host_has_waited(stand_in):
    x = ones(2)
    host = torch.empty(2, pin_memory=True).copy_(x, non_blocking=True)
    done = torch.cuda.current_stream().record_event()
    x.add_(1)
    later = x.to("cpu", non_blocking=True)
    assert host.isnan().all() and later.isnan().all() and not done.query()
    done.synchronize()
    assert host.eq(1).all() and later.isnan().all()
    assert x.sum().item() == 4 and later.eq(2).all()


@pytest.mark.parametrize("forgotten", ["wait", "record_stream", "nothing"])
def test_streams_that_race_are_seen(forgotten):
    with stand_in_cuda() as device:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            made = ones(3).mul_(2)
            done = side.record_event()
        if forgotten != "wait":
            torch.cuda.current_stream().wait_event(done)
        if forgotten != "record_stream":
            made.record_stream(torch.cuda.current_stream())
        made.sum()
        del made
    assert {"wait": "still be writing", "record_stream": "given back"}.get(forgotten, "") in str(device.races)
    assert bool(device.races) == (forgotten != "nothing")


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def test_graph_repeats_numbers_and_reads_tensors_and_seed_anew(stand_in):
    weight, scale, number = ones(4), torch.full((), 2.0, device="cuda"), torch.tensor(5.0)
    graph, result = captured(lambda: (weight.mul_(scale).add_(number), torch.rand(4, device="cuda")))
    assert weight.eq(1).all() and result[1].isnan().all()  # nothing was computed
    scale.fill_(3)
    number.fill_(7)
    stand_in.launches.clear()
    torch.manual_seed(1)
    graph.replay()
    assert stand_in.launches.total() == 1
    drawn = result[1].cpu()
    assert weight.eq(1 * 3 + 5).all()
    graph.replay()
    assert weight.eq(8 * 3 + 5).all() and not torch.equal(result[1].cpu(), drawn)
    torch.manual_seed(1)
    torch.testing.assert_close(torch.rand(4, device="cuda").cpu(), drawn)


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: x.sum().item(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.ones(2).pin_memory().to("cuda", non_blocking=True),
        lambda x: torch.manual_seed(1),
        lambda x: torch.rand(2, device="cuda", generator=torch.Generator("cuda")),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.optim.AdamW([nn.Parameter(x)], fused=True).step(),  # not capturable
    ],
)
def test_a_capture_refuses_what_the_host_has_to_do(stand_in, refused):
    x = ones(2)
    with pytest.raises(RuntimeError, match="captur"):
        captured(lambda: refused(x))
    assert x.sum().item() == 2  # nothing is captured any more


def test_a_graph_that_uses_memory_which_was_given_back_is_seen():
    with stand_in_cuda() as device:
        kept = [ones(2)]
        graph, _ = captured(lambda: [kept[0].add_(1), None][1])
        graph.replay()
        assert not device.races
        kept.clear()
        graph.replay()
    assert "given back" in str(device.races)


def test_checksums_of_many_tensors_take_few_launches(stand_in):
    tensors = [ones(9) for _ in range(99)]
    stand_in.launches.clear()
    checksum(tensors)
    assert 0 < stand_in.launches.total() < 20


@pytest.mark.parametrize(("count", "most"), [(256, 300), (16, 175)])
def test_device_stage_takes_few_launches_for_the_cpus_bits(stand_in, count, most):
    config = AugmentConfig((32, 32), auto_augment="rand-m9-mstd0.5-inc1", vflip=0.2, reprob=0.25)
    stage, images = DeviceStage(config, (0.5,) * 3, (0.5,) * 3), torch.randint(256, (count, 3, 32, 32)).byte()
    plan = make_plan(config, 0, 0, range(count), 500, 375)
    expected, crops = stage(images, plan), images.cuda()
    stage.cuda()
    stand_in.launches.clear()
    stand_in.waits.clear()
    finished = stage(crops, plan)
    assert 0 < stand_in.launches.total() < most and not stand_in.waits
    assert torch.equal(finished.cpu(), expected) and torch.equal(crops.cpu(), images)


@pytest.mark.parametrize("wrong", [False, True])
def test_first_batch_is_compared_with_the_cpu(stand_in, monkeypatch, make_dataset, wrong):
    def brighter(images: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return warp(images, *arguments, **options) + 2 * images.is_cuda

    warp, config = device_stage.warp, AugmentConfig((32, 32), auto_augment="rand-n1-p1")
    if wrong:
        monkeypatch.setattr(device_stage, "warp", brighter)
    images = tlt.open_images(make_dataset(train=8), "train")
    loader = tlt.Loader(images, None, config, batch_size=4, workers=0, device="cuda")
    batches = loader.epoch(0)
    with warnings.catch_warnings(record=True) as caught:
        next(batches)
        stand_in.waits.clear()
        next(batches)
    assert ["% of the values of the first batch differ" in str(line.message) for line in caught] == [True] * wrong
    assert not stand_in.waits
    # Memory that is freed on a stream is used again on that stream only: all passes have the same.
    assert len({batch.images.block.owner for epoch in range(2) for batch in loader.epoch(epoch)}) == 1


def test_step_starts_no_more_kernels(stand_in, make_dataset, make_labels):
    """A step with token labels, in the parts of the loop in docs/python_api.md."""
    images = tlt.open_images(data := make_dataset(train=8), "train")
    labels = tlt.open_labels(make_labels(data), images.paths)
    loader = tlt.Loader(images, labels, tlt.AugmentConfig((64, 64)), batch_size=4, workers=0, device="cuda")
    model = timm.create_model("volo_test", img_size=64, num_classes=4, drop_path_rate=0.1).cuda()
    criterion, precision = tlt.TokenLabelLoss.of(model, (64, 64)), Precision(torch.device("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    parameters, batch = list(model.parameters()), next(iter(loader))
    launches: dict[str, int] = {}

    def note(part: str) -> None:
        launches[part] = stand_in.launches.total()
        stand_in.launches.clear()

    for update in range(2):  # the first one makes the optimizer's state
        stand_in.waits.clear()
        note("before")
        targets = criterion.targets(batch)
        note("targets")
        outputs = model(batch.images, dense=True, mix_box=tlt.draw_box(tlt.StepKey(0, update), criterion.grid))
        note("model")
        loss = criterion(outputs, targets).total
        note("loss")
        precision.backward(loss)
        note("backward")
        precision.step(optimizer, parameters)
        note("update")
        assert not stand_in.waits
    ceilings = {"targets": 300, "model": 140, "loss": 30, "backward": 240, "update": 20}
    assert all(0 < launches[part] <= ceiling for part, ceiling in ceilings.items()), launches


@pytest.mark.parametrize("name", ["adamw", "adam", "momentum", "lamb", "lion", "adafactor", "muon", "lookahead_adamw"])
def test_a_step_waits_at_most_to_learn_whether_to_skip(stand_in, name):
    model, device = nn.Linear(8, 4).cuda(), torch.device("cuda")
    optimizer = optimizer_of(arguments(f"--opt {name} --clip-grad 1"), model, device)
    precision = Precision(device, clip=Clipping(1.0))
    for _ in range(2):
        precision.backward(model(ones(2, 8)).square().sum())
        stand_in.waits.clear()
        precision.step(optimizer, list(model.parameters()))
    places = [wait.stack[-1] for wait in stand_in.waits]
    assert places == ([] if name in ("adamw", "adam") else ["train/precision.py:_step_unless"])


def test_dali_batch_on_a_gpu_is_finished_and_kept(stand_in, monkeypatch, make_dataset):
    """DALI's pipeline of the CPU takes the place of the GPU's, which needs a driver. Its memory is always the same."""
    pipeline, taken, memory = dali._pipeline, torch.from_dlpack, dict[Any, Tensor]()
    host, of_dali = torch.device("cpu"), torch.cuda.Stream()

    def given(values: Any) -> Tensor:
        pixels = taken(values)
        with torch.cuda.stream(of_dali):
            if pixels.shape not in memory:
                memory[pixels.shape] = torch.empty(pixels.shape, dtype=pixels.dtype, device="cuda")
            memory[pixels.shape].copy_(pixels)
        return memory[pixels.shape]

    def finished(*arguments: Any) -> Any:
        decoded = decode(*arguments)
        assert arguments[0]._stream.query()  # the training thread's streams do not wait for it
        return decoded

    def ran(requests: Any, *rest: Any) -> Any:
        if len(requests) == 3:  # the batch with the PNG: as with a bad image, each is then decoded alone
            raise dali._FAILURES[0]("one of them is bad")
        return run(requests, *rest)

    decode, run = dali.DaliBackend.decode_batch, dali._run
    monkeypatch.setattr(dali.DaliBackend, "decode_batch", finished)
    monkeypatch.setattr(dali, "_run", ran)
    monkeypatch.setattr(dali, "_pipeline", lambda room, threads, device, fill: pipeline(room, threads, host, fill))
    monkeypatch.setattr(torch, "from_dlpack", given)
    photo = next((folder := make_dataset() / "train").rglob("*.jpg"))
    Image.open(photo).save(photo.with_suffix(".png"))  # which the host decodes, beside the others of its batch
    images, config = tlt.open_images(folder.parent, "train"), tlt.AugmentConfig((32, 32))

    def losses(name: str) -> list[Tensor]:
        backend = create_backend(name, device="cuda")
        loader = tlt.Loader(images, None, config, batch_size=4, workers=1, device="cuda", backend=backend)
        return [batch.images.mean((1, 2, 3)).cpu() for batch in loader]

    torch.testing.assert_close(losses("dali-gpu"), losses("torchvision"), rtol=0, atol=0.05)


def test_a_device_is_timed_without_a_wait_until_one_asks(stand_in):
    timer, x = DeviceTimer(), ones(2)
    stand_in.waits.clear()
    for _ in range(3):
        with timer.measured(x.device):
            x.add_(1)
    assert len(timer.pending) == 3 and not stand_in.waits
    torch.cuda.synchronize()
    with timer.measured(x.device):
        x.add_(1)
    assert len(timer.pending) == 1  # what the device has ended is kept no longer
    assert timer.take() == pytest.approx(4e-3) and not timer.pending and timer.take() == 0


def test_batchnorm_of_several_gpus_is_synchronised(stand_in):
    flags = ["/data", "--model", "test_resnet", "--sync-bn", "--channels-last", "--bn-momentum", "0.3"]
    world = World(1, 0, 2, torch.device("cuda", 0))
    model = tlt.with_dense_head(timm.create_model("test_efficientnet"), (64, 64))
    model = prepare_model(model, TRAIN.parse(flags), world)
    assert model.mix_point in model.bn1._forward_hooks.values()  # before torch.compile traces the model
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert norms and all(isinstance(norm, nn.SyncBatchNorm) and norm.momentum == 0.3 for norm in norms)
    assert all(value.is_cuda for value in model.state_dict().values())
