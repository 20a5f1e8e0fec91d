"""Writes a trained model as a folder for the Hugging Face Hub (`volo export --to-hf`), and uploads it (`volo push`)."""

import json
import shlex
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import timm
import yaml
from timm.models import get_model_traits, save_for_hf

from tlt.errors import UserError, install_command
from tlt.io.files import blamed_on, os_errors_as
from tlt.io.weights import peek_checkpoint
from volo.checkpoint.model_config import class_names
from volo.checkpoint.resume import table
from volo.config.checkpoint_files import ENDINGS
from volo.config.fields import flags_of
from volo.config.settings_tools import PushSettings
from volo.config.settings_train import Checkpoints, Distributed, RunSettings, Tracking
from volo.config.train import changed_flags
from volo.record.goodput import account_of
from volo.record.history import epochs_of, read_records
from volo.train.architecture import architecture_of, is_ours
from volo.train.trained_model import TrainedModel

# Flags about where and on what data a run was trained. The model card must not contain its user's paths.
_PLACES = {name for group in (RunSettings, Checkpoints, Tracking, Distributed) for name in flags_of(group)}
# Except those that decide what is learnt, and which of its epochs is the best.
_PLACES -= {"seed", "stop_epoch", "patience", "eval_metric", "grad_compression"}
_PLACES |= {"model", "workers", "loader_timeout", "pin_mem", "no_prefetcher"}
_IMAGES = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")
# Entries in which timm describes its own weights; they don't apply to these weights.
_OF_OTHERS = (
    *("url", "hf_hub_id", "origin_url", "paper_ids", "paper_name", "notes", "license", "tag", "file", "source"),
    *("test_input_size", "test_crop_pct"),
)


def write_folder(trained: TrainedModel, checkpoint: str, folder: Path, licence: str, origin_url: str) -> str:
    """Write the folder; return a line for the user. Raises UserError if the folder is not empty, or can't be written.

    Args:
        checkpoint: Path of the weights' checkpoint, whose run has accuracy and settings; "" for published weights.
        licence: The Hub's name of the licence (`apache-2.0`); with "" the card says that none is stated.
        origin_url: Address where the model comes from; "" leaves it out.
    """
    name = name_in_timm(trained)
    classes = trained.model.num_classes
    names = class_names(trained.config, classes)
    shown = {key: trained.data_config[key] for key in _IMAGES}
    with blamed_on(checkpoint or None):
        text = card(trained, name, checkpoint, licence, origin_url)
    with os_errors_as(lambda error: f"--to-hf {folder} can't be written: {error.strerror}"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"--to-hf {folder} is not empty: name a new folder")
        described = {"label_names": names} if names else {}
        save_for_hf(trained.model, str(folder), model_config=described, safe_serialization=True)
        config = json.loads((folder / "config.json").read_text())
        config["architecture"] = name
        theirs = {k: v for k, v in config["pretrained_cfg"].items() if k not in _OF_OTHERS}
        config["pretrained_cfg"] = theirs | shown | ({"origin_url": origin_url} if origin_url else {})
        if name != trained.name:  # timm's own model of that name has one fixed image size
            config["model_args"] = {"img_size": trained.data_config["input_size"][1:], "num_classes": classes}
        elif get_model_traits(trained.model).get("img_size") not in (None, tuple(shown["input_size"][1:])):
            config["pretrained_cfg"]["fixed_input_size"] = False  # timm would take the size of `model_args` for images
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "README.md").write_text(text, "utf-8")
    return f"wrote {folder}: {name}, {classes} classes; {needed_import(name) or 'timm alone loads it'}"


def name_in_timm(trained: TrainedModel) -> str:
    """Return the architecture's name: timm's own if its model computes the same, so that timm alone can load it."""
    model = trained.model
    theirs = f"{trained.name}_224"
    kwargs = trained.config.get("kwargs") or trained.request.kwargs
    same = trained.name in {f"volo_d{n}" for n in range(1, 6)} and model.dense_head and not kwargs
    return theirs if same and timm.is_model(theirs) else str(model.pretrained_cfg["architecture"])


def needed_import(name: str) -> str:
    """Return the import that makes the architecture known to timm; "" if timm has it."""
    if not is_ours(name):
        return ""
    return f"import {timm.model_entrypoint(name).__module__.split('.')[0]} first ({install_command()})"


def card(trained: TrainedModel, name: str, checkpoint: str, licence: str, origin_url: str) -> str:
    """Return the model card: a header that the Hub reads, then text for people."""
    head: dict[str, Any] = {"library_name": "timm", "tags": ["image-classification", "timm"]}
    head |= {"license": licence} if licence else {}
    size = " x ".join(map(str, trained.data_config["input_size"][1:]))
    model = architecture_of(trained.name).name  # an architecture's name even if --model names a folder
    lines = [f"# {model}", ""]
    parameters = sum(p.numel() for p in trained.model.parameters())
    lines.append(f"{parameters / 1e6:.1f} M parameters, images of {size} px, {trained.model.num_classes} classes.")
    lines += _accuracy(trained, checkpoint)
    lines += [f"Origin: {origin_url}"] if origin_url else []
    lines += [f"Licence: {licence or 'not stated'}.", "", "```python"]
    needs = needed_import(name)
    lines += [needs.partition(" first")[0]] if needs else []
    lines += ["import timm", "", 'model = timm.create_model("hf-hub:ORG/NAME", pretrained=True).eval()', "```", ""]
    settings = (peek_checkpoint(checkpoint).get("args") or {}) if checkpoint else {}
    if changed := {dest: words for dest, words in changed_flags(settings).items() if dest not in _PLACES}:
        command = shlex.join(["volo", "train", "DATA", "--model", model, *chain(*map(_public, changed.values()))])
        lines += ["## Training", "", "```bash", command, "```", "", *_time(Path(checkpoint).parent)]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n".join(lines) + "\n"


def _time(run: Path) -> list[str]:
    """Return a sentence about where a run's time went; [] if the folder has no records of it."""
    with suppress(UserError):
        account = account_of(read_records(run))
        return [f"{account}.", ""] if account.total else []
    return []


def _public(words: list[str]) -> list[str]:
    """Return a flag and its values, with a placeholder if a value is a path on the user's machine."""
    flag, *values = words
    is_name = [not value.endswith(ENDINGS) and ("/" not in value or value.startswith("hf-hub:")) for value in values]
    if flag == "--token-label-data" or not (all(is_name) or flag == "--dataset"):
        return [flag, "LABELS" if flag == "--token-label-data" else "PATH"]
    return words


def _accuracy(trained: TrainedModel, checkpoint: str) -> list[str]:
    """Return a sentence about the accuracy of the exported weights, which their file tells; their run's records tell
    of how many images. Return [] if the run did not measure exactly these weights on images prepared in this way."""
    if not checkpoint:
        return []
    saved = peek_checkpoint(checkpoint)
    config = trained.config
    suffix = "_ema" if trained.ema else ""
    recorded = {
        "input_size": [config.get("in_chans"), *(config.get("val_img_size") or config.get("img_size", ()))],
        **config,
    }
    as_trained = all(json.dumps(recorded.get(key)) == json.dumps(trained.data_config[key]) for key in _IMAGES)
    epoch = saved.get("epoch")
    is_whole = type(epoch) is int and saved.get("update") == (epoch + 1) * (saved.get("updates_per_epoch") or 0)
    # Records may be of another epoch of this number, which took the place of a file that was set aside.
    top1 = table(table(saved, "scores"), epoch).get(f"top1{suffix}")
    for row in epochs_of(Path(checkpoint).parent) if as_trained and is_whole and top1 is not None else ():
        if row.get("epoch") == epoch:
            which = " (averaged weights)" if suffix else ""
            return [f"Top-1 {top1:.2f} % of {row.get(f'eval_images{suffix}')} validation images{which}."]
    return []


def run(settings: PushSettings) -> int:
    """Upload the folder, or list what would be uploaded. Raises UserError if the folder is not of that kind, or the Hub
    refuses it."""
    folder = Path(settings.folder)
    missing = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    if missing:
        raise UserError(f"--from {folder} has no {missing[0]}: write the folder with volo export --to-hf {folder}")
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"{file.stat().st_size / 1e6:9.1f} MB  {file.relative_to(folder)}")
    if settings.dry_run:
        print(f"--dry-run: nothing was sent to {settings.repository}")
        return 0
    from huggingface_hub import HfApi  # timm depends on it

    with blamed_on(settings.repository, "was not uploaded", "log in (`hf auth login`, HF_TOKEN)"):
        api = HfApi()
        api.create_repo(settings.repository, private=settings.private or None, exist_ok=True)
        done = api.upload_folder(
            repo_id=settings.repository,
            folder_path=folder,
            revision=settings.revision or None,
            commit_message=settings.message,
        )
    print(f"uploaded: {done.commit_url}")
    return 0
