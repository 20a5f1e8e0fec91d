"""Files: reading at an offset and trying again, writing whole files and flushing them to the disk, checksums."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from tlt.errors import MachineFault, UserError
from tlt.io.text import printable

# Windows would translate line ends, and has none of the others. O_NONBLOCK: a pipe without a writer opens at once.
_READ_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_SEEKING = Lock()
_WAITS = (0.1, 0.5, 2.0)  # seconds between the times that a file is read
# What is wrong with a file itself, or with where a damaged one leads its reader. All else is the machine's fault.
_OF_THE_FILE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM),
    *(errno.ENXIO, errno.ENODEV, errno.EINVAL, errno.EOVERFLOW, errno.EFBIG, errno.ESPIPE, errno.EILSEQ),
}

Result = TypeVar("Result")


def is_machine_fault(error: OSError) -> bool:
    """Whether a file can't be read because of the machine. Errors that a decoder raises have no number."""
    return error.errno is not None and error.errno not in _OF_THE_FILE


def with_retries(read: Callable[[], Result], path: str) -> Result:
    """What `read` makes of a file, perhaps at the fourth time: what fails because of the machine may pass.

    Raises:
        MachineFault: It did not pass.
        OSError: It is the file's fault.
    """
    waits = iter(_WAITS)
    while True:
        try:
            return read()
        except OSError as error:
            if not is_machine_fault(error):
                raise
            if (wait := next(waits, None)) is None:
                reason = f"{error.strerror or error}, {len(_WAITS) + 1} times in a row"
                raise MachineFault(
                    f"{printable(path)} can't be read: {reason}; its storage or this machine is at fault (mounts, "
                    "memory, ulimit -n), not the file: mend that and go on"
                ) from error
        time.sleep(wait)


@contextmanager
def blamed_on(file: str | Path | None, what: str = "can't be used", remedy: str = "copy it again") -> Iterator[None]:
    """Turn whatever the content of somebody's file leads to in the block into one line that begins with the file.

    Parsers, constructors and optimizers raise anything for foreign content, so all is caught. None: there is no file,
    and all errors pass.

    Raises:
        UserError: `FILE what (the error): remedy`; one that was raised in the block gets the file's name, if it lacks
            it, and keeps its class.
    """
    try:
        yield
    except Exception as error:
        name, text = printable(str(file)), " ".join(str(error).split())[:200]
        if file is None or (isinstance(error, UserError) and name in printable(str(error))):
            raise
        if isinstance(error, UserError):
            raise type(error)(f"{name}: {error}") from error
        reason = type(error).__name__ + (f": {text}" if text else "")
        raise UserError(f"{name} {what} ({reason}): {remedy}") from error


@contextmanager
def os_errors_told(message: Callable[[OSError], str]) -> Iterator[None]:
    """Turn what the system refuses in the block into a UserError with the text that `message` makes of it."""
    try:
        yield
    except OSError as error:
        raise UserError(message(error)) from error


def regular_only(path: str, flags: int) -> int:
    """An `opener` of `open` for files that users name. Raises OSError: it is a folder, a device, or a pipe, which might
    wait for its writer for ever."""
    descriptor = os.open(path, flags | _READ_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file but a directory, pipe or device", path)
    return descriptor


def read_bytes(path: str | Path) -> bytes:
    """All bytes of a regular file. Raises what `with_retries` and `regular_only` raise."""

    def read() -> bytes:
        with open(path, "rb", opener=regular_only) as file:
            return file.read()

    return with_retries(read, str(path))


def sync_folder(folder: str | Path) -> None:
    """Wait until the names in a folder are on the disk (not on Windows, where folders can't be opened)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Read up to `length` bytes from byte `offset` of an open file, which processes and threads may share."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, offset)
    with _SEEKING:  # Windows: there processes that share a file are started anew and open it themselves
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, length)


def read_into(data: bytearray, descriptor: int, offset: int) -> int:
    """Fill `data` from byte `offset` of an open file; return how many bytes there were."""
    done = 0
    while done < len(data) and (part := read_at(descriptor, len(data) - done, offset + done)):
        data[done : done + len(part)] = part
        done += len(part)
    return done


def write_whole(path: str | Path, data: bytes | memoryview, sync: bool = True) -> None:
    """Write a file, whole or not at all, and with `sync` wait until it is on the disk; `sync_folder` does so for its
    name."""
    path = Path(path)
    # No process id in the name: what a killed process leaves behind, the next one overwrites.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_json(path: str | Path, format_name: str) -> dict[str, Any]:
    """The JSON object in a file, whose `format` says what it is. Raises UserError if it is something else."""
    name = printable(str(path))
    try:
        content = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{name} can't be read as JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != format_name:
        raise UserError(f"{name} does not describe a {format_name}")
    return content


def refuse_existing(path: str | Path, flag: str) -> None:
    """Raise UserError if there is something already where `flag` asks for a file."""
    if os.path.lexists(path):
        raise UserError(f"{flag} {printable(str(path))} exists already: remove it, or choose another name")
