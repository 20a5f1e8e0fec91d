"""Saving and resuming: nothing is lost at any instant, and what comes back is what was."""

from __future__ import annotations

import argparse
import io
import os
import random
import resource
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import load_checkpoint, resume_checkpoint
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import Tensor, nn

import volo  # noqa: F401  (registers the models)
import volo.engine.checkpoint_file as module
from tlt.errors import UserError
from tlt.weights import peek_checkpoint, read_checkpoint
from volo.engine.checkpoint import CheckpointDir, TrainState, load_weights, save_checkpoint
from volo.engine.precision import NonFiniteError
from volo.engine.resume import changed_args, find_resume

METADATA = {
    "arch": "tiny",
    "args": {"lr": 0.1, "data": Path("/data"), "scale": (0.08, 1.0)},
    "model_config": {"img_size": (64, 48), "crop_pct": 0.96},
}


def build(seed: int = 0, optimizer: str = "adamw", ema: bool = True, scaler: bool = True, **kwargs: Any) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    weights, biases = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    optimizers = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    options = {"lr": 0.01, "momentum": 0.9} if optimizer == "sgd" else {"lr": 0.01, "weight_decay": 0.05}
    return TrainState(
        model,
        optimizers[optimizer](groups, **options),
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) if scaler else None,
        ema=ModelEmaV3(model, decay=0.9) if ema else None,
        metadata=dict(METADATA),
        **{"updates_per_epoch": 4, **kwargs},
    )


def train(state: TrainState, epochs: int = 1) -> None:
    """Train on data that are a function of the update number."""
    for _ in range(epochs):
        for _ in range(state.updates_per_epoch):
            images = torch.randn(5, 6, generator=torch.Generator().manual_seed(state.update))
            loss = state.model(images).square().mean()
            state.optimizer.zero_grad()
            if state.scaler is None:
                loss.backward()
                state.optimizer.step()
            else:
                state.scaler.scale(loss).backward()  # type: ignore[attr-defined]
                state.scaler.step(state.optimizer)  # type: ignore[attr-defined]
                state.scaler.update()  # type: ignore[attr-defined]
            state.update += 1
            if state.ema is not None:
                state.ema.update(state.model, step=state.update)
        state.epoch += 1


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.clone()]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for v in values for t in tensors(v)]


def same(first: TrainState, second: TrainState) -> bool:
    one, two = first.state_dict(), second.state_dict()
    position = (first.epoch, first.update, first.best) == (second.epoch, second.update, second.best)
    scale = one.get("amp_scaler") == two.get("amp_scaler")
    pairs = zip(tensors(one), tensors(two), strict=True)
    return position and scale and all(torch.equal(a, b) for a, b in pairs)


def resumed(directory: Path, spec: str = "auto", **kwargs: Any) -> tuple[TrainState, CheckpointDir, list[str]]:
    """What a program does on --resume."""
    state = build(seed=99, **kwargs)
    files = CheckpointDir(directory, keep=2)
    found = find_resume(spec, directory)
    messages = list(found.messages)
    if found.path is not None and found.checkpoint is not None:
        messages += state.load(found.checkpoint, found.path)
        messages += files.restore(state, found.path)
    return state, files, messages


def names(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir()}


def epoch_of(path: Path) -> int:
    return read_checkpoint(path)["epoch"]


# One state, whole ------------------------------------------------------------------------------------------------


def test_interrupted_run_equals_uninterrupted(tmp_path: Path) -> None:
    straight = build()
    train(straight, 3)
    first = build()
    train(first, 2)
    CheckpointDir(tmp_path, keep=2).save(first, 50.0)
    second, _, messages = resumed(tmp_path)
    assert same(first, second) and messages == []
    train(second, 1)
    second.best = []
    assert same(straight, second)


def test_saved_under_wrappers_loaded_without_and_back(tmp_path: Path) -> None:
    first = build()
    train(first)
    bare = build(seed=5)
    wrapped = build(seed=6)
    wrapped.model = nn.DataParallel(torch.compile(wrapped.model))  # type: ignore[arg-type]
    first.model = torch.compile(first.model)  # type: ignore[assignment]
    CheckpointDir(tmp_path).save(first)
    path = tmp_path / "last.pth.tar"
    assert all(not k.startswith(("module", "_orig_mod")) for k in read_checkpoint(path)["state_dict"])
    for state in (bare, wrapped):
        assert state.load(read_checkpoint(path), path) == []
        assert same(first, state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_from_gpu_to_cpu_and_back(tmp_path: Path) -> None:
    def on_gpu(seed: int) -> TrainState:
        state = build(seed)
        state.model.cuda()
        state.optimizer = torch.optim.AdamW(state.model.parameters(), fused=True)
        state.scaler, state.ema = torch.amp.GradScaler("cuda"), ModelEmaV3(state.model)
        return state

    first, path = on_gpu(0), tmp_path / "last.pth.tar"
    for parameter in first.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.optimizer.step()
    CheckpointDir(tmp_path).save(first)
    cpu, again = build(seed=1), on_gpu(2)
    cpu.optimizer = torch.optim.AdamW(cpu.model.parameters())
    for state, device in ((cpu, "cpu"), (again, "cuda")):
        state.load(read_checkpoint(path), path)
        pairs = zip(tensors(first.state_dict()), tensors(state.state_dict()), strict=True)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)
        assert {v.device.type for s in state.optimizer.state.values() for v in s.values() if v.ndim} == {device}
        state.optimizer.step()


def test_payload_is_plain_data(tmp_path: Path) -> None:
    CheckpointDir(tmp_path).save(build(epoch=1, update=4), 1.0)
    checkpoint = torch.load(tmp_path / "last.pth.tar", weights_only=True)
    assert checkpoint["args"] == {"lr": 0.1, "data": "/data", "scale": [0.08, 1.0]}
    assert checkpoint["model_config"] == {"img_size": [64, 48], "crop_pct": 0.96}
    assert checkpoint["arch"] == "tiny"
    assert changed_args(checkpoint, {"lr": 0.2, "data": Path("/data"), "new": 1, "scale": (0.08, 1.0)}) == [
        "lr: 0.1 in the checkpoint, 0.2 now"
    ]


def test_timm_reads_ours(tmp_path: Path) -> None:
    state = build()
    train(state, 3)
    CheckpointDir(tmp_path).save(state, 1.0)
    path = str(tmp_path / "last.pth.tar")
    other = build(seed=7)
    assert resume_checkpoint(other.model, path, other.optimizer) == 3
    expected = state.state_dict()
    assert all(torch.equal(v, expected["state_dict"][k]) for k, v in other.model.state_dict().items())
    assert all(map(torch.equal, tensors(expected["optimizer"]), tensors(other.optimizer.state_dict())))
    load_checkpoint(other.model, path, use_ema=True)
    assert all(torch.equal(v, expected["state_dict_ema"][k]) for k, v in other.model.state_dict().items())
    assert not torch.equal(expected["state_dict"]["0.weight"], expected["state_dict_ema"]["0.weight"])


def test_we_resume_timms(tmp_path: Path) -> None:
    theirs = build(scaler=False)
    train(theirs, 2)
    args = argparse.Namespace(model="tiny", lr=5.0)
    saver = CheckpointSaver(theirs.model, theirs.optimizer, args, theirs.ema, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(1, 33.0)
    ours, _, messages = resumed(tmp_path)
    assert (ours.epoch, ours.update) == (2, 8)
    assert all(map(torch.equal, tensors(theirs.state_dict()), tensors(ours.state_dict())))
    assert len(messages) == 2 and "loss scale" in messages[0]
    assert messages[1] == "set aside as superseded-*, not on the way to last.pth.tar: model_best.pth.tar"
    assert ours.optimizer.param_groups[0]["lr"] == 0.01  # arguments in a file are never applied


def test_weights_alone_start_a_run(tmp_path: Path) -> None:
    torch.save(build(seed=3).model.state_dict(), tmp_path / "x")
    state = build(epoch=5)
    messages = state.load(read_checkpoint(tmp_path / "x"), tmp_path / "x")
    assert (state.epoch, state.update) == (0, 0)
    assert any("weights only" in m for m in messages)
    assert torch.equal(state.ema.module[0].weight, build(seed=3).model[0].weight)  # type: ignore[union-attr, index]


# Does it fit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "now"), [("sgd", "adamw"), ("adamw", "sgd")])
@pytest.mark.parametrize("with_class", [True, False])
def test_optimizer_mismatch_suggests_no_resume_opt(tmp_path: Path, saved: str, now: str, with_class: bool) -> None:
    first, second = build(optimizer=saved), build(seed=1, optimizer=now)
    train(first)
    payload = first.state_dict()
    if not with_class:
        del payload["optimizer_class"]
    before = tensors(second.state_dict())
    with pytest.raises(UserError, match=r"file.pth: its optimizer state does not fit.*--no-resume-opt"):
        second.load(payload, "file.pth")
    assert all(map(torch.equal, before, tensors(second.state_dict()))) and second.epoch == 0
    second.load(payload, "file.pth", load_optimizer=False)
    assert second.epoch == 1 and not second.optimizer.state


def test_optimizer_state_of_other_parameters() -> None:
    state = build()
    train(state)
    for spoil, reason in (
        (lambda o: o["state"][0].update(exp_avg=torch.zeros(2, 2)), r"exp_avg of parameter 0 is \(2, 2\)"),
        (lambda o: o["state"][1]["exp_avg_sq"].fill_(float("nan")), "exp_avg_sq of parameter 1 holds NaN"),
        (lambda o: o["param_groups"].pop(), "groups have"),
        (lambda o: o.pop("state"), "no optimizer state"),
        (lambda o: o.update(param_groups=3), "no optimizer state"),
    ):
        payload = payload_of(state)
        spoil(payload["optimizer"])
        with pytest.raises(UserError, match=reason):
            build(seed=1).load(payload, "file.pth")
    payload = payload_of(state)
    del payload["optimizer"]
    with pytest.raises(UserError, match="no optimizer state: .*--no-resume-opt"):
        build(seed=1).load(payload, "file.pth")


def payload_of(state: TrainState) -> dict[str, Any]:
    """What a file would hold; it shares nothing with the state."""
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_settings_of_the_command_win_over_the_files() -> None:
    first, second = build(), build(seed=1)
    train(first)
    second.optimizer.param_groups[0]["weight_decay"] = 1e-8
    second.optimizer.param_groups[0]["foreach"] = True
    second.optimizer.defaults["weight_decay"] = 1e-8
    messages = second.load(payload_of(first), "file.pth")
    assert messages == ["optimizer weight_decay: 0.05 in the checkpoint, 1e-08 now"]
    assert second.optimizer.param_groups[0]["weight_decay"] == 1e-8
    assert second.optimizer.param_groups[0]["foreach"] is True
    assert all(map(torch.equal, tensors(first.optimizer.state_dict()), tensors(second.optimizer.state_dict())))


def test_ema_and_loss_scale_that_only_one_side_has() -> None:
    train(full := build())
    messages = build(seed=1, ema=False, scaler=False).load(payload_of(full), "file.pth")
    assert len(messages) == 2 and "--model-ema is off" in messages[0] and "scales no loss" in messages[1]
    train(bare := build(ema=False, scaler=False))
    state = build(seed=1)
    messages = state.load(payload_of(bare), "file.pth")
    assert len(messages) == 2 and "starts from its plain weights" in messages[0] and "loss scale" in messages[1]
    assert all(map(torch.equal, tensors(bare.model.state_dict()), tensors(state.ema.module.state_dict())))  # type: ignore[union-attr]


def of_model(name: str, **kwargs: Any) -> TrainState:
    model = timm.create_model(name, num_classes=kwargs.pop("num_classes", 10), **kwargs)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), metadata={"arch": name}, updates_per_epoch=2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: of_model("lvvit_test"), r"^checkpoint is volo_test, --model is lvvit_test: file.pth$"),
        (lambda: of_model("volo_test", num_classes=7), "10 classes, the model has 7.*--finetune"),
        (lambda: of_model("volo_test", img_size=96), "pos_embed.*--img-size.*--finetune"),
    ],
)
def test_resume_into_another_model(other: Any, message: str) -> None:
    payload = payload_of(of_model("volo_test"))
    state = other()
    before = tensors(state.model.state_dict())
    with pytest.raises(UserError, match=message):
        state.load(payload, "file.pth")
    assert all(map(torch.equal, before, tensors(state.model.state_dict())))


def test_nan_weights_are_not_resumed() -> None:
    payload = payload_of(build())
    payload["state_dict_ema"]["3.bias"][0] = float("nan")
    with pytest.raises(UserError, match="3.bias holds 1 NaN"):
        build().load(payload, "file.pth")
    build(ema=False).load(payload, "file.pth")


def test_other_number_of_updates_per_epoch() -> None:
    train(first := build(), 2)
    second = build(updates_per_epoch=8)
    messages = second.load(payload_of(first), "file.pth")
    assert (second.epoch, second.update) == (2, 16)
    assert "an epoch had 4 updates, now 8" in messages[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": "x"},
        {"epoch": -7},
        {"update": None},
        {"best": [[1.0, 2]]},
        {"best": [[1.0, 2, "../../x"]]},
        {"outdated": ["args.yaml"]},
    ],
)
def test_position_that_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="file.pth does not tell where its run stopped"):
        build().load(payload_of(build(epoch=1, update=4)) | wrong, "file.pth")


# Files ---------------------------------------------------------------------------------------------------------------


def test_top_k_is_timms(tmp_path: Path) -> None:
    """Against timm's saver, random metrics with ties, epochs without a metric, both directions."""
    for trial in range(6):
        generator, decreasing = random.Random(trial), trial % 2 == 0
        ours, theirs = tmp_path / f"ours{trial}", tmp_path / f"timm{trial}"
        theirs.mkdir()
        state = build(ema=False, scaler=False)
        saver = CheckpointSaver(
            state.model, state.optimizer, checkpoint_dir=str(theirs), max_history=3, decreasing=decreasing
        )
        files = CheckpointDir(ours, keep=3, higher_is_better=not decreasing)
        for epoch in range(9):
            metric = None if generator.random() < 0.2 else float(generator.randrange(5))
            state.epoch = epoch + 1
            best = files.save(state, metric)
            assert saver.save_checkpoint(epoch, metric) == ((best.metric, best.epoch) if best else (None, None))
            assert names(ours) == names(theirs)
        if best:
            assert epoch_of(ours / "model_best.pth.tar") == epoch_of(theirs / "model_best.pth.tar") == best.epoch


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_nan_is_never_best_not_even_after_resume(tmp_path: Path, bad: float | None) -> None:
    state, files = build(), CheckpointDir(tmp_path, keep=2)
    train(state)
    assert files.save(state, bad) is None
    assert "model_best.pth.tar" not in names(tmp_path)
    train(state)
    assert files.save(state, 25.0) == (25.0, 1, "checkpoint-1.pth.tar")
    again, files, _ = resumed(tmp_path)
    assert again.best == state.best
    train(again)
    assert files.save(again, bad) == (25.0, 1, "checkpoint-1.pth.tar")
    train(again)
    assert files.save(again, 20.0) == (25.0, 1, "checkpoint-1.pth.tar")
    assert epoch_of(tmp_path / "model_best.pth.tar") == 1
    assert names(tmp_path) == {"last.pth.tar", "model_best.pth.tar", "checkpoint-1.pth.tar", "checkpoint-3.pth.tar"}


def test_weights_with_nan_are_not_saved(tmp_path: Path) -> None:
    state, files = build(), CheckpointDir(tmp_path)
    train(state)
    files.save(state, 1.0)
    kept = (tmp_path / "last.pth.tar").read_bytes()
    train(state)
    state.model[3].weight.data[0, 0] = float("inf")  # type: ignore[index, union-attr]
    with pytest.raises(NonFiniteError, match="3.weight holds NaN or infinite values: not saved") as caught:
        files.save(state, 2.0)
    assert caught.value.exit_code == 3
    assert (tmp_path / "last.pth.tar").read_bytes() == kept and len(state.best) == 1


def test_names_of_one_epoch_share_a_file(tmp_path: Path) -> None:
    state, files = build(), CheckpointDir(tmp_path)
    train(state)
    files.save(state, 1.0)
    assert (tmp_path / "last.pth.tar").stat().st_nlink == 3
    train(state)
    files.save(state, 0.5)
    assert (tmp_path / "last.pth.tar").samefile(tmp_path / "checkpoint-1.pth.tar")
    assert (tmp_path / "model_best.pth.tar").samefile(tmp_path / "checkpoint-0.pth.tar")


def test_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    state, files = build(), CheckpointDir(tmp_path, keep=1)
    for metric in (1.0, 3.0, 2.0):
        train(state)
        files.save(state, metric)
    assert names(tmp_path) == {"last.pth.tar", "model_best.pth.tar", "checkpoint-1.pth.tar"}
    assert [epoch_of(tmp_path / n) for n in sorted(names(tmp_path))] == [1, 2, 1]


def test_saving_between_epochs(tmp_path: Path) -> None:
    state, files = build(), CheckpointDir(tmp_path, keep=2)
    train(state)
    files.save(state, 1.0)
    state.update += 2
    files.save_last(state)
    again, _, _ = resumed(tmp_path)
    assert (again.epoch, again.update, again.best) == (1, 6, state.best)
    assert read_checkpoint(tmp_path / "checkpoint-0.pth.tar")["update"] == 4


def test_keep_below_one() -> None:
    with pytest.raises(UserError, match="--checkpoint-hist 0"):
        CheckpointDir(Path("x"), keep=0)


# At any instant --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def spied(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[str]:
    """Record every call that changes a directory or syncs; die just before number `stop_at`, leaving all as it is."""
    events: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if stop_at is not None and len(events) >= stop_at:
                raise Killed
            target = args[0]
            if isinstance(target, int):
                target = os.readlink(f"/proc/self/fd/{target}")
            events.append(f"{name} {Path(target).name}")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("fsync", "replace", "link"):
        wrap(os, name)
    wrap(Path, "unlink")
    return events


def test_order_of_syncs_and_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = spied(monkeypatch)
    save_checkpoint(tmp_path / "last.pth.tar", {"x": 1})
    staged = f".staged-{os.getpid()}-last.pth.tar"
    expected = [f"fsync {staged}", f"replace {staged}", f"fsync {tmp_path.name}"]
    assert [e for e in events if not e.startswith("unlink")] == expected


def two_epochs_of_three(directory: Path) -> tuple[TrainState, CheckpointDir]:
    state, files = build(), CheckpointDir(directory, keep=2)
    for metric in (1.0, 2.0):
        train(state)
        files.save(state, metric)
    train(state)
    return state, files


def test_killed_before_any_step_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, files = two_epochs_of_three(tmp_path / "straight")
    files.save(straight, 3.0)
    finished, at = False, 0
    while not finished:
        directory = tmp_path / str(at)
        state, files = two_epochs_of_three(directory)
        with monkeypatch.context() as patch:
            events = spied(patch, stop_at=at)
            try:
                files.save(state, 3.0)
                finished = True  # no step was left to die at
            except Killed:
                pass
        assert "last.pth.tar" in names(directory)
        again, files, messages = resumed(directory)
        assert again.epoch in (2, 3) and messages == []
        if again.epoch == 2:
            train(again)
            files.save(again, 3.0)
        assert names(directory) == names(tmp_path / "straight"), f"killed before step {at} of {events}"
        assert epoch_of(directory / "model_best.pth.tar") == epoch_of(directory / "last.pth.tar") == 2
        assert same(again, straight)
        at += 1
    assert at > 8


def killed_again_and_again(directory: Path) -> None:
    """Start, kill and resume a run; print OK if nothing was lost. Runs in a process of its own, which forks safely."""
    generator, parent = random.Random(0), os.getpid()
    for _ in range(12):
        before = newest(directory)
        child = os.fork()
        if child == 0:
            try:
                state, files, _ = resumed(directory, ema=False, scaler=False)
                while os.getppid() == parent:
                    train(state)
                    files.save(state, float(state.epoch % 7))
            finally:
                os._exit(1)
        while newest(directory) == before:  # at least one save each, or a slow machine would prove nothing
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.001)
        time.sleep(generator.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = find_resume("auto", directory)
        assert found.messages == [] and found.path == directory / "last.pth.tar" and found.checkpoint is not None
    straight = build(seed=99, ema=False, scaler=False)
    train(straight, found.checkpoint["epoch"] + 1)
    assert found.checkpoint["epoch"] >= 11  # one epoch saved in each of the 12 lives, at least; counted from 0
    assert all(torch.equal(v, found.checkpoint["state_dict"][k]) for k, v in straight.model.state_dict().items())
    print("OK")


def newest(directory: Path) -> int | None:
    path = directory / "last.pth.tar"
    return path.stat().st_ino if path.exists() else None


def test_kill_9(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "OK\n", done.stderr


def test_leftovers_are_never_read_and_removed_at_start(tmp_path: Path) -> None:
    state = build(epoch=1, update=4)
    CheckpointDir(tmp_path).save(state, 1.0)
    for name in (".staged-1-last.pth.tar", "tmp.pth.tar", "recovery-9-9.pth.tar", "superseded-checkpoint-9.pth.tar"):
        save_checkpoint(tmp_path / name, state.state_dict() | {"epoch": 9, "update": 99})
    found = find_resume("auto", tmp_path)
    assert found.path == tmp_path / "last.pth.tar" and found.messages == []
    CheckpointDir(tmp_path)
    assert ".staged-1-last.pth.tar" not in names(tmp_path)


def test_full_disk(tmp_path: Path) -> None:
    """The system's limit on file sizes gives a real error in the middle of a write."""
    state, files = build(), CheckpointDir(tmp_path)
    train(state)
    files.save(state, 1.0)
    before, kept = names(tmp_path), (tmp_path / "last.pth.tar").read_bytes()
    train(state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*last.pth.tar: File too large; it needs 0.0 MiB") as caught:
            files.save(state, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == before and (tmp_path / "last.pth.tar").read_bytes() == kept
    assert len(state.best) == 1
    files.save(state, 2.0)  # the next attempt works
    assert len(state.best) == 2


def test_full_disk_while_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(module.shutil, "copyfileobj", fail)
    with pytest.raises(UserError, match=r"cannot write .*checkpoint-0.pth.tar: No space left on device"):
        CheckpointDir(tmp_path).save(build(epoch=1, update=4), 1.0)
    assert names(tmp_path) == {"last.pth.tar"}


def test_defects_are_not_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(module.torch, "save", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        save_checkpoint(tmp_path / "x", {})
    assert names(tmp_path) == set()


# --resume ----------------------------------------------------------------------------------------------------------


def three_epochs(directory: Path) -> TrainState:
    state, files = build(), CheckpointDir(directory, keep=5)
    for metric in (1.0, 3.0, 2.0):
        train(state)
        files.save(state, metric)
    return state


def separate(path: Path, content: bytes) -> None:
    """Write `content` under this name alone, not into the file it shares with others."""
    path.unlink()
    path.write_bytes(content)


def test_auto_in_an_empty_or_missing_directory(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "none"):
        found = find_resume("auto", directory)
        assert found.path is None and found.checkpoint is None
        assert found.messages == [f"no checkpoint to resume in {directory}: a fresh start"]


def test_auto_takes_the_newest_by_number(tmp_path: Path) -> None:
    for epoch in (9, 10, 2):  # neither order of names nor of times is that of epochs
        state = build(epoch=epoch, update=4 * epoch)
        save_checkpoint(tmp_path / f"checkpoint-{epoch - 1}.pth.tar", state.state_dict())
    assert find_resume("auto", tmp_path).path == tmp_path / "checkpoint-9.pth.tar"


def flip(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        record = archive.read(next(r for r in archive.infolist() if r.filename.endswith("data/2")))
    at = content.index(record)
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: b"", "empty"),
        (lambda c: c[: len(c) // 2], "truncated"),
        (flip, "does not match its checksum"),
        (lambda c: b"<html>", "web page"),
    ],
)
def test_auto_skips_damaged_files_and_says_so(tmp_path: Path, damage: Any, reason: str) -> None:
    three_epochs(tmp_path)
    for name in ("last.pth.tar", "checkpoint-2.pth.tar"):
        separate(tmp_path / name, damage((tmp_path / name).read_bytes()))
    state, files, messages = resumed(tmp_path)
    assert state.epoch == 2
    for name in ("last.pth.tar", "checkpoint-2.pth.tar"):
        assert any(m.startswith(f"skipped: {tmp_path / name}") and reason in m for m in messages)
    assert names(tmp_path) >= {"superseded-last.pth.tar", "superseded-checkpoint-2.pth.tar", "checkpoint-1.pth.tar"}
    train(state)
    files.save(state, 2.0)
    assert find_resume("auto", tmp_path).path == tmp_path / "last.pth.tar"


def test_auto_skips_nan_weights(tmp_path: Path) -> None:
    three_epochs(tmp_path)
    payload = read_checkpoint(tmp_path / "last.pth.tar")
    payload["state_dict"]["0.weight"][0, 0] = float("nan")
    for name in ("last.pth.tar", "checkpoint-2.pth.tar"):
        save_checkpoint(tmp_path / name, payload)
    found = find_resume("auto", tmp_path)
    assert peek_checkpoint(found.path)["epoch"] == 1  # type: ignore[arg-type]
    assert sum("0.weight holds 1 NaN" in m for m in found.messages) == 2


def test_explicit_path_has_to_be_good(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such checkpoint"):
        find_resume(str(tmp_path / "x.pth.tar"), tmp_path)
    three_epochs(tmp_path)
    path = tmp_path / "last.pth.tar"
    separate(path, flip(path.read_bytes()))
    with pytest.raises(UserError, match="checksum"):
        find_resume(str(path), tmp_path)


def test_going_back_to_an_older_epoch(tmp_path: Path) -> None:
    three_epochs(tmp_path)
    state, files, messages = resumed(tmp_path, str(tmp_path / "checkpoint-0.pth.tar"))
    assert state.epoch == 1 and state.best == [(1.0, 0, "checkpoint-0.pth.tar")]
    assert "checkpoint-1.pth.tar, checkpoint-2.pth.tar, last.pth.tar" in messages[0]
    assert epoch_of(tmp_path / "superseded-last.pth.tar") == 2
    # Killed now, the run goes on from what was chosen.
    assert peek_checkpoint(find_resume("auto", tmp_path).path)["epoch"] == 0  # type: ignore[arg-type]
    assert epoch_of(tmp_path / "model_best.pth.tar") == 0
    train(state)
    assert files.save(state, 0.5) == (1.0, 0, "checkpoint-0.pth.tar")
    assert find_resume("auto", tmp_path).path == tmp_path / "last.pth.tar"


def test_going_back_to_before_the_first_metric(tmp_path: Path) -> None:
    state, files = build(), CheckpointDir(tmp_path)
    for metric in (None, 3.0):
        train(state)
        files.save(state, metric)
    state, files, _ = resumed(tmp_path, str(tmp_path / "checkpoint-0.pth.tar"))
    assert epoch_of(tmp_path / "superseded-model_best.pth.tar") == 1
    train(state)
    assert files.save(state, 1.0) == (1.0, 1, "checkpoint-1.pth.tar")


def test_kept_checkpoints_that_were_deleted(tmp_path: Path) -> None:
    three_epochs(tmp_path)
    (tmp_path / "checkpoint-1.pth.tar").unlink()
    state, _, messages = resumed(tmp_path)
    assert [b.epoch for b in state.best] == [2, 0]
    assert messages == ["checkpoint-1.pth.tar, one of the kept checkpoints, is gone"]


def test_fewer_are_kept_after_resume(tmp_path: Path) -> None:
    three_epochs(tmp_path)
    state, _, _ = resumed(tmp_path)  # keeps 2
    assert [b.epoch for b in state.best] == [1, 2]
    assert "checkpoint-0.pth.tar" not in names(tmp_path)


def test_resuming_into_another_directory(tmp_path: Path) -> None:
    three_epochs(tmp_path / "old")
    before = names(tmp_path / "old")
    state = build()
    found = find_resume(str(tmp_path / "old/last.pth.tar"), tmp_path / "new")
    state.load(found.checkpoint, found.path)  # type: ignore[arg-type]
    files = CheckpointDir(tmp_path / "new")
    assert "ranked anew" in files.restore(state, found.path)[0]  # type: ignore[arg-type]
    train(state)
    files.save(state, 1.5)
    assert names(tmp_path / "new") == {"last.pth.tar", "model_best.pth.tar", "checkpoint-3.pth.tar"}
    assert names(tmp_path / "old") == before


def test_load_weights_of_a_run(tmp_path: Path) -> None:
    state = three_epochs(tmp_path)
    other = build(seed=4).model
    load_weights(other, tmp_path / "last.pth.tar", use_ema=True)
    assert all(map(torch.equal, tensors(other.state_dict()), tensors(state.ema.module.state_dict())))  # type: ignore[union-attr]


if __name__ == "__main__":
    killed_again_and_again(Path(sys.argv[1]))
