"""How every program starts and ends: parse, run, one line for a user's mistake, documented exit codes.

Exit codes: 0 success; 2 bad input (one line on stderr; `--debug` shows a traceback); 3 training stopped because losses
were not finite; 4 checkpoints could not be written; 5 a rank hung or was lost, or a data worker died, or storage
failed; 6 the machines are not fit (preflight); 85 stopped by SIGTERM, SIGUSR1 or SIGHUP, and can be started again; 130
interrupted from the keyboard; 141 the reader of the output has closed it; 1 a defect in the program, with its
traceback.
"""

import importlib
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from tlt.errors import UserError
from tlt.io.text import open_streams, printable, safe_text
from volo.cluster.binding import bind_process
from volo.cluster.compiled import keep_compiled
from volo.cluster.launch import Launch, launch_of
from volo.cluster.stopping import STOP, Stopped, end_with_launcher
from volo.config.fields import S, Settings, flags_of

Parse = Callable[[Sequence[str] | None], Settings]


def run_program(parse: Parse, module: str, argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (None: sys.argv), bind the process if the program has `--bind`, import `module`, and return the exit
    code of its `run(settings)`.

    If a process group still exists, end the process here. Otherwise a thread of gloo could free a tensor while Python
    ends, which aborts the process ("terminate called without an active exception", exit code 134).
    """
    open_streams()
    end_with_launcher()
    # torch warns about more workers than CPUs; if they cost time, the log's "data wait" shows it.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    warnings.filterwarnings("ignore", "MixToken mixes nothing")  # the program reports this at the start
    output = _Output(sys.stdout)
    errors = _Output(sys.stderr)
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            code = _run(parse, module, argv)
        except Exception:
            if not _joined():
                raise
            traceback.print_exc()
            code = 1
    output.end()
    errors.end()
    if _joined():
        os._exit(code)
    return code


def bound(settings: S) -> S:
    """Bind the process as `--bind` says, in programs that have it, and name a folder for what they compile. Return the
    settings with lines about both."""
    if "bind" not in flags_of(type(settings)):
        return settings
    if settings.values().get("torchcompile") or os.path.exists("/dev/nvidiactl"):
        settings = settings.noting(*keep_compiled())
    return settings.noting(*bind_process(settings["bind"], settings["device"], settings.values().get("local_rank", 0)))


def say(lines: Iterable[str], on_this_rank: bool = True) -> None:
    """Print each line and flush it."""
    for line in lines if on_this_rank else ():
        print(line, flush=True)


def warn(lines: Iterable[str], on_this_rank: bool = True) -> None:
    """Print each line as a warning and flush it."""
    say((f"warning: {line}" for line in lines), on_this_rank)


class _Output:
    """A standard stream whose failures don't end the program. Text that can't be written (full disk, lost terminal) is
    dropped, with one warning on stderr. Only a closed reader (`| head`) is an error. Control characters are escaped.

    Each line is one write. Launchers use `python -u`, where each part of a `print` would be a write of its own, and a
    program that passes on the lines of several ranks would cut them there.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told = False
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or drop it if that fails."""
        self._try(self._stream.write, safe_text(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        self._try(self._stream.flush)

    def end(self) -> None:
        """Flush the stream. Discard what can't be written, because Python would fail on it at exit."""
        try:
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _try(self, do: Callable[..., object], *args: str) -> None:
        try:
            do(*args)
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._told:
                self._told = True
                print(f"warning: output is left out that can't be written: {error.strerror}", file=sys.stderr)


def _run(parse: Parse, module: str, argv: Sequence[str] | None) -> int:
    debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    launch = Launch()
    try:
        launch = launch_of(os.environ)
        settings = bound(parse(argv))
        STOP.begin()
        program = importlib.import_module(module)  # outside `raising`: an exception while torch's C++ loads would abort
        with STOP.raising():
            return program.run(settings)
    except UserError as error:
        if debug:
            raise
        # Text that a message quotes (a flag, a file name) may contain line breaks.
        _tell(f"error: {printable(str(error))}", launch)
        return error.exit_code
    except Stopped as stop:
        _tell(f"{'error: ' if stop.__cause__ else ''}{stop}", launch)
        return stop.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has closed it (| head), which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python complains at exit
        return 141


def _tell(text: str, launch: Launch) -> None:
    """Print a line on stderr with one write, because several ranks share stderr.

    If several ranks on one machine have the same text, only the first one prints it.
    """
    if launch.size == 1:
        return print(text, file=sys.stderr, flush=True)
    line = f"[rank {launch.rank}] {text}\n"
    entry = f"{launch.rank} {os.environ.get('SLURM_STEP_ID') or os.getppid()} {text!a}\n"
    with suppress(ImportError, OSError):  # on Windows, which has no launcher; or without a writable folder
        import fcntl

        where = Path(tempfile.gettempdir(), f"volo-told-{os.getuid()}")
        with open(os.open(where, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as log:
            # Hold the lock while printing: a rank with the same text could exit first and get this one killed.
            fcntl.flock(log, fcntl.LOCK_EX)
            lines = log.readlines()
            same = [text_line for text_line in lines if text_line.partition(" ")[2] == entry.partition(" ")[2]]
            if not same or entry in same:  # if this rank has an entry already, that is from an earlier start
                print(line, file=sys.stderr, end="", flush=True)
                lines = [text_line for text_line in lines if text_line not in same]
            log.seek(0)
            log.truncate()
            log.writelines([*lines, entry][-1000:])
        return
    print(line, file=sys.stderr, end="", flush=True)


def _joined() -> bool:
    """Whether this process is in a process group that this program created."""
    distributed = sys.modules.get("volo.cluster.distributed")
    return distributed is not None and distributed.in_own_group()
