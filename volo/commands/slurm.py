"""Writes the batch scripts for Slurm into a folder, for users who have installed the package without the checkout."""

import shutil
from pathlib import Path

from tlt.errors import UserError
from tlt.io.files import os_errors_as
from volo.config.recipes import shipped
from volo.config.settings_tools import SlurmSettings

_LAUNCHER = """#!/usr/bin/env bash
# Written by `volo slurm`: N DATA [flags of volo train]; the same as `volo launch N DATA ...`.
exec "${PYTHON:-python3}" -m volo launch "$@"
"""


def run(settings: SlurmSettings) -> int:
    """Write scripts and recipes into a new or empty folder. Raises UserError if the folder is not empty, or can't be
    written."""
    folder = Path(settings.directory)
    with os_errors_as(lambda error: f"{folder} can't be written: {error.strerror}"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: name a new folder, or remove what it holds")
        for name in ("slurm", "configs"):
            shutil.copytree(shipped(name), folder / name)
        launcher = folder / "distributed_train.sh"
        launcher.write_text(_LAUNCHER)
        for script in (launcher, *(folder / "slurm").iterdir()):
            script.chmod(0o755)
    print(f"wrote {folder}: edit the #SBATCH lines of slurm/pretrain.sbatch, then, in {folder},")
    print("  DATA=/data/imagenet LABELS=/data/token_labels sbatch -N 2 slurm/pretrain.sbatch --model volo_d1")
    return 0
