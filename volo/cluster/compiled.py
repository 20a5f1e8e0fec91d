"""Keeps what torch and Triton compile for the next start of a program. This module imports no torch, which decides at
its import where it keeps them."""

import hashlib
import os
import platform
import re
import stat
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from tlt.errors import UserError


def keep_compiled() -> list[str]:
    """Let torch and Triton keep what they compile for the next start, where the environment doesn't say where: in a
    folder for this user and kind of machine in VOLO_COMPILED, or else in the user's cache. Return a line for the user
    if it can't be made. Raises UserError if others can write there, because what is there is executed."""
    where = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    unset = {name: part for name, part in where.items() if name not in os.environ}
    if not unset or not hasattr(os, "getuid"):
        return []
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = Path(os.environ.get("VOLO_COMPILED") or Path(cache, "volo")).absolute()
    folder = root / f"compiled-{os.getuid()}-{_kind_of_machine()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        return [f"no compiled programs are kept in {folder} ({error.strerror}): VOLO_COMPILED names another folder"]
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UserError(
            f"{folder} holds programs that this run would execute, and is not yours alone: remove it, or name another "
            "folder with VOLO_COMPILED"
        )
    os.environ |= {name: str(folder / part) for name, part in unset.items()}
    return []


def _kind_of_machine() -> str:
    """Return a name for machines that can execute each other's programs: a processor's features, torch and the C
    library, of which torch's own keys tell only a part."""
    described = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else platform.processor()
    first, _, _ = described.partition("\n\n")
    features = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*", first, re.MULTILINE)
    facts = (*features, platform.machine(), *platform.libc_ver(), version("torch"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
