"""Token labels on timm's models, as a user runs the programs, and what plain timm makes of the checkpoints."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import timm
import torch
from timm.utils import ModelEmaV3

from tests.commands.conftest import QUICK, ROOT, metrics, same_weights
from tlt.data.batch import IndexStream
from tlt.errors import UserError
from tlt.labels.store import open_labels
from tlt.mix import Mixup
from volo.cluster.distributed import World
from volo.commands.run_start import check_smallest_batch
from volo.config.train import TRAIN
from volo.train.loop import evaluate
from volo.train.precision import Precision

SMALL = QUICK.replace("--model volo_test --img-size 32", "--img-size 64")
SWIN = {"window_size": 2, "embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
MODELS: dict[str, dict[str, Any]] = {
    "test_vit": {},
    "test_convnext": {},
    "swin_tiny_patch4_window7_224": {**SWIN, "img_size": 64},  # in place of --img-size
}


def load(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", MODELS)
def test_trains_and_is_plain_timm_afterwards(call, data, labels, tmp_path, name):
    run, results = tmp_path / "run", tmp_path / "results.json"
    more = [f"{key}={value}".replace(" ", "") for key, value in MODELS[name].items()]
    small = SMALL.replace("--img-size 64", "" if "img_size" in MODELS[name] else "--img-size 64")
    flags = f"{data} {small} --epochs 2 --lr 1e-3 --token-label --model {name} --output {tmp_path} --experiment run"
    ended = call("train", flags, "--token-label-data", labels, "--model-ema", "--model-kwargs", *more).ok()
    records = metrics(run)
    assert all(r["loss"] == pytest.approx(r["cls_loss"] + 0.5 * r["dense_loss"], rel=1e-6) for r in records)
    assert all(r["dense_loss"] > 0 for r in records)
    kwargs = {"num_classes": 4, **MODELS[name], **({"img_size": 64} if "vit" in name else {})}
    for entry in ("state_dict", "state_dict_ema"):
        model = timm.create_model(name, **kwargs)
        model.load_state_dict(load(run / "last.pth.tar")[entry], strict=True)
    averaged = timm.create_model(name, **kwargs, checkpoint_path=str(run / "last.pth.tar"))  # timm takes the average
    assert all(torch.equal(v, averaged.state_dict()[n]) for n, v in model.state_dict().items())
    trained = metrics(run, "epoch")[-1]
    for ema in ("--no-use-ema", ""):
        ended = call("validate", f"{data} -b 4 -j 0 --results-format json {ema} --results-file", results,
                     "--checkpoint", run / "last.pth.tar")  # fmt: skip
        assert ended.code == 0, ended.err
        row = json.loads(results.read_text())[0]
        results.unlink()
        assert row["loss"] == pytest.approx(trained["eval_loss" if ema else "eval_loss_ema"], rel=1e-4)


class OneBatch(list[Any]):
    dataset, left_out = range(2), 0


def test_average_is_evaluated_with_its_present_weights():
    """This model keeps what it makes of its weights from one evaluation to the next."""
    torch.manual_seed(0)
    model = timm.create_model("levit_128s", num_classes=2, drop_path_rate=0.0)
    average, batch = ModelEmaV3(model, decay=0.5), SimpleNamespace(images=torch.randn(2, 3, 224, 224), size=2)
    batch.classes = batch.indices = torch.tensor([0, 1])
    cpu = torch.device("cpu")
    for _ in range(2):
        loss = evaluate(average.module, cast(Any, OneBatch([batch])), Precision(cpu), World(0, 0, 1, cpu)).loss
        fresh = timm.create_model("levit_128s", num_classes=2).eval()
        fresh.load_state_dict(average.module.state_dict())
        assert loss == torch.nn.functional.cross_entropy(fresh(batch.images), batch.classes).item()
        for name, weight in model.named_parameters():
            if "attention_biases" in name:
                weight.data.normal_()
        average.update(model)


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [  # nine images
        ("--model test_resnet --img-size 32 -b 4", "--drop-last"),
        ("--model test_resnet --img-size 32 -b 2 --grad-accum-steps 2", "--drop-last"),
        ("--model test_resnet --img-size 32 -b 1", "-b 2"),
        ("--model levit_128s --img-size 224 -b 8", "--drop-last"),  # of one value at any size
        ("--model test_resnet --img-size 32 -b 4 --aug-repeats 3", "--drop-last"),
        ("--model test_resnet --img-size 32 -b 4 --val-fraction 0.3", "--drop-last"),  # of five
        ("--model test_resnet --img-size 32 --no-drop-last", "--drop-last"),
        ("--model test_resnet --img-size 32", ""),  # in twos
        ("--model test_resnet --img-size 64 -b 4", ""),
        ("--model test_resnet --img-size 32 -b 4 --freeze-bn", ""),
        ("--model test_resnet --img-size 32 -b 4 --drop-last", ""),
    ],
)
def test_fault_52_batch_of_one_trains_or_is_refused_first(call, make_dataset, tmp_path, flags, remedy):
    data = make_dataset(train=9, validation=0 if "--val-fraction" in flags else 8)
    quick = f"{data} -j 0 --epochs 1 --output {tmp_path} --dry-run"
    ended = call("train", f"{quick} {flags}")
    assert ended.refused(remedy) and "BatchNorm" in ended.err if remedy else ended.code == 0, ended


def test_fault_52_synchronised_ranks_may_have_one_image():
    model, stream = timm.create_model("test_resnet"), IndexStream(10, 4, seed=0, world_size=2)  # two each, then one
    args = TRAIN.parse(["data", "--model", "test_resnet", "--img-size", "32", "--sync-bn"])
    check_smallest_batch(args, model, (3, 32, 32), stream)
    with pytest.raises(UserError, match="BatchNorm"):
        check_smallest_batch(args.decide("command line", sync_bn=False), model, (3, 32, 32), stream)


def test_checkpoint_annotates_with_its_dense_head_only(call, data, labels, tmp_path):
    flags = f"{data} {SMALL} --epochs 2 --model test_vit --token-label --token-label-data {labels} --output {tmp_path}"
    assert call("train", flags, "--experiment", "run").code == 0
    whole, cut, out = tmp_path / "run" / "last.pth.tar", tmp_path / "cut.pth.tar", tmp_path / "out"
    assert call("label", f"{data} {out} --checkpoint {whole} -b8 -j0 --top-k=4").code == 0
    assert open_labels(out, ["red/red3.jpg"]).read(0).shape == (4, 4, 4)
    checkpoint = load(whole)
    del checkpoint["dense_head"]
    torch.save(checkpoint, cut)
    assert call("label", f"{data} {tmp_path / 'no'} --checkpoint {cut} -b8 -j0").code == 2
    ended = call("train", flags, "--experiment", "again", "--resume", cut)
    assert ended.refused("aux_head.weight is missing from it")
    ended = call("train", flags, "--experiment", "start", "--initial-checkpoint", cut)
    assert ended.code == 0 and "missing 2: aux_head.weight, aux_head.bias (left as initialised)" in ended.out


def test_run_with_every_mix_resumes_to_the_same_bits(call, make_dataset, make_labels, tmp_path, monkeypatch):
    draw, drawn = Mixup.draw, []
    monkeypatch.setattr(Mixup, "draw", lambda *given: drawn.append(1) or draw(*given))
    data = make_dataset(train=15)  # batches of 5
    flags = f"{data} {SMALL} -b 5 --epochs 2 --lr 1e-3 --token-label --token-label-data {make_labels(data)} --cutmix 1"
    flags += " --mixup 0.8 --mixup-mode elem --mixup-off-epoch 1 --model test_vit4 --drop-path 0.2 --model-ema"
    flags += f" --output {tmp_path} --experiment run"
    ended = call("train", flags)
    assert ended.code == 0 and len(metrics(tmp_path / "run")) == 2 * len(drawn) == 6, ended.err
    assert all(r["loss"] == pytest.approx(r["cls_loss"] + 0.5 * r["dense_loss"]) for r in metrics(tmp_path / "run"))
    whole = (tmp_path / "run" / "last.pth.tar").rename(tmp_path / "whole.pth.tar")
    resumed = call("train", f"{flags} --resume", tmp_path / "run" / "checkpoint-0.pth.tar")
    assert resumed.code == 0 and "1 epochs, 3 updates done" in resumed.out, resumed.err
    whole = same_weights(whole, tmp_path / "run" / "last.pth.tar")
    assert not torch.equal(whole["dense_head"]["aux_head.weight"], whole["dense_head_ema"]["aux_head.weight"])
    assert set(whole["dense_head"]) == {"aux_head.weight", "aux_head.bias", "aux_norm.weight", "aux_norm.bias"}


def test_transformers_model_with_two_layer_head_trains(call, make_dataset, tmp_path):
    model = "vit_transformers --model-kwargs patch_size=16 embed_dim=64 depth=1 num_heads=2 representation_size=64"
    small = "--img-size 32 --batch-size 4 --grad-accum-steps 1 --epochs 1 --warmup-epochs 0 --num-classes 4 -j 0"
    flags = f"{make_dataset(train=8)} -c {ROOT}/configs/vit_b16_224.yaml {small} --model {model} --log-interval 1"
    call("train", f"{flags} --no-warmup-prefix --cooldown-epochs 0 --output {tmp_path} --experiment run").ok()
    assert "head.pre_logits.weight" in load(tmp_path / "run" / "last.pth.tar")["state_dict"]
    losses = [record["loss"] for record in metrics(tmp_path / "run")]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
