"""Reads files with retries and at offsets, writes whole files atomically, and explains errors."""

import csv
import errno
import io
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from tlt.errors import MachineFault, UserError
from tlt.io.text import printable

# O_BINARY stops Windows from translating line ends. With O_NONBLOCK, opening a pipe without a writer does not wait.
_READ_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_SEEKING = Lock()
_WAITS = (0.1, 0.5, 2.0)  # seconds between attempts to read a file
# Error numbers for which a file, or a damaged file that refers to it, is at fault. For all others the machine is.
_OF_THE_FILE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM),
    *(errno.ENXIO, errno.ENODEV, errno.EINVAL, errno.EOVERFLOW, errno.EFBIG, errno.ESPIPE, errno.EILSEQ),
}
# Error numbers of a folder's fsync that say "this file system can't", not "it failed".
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_told_unsynced = False  # whether this process has said so

Result = TypeVar("Result")


def is_machine_fault(error: OSError) -> bool:
    """Return whether the machine is at fault that a file can't be read. Errors of decoders have no number."""
    return error.errno is not None and error.errno not in _OF_THE_FILE


def with_retries(read: Callable[[], Result], path: str) -> Result:
    """Return `read()`. If it fails because of the machine, which may pass, try up to three times more, then raise
    MachineFault. Raise OSError at once if the file is at fault."""
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
def blamed_on(
    file: str | Path | None, what: str = "can't be used", remedy: str = "copy it again", of: type[Exception] = Exception
) -> Iterator[None]:
    """Turn every error that the content of a file causes in the block into a UserError of one line, `FILE what (the
    error): remedy`. A UserError from the block keeps its class and gets the file's name, if it lacks it. Foreign
    content makes parsers, constructors and optimizers raise errors of any class, so all are caught; where only our own
    code runs, those `of` UserError, because others are defects. If `file` is None, all errors pass unchanged."""
    try:
        yield
    except of as error:
        name = printable(str(file))
        text = " ".join(str(error).split())[:200]
        if file is None or (isinstance(error, UserError) and name in printable(str(error))):
            raise
        if isinstance(error, UserError):
            raise type(error)(f"{name}: {error}") from error
        reason = type(error).__name__ + (f": {text}" if text else "")
        raise UserError(f"{name} {what} ({reason}): {remedy}") from error


@contextmanager
def os_errors_as(message: Callable[[OSError], str]) -> Iterator[None]:
    """Turn an OSError in the block into a UserError with the text that `message` makes of it."""
    try:
        yield
    except OSError as error:
        raise UserError(message(error)) from error


def regular_only(path: str, flags: int) -> int:
    """Open a file that a user named (an `opener` for `open`). Raise OSError for a folder, a device, or a pipe, which
    might wait for ever for its writer."""
    descriptor = os.open(path, flags | _READ_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file but a directory, pipe or device", path)
    return descriptor


def read_bytes(path: str | Path) -> bytes:
    """Return all bytes of a regular file. Raises what `with_retries` and `regular_only` raise."""

    def read() -> bytes:
        with open(path, "rb", opener=regular_only) as file:
            return file.read()

    return with_retries(read, str(path))


def read_lines(path: str | Path, what: str, errors: str = "strict") -> list[str]:
    """Return the lines of a text file, without blank ones. Raise UserError, which calls the file `what`."""
    told = blamed_on(f"{what} {path}", "can't be read as lines of text", "name a text file")
    with told, open(path, encoding="utf-8-sig", errors=errors, opener=regular_only) as file:
        return [line.rstrip("\n") for line in file if line.strip()]


def write_csv(path: str | Path, rows: Iterable[Sequence[Any]], **style: Any) -> None:
    """Write a table atomically. `style` is that of `csv.writer`."""
    content = io.StringIO(newline="")
    csv.writer(content, **style).writerows(rows)
    write_whole(path, content.getvalue().encode(errors="surrogateescape"))


def sync_folder(folder: str | Path) -> None:
    """Wait until the names in a folder are on the disk.

    Windows can't open folders, and some file systems (CIFS, sshfs, shared folders of virtual machines) can't sync them.
    The latter is told once, because it is no failure: the files are there, and only a power cut may lose new names.
    """
    global _told_unsynced
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
        if not _told_unsynced:
            _told_unsynced = True
            where = f"the file system of {printable(str(folder))} can't sync folders ({error.strerror})"
            print(f"warning: {where}: a power cut may lose the newest files", file=sys.stderr, flush=True)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Read up to `length` bytes from byte `offset` of an open file, which processes and threads may share."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, offset)
    with _SEEKING:  # on Windows, where processes don't inherit open files, only threads share the position
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
    """Write a file atomically. With `sync`, wait until its contents are on the disk; `sync_folder` does so for its
    name."""
    path = Path(path)
    # The name has no process id, so that the next writer overwrites what a killed process left.
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
    """Return the JSON object in a file. Raise UserError if its `format` is not `format_name`."""
    name = printable(str(path))
    with blamed_on(path, "can't be read as JSON"):
        content = json.loads(read_bytes(path))
    if not isinstance(content, dict) or content.get("format") != format_name:
        raise UserError(f"{name} does not describe a {format_name}")
    return content


def refuse_existing(path: str | Path, flag: str) -> None:
    """Raise UserError if the path of the output file that `flag` names already exists."""
    if os.path.lexists(path):
        raise UserError(f"{flag} {printable(str(path))} exists already: remove it, or choose another name")
