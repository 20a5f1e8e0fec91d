"""train.py as a user runs it: what it writes, what it resumes, what it refuses."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml

from tests.commands.conftest import QUICK, ROOT, metrics, spent_in
from tests.conftest import LIMIT
from tlt.data.batch import Batch
from tlt.models.flops import flops_per_image
from volo import cli
from volo.cluster.distributed import init_world
from volo.cluster.watchdog import Watchdog
from volo.commands import train
from volo.record.history import epochs_of, read_json_lines
from volo.train.loop import scores_of
from volo.train.meter import Meter

RECORDS = {"args.yaml", "run.json", "log.txt", "metrics.jsonl", "summary.csv", "last.pth.tar", "model_best.pth.tar"}


def _weights(path: Path, key: str = "state_dict") -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)[key]


def test_fault_60_run_leaves_records_that_validate_confirms(call, make_dataset, make_labels, tmp_path):
    labels = make_labels(data := make_dataset(size=(70, 40)))
    flags = f"{data} {QUICK} --epochs 2 --token-label --model-ema --checkpoint-hist 1 --output {tmp_path}"
    flags += " --crop-pct 0.8 --interpolation bilinear --mean 0.4 0.4 0.4"
    flags += " --sync-bn --save-images"  # the first does nothing to one process
    ended = call("train", flags, "--token-label-data", labels, "--val-label-data", labels, "--experiment", "run").ok()
    run = tmp_path / "run"
    assert {p.name for p in run.iterdir()} >= RECORDS
    assert len(list(run.glob("checkpoint-*.pth.tar"))) == 1 and len(list(run.glob("train-batch-*.jpg"))) == 4
    assert yaml.safe_load((run / "args.yaml").read_text())["token_label"] is True
    start = json.loads((run / "run.json").read_text())[0]
    assert start["versions"]["torch"] == torch.__version__
    records, (epoch, last) = metrics(run), metrics(run, "epoch")
    assert last["best"] == max(epoch["eval_top1_ema"], last["eval_top1_ema"])
    summary = list(csv.DictReader((run / "summary.csv").open()))[1]
    assert {name: float(summary[name]) for name in ("dense_top1", "dense_top1_ema", "annotator_top1")} == {
        "dense_top1": last["dense_top1"], "dense_top1_ema": last["dense_top1_ema"], "annotator_top1": 100.0,
    }  # fmt: skip
    for dense in ("", f"--token-label-data {labels}"):
        measured = call("validate", f"{data} --checkpoint {run}/last.pth.tar -j 0 {dense}").row
        assert measured["loss"] == round(last["eval_loss_ema"], 6)
        assert measured["crop_pct"] == 0.8 and measured["interpolation"] == "bilinear"
    assert measured["dense_top1"] == last["dense_top1_ema"] and measured["tokens"] == 8 * 2 * 2
    assert [record["update"] for record in records] == [1, 2, 3, 4]
    assert [record["lr"] for record in records] == pytest.approx([1.25e-5] * 2 + [1.125e-5] * 2)  # cosine to 1e-5
    assert epoch["images_per_second"] == pytest.approx(16 / (records[0]["seconds"] + records[1]["seconds"]), rel=1e-3)
    for each in ("loss", "cls_loss", "dense_loss"):  # of two updates of as many images
        assert epoch[f"train_{each}"] == pytest.approx((records[0][each] + records[1][each]) / 2), each
    record = records[0]
    assert record["loss"] == pytest.approx(record["cls_loss"] + 0.5 * record["dense_loss"], rel=1e-6)
    config = torch.load(run / "last.pth.tar", weights_only=True)["model_config"]
    model = timm.create_model("volo_test", num_classes=config["num_classes"], img_size=config["img_size"])
    # Counted as three forward passes: of a model this small, the images' own gradient would be a large part.
    work = flops_per_image(model.train(), (3, *config["img_size"]), backward=True, dense=True)
    assert record["tflops_per_second"] == pytest.approx(record["images_per_second"] * work / 1e12, rel=0.1)
    assert "over 8 images" in ended.out and "class" in ended.out and "dense" in ended.out
    assert "the token labels name the class of 100.0 % of 16 sampled images" in ended.out
    assert "warning: the token" not in ended.out
    assert "learning rate 1.25e-05 = --lr-base 0.0016 x global batch 8 / 1024" in ended.out


def test_accumulation_equals_a_large_batch(call, make_dataset, make_labels, tmp_path):
    data = make_dataset(train=21)  # updates of 8, 8 and 5 images, the last one in micro-batches of 2, 2 and 1
    flags = f"{data} {QUICK} --lr 1e-3 --epochs 2 --token-label --freeze-bn --no-mix-token --drop-path 0"
    flags += f" --log-interval 2 --output {tmp_path}"
    labels = make_labels(data)
    large = call("train", flags, "--token-label-data", labels, "--experiment", "large")
    small = call("train", f"{flags} -b 2 --grad-accum-steps 4 --experiment small --token-label-data {labels}")
    assert (large.code, small.code) == (0, 0), large.err + small.err
    one, two = (metrics(tmp_path / name) for name in ("large", "small"))
    assert [r["images"] for r in one] == [r["images"] for r in two] == [16, 5] * 2
    assert [r["update"] for r in one] == [2, 3, 5, 6]
    for name in ("loss", "cls_loss", "dense_loss", "grad_norm"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in one], rel=1e-4, abs=1e-6), name


def test_a_requeued_run_does_not_begin_at_its_start_epoch_again(call, make_dataset, tmp_path):
    flags = f"{make_dataset(train=8)} {QUICK} --output {tmp_path} --experiment run --start-epoch 1"
    assert call("train", f"{flags} --epochs 2 --resume auto").code == 0
    again = call("train", f"{flags} --epochs 3 --resume auto")
    assert again.code == 0 and "--start-epoch 1: the run has begun there and goes on from epoch 2" in again.out
    assert [record["epoch"] for record in metrics(tmp_path / "run")] == [1, 2]
    back = call("train", f"{flags} --epochs 3 --resume {tmp_path / 'run' / 'last.pth.tar'}")
    assert back.code == 0 and "has begun there" not in back.out
    assert [record["epoch"] for record in metrics(tmp_path / "run")] == [1, 2]


def test_name_commands_no_terminal(make_dataset, tmp_path, capsys):
    data = make_dataset(train=8, validation=8).rename(tmp_path / "d\x1b]0;owned\x07\x9b2J\x1b[31m")
    assert cli.run("train", [str(data), *QUICK.split(), "--epochs", "1", "--output", str(data / "runs")]) == 0
    printed = capsys.readouterr()
    (log,) = (data / "runs").glob("*/log.txt")
    for text in (printed.out, printed.err, log.read_text()):
        assert not set(text) & {"\x07", "\x9b"} and "\x1b" not in text.replace("\x1b[A", "")
    assert r"\x1b]0;owned\x07" in printed.out


@pytest.mark.usefixtures("pictures")
def test_a_run_outlives_its_output_and_its_pictures(make_dataset, tmp_path):
    flags = f"{make_dataset(train=8)} {QUICK} --epochs 2 --output {tmp_path} --experiment run"
    environment = {**os.environ, "MPLBACKEND": "nonsense"}
    command = [sys.executable, str(ROOT / "train.py"), *flags.split()]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("warning: output is left out that can't be written: No space left on device\n") == 1
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "done: 2 updates" in log
    assert "warning: curve.png could not be drawn: " in log and log.count("warning: first_batch.png could not") == 1
    assert len(epochs_of(tmp_path / "run")) == 2


def test_fault_62_run_without_its_directory_ends_saved(call, make_dataset, tmp_path, monkeypatch):
    run, epochs = tmp_path / "out" / "run", []

    def remove_after_the_second(evaluations: Any) -> dict[str, float]:
        epochs.append(1)
        while len(epochs) == 2 and run.exists():  # a checkpoint may be written meanwhile
            shutil.rmtree(run, ignore_errors=True)
        return scores_of(evaluations)

    monkeypatch.setattr("volo.train.loop.scores_of", remove_after_the_second)
    flags = f"{make_dataset(train=8)} {QUICK} --output {tmp_path}/out --experiment run"
    ended = call("train", f"{flags} --epochs 3").ok()
    assert f"warning: {run} was removed while this run goes on: made anew" in ended.out
    assert {path.name for path in run.iterdir()} >= RECORDS
    again = call("train", f"{flags} --epochs 4 --resume auto")
    assert again.code == 0 and "last.pth.tar: 3 epochs" in again.out, again.out


def test_fault_53_divergence_keeps_the_last_good_file(call, make_dataset, tmp_path, monkeypatch):
    data, shown, look_at = make_dataset(train=32), dict[int, list[str]](), Meter.look_at

    def note(meter: Meter, batch: Batch) -> None:
        shown[meter.state.update] = [meter.loader.dataset.path(int(index)) for index in batch.indices]
        look_at(meter, batch)

    monkeypatch.setattr(Meter, "look_at", note)
    flags = f"{data} {QUICK} --output {tmp_path} --experiment run --max-nonfinite 2"
    assert call("train", f"{flags} --epochs 1 --lr 1e-3").code == 0
    good = (tmp_path / "run" / "last.pth.tar").read_bytes()
    ended = call("train", f"{flags} --epochs 9 --lr 1e38 --resume auto")
    assert ended.code == 3, ended.out
    assert "--lr" in ended.err and "--max-nonfinite" in ended.err and "Traceback" not in ended.err
    assert (tmp_path / "run" / "last.pth.tar").read_bytes() == good
    records, _ = read_json_lines(tmp_path / "run" / "events.jsonl")
    skipped = [record for record in records if record["kind"] == "nonfinite"]
    assert [event["update"] for event in skipped] == list(range(skipped[0]["update"], skipped[0]["update"] + 3))
    assert set(skipped[-1]["not_finite"]) == {"loss", "gradients"} and len(skipped[-1]["images"]) == 8
    assert [event["images"] for event in skipped] == [shown[event["update"]] for event in skipped]
    assert spent_in(tmp_path / "run").restarts == 1
    best = _weights(tmp_path / "run" / "model_best.pth.tar")
    assert all(torch.isfinite(value).all() for value in best.values())


@pytest.mark.parametrize(
    ("more", "decays"), [("", (0.5, 0.5)), ("--model-ema-warmup", (1 - 2 ** (-2 / 3), 0.5))], ids=["", "warm-up"]
)
def test_average_follows_its_definition_and_val_interval(call, make_dataset, tmp_path, more, decays):
    data = make_dataset(train=8)  # one update an epoch, so that every epoch's checkpoint shows one update
    flags = f"{data} {QUICK} --lr 1e-2 --epochs 3 --output {tmp_path} --experiment run"
    assert call("train", f"{flags} --model-ema --model-ema-decay 0.5 {more} --val-interval 2").code == 0
    assert ["eval_top1" in record for record in metrics(tmp_path / "run", "epoch")] == [False, True, True]
    files = [tmp_path / "run" / f"checkpoint-{epoch}.pth.tar" for epoch in range(3)]
    name = "head.weight"
    for before, after, decay in zip(files, files[1:], decays, strict=False):
        expected = decay * _weights(before, "state_dict_ema")[name] + (1 - decay) * _weights(after)[name]
        torch.testing.assert_close(_weights(after, "state_dict_ema")[name], expected)


def test_finetune_validates_first_and_reports_resizing(call, trained_run, tmp_path):
    flags = f"{trained_run.data} {QUICK.replace('--img-size 32', '--input-size 3 64 48')} --epochs 1"
    flags += f" --output {tmp_path} --experiment run"
    ended = call("train", flags, "--finetune", trained_run.run / "last.pth.tar").ok()
    assert "pos_embed" in ended.out
    assert torch.load(tmp_path / "run" / "last.pth.tar", weights_only=True)["model_config"]["img_size"] == [64, 48]
    assert ended.out.index("before fine-tuning: top-1") < ended.out.index("epoch 1 [")


def test_fault_24_broken_images_are_named_counted_and_limited(call, data, tmp_path):
    broken = [sorted((data / split / "red").iterdir())[0] for split in ("train", "validation")]
    for image in broken:
        image.write_bytes(image.read_bytes()[:300])
    flags = f"{data} {QUICK} --epochs 1 --output {tmp_path} --experiment"
    ended = call("train", f"{flags} some").ok()
    assert all(image.name in ended.out for image in broken)
    epoch = metrics(tmp_path / "some", "epoch")[0]
    assert (epoch["unreadable_images"], epoch["eval_images"]) == (1, 7)
    assert "1 unreadable images left out" in ended.out
    stopped = call("train", f"{flags} none --max-bad-images 0")
    assert stopped.code == 2 and "--max-bad-images 0" in stopped.err


def test_joining_is_watched_and_rank_0_looks_up_first(call, data, monkeypatch):
    done: list[str] = []

    @contextmanager
    def primary_first() -> Iterator[None]:
        done.append("rank 0")
        yield
        done.append("others")

    monkeypatch.setattr(Watchdog, "start", lambda watchdog: done.append("watched"))
    monkeypatch.setattr(train, "init_world", lambda *args: done.append("joined") or init_world(*args))
    monkeypatch.setattr(train, "primary_first", primary_first)
    monkeypatch.setattr(train, "architecture_of", done.append)
    assert call("train", f"{data} {QUICK} --train-split nowhere").refused("nowhere")
    assert done == ["watched", "joined", "rank 0", "volo_test", "others"]


@pytest.mark.parametrize(
    "spoil", [lambda saved: saved["args"].update(compat=3), lambda saved: saved["args"].update(model_ema=torch.ones(3))]
)
def test_strange_checkpoint_is_one_line(call, trained_run, tmp_path, spoil):
    saved = torch.load(trained_run.run / "last.pth.tar", weights_only=True)
    spoil(saved)
    torch.save(saved, file := tmp_path / "odd.pth.tar")
    ended = call("train", f"{trained_run.data} {QUICK} --epochs 3 --model-ema --output {tmp_path} --resume {file}")
    assert ended.refused(str(file)), ended


def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    flags = f"{QUICK} --data-backend synthetic --epochs 1 --output {tmp_path}"
    command = f"{sys.executable} {ROOT / 'train.py'} {flags} | head -n 1"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=LIMIT)
    assert len(ended.stdout.splitlines()) == 1 and "Traceback" not in ended.stderr


def test_the_published_command_of_d5_at_512(call, make_dataset, make_labels, tmp_path):
    """Its label size is not that of the tokens, and its weights are a folder; a dry run leaves no directory."""
    data, weights = make_dataset(), tmp_path / "weights"
    weights.mkdir()
    labels = f"--token-label --token-label-data {make_labels(data)} --token-label-size 3"
    flags = f"{data} {QUICK} --img-size 64 --output {tmp_path} --dry-run {labels} --finetune {weights}/"
    torch.save(timm.create_model("volo_test", img_size=32, num_classes=4).state_dict(), weights / "d5.pth.tar")
    ended = call("train", flags).ok()
    assert "warning: --token-label-size 3 is not used: at 64 x 64 px each of the 4 x 4 tokens gets" in ended.out
    assert f"{weights / 'd5.pth.tar'}" in ended.out and not [*tmp_path.glob("*volo_test*")]
