"""What a run begins as: the table of `--resume`, `--experiment` and `--branch` over what lies there."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from tlt.errors import UserError
from volo.checkpoint.start import Asked, Start, asked_by, decide_start
from volo.config.settings_train import FITTED, TrainSettings
from volo.config.train import TRAIN
from volo.record.records import RunRecords
from volo.record.run_directory import newest_alike

HELD = "already holds checkpoints: continue it with --resume auto, or name another --experiment"
TRUNK = "trunk/args.yaml trunk/milestone-2 trunk/last"
BRANCH = "--branch trunk/milestone-2"
AGAIN = "--again x"  # the launcher has started it before, and run.json is of that start


@pytest.mark.parametrize(
    ("flags", "there", "becomes"),
    [
        ("", "", "NEW new"),
        ("", TRUNK, "NEW new"),
        ("--experiment mine", "", "NEW mine"),
        ("--experiment mine", "mine/log.txt", "NEW mine"),
        ("--experiment mine", "mine/last", HELD),
        ("--resume auto", "", "NEW new"),
        ("--resume auto", TRUNK, "NEW new"),  # its name is not one of runs without a name
        ("--resume auto", "1-end/args.yaml 1-end/last", "CONTINUE 1-end 1-end/last"),
        ("--resume auto", "1-end/args.yaml 2-end/args.yaml 1-end/last", "NEW 2-end"),
        ("--resume auto", "1-end/args.yaml 1-end/last!", "NEW 1-end"),
        ("--resume auto --experiment mine", "", "NEW mine"),
        ("--resume auto --experiment mine", "mine/last", "CONTINUE mine mine/last"),
        ("--resume auto --experiment mine", "mine/last! mine/checkpoint-3", "CONTINUE mine mine/checkpoint-3"),
        ("--resume auto --experiment mine", "mine/last!", "NEW mine"),
        ("--resume trunk/last", TRUNK, "CONTINUE trunk trunk/last"),
        ("--resume trunk/last", "trunk/last", "BRANCH new trunk/last"),  # not a run's directory
        ("--resume trunk/last", "trunk/args.yaml trunk/last!", "trunk/last.pth.tar is"),
        ("--resume trunk/last", "", "trunk/last.pth.tar: no such checkpoint"),
        ("--resume trunk/last --output elsewhere", TRUNK, "BRANCH new trunk/last"),
        ("--resume trunk/last --experiment trunk", TRUNK, "CONTINUE trunk trunk/last"),
        ("--resume trunk/last --experiment trunk", "trunk/last", HELD),
        ("--resume trunk/last --experiment mine", TRUNK, "BRANCH mine trunk/last"),
        ("--resume trunk/last --experiment mine", f"{TRUNK} mine/last", HELD),
        ("--resume trunk/milestone-2", TRUNK, "BRANCH new trunk/milestone-2"),
        ("--resume trunk/milestone-2 --experiment trunk", TRUNK, "CONTINUE trunk trunk/milestone-2"),
        ("--resume trunk/milestone-2 --experiment mine", TRUNK, "BRANCH mine trunk/milestone-2"),
        (BRANCH, TRUNK, "BRANCH new trunk/milestone-2"),
        (f"{BRANCH} --experiment mine", TRUNK, "BRANCH mine trunk/milestone-2"),
        (f"{BRANCH} --experiment mine", f"{TRUNK} mine/last", HELD),
        (f"{BRANCH} --experiment trunk", TRUNK, "trunk itself: name another --experiment for the branch"),
        (f"{BRANCH} --resume auto", TRUNK, "BRANCH new trunk/milestone-2"),
        (f"{BRANCH} --resume auto --experiment mine", TRUNK, "BRANCH mine trunk/milestone-2"),
        (f"{BRANCH} --resume auto --experiment mine", f"{TRUNK} mine/last", "CONTINUE mine mine/last"),
        (f"{BRANCH} --resume auto --experiment mine", f"{TRUNK} mine/last!", "BRANCH mine trunk/milestone-2"),
        (f"{BRANCH} --resume auto --experiment trunk", TRUNK, "trunk itself: name another --experiment"),
        (AGAIN, "", "NEW new"),
        (AGAIN, "1-end/run.json", "NEW 1-end"),
        (AGAIN, "1-end/run.json 1-end/last", "RESTARTED 1-end 1-end/last"),
        (f"{AGAIN} --experiment mine", "mine/run.json mine/last", "RESTARTED mine mine/last"),
        (f"{AGAIN} --experiment mine", "1-end/run.json 1-end/last", "NEW mine"),
        (f"{AGAIN} --experiment mine", "mine/last", HELD),
        (f"{AGAIN} --resume auto --experiment mine", "mine/run.json mine/last!", "NEW mine"),
        (f"{AGAIN} --resume trunk/milestone-2", f"{TRUNK} 1-end/run.json 1-end/last", "RESTARTED 1-end 1-end/last"),
        (f"{AGAIN} --resume trunk/milestone-2", f"{TRUNK} 1-end/run.json", "BRANCH 1-end trunk/milestone-2"),
        (f"{AGAIN} --resume trunk/model_best --output o", f"{TRUNK} trunk/run.json", "RESTARTED trunk trunk/last"),
        (f"{AGAIN} --resume trunk/milestone-2 --output o", f"{TRUNK} trunk/run.json", "BRANCH new trunk/milestone-2"),
        (f"{AGAIN} --resume trunk/model_best", f"{TRUNK} trunk/run.json", "RESTARTED trunk trunk/last"),
        (f"{AGAIN} {BRANCH} --experiment mine", f"{TRUNK} mine/run.json", "BRANCH mine trunk/milestone-2"),
        (f"{AGAIN} {BRANCH} --experiment mine", f"{TRUNK} mine/run.json mine/last", "RESTARTED mine mine/last"),
    ],
)  # fmt: skip
def test_what_a_run_begins_as(tmp_path, monkeypatch, flags, there, becomes):
    monkeypatch.chdir(tmp_path)
    for update, name in enumerate(there.split()):
        write(Path(name), update)
    words = shlex.split(flags)
    given = {"output": ".", **dict(zip([word[2:] for word in words[::2]], words[1::2], strict=True))}
    if given.pop("again", ""):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this launch")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for flag in ("branch", "resume"):
        if "/" in given.get(flag, ""):
            given[flag] += ".pth.tar"
    before = {*tmp_path.rglob("*")}
    asked = Asked(**given, name_end="-end")
    if becomes[0].isupper():
        looked = decide_start(asked, print, None)  # --dry-run
        assert {*tmp_path.rglob("*")} == before
        held: list[Path] = []
        start = decide_start(asked, print, held.append)
        assert shown(start) == shown(looked) == becomes
        looked_at = start.directory.resolve() in before and (start.file is not None or "auto" in flags)
        assert held == [start.directory] * looked_at
    else:
        with pytest.raises(UserError, match=becomes):
            decide_start(asked, print, None)


def write(path: Path, update: int) -> None:
    """One of the files that lie there; a checkpoint is whole unless its name ends in "!"."""
    path.parent.mkdir(exist_ok=True)
    if path.name == "run.json":
        path.write_text(json.dumps([{"launch": "this launch"}]))
    elif "." in path.name:
        path.write_text("{}")
    else:
        file = path.with_name(f"{path.name.removesuffix('!')}.pth.tar")
        torch.save({"epoch": update, "update": update, "state_dict": {"weight": torch.ones(1)}}, file)
        if path.name.endswith("!"):
            file.write_bytes(file.read_bytes()[:100])


def shown(start: Start) -> str:
    words = [start.kind.name, "new" if start.directory.name.startswith("20") else start.directory.name]
    return " ".join(words + ([str(start.file).removesuffix(".pth.tar")] if start.file else []))


LABELS = "--token-label --token-label-data l"


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ("", "", True),
        ("-b 8 --lr 0.1", "-b 8 --lr 0.1", True),
        ("", "-b 8 --warmup-epochs 8 --num-classes 2", True),  # as it was fitted
        ("", "-b 4", False),
        ("-b 8", "", False),  # another command, which may come to another batch
        ("--cooldown-epochs 0", "--cooldown-epochs 1", False),
        ("--epochs 300", "", True),
        ("", "--epochs 40", False),
        ("--train-img-sizes 16 32", "--train-img-sizes 24 32", False),
        ("", "--kd-model-name hf-hub:somebody/model", False),
        ("--branch trunk/milestone-8.pth.tar", "--branch trunk/milestone-16.pth.tar", False),
        (f"{LABELS} --val-label-data v", f"{LABELS} --val-label-data moved --val-img-size 64", True),
    ],
)
def test_an_experiment_is_what_was_asked_for(tmp_path, before, now, same):
    def asked(flags: str) -> TrainSettings:
        line = f"/data --model resnet10t --img-size 32 --output {tmp_path} --resume auto {flags}"
        return TRAIN.parse(line.split())

    begun, run = asked(before), tmp_path / "20260101-000000-resnet10t-32"
    decided = {"batch_size": 8, "num_classes": 2, "lr_base_scale": "sqrt", "warmup_epochs": 8, "cooldown_epochs": 0}
    fitted = {name: value for name, value in decided.items() if name in FITTED and not begun.set_by_user(name)}
    RunRecords(run).record_start(begun.decide("data", **fitted).decide("checkpoint", grad_accum_steps=4), 2, "cpu")
    reported: list[str] = []
    wanted = asked_by(asked(now), (32, 32))
    newest = newest_alike(wanted.root, wanted.name_end, wanted.settings, wanted.defaulted, reported.append)
    assert (newest == run) == same == (not reported)
