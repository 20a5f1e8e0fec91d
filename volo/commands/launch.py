"""Starts N processes of a program on this node; see volo/commands/launch.sh for the environment.

    python volo/commands/launch.py N PROGRAM [flags]

Run as a file, it imports no model. Exit code: that of the process that failed first, of those that can tell why; 2: a
mistake; 5: nodes do not come together.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: the rest is found from the root
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tlt.errors import UserError  # noqa: E402
from volo.cluster.launch import described  # noqa: E402


def run(args: Namespace) -> int:
    """`volo launch`: what `distributed_train.sh` does in a checkout."""
    # Not a file of the package where that can be avoided: its folder would stand in sys.path.
    own, script = Path(__file__).resolve().parents[1] / "__main__.py", Path(sys.argv[0])
    program = script if script.name == "volo" and script.is_file() else own
    return main([str(args.processes), str(program), args.command, *args.flags])


def main(argv: Sequence[str]) -> int:
    """Start the processes, or print what would; `argv` is their number, the program's file and its flags."""
    try:
        launch = described(int(argv[0]), argv[1:], os.environ)
        if os.environ.get("DRY_RUN"):
            print(f"{launch.processes} processes: {shlex.join((sys.executable, *launch.program))}")
            return 0
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # also into a pipe
        from volo.cluster.elastic import Launcher  # imports torch

        return Launcher(launch).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
