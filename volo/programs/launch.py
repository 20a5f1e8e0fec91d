"""torchrun without its traceback: the processes have already said what went wrong, and their exit code is passed on.

    python volo/programs/launch.py [flags of torchrun] train.py [flags]

It is run as a file, so that starting the processes doesn't import the models first.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def launch(argv: list[str]) -> int:
    """Run torchrun with `argv`; return 0, or the exit code of the process that failed first."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        main(argv)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # A process that was killed has its signal as a negative number; shells add 128.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
