"""Files that are no Python, of the checkout or of the installed package: recipes and batch scripts."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(folder: str) -> Path:
    """Return the folder "configs" or "slurm": at the root of a checkout, in the package where it is installed."""
    installed = _PACKAGE / "files" / folder
    return installed if installed.is_dir() else _PACKAGE.parent / folder


def recipe_file(name: str) -> str:
    """Return the file that `-c` names: a path, or a recipe of this project by its name alone (`volo_d1_224`)."""
    known = shipped("configs") / f"{name}.yaml"
    return str(known) if not Path(name).exists() and Path(name).name == name and known.is_file() else name
