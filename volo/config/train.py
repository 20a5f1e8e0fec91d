"""The settings of train.py from a command line over a recipe (`-c`), checked before anything starts, and from records.

A value is decided by the last of these that has one; `Settings.sources` keeps which: the default, the recipe, the
command line, other flags (`rules`), then data and checkpoint (volo/train/run.py), which complete what is left open.

Reading order: `value_types` and `fields` (what a setting is), `settings_train` and the groups that it names, `rules`
(contradictions between settings), `parser`, `recipes`, this file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tlt.errors import UserError
from volo.config.fields import flags_of
from volo.config.flags_timm import TIMM_FLAGS
from volo.config.parser import Program
from volo.config.recipes import convert, load_yaml
from volo.config.rules import check_train, join_data_dir
from volo.config.settings_data import AUGMENTED, TokenLabels
from volo.config.settings_train import STABLE_SCHEDULES, TrainSettings


class _Train(Program[TrainSettings]):
    def parse(self, argv: Sequence[str] | None = None) -> TrainSettings:
        """Parse train.py's command line (`argv`, or sys.argv if None) over its recipe (`-c`). Raises UserError: a flag
        or key is unknown, a value is wrong, flags contradict each other, or one has no effect."""
        return self.over_recipe(self.parser().explicit(argv))

    def over_recipe(self, explicit: dict[str, Any]) -> TrainSettings:
        """Return the settings that `explicit`, the values of a command line, makes over the recipe that it names.
        Raises UserError: as `parse`."""
        recipe = load_yaml(explicit["config"], self.parser()) if explicit.get("config") else {}
        settings = TrainSettings().decide("recipe", **_not_overruled(recipe, explicit))
        settings = settings.decide("command line", **explicit)
        if settings.schedule.sched in STABLE_SCHEDULES and not settings.set_by_user("decay_epochs"):
            settings = settings.decide("other flags", decay_epochs=0.2)
        settings = check_train(join_data_dir(settings, "DATA_DIR", "data_dir"))
        if explicit.get("uncovered", settings.labels.maps.uncovered) != settings.labels.maps.uncovered:
            raise UserError(f"--uncovered {explicit['uncovered']} contradicts --compat uncovered: keep one of them")
        return settings


TRAIN = _Train("train", "[-c RECIPE.yaml] DATA_DIR [flags]", TrainSettings, undo=True, instead=TIMM_FLAGS)


def checked_settings(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of train.py's flags that a checkpoint records, by destination; empty values are left out.
    Raises UserError: a flag doesn't accept its value."""
    parser = TRAIN.parser()
    checked = {}
    for dest, value in recorded.items():
        row = parser.flags[dest]
        try:
            if value is not None and not (isinstance(value, str) and not value):
                checked[dest] = convert(row, value, parser)
        except (UserError, ValueError) as error:  # ValueError: Python doesn't print an int of thousands of digits
            raise UserError(f"{row.label} in the checkpoint: {error}; give {row.label} a value") from error
    return checked


def changed_flags(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return, by destination, the command-line words that set train.py's flags to recorded values; flags at their
    defaults are left out."""
    return {
        dest: row.words(value)
        for dest, row in flags_of(TrainSettings).items()
        if row.label.startswith("--")
        and (value := settings.get(dest)) is not None
        and row.default not in (value, [value])
    }


def _not_overruled(recipe: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe without the values that the command line overrides."""
    flags = flags_of(TrainSettings)
    switched_on = {dest for dest, value in explicit.items() if value is not False and value != ""}
    void = {other for dest in switched_on for other in flags[dest].excludes}
    void |= {dest for dest, row in flags.items() if switched_on & set(row.excludes)}
    if explicit.get("token_label") is False:
        void |= {*flags_of(TokenLabels)}
    if explicit.get("no_aug"):
        void |= {dest for dest, row in flags.items() if AUGMENTED in row.needs}
    if {"img_size", "input_size"} & explicit.keys() and recipe.get("token_label_size") != 1:
        void.add("token_label_size")  # the recipe's value belongs to the recipe's image size
    return {dest: value for dest, value in recipe.items() if dest not in void}
