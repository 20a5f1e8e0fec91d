"""Repeat a step whose gradients were not finite, and report where the first such value appears.

    python -m volo.commands.replay RUN/nonfinite/UPDATE-rankR.json [--checkpoint FILE] [--device NAME]

The weights are those that the record names, else those of the newest checkpoint in RUN up to that update. Batch,
augmentation and dropout are those of the step. The exit code is 3 if a value is not finite again, 0 if all are finite.
"""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.io.weights import peek_checkpoint
from volo.checkpoint.finetune import load_weights
from volo.cluster.distributed import World, choose_device
from volo.commands.console import run_program
from volo.commands.train import criterion_of_epoch
from volo.train.convolutions import check_convolutions
from volo.train.criterion import StepKey, make_criterion
from volo.train.data import open_folders, open_labels, train_loader
from volo.train.loop import set_train_mode
from volo.train.model import add_dense_head, build_model, eval_settings, freeze_backbone, prepare_model
from volo.train.nonfinite import FOLDER
from volo.train.precision import WorkingCopy, compute_dtype


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line (sys.argv where None)."""
    parser = argparse.ArgumentParser(prog="python -m volo.commands.replay", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("record", type=Path, help=f"RUN/{FOLDER}/UPDATE-rankR.json")
    parser.add_argument("--checkpoint", type=Path, help="weights (the record's, else RUN's newest before the update)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (the record's kind)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser.parse_args(argv)


def run(options: Namespace) -> int:
    """Replay the step; return 3 if a value is not finite, else 0."""
    record = read_record(options.record)
    weights, update = find_weights(options, record)
    where = f"update {record['update']}, rank {record['rank']} of {record['world_size']}, lr {record['lr']:.3e}"
    print(f"{where}; weights of update {update}, {weights}")
    if update != record["update"]:
        print(f"these weights are not those of the step: {record['update'] - update} updates lie between")
    found = replay(record, weights, options.device or record["device"])
    for line in found or ["all values are finite"]:
        print(line)
    return 3 if found else 0


def read_record(path: Path) -> dict[str, Any]:
    """Read a record of `volo.train.nonfinite`. Raises UserError for any other file."""
    try:
        record = json.loads(path.read_text())
        return {name: record[name] for name in (*_NEEDED, "weights", "loss_scale")}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no record of a non-finite step ({error})") from error


_NEEDED = ("update", "epoch", "update_in_epoch", "rank", "world_size", "seed", "lr", "device", "args", "micro_batches")


def find_weights(options: Namespace, record: dict[str, Any]) -> tuple[Path, int]:
    """Return the checkpoint to replay with, and the update at which it was written."""
    if options.checkpoint is not None:
        return options.checkpoint, int(peek_checkpoint(options.checkpoint).get("update", 0))
    if record["weights"] is not None:
        return options.record.parent / record["weights"], record["update"]
    found = []
    for path in options.record.parent.parent.glob("*.pth.tar"):
        update = int(peek_checkpoint(path).get("update", 0))
        if update <= record["update"]:
            found.append((update, path))
    if not found:
        raise UserError(f"{options.record.parent.parent} holds no checkpoint before that update: give one --checkpoint")
    update, path = max(found)
    return path, update


def replay(record: dict[str, Any], weights: Path, device: str) -> list[str]:
    """Run forward and backward passes of all micro-batches of the step; return what was not finite, in order."""
    args = Namespace(**record["args"])
    args.workers, args.worker_type = 0, None
    world = World(record["rank"], 0, record["world_size"], choose_device(device, 0))
    folders = open_folders(args, world.size)
    model = build_model(args)
    settings = eval_settings(args, model)
    model = add_dense_head(model, args, settings["input_size"][1:])
    labels, _ = open_labels(args, folders.train, model.num_classes)
    criterion = criterion_of_epoch(make_criterion(args, model, settings["input_size"][1:]), args, record["epoch"])
    model = prepare_model(model, args, World(0, 0, 1, world.device))
    if args.freeze:
        freeze_backbone(model)
    load_weights(model, weights, use_ema=False)
    dtype = compute_dtype(args, world.device)
    check_convolutions(model, settings["input_size"], dtype, world.device)  # as the run did, which printed the result
    if getattr(args, "model_dtype", "float32") == "bfloat16":
        model = WorkingCopy(model).module
    set_train_mode(model, args.freeze_bn or args.freeze)
    loader = train_loader(args, folders.train, labels, settings, world)
    found: list[str] = []
    watch(model, found)
    batches = loader.epoch(record["epoch"], record["update_in_epoch"])
    for number in range(len(record["micro_batches"])):
        _, images, batch = next(batches)
        step = StepKey(record["seed"], record["update"], number, record["rank"])
        step.seed_torch()
        check(batch.images, f"micro-batch {number}: its images", found)
        targets, mixed = criterion.targets(batch), criterion.draw(batch, step)
        with torch.autocast(world.device.type, dtype=dtype, enabled=dtype is not None):
            terms = criterion(model(mixed.images, **criterion.arguments(mixed)), targets, mixed)
        for name, term in zip(("loss", "class loss", "dense loss"), terms, strict=True):
            check(term, f"forward: {name} {float(term):g} of images {record['micro_batches'][number]['paths']}", found)
        (terms.total * (batch.size / images) * (record["loss_scale"] or 1.0)).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            check(parameter.grad, f"gradient of {name}", found)
    return found


def watch(model: nn.Module, found: list[str]) -> None:
    """Add a line to `found` for each output of a module, and each gradient at one, that is not finite."""

    def hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in output if isinstance(output, (tuple, list)) else (output,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    check(tensor, f"forward: output of {name}", found)
                    if tensor.requires_grad:
                        tensor.register_hook(lambda grad: check(grad, f"backward: gradient at {name}", found))

        return look

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name or "the model"))


def check(tensor: Tensor, what: str, found: list[str]) -> None:
    """Add a line if `tensor` holds NaN or infinity."""
    broken = int((~torch.isfinite(tensor.detach())).sum())
    if broken:
        found.append(f"{what}: {broken} of {tensor.numel()} values are not finite")


if __name__ == "__main__":
    sys.exit(run_program(parse, "volo.commands.replay"))
