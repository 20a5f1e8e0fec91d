"""Models from and for the Hugging Face Hub: folders that describe them, and uploading."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from typing import Any

import pytest
import timm
import torch
import yaml

from tests.commands.conftest import QUICK
from tests.conftest import LIMIT
from volo.config.train import TRAIN
from volo.train.model import build_named_model

# Folders are loaded where neither package is there.
LOAD = """
import sys
sys.modules["volo"] = sys.modules["tlt"] = None
import timm, torch
for folder in sys.argv[1:]:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    x = torch.randn(2, *model.pretrained_cfg["input_size"], generator=torch.Generator().manual_seed(0))
    loaded = {"weights": model.state_dict(), "logits": model(x).detach(), "cfg": dict(model.pretrained_cfg)}
    torch.save(loaded, f"{folder}.pt")
"""


def test_model_of_a_folder_trains_resumes_and_validates(call, make_dataset, tmp_path):
    folder, data = tmp_path / "described", make_dataset()
    torch.manual_seed(0)
    start = timm.create_model("test_resnet", num_classes=4, global_pool="max")
    timm.models.save_for_hf(start, folder, safe_serialization=True)
    flags = QUICK.replace("volo_test", f"local-dir:{folder}")
    line = f"{data} {flags} --pretrained --lr 0 --min-lr 0 --output {tmp_path} --experiment run"
    call("train", f"{line} --epochs 1").ok()
    checkpoint = tmp_path / "run" / "last.pth.tar"
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["model_config"]["name"] == saved["arch"] == "test_resnet"
    assert torch.equal(saved["state_dict"]["fc.weight"], start.state_dict()["fc.weight"])
    assert call("train", f"{line.replace('--pretrained', '')} --epochs 2 --resume auto").code == 0

    assert call("export", f"--checkpoint {checkpoint} --to-hf {tmp_path / 'hub'}").code == 0
    image = next((data / "validation" / "blue").iterdir())
    ended = call("predict", f"--model local-dir:{tmp_path / 'hub'} --pretrained -j 0", image)
    assert ended.code == 0 and "blue" in ended.out.split("probability")[1].replace(str(image), ""), ended.err

    (folder / "config.json").rename(tmp_path / "moved.json")  # a checkpoint stands for itself
    measured = call("validate", f"{data} --checkpoint {checkpoint} -j 0")
    assert measured.code == 0 and "over 8 images" in measured.out, measured.err
    gone = flags.replace(str(folder), str(tmp_path / "gone"))
    refused = call("train", f"{data} {gone} --epochs 1 --output {tmp_path} --experiment other")
    assert refused.code == 2 and "local-dir:" in refused.err and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("ours", "rows"),
    [(["c", "a", "b"], [2, 0, 1]), (["0", "1", "2"], [0, 1, 2]), (["c", "a", "q", "r"], [2, 0, None, None])],
)
def test_folder_with_class_names_gives_rows(tmp_path, ours, rows):
    start = timm.create_model("test_resnet", num_classes=3)
    described = {"label_names": ["a", "b", "c"]}
    timm.models.save_for_hf(start, tmp_path, safe_serialization=True, model_config=described)
    flags = ["DATA", "--model", f"local-dir:{tmp_path}", "--pretrained", "--num-classes", str(len(ours))]
    model, notes = build_named_model(TRAIN.parse(flags), ours)
    where = [[row for row in range(3) if torch.equal(each, start.fc.weight[row])] for each in model.fc.weight]
    assert where == [[] if row is None else [row] for row in rows] and len(notes) == (ours[0] != "0")


def test_a_folder_for_the_hub_is_loaded_by_timm_alone(call, described, tmp_path):
    sizes, models = {"volo_d1": (3, 64, 64), "test_resnet": (3, 160, 160)}, {}
    for name, size in sizes.items():
        image = {"img_size": [*size[1:]], "in_chans": 3} if name == "volo_d1" else {}
        models[name], checkpoint = described(name, **image)
        line = f"--checkpoint {checkpoint} --to-hf {tmp_path / f'hub-{name}'} --licence apache-2.0"
        ended = call("export", f"{line} --origin-url https://example.org/mine")
        assert ended.code == 0 and "timm alone loads it" in ended.out, ended.err
        assert call("export", line).refused("not empty")
    command = [sys.executable, "-c", LOAD, *(str(tmp_path / f"hub-{name}") for name in sizes)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    for name, size in sizes.items():
        folder, saved = tmp_path / f"hub-{name}", models[name].state_dict()
        loaded = torch.load(tmp_path / f"hub-{name}.pt", weights_only=False)
        assert loaded["weights"].keys() <= saved.keys()
        assert all(torch.equal(weight, saved[key]) for key, weight in loaded["weights"].items())
        assert loaded["cfg"]["label_names"] == list("abcdef") and loaded["cfg"]["classifier"]
        assert "paper_ids" not in json.loads((folder / "config.json").read_text())["pretrained_cfg"]
        assert tuple(loaded["cfg"]["input_size"]) == size and not loaded["cfg"].get("test_input_size")
        x = torch.randn(2, *size, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(loaded["logits"], models[name](x).detach(), atol=1e-5, rtol=1e-5)
        text = (folder / "README.md").read_text()
        assert yaml.safe_load(text.split("---")[1])["license"] == "apache-2.0" and "https://example.org/mine" in text


def test_card_has_settings_and_exported_accuracy(call, trained_run, tmp_path):
    run, numbers = shutil.copytree(trained_run.run, tmp_path / "run"), itertools.count()
    file = run / "metrics.jsonl"
    saved = torch.load(run / "last.pth.tar", weights_only=True)
    saved["scores"][saved["epoch"]] |= {"top1": 12.5, "top1_ema": 62.5}  # two numbers, whatever was learned
    saved["args"] |= {"token_label": True, "token_label_data": str(tmp_path), "smoothing": 0.0}
    torch.save(saved, run / "last.pth.tar")
    taught = saved["args"] | {"token_label_teacher": f"local-dir:{tmp_path}", "finetune": str(run / "last.pth.tar")}
    torch.save(saved | {"update": saved["update"] + 1, "args": taught}, run / "later.pth.tar")

    def card(more: str, checkpoint: str = "last.pth.tar") -> str:
        folder = tmp_path / f"hub{next(numbers)}"
        call("export", f"--checkpoint {run / checkpoint} {more} --to-hf", folder).ok()
        for file in ("README.md", "config.json"):
            assert str(tmp_path) not in (folder / file).read_text()
        return (folder / "README.md").read_text()

    average, plain = "Top-1 62.50 % of 8 validation images (averaged weights).", "Top-1 12.50 % of 8 validation images."
    text = card("")
    assert average in text and "12.50" not in text
    assert re.search(r"^\d+ % of [\d.]+ s trained\.$", text, re.M)
    assert "volo train DATA --model volo_test" in text and "--token-label --token-label-data LABELS" in text
    assert "--smoothing 0.0" in text and "False" not in text
    # The command trains as the run did: its settings are all told, also those that the data decided.
    words = shlex.split(text.split("```bash\n")[1].split("\n```")[0])
    again = TRAIN.parse(words[2:])
    where = {"output", "experiment", "log_interval", "checkpoint_hist", "workers", "data_dir", "token_label_data"}
    assert {k for k, v in again.values().items() if k in saved["args"] and v != saved["args"][k]} <= where
    assert "--img-size 32" in text and "--warmup-epochs 0" in text and str(run) not in text
    assert average in card("--use-ema")
    assert plain in card("--no-use-ema") and "62.50" not in card("--no-use-ema")
    for more in ("--img-size 64", "--crop-pct 0.5", "--mean 0.5"):
        assert "Top-1" not in card(more)
    assert "Top-1" not in card("", "later.pth.tar")  # saved within the next epoch
    # Another epoch of that number is recorded now.
    records = [json.loads(line) | {"eval_top1_ema": 99.0} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    shutil.copy(run / "last.pth.tar", run / "superseded-last.pth.tar")
    assert average in card("--use-ema", "superseded-last.pth.tar")
    del saved["scores"][saved["epoch"]]["top1_ema"]
    torch.save(saved, run / "last.pth.tar")
    assert "Top-1" not in card("--use-ema")


def test_what_timm_lacks_is_told(call, tmp_path):
    torch.manual_seed(0)
    weights = tmp_path / "weights.pth"
    torch.save(timm.create_model("lvvit_test").state_dict(), weights)
    ended = call("export", f"--model lvvit_test --checkpoint {weights} --to-hf {tmp_path / 'hub'}")
    assert ended.code == 0 and "import tlt first" in ended.out, ended.err
    assert "import tlt\nimport timm" in (tmp_path / "hub" / "README.md").read_text()
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["architecture"] == "lvvit_test"
    again = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True)
    assert torch.equal(again.head.weight, torch.load(weights, weights_only=True)["head.weight"])


def test_push_uploads_the_folder_or_lists_it(call, tmp_path, monkeypatch):
    import huggingface_hub

    done: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def create_repo(self, name: str, **more: Any) -> None:
            done.append((name, more))
            if name == "nobody/x":
                raise OSError("401 Client Error")

        def upload_folder(self, **more: Any) -> Namespace:
            done.append(("upload", more))
            return Namespace(commit_url="https://hub/commit/1")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    folder = tmp_path / "hub"
    refused = call("push", f"me/model --from {folder}")
    assert refused.code == 2 and "--to-hf" in refused.err
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    listed = call("push", f"me/model --from {folder} --dry-run")
    assert listed.code == 0 and "model.safetensors" in listed.out and not done
    ended = call("push", f"me/model --from {folder} --private --revision next")
    assert ended.code == 0 and "https://hub/commit/1" in ended.out
    assert done[0] == ("me/model", {"private": True, "exist_ok": True})
    assert done[1][1]["repo_id"] == "me/model" and done[1][1]["revision"] == "next"
    failed = call("push", f"nobody/x --from {folder}")
    assert failed.code == 2 and "401 Client Error" in failed.err and "HF_TOKEN" in failed.err
