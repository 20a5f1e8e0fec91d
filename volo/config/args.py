"""The command line of train.py: it is parsed over a recipe and checked before anything starts.

Reading order: `flag_table` (what a flag is), `flags_train` and `flags_data` (the flags), `recipes`,
`flag_rules` (contradictions), this file. The other programs' flags stand in `flags_eval` and `flags_tools`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from tlt.errors import UserError
from volo.config.flag_rules import check_train, join_data_dir
from volo.config.flag_table import Flag, Program
from volo.config.flags_data import AUGMENTED, TOKEN_LABELS
from volo.config.flags_train import FITTED, TRAIN_GROUPS
from volo.config.recipes import load_yaml

TRAIN = Program(
    "train",
    "[-c RECIPE.yaml] DATA_DIR [flags]",
    "Train VOLO, LV-ViT or any timm model, with or without token labels.",
    TRAIN_GROUPS,
    undo=True,
)


class TrainArgs(Namespace):
    """The arguments of train.py, one attribute per flag.

    Attributes:
        notes: Lines that rank 0 prints once.
        defaulted: The flags of `FITTED` that neither command line nor recipe has; no setting of the run, so that it is
            not among `vars`.
    """

    __slots__ = ("defaulted",)
    defaulted: tuple[str, ...]


class FrozenArgs(TrainArgs):
    """Arguments that can't be changed any more.

    Args:
        args: The arguments from command line and recipe.
        decided: Values that replace them, for example from a checkpoint.
    """

    def __init__(self, args: TrainArgs, **decided: Any) -> None:
        object.__setattr__(self, "defaulted", args.defaulted)
        self.__dict__.update(vars(args), **decided)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"--{name.replace('_', '-')} is decided before the run is built")


def parse_train(argv: Sequence[str] | None = None) -> TrainArgs:
    """Parse train.py's command line (sys.argv where None) over its recipe (`-c`).

    Raises:
        UserError: An unknown flag or key, a wrong value, a contradiction, or a flag that would have no effect.
    """
    parser = TRAIN.parser()
    given = parser.explicit(argv)
    recipe = load_yaml(given["config"], parser) if given.get("config") else {}
    args = TrainArgs(**(parser.defaults() | _not_overruled(recipe, given, parser.flags) | given))
    args.defaulted = tuple(dest for dest in FITTED if dest not in recipe | given)
    join_data_dir(args, "DATA_DIR", "data_dir")
    args.notes = check_train(args, parser.flags)
    if given.get("uncovered", args.uncovered) != args.uncovered:
        raise UserError(f"--uncovered {given['uncovered']} contradicts --compat uncovered: keep one of them")
    return args


def _not_overruled(recipe: Mapping[str, Any], given: Mapping[str, Any], flags: Mapping[str, Flag]) -> dict[str, Any]:
    """Return the recipe without the values that the command line overrules."""
    chosen = {dest for dest, value in given.items() if value is not False and value != ""}
    void = {other for dest in chosen for other in flags[dest].excludes}
    void |= {dest for dest, row in flags.items() if chosen & set(row.excludes)}
    if given.get("token_label") is False:
        void |= {row.dest for row in TOKEN_LABELS.flags}
    if given.get("no_aug"):
        void |= {dest for dest, row in flags.items() if AUGMENTED in row.needs}
    if {"img_size", "input_size"} & given.keys() and recipe.get("token_label_size") != 1:
        void.add("token_label_size")  # it belongs to the recipe's image size
    return {dest: value for dest, value in recipe.items() if dest not in void}
