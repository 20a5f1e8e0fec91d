"""`python volo/commands/launch.py N PROGRAM [flags]` starts N processes on this node; launch.sh lists its variables.

`volo.cluster.elastic` starts and ends the processes.

As a script it imports no models, and imports torch only after checking its arguments. Exit code: that of the process
that failed first for a reason of its own; 2 for a user's mistake; 5 if the nodes don't come together.
"""

import ipaddress
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script: find the packages from the root of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tlt.errors import UserError  # noqa: E402
from volo.config.settings_tools import LaunchSettings

_LEAST = {"MAX_RESTARTS": 0, "SHUTDOWN_TIMEOUT": 0, "NNODES": 1, "NODE_RANK": 0, "MASTER_PORT": 1, "JOIN_TIMEOUT": 1}


def run(settings: LaunchSettings) -> int:
    """Run `volo launch`, which does what `distributed_train.sh` does in a checkout."""
    # Prefer the `volo` script to a file of the package, whose folder would be put into sys.path.
    main_file = Path(__file__).resolve().parents[1] / "__main__.py"
    script = Path(sys.argv[0])
    program = script if script.name == "volo" and script.is_file() else main_file
    return main([str(settings.processes), str(program), settings.command, *settings.flags])


def main(argv: Sequence[str]) -> int:
    """Start the processes, or with DRY_RUN print the command. `argv` is their number, the program's file, its flags."""
    try:
        launch = described(os.environ)
        if os.environ.get("DRY_RUN"):
            print(f"{argv[0]} processes: {shlex.join((sys.executable, *argv[1:]))}")
            return 0
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # also if stdout is a pipe
        from volo.cluster.elastic import Launcher

        return Launcher(int(argv[0]), argv[1:], **launch).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def described(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `volo.cluster.elastic.Launcher` that environment variables set. Raises UserError if a
    variable is missing or out of range, or its address can't be reached from other nodes."""
    settings: dict[str, Any] = {}
    if env.get("LOG_DIR"):
        raise UserError("LOG_DIR is no longer read: torchrun --log-dir DIR --tee 3 writes a log of each process")
    for name, least in _LEAST.items():
        if text := env.get(name):
            if not text.isdecimal() or int(text) < least:
                raise UserError(f"{name}={text}: a whole number from {least} on is needed")
            settings[name.lower()] = int(text)
    nodes = settings.get("nnodes", 1)
    rank = settings.get("node_rank")
    if (rank or 0) >= nodes or (nodes > 1 and rank is None):
        numbers = f"from 0 to {nodes - 1}, 0 on the node that has MASTER_ADDR"
        raise UserError(f"NODE_RANK={'' if rank is None else rank}: NNODES={nodes} needs a number {numbers}")
    if nodes > 1 and "max_restarts" in settings:
        raise UserError(
            "MAX_RESTARTS: started by hand, several nodes do not start again together; Slurm's requeue (slurm/) and "
            "torchrun --max-restarts do that"
        )
    if nodes > 1:
        settings = {"master_port": 29500, **settings, "master_addr": _address(env.get("MASTER_ADDR", ""))}
    else:
        settings["master_port"] = 0  # any free port
    return settings


def _address(name: str) -> str:
    """Return the IP address of MASTER_ADDR's value `name`."""
    address = ""
    with suppress(OSError):
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    if not address or ipaddress.ip_address(address).is_loopback:  # Debian resolves a machine's own name to loopback
        state = f"is {address or 'no address'} on {socket.gethostname()}"
        raise UserError(f"MASTER_ADDR={name} {state}: give the IP address of node 0 that the other nodes reach it by")
    return address


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
