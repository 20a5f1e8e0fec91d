"""train.py, stopped after a save at given updates: `python interrupted_train.py 3,7 FLAGS`.

The save is the one that a signal leads to. Update numbers that end an epoch stop in its validation.
"""

import sys
from typing import Any

from volo import cli
from volo.checkpoint.saver import Saver
from volo.train import loop as program


def stop_at(updates: set[int]) -> None:
    """From now on, leave `train` after each of these updates, saved, as after Ctrl-C."""
    validate, savers = program.validate_epoch, []
    enter = Saver.__enter__

    def entered(saver: Saver) -> Saver:
        savers.append(saver)
        return enter(saver)

    def stop_if_asked(saver: Saver) -> None:
        if saver.state.update in updates:
            updates.discard(saver.state.update)
            saver.save_now("test")
            raise KeyboardInterrupt

    def stop_before_validation(*args: Any) -> Any:
        stop_if_asked(savers[-1])
        return validate(*args)

    Saver.__enter__ = entered  # type: ignore[method-assign]
    Saver.after_update = stop_if_asked  # type: ignore[method-assign]
    program.validate_epoch = stop_before_validation


if __name__ == "__main__":
    stop_at({int(number) for number in sys.argv[1].split(",")})
    sys.exit(cli.run("train", sys.argv[2:]))
